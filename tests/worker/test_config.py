from __future__ import annotations

from typing import Any

import pytest

from settings.errors import ConfigError
from worker.config import WorkerConfig


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"attention": "paged"}, "--attention is 'paged', but must be one of: auto, torch, flashinfer, fake"),
        ({"dtype": "int4"}, "--dtype is 'int4', but must be one of"),
        ({"kv_cache_dtype": "int8"}, "--kv-cache-dtype is 'int8'"),
        ({"port": 70000}, "--port is 70000, but must be from 0 to 65535"),
        ({"block_size": 0}, "--block-size is 0, but must be from 1 to 4096"),
        ({"max_batch_size": 0}, "--max-batch-size is 0"),
        ({"max_batch_prefill_tokens": 0}, "--max-batch-prefill-tokens is 0"),
        ({"max_batch_total_tokens": 0}, "--max-batch-total-tokens is 0"),
        (
            {"max_batch_total_tokens": 5},
            "--max-batch-total-tokens is 5, but one block holds 16 tokens (--block-size): at least 16",
        ),
        ({"max_total_tokens": 1}, "--max-total-tokens is 1, but must be from 2"),
        ({"wiggle_room": 0}, "--wiggle-room is 0, but must be above 0 and at most 1"),
        ({"wiggle_room": 1.5}, "--wiggle-room is 1.5"),
        ({"window": 0}, "--window is 0, but must be from 1 to 64"),
        ({"threads": -1}, "--threads is -1"),
        ({"fake_eos_rate": 2}, "--fake-eos-rate is 2"),
        ({"host": ""}, "--host is empty"),
        ({"model": ""}, "--model is empty"),
        ({"port_file": "/no/such/folder/port"}, "its folder /no/such/folder does not exist"),
        ({"port_file": "/dev/null"}, "--port-file is '/dev/null', but that is not an ordinary file"),
        ({"port_file": "/"}, "--port-file is '/', but that is not an ordinary file"),
    ],
)
def test_a_bad_value_is_refused_with_flag_value_and_limit(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        WorkerConfig(**values)
    assert message in str(raised.value)


def test_a_step_has_room_for_every_row_beside_the_prompt_tokens() -> None:
    assert WorkerConfig(max_batch_prefill_tokens=100, max_batch_size=7).max_step_tokens == 107


def test_a_fake_worker_needs_no_model() -> None:
    assert WorkerConfig(model="", attention="fake").model == ""
