"""Where an API process finds the tokenizer when it was not told."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from checkpoint.checkpoint import CheckpointError
from router.api.main import _model_place
from tests.api.scripted import ScriptedClient, server_state


def _client(*, model_id: str, path: str) -> ScriptedClient:
    state = server_state()
    assert state.model is not None
    model = msgspec.structs.replace(state.model, model_id=model_id, settings={"model_path": path})
    return ScriptedClient(state=msgspec.structs.replace(state, model=model))


async def test_the_workers_own_copy_on_the_same_host(tmp_path: Path) -> None:
    assert await _model_place(_client(model_id="org/name", path=str(tmp_path))) == str(tmp_path)


async def test_the_name_of_a_model_whose_copy_lies_on_another_host() -> None:
    for name in ("org/name", "smollm2"):
        assert await _model_place(_client(model_id=name, path="/not/on/this/host")) == name


async def test_a_folder_of_another_host_is_asked_for_and_so_named_in_the_error() -> None:
    place = await _model_place(_client(model_id="/srv/model", path="/srv/model"))
    assert place == "/srv/model"


async def test_a_worker_that_names_no_place() -> None:
    with pytest.raises(CheckpointError, match="--model must name it"):
        await _model_place(_client(model_id="org/name", path=""))
