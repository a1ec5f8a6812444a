"""Tiny random models, written and computed by transformers: the reference of the fast tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from checkpoint.checkpoint import Checkpoint
from checkpoint.folder import read_json
from worker.config import WorkerConfig
from worker.cpu_runner import CpuRunner, make_cpu_runner

VOCAB = 199
_SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}

FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "llama3-rope-biases": (
        LlamaConfig,
        LlamaForCausalLM,
        {
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "llama-yarn": (
        LlamaConfig,
        LlamaForCausalLM,
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen2-mixed-windows": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16, "tie_word_embeddings": True}),
    "mistral-window": (MistralConfig, MistralForCausalLM, {"sliding_window": 13, "head_dim": 8}),
}


def make_model(family: str, folder: Path, **overrides: Any) -> PreTrainedModel:
    """Random weights, saved to `folder`; norms and biases are made non-trivial."""
    config_type, model_type, extra = FAMILIES[family]
    torch.manual_seed(0)
    model: PreTrainedModel = model_type(config_type(**{**_SIZES, **extra, **overrides})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return model


def open_checkpoint(folder: Path) -> Checkpoint:
    """Without a tokenizer, which these models don't have."""
    config = read_json(folder / "config.json")
    eos = config["eos_token_id"]
    return Checkpoint(
        name=str(folder),
        path=folder,
        kind="safetensors",
        config=config,
        eos_token_ids=(eos,),
        bos_token_id=config["bos_token_id"],
        max_context=config["max_position_embeddings"],
        vocab_size=config["vocab_size"],
        fingerprint="tiny",
    )


def make_runner(checkpoint: Checkpoint, **settings: Any) -> CpuRunner:
    defaults: dict[str, Any] = {
        "model": checkpoint.name,
        "attention": "torch",
        "max_batch_size": 16,
        "max_batch_prefill_tokens": 512,
        "max_batch_total_tokens": 4096,
        "threads": 1,
    }
    return make_cpu_runner(WorkerConfig(**{**defaults, **settings}), checkpoint)


def greedy(model: PreTrainedModel, prompt: list[int], n: int) -> list[int]:
    """Token by token on the whole text, without transformers' generation code or cache."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(n):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]
