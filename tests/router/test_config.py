from __future__ import annotations

from typing import Any

import pytest

from router.config import RouterConfig
from router.errors import ReplicaMismatchError
from router.limits import arithmetic, check_replica, model_info, resolve_limits
from settings.errors import ConfigError
from settings.load import load
from tests.router.sim import Sim, capacity_of


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"window": 0}, r"--window is 0, but must be from 1 to 64"),
        ({"max_concurrent_requests": 0}, r"--max-concurrent-requests is 0"),
        ({"max_input_tokens": 10, "max_total_tokens": 10}, r"--max-input-tokens is 10, but must be below"),
        (
            {"prefill_chunking": False, "max_input_tokens": 100, "max_batch_prefill_tokens": 50},
            r"--max-batch-prefill-tokens is 50, but without --prefill-chunking",
        ),
        ({"attention": "magic"}, r"--attention is 'magic', but must be one of: auto, torch"),
        ({"health_timeout_s": 0.5}, r"--health-timeout-s is 0.5, but must be at least"),
        ({"port": 70000}, r"--port is 70000"),
        ({"waiting_served_ratio": -1}, r"--waiting-served-ratio is -1"),
    ],
)
def test_wrong_values_name_their_flag(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RouterConfig(**values)


def test_tgis_names_are_accepted_but_for_hostname() -> None:
    env = {
        "MAX_CONCURRENT_REQUESTS": "7",
        "MAX_INPUT_TOKENS": "100",
        "MAX_TOTAL_TOKENS": "200",
        "MAX_BATCH_PREFILL_TOKENS": "300",
        "MAX_BATCH_TOTAL_TOKENS": "400",
        "MAX_WAITING_TOKENS": "5",
        "WAITING_SERVED_RATIO": "1.2",
        "MAX_BATCH_SIZE": "6",
        "PREFIX_CACHING": "false",
        "HOSTNAME": "container-7",
        "QUIRE_WINDOW": "3",
        "QUIRE_MAX_CONCURRENT_REQUESTS": "8",
    }
    config = load(RouterConfig, env=env, args={})
    assert config.max_concurrent_requests == 8
    assert (config.max_input_tokens, config.max_total_tokens) == (100, 200)
    assert (config.max_batch_prefill_tokens, config.max_batch_total_tokens) == (300, 400)
    assert (config.max_waiting_tokens, config.waiting_served_ratio, config.max_batch_size) == (5, 1.2, 6)
    assert config.prefix_caching is False
    assert config.window == 3
    assert config.host == RouterConfig().host


def test_secrets_are_not_shown() -> None:
    sim = Sim(config={"api_keys": ("top-secret",)})
    info = model_info(sim.config, sim.limits)
    assert "top-secret" not in str(info)
    assert info.settings["api_keys"] == "set"
    assert info.settings["max_batch_prefill_tokens"] == 64


def test_the_arithmetic_of_the_budget_is_told() -> None:
    sim = Sim(block_size=16, fake_n_blocks=65, config={"max_batch_total_tokens": 500})
    line = arithmetic(sim.limits, sim.config, sim.capacity)
    assert "max_batch_total_tokens = 496 (31 blocks of 16; warm-up: 1024" in line


def test_info_says_why_prefix_caching_is_off() -> None:
    """TGI #2676, #3333."""
    sim = Sim(config={"prefix_caching": False})
    info = model_info(sim.config, sim.limits)
    assert info.prefix_caching is False
    assert "--no-prefix-caching" in info.prefix_caching_reason


@pytest.mark.parametrize(
    ("changes", "config", "message"),
    [
        ({"protocol_version": 99}, {}, r"step protocol 99, this router speaks \d"),
        ({"model_hash": "other"}, {}, r"serves 'fake' \(digest other\)"),
        ({"n_blocks": 10}, {}, r"can hold 144 tokens, but requests of up to 1024"),
        ({"block_size": 32}, {"block_size": 16}, r"blocks of 32 tokens, but --block-size is 16"),
        ({"attention": "torch"}, {"attention": "fake"}, r"attention 'torch', but --attention is 'fake'"),
        ({"max_window": 1}, {}, r"--window is 2, but worker w takes 1"),
        ({"attention": "native"}, {"attention": "fake"}, r"attention 'native', but --attention is 'fake'"),
        ({"model_id": "org/other"}, {"model": "fake"}, r"serves 'org/other', but --model is 'fake'"),
        ({"model_id": "smollm2"}, {"model": "fake"}, r"serves 'smollm2', but --model is 'fake'"),
    ],
)
def test_workers_that_do_not_fit_are_refused(
    changes: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    sim = Sim(config=config)
    capacity = capacity_of(sim.replicas[0].runner)
    check_replica(sim.limits, sim.config, capacity)
    for name, value in changes.items():
        setattr(capacity, name, value)
    with pytest.raises(ReplicaMismatchError, match=message):
        check_replica(sim.limits, sim.config, capacity)


@pytest.mark.parametrize("model", ["", "org/model", "/srv/tokenizers/of-it", "./somewhere"])
def test_a_place_for_the_tokenizer_tells_nothing_of_the_model(model: str) -> None:
    sim = Sim(config={"model": model})
    capacity = capacity_of(sim.replicas[0].runner)
    for served in ("org/model", "/models/a-copy"):
        capacity.model_id = served
        check_replica(None, sim.config, capacity)


def test_compiled_code_is_what_attention_torch_means_on_a_cpu() -> None:
    sim = Sim(config={"attention": "auto"})
    capacity = capacity_of(sim.replicas[0].runner)
    capacity.attention = "native"
    check_replica(None, RouterConfig(attention="torch"), capacity)
    limits = resolve_limits(RouterConfig(), capacity)
    assert model_info(RouterConfig(), limits).settings["attention"] == "native"
