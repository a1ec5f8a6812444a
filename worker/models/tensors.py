"""Which tensor of a checkpoint fills which rows of which weight: the Llama line's names.

Every served architecture names its tensors alike; which of them exist follows from the `ModelSpec`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from worker.models.spec import ModelSpec

MODEL = -1
"""`Part.layer` of tensors outside the layers."""


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of the checkpoint and its place."""

    name: str
    layer: int
    """Index into `DecoderWeights.layers`, or MODEL."""
    field: str
    """Attribute of `LayerWeights` or `DecoderWeights`."""
    shape: tuple[int, ...]
    start: int = 0
    """First row of the destination that it fills."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A destination: one allocated tensor, filled by one part or several."""

    layer: int
    field: str
    shape: tuple[int, ...]


_HARMLESS = re.compile(r"(^|\.)(rotary_emb\.inv_freq|masked_bias|attn\.bias|rope_freqs\.weight)$")


def is_harmless(name: str, spec: ModelSpec) -> bool:
    """Whether a tensor that no part names may be left out: buffers that are computed, and the second
    copy of a tied embedding."""
    return bool(_HARMLESS.search(name)) or (spec.tied_embeddings and name == "lm_head.weight")


def parts(spec: ModelSpec) -> Iterator[Part]:
    """Every tensor that a checkpoint of this model must have."""
    hidden, vocab = spec.hidden_size, spec.vocab_size
    yield Part("model.embed_tokens.weight", MODEL, "embed", (vocab, hidden))
    yield Part("model.norm.weight", MODEL, "final_norm", (hidden,))
    if not spec.tied_embeddings:
        yield Part("lm_head.weight", MODEL, "lm_head", (vocab, hidden))
    for layer in range(spec.n_layers):
        yield from _layer_parts(spec, layer)


def weights(spec: ModelSpec) -> Iterator[Weight]:
    """Every destination, with its merged shape."""
    rows: dict[tuple[int, str], tuple[int, ...]] = {}
    for part in parts(spec):
        key = (part.layer, part.field)
        end = part.start + part.shape[0]
        rows[key] = (max(end, rows.get(key, (0,))[0]), *part.shape[1:])
    for (layer, field), shape in rows.items():
        yield Weight(layer, field, shape)


def _layer_parts(spec: ModelSpec, layer: int) -> Iterator[Part]:
    prefix = f"model.layers.{layer}."
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_rows, kv_rows = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    yield Part(f"{prefix}input_layernorm.weight", layer, "input_norm", (hidden,))
    start = 0
    for letter, n in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
        name = f"{prefix}self_attn.{letter}_proj"
        yield Part(f"{name}.weight", layer, "qkv", (n, hidden), start)
        if spec.qkv_bias:
            yield Part(f"{name}.bias", layer, "qkv_bias", (n,), start)
        start += n
    yield Part(f"{prefix}self_attn.o_proj.weight", layer, "o", (hidden, q_rows))
    if spec.o_bias:
        yield Part(f"{prefix}self_attn.o_proj.bias", layer, "o_bias", (hidden,))
    if spec.qk_norm:
        yield Part(f"{prefix}self_attn.q_norm.weight", layer, "q_norm", (spec.head_dim,))
        yield Part(f"{prefix}self_attn.k_norm.weight", layer, "k_norm", (spec.head_dim,))
    yield Part(f"{prefix}post_attention_layernorm.weight", layer, "post_norm", (hidden,))
    for start, word in ((0, "gate"), (inner, "up")):
        yield Part(f"{prefix}mlp.{word}_proj.weight", layer, "gate_up", (inner, hidden), start)
        if spec.mlp_bias:
            yield Part(f"{prefix}mlp.{word}_proj.bias", layer, "gate_up_bias", (inner,), start)
    yield Part(f"{prefix}mlp.down_proj.weight", layer, "down", (hidden, inner))
    if spec.mlp_bias:
        yield Part(f"{prefix}mlp.down_proj.bias", layer, "down_bias", (hidden,))
