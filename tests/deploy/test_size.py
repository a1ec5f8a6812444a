from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from checkpoint.checkpoint import CheckpointError
from deploy.size import GIB, SizeError, Wanted, config_of, report, size_of
from worker.models.config import spec_from_config
from worker.models.size import kv_bytes_per_token, n_parameters

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}
QWEN_HALF_B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
QWEN3_HALF_B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize(
    ("config", "n"),
    [(LLAMA_8B, 8_030_261_248), (QWEN_HALF_B, 494_032_768), (QWEN3_HALF_B, 596_049_920)],
    ids=["Llama-3.1-8B", "Qwen2.5-0.5B", "Qwen3-0.6B"],
)
def test_parameters_are_counted_as_the_models_cards_have_them(config: dict[str, Any], n: int) -> None:
    assert n_parameters(spec_from_config(config)) == n


def test_the_kv_of_a_token() -> None:
    spec = spec_from_config(LLAMA_8B)
    assert kv_bytes_per_token(spec, itemsize=2) == 131072
    assert kv_bytes_per_token(spec, itemsize=1) == 65536


def test_the_arithmetic_adds_up() -> None:
    spec = spec_from_config(LLAMA_8B)
    wanted = Wanted(memory_gib=80)
    size = size_of(spec, wanted)
    assert size.weights == 2 * 8_030_261_248
    assert size.kv == int((size.free - size.step) * 0.95)
    assert size.n_tokens % 16 == 0
    assert size.n_tokens * 131072 <= size.kv < (size.n_tokens + 32) * 131072
    half = size_of(spec, Wanted(memory_gib=80, kv_cache_dtype="fp8_e4m3"))
    assert half.n_tokens == pytest.approx(2 * size.n_tokens, rel=1e-3)
    text = report("llama", spec, wanted, size)
    assert "8.03 billion parameters" in text
    assert f"{size.n_tokens:,}" in text


@pytest.mark.parametrize("wiggle_room", [0.5, 0.95, 1.0])
def test_the_figures_stand_in_one_column(wiggle_room: float) -> None:
    spec, wanted = spec_from_config(LLAMA_8B), Wanted(memory_gib=140, wiggle_room=wiggle_room)
    lines = report("m", spec, wanted, size_of(spec, wanted)).splitlines()
    assert {line.index(" GiB") for line in lines if " GiB" in line} == {42}


def test_what_does_not_fit_says_what_would() -> None:
    spec = spec_from_config(LLAMA_8B)
    with pytest.raises(
        SizeError, match=r"weights 15\.0 GiB.*need (\d+\.\d) GiB, but --gpu-memory is 16"
    ) as caught:
        size_of(spec, Wanted(memory_gib=16))
    needed = float(str(caught.value).split("need ")[1].split()[0])
    size_of(spec, Wanted(memory_gib=needed + 0.1))
    with pytest.raises(SizeError):
        size_of(spec, Wanted(memory_gib=needed - 0.1))


def test_a_folder_needs_its_config_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    assert config_of(str(tmp_path), revision=None) == LLAMA_8B
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="holds no model config"):
        config_of(str(tmp_path), revision=None)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match="can't read"):
        config_of(str(tmp_path), revision=None)


def test_a_gpu_of_141_gib_holds_an_8b_model_many_times() -> None:
    size = size_of(spec_from_config(LLAMA_8B), Wanted(memory_gib=140.4))
    assert 110 * GIB < size.kv < 125 * GIB
