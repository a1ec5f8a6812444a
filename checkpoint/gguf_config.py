"""GGUF metadata as a transformers-style config, so that nothing downstream cares which kind a model is.

Key names: the GGUF specification's standardised keys on one side, transformers' LlamaConfig, MistralConfig,
Qwen2Config and Qwen3Config on the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from checkpoint.checkpoint import Checkpoint, CheckpointError
from checkpoint.fingerprint import fingerprint_gguf
from checkpoint.gguf_header import GgufHeader, read_gguf_header

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_REQUIRED = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_GGML_F32 = 0


def gguf_checkpoint(path: Path, *, name: str) -> Checkpoint:
    """Everything but the weights. Raises `CheckpointError` for a damaged file or another architecture."""
    header = read_gguf_header(path)
    config = gguf_config(header, path)
    eos = config["eos_token_id"]
    return Checkpoint(
        name=name,
        path=path,
        kind="gguf",
        config=config,
        eos_token_ids=tuple(eos),
        bos_token_id=config["bos_token_id"],
        max_context=config["max_position_embeddings"],
        vocab_size=config["vocab_size"],
        fingerprint=fingerprint_gguf(path, header),
    )


def gguf_config(header: GgufHeader, path: Path) -> dict[str, Any]:
    """The config dict; `path` serves for messages and for the few floats of `rope_freqs.weight`."""
    meta = header.metadata
    architecture = meta.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise CheckpointError(
            f"{path} holds the architecture {architecture!r}; served are {', '.join(_ARCHITECTURES)}"
        )
    if meta.get(f"{architecture}.expert_count"):
        raise CheckpointError(f"{path} is a mixture of experts ({architecture}), which is not served")

    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[architecture]],
        "model_type": architecture,
        "hidden_act": "silu",
    }
    for ours, key in _REQUIRED.items():
        value = meta.get(f"{architecture}.{key}")
        if not isinstance(value, int | float) or value <= 0:
            raise CheckpointError(f"{path} has no usable {architecture}.{key} ({value!r}): convert it again")
        config[ours] = value
    n_heads = config["num_attention_heads"]
    config["num_key_value_heads"] = meta.get(f"{architecture}.attention.head_count_kv") or n_heads
    config["head_dim"] = meta.get(f"{architecture}.attention.key_length") or config["hidden_size"] // n_heads
    config["rope_theta"] = meta.get(f"{architecture}.rope.freq_base", 10000.0)
    config["rope_scaling"] = _rope_scaling(header, architecture, path)
    rotary = meta.get(f"{architecture}.rope.dimension_count")
    if rotary and rotary != config["head_dim"]:
        config["partial_rotary_factor"] = rotary / config["head_dim"]
    window = meta.get(f"{architecture}.attention.sliding_window")
    config["sliding_window"] = window or None
    if architecture.startswith("qwen"):
        config["use_sliding_window"] = bool(window)
        config["max_window_layers"] = 0

    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{path} has no token_embd.weight: it is not a whole model")
    # The logits have as many entries as the embedding has rows; a vocabulary may be listed shorter.
    config["vocab_size"] = embedding.shape[1]
    config["tie_word_embeddings"] = "output.weight" not in header.tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    config["mlp_bias"] = "blk.0.ffn_gate.bias" in header.tensors

    config["bos_token_id"] = meta.get("tokenizer.ggml.bos_token_id")
    config["eos_token_id"] = _eos_ids(meta, config["vocab_size"])
    return config


def _eos_ids(meta: Mapping[str, Any], vocab_size: int) -> list[int]:
    found = (meta.get(f"tokenizer.ggml.{key}") for key in _EOS_KEYS)
    ids = [int(token) for token in found if token is not None and int(token) < vocab_size]
    return list(dict.fromkeys(ids))


def _rope_scaling(header: GgufHeader, architecture: str, path: Path) -> dict[str, Any] | None:
    """transformers' `rope_scaling`. Per-frequency factors (how GGUF stores llama3's variant) become the
    `longrope` form with equal short and long factors: both divide the inverse frequencies by them."""
    meta, prefix = header.metadata, f"{architecture}.rope.scaling"
    context = meta[f"{architecture}.context_length"]
    factors = header.tensors.get("rope_freqs.weight")
    if factors is not None:
        if factors.ggml_type != _GGML_F32:
            raise CheckpointError(f"{path}: rope_freqs.weight is not float32: convert it again")
        values = np.fromfile(path, dtype="<f4", count=factors.shape[0], offset=factors.offset).tolist()
        return {
            "rope_type": "longrope",
            "short_factor": values,
            "long_factor": values,
            "attention_factor": 1.0,
            "original_max_position_embeddings": context,
        }
    kind = meta.get(f"{prefix}.type", "none")
    factor = meta.get(f"{prefix}.factor") or meta.get(f"{architecture}.rope.scale_linear")
    if kind == "none" or not factor:
        return None
    if kind not in ("linear", "yarn"):
        raise CheckpointError(
            f"{path} scales rope by {kind!r}; served are linear, yarn and rope_freqs factors"
        )
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        original = meta.get(f"{prefix}.original_context_length")
        scaling["original_max_position_embeddings"] = original or int(context / factor)
        if (attention := meta.get(f"{prefix}.attn_factor")) is not None:
            scaling["attention_factor"] = attention
    return scaling
