from __future__ import annotations

import json
from pathlib import Path

import pytest

from checkpoint.checkpoint import CheckpointError
from checkpoint.resolve import resolve
from tests.checkpoint.conftest import CONFIG, safetensors_bytes


def test_a_folder_is_described_by_its_config(model_folder: Path) -> None:
    found = resolve(str(model_folder))
    assert (found.kind, found.path, found.name) == ("safetensors", model_folder, str(model_folder))
    assert found.config == CONFIG
    assert (found.bos_token_id, found.eos_token_ids, found.max_context) == (1, (2,), 64)


def test_generation_config_says_what_ends_an_answer(model_folder: Path) -> None:
    (model_folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert resolve(str(model_folder)).eos_token_ids == (2, 7)


def test_a_model_without_eos_has_none(model_folder: Path) -> None:
    (model_folder / "config.json").write_text(json.dumps({**CONFIG, "eos_token_id": None}))
    assert resolve(str(model_folder)).eos_token_ids == ()


def test_the_index_says_which_files_are_needed(model_folder: Path) -> None:
    index = model_folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    (model_folder / "one.safetensors").write_bytes(safetensors_bytes())
    with pytest.raises(CheckpointError, match=r"lacks two.safetensors \(1 of 2 weight files\)"):
        resolve(str(model_folder))
    (model_folder / "two.safetensors").write_bytes(safetensors_bytes())
    resolve(str(model_folder))


def test_weights_in_another_format_are_named(model_folder: Path) -> None:
    (model_folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no safetensors file: fetch"):
        resolve(str(model_folder))
    (model_folder / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"it has pytorch_model\.bin: convert it to safetensors"):
        resolve(str(model_folder))


def test_damaged_weights_are_found_without_reading_them(model_folder: Path) -> None:
    weights = model_folder / "model.safetensors"
    whole = weights.read_bytes()
    for damaged, words in (
        (whole[:-1], f"cut short: {len(whole) - 1} bytes on disk, {len(whole)} by its own header"),
        (whole[:20], "damaged or cut short"),
        (b"", "damaged or cut short"),
        (b"\xff" * 64, "damaged or cut short"),
        (whole[:8] + b"!" + whole[9:], "its header is not JSON"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    ):
        weights.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=words):
            resolve(str(model_folder))


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_a_damaged_config_is_named(model_folder: Path, text: str) -> None:
    (model_folder / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"config\.json is damaged"):
        resolve(str(model_folder))


def test_the_fingerprint_follows_content_not_place(model_folder: Path, tmp_path: Path) -> None:
    first = resolve(str(model_folder)).fingerprint
    moved = model_folder.rename(tmp_path / "elsewhere")
    (moved / "config.json").write_text(json.dumps({**CONFIG, "_name_or_path": "me/mine"}, indent=1))
    assert resolve(str(moved)).fingerprint == first
    (moved / "tokenizer.json").write_text('{"a": 1}')
    second = resolve(str(moved)).fingerprint
    assert second != first
    (moved / "model.safetensors").write_bytes(safetensors_bytes(fill=1.0))
    assert resolve(str(moved)).fingerprint not in (first, second)
