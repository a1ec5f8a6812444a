"""What every backend knows of a decoder of the Llama line: its shape and its weights, merged for speed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from checkpoint.grouped import Grouped


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding. `inv_freq` already includes the scaling variant (linear, llama3, yarn …)."""

    inv_freq: tuple[float, ...]
    """[rotary_dim / 2]"""
    rotary_dim: int
    attention_factor: float = 1.0
    """cos and sin are multiplied by it (yarn)."""
    theta: float = 10000.0
    variant: str = "default"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    architecture: str
    n_layers: int
    hidden_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_eps: float
    rope: RopeSpec
    max_positions: int
    tied_embeddings: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm over each head of q and k before rope (Qwen3)."""
    sliding_windows: tuple[int | None, ...] = ()
    """Per layer; empty: none anywhere."""
    eos_token_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class LayerWeights:
    """Linear weights are [out_features, in_features], as torch.nn.functional.linear takes them."""

    input_norm: torch.Tensor
    """[hidden]"""
    qkv: torch.Tensor
    """[(n_heads + 2 n_kv_heads) head_dim, hidden]: q rows, then k, then v"""
    o: torch.Tensor
    """[hidden, n_heads head_dim]"""
    post_norm: torch.Tensor
    """[hidden]"""
    gate_up: torch.Tensor
    """[2 intermediate, hidden]: gate rows, then up"""
    down: torch.Tensor
    """[hidden, intermediate]"""
    qkv_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    """[head_dim]"""
    k_norm: torch.Tensor | None = None


@dataclass(slots=True)
class DecoderWeights:
    spec: ModelSpec
    embed: torch.Tensor
    """[vocab, hidden]"""
    final_norm: torch.Tensor
    """[hidden]"""
    lm_head: torch.Tensor
    """[vocab, hidden]; the same tensor as `embed` when tied"""
    layers: list[LayerWeights] = field(default_factory=list)
    grouped: dict[tuple[int, str], Grouped] = field(default_factory=dict)
    """Linear weights kept as the file holds them, by (layer, field); their tensors in `layers` are on the
    meta device: a shape without values. Layer -1 (`tensors.MODEL`): outside the layers."""
