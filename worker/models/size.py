"""How large a model is, from its shape alone: parameters, KV bytes per token, memory of a step. No torch."""

from __future__ import annotations

from worker.models.spec import ModelSpec


def n_parameters(spec: ModelSpec) -> int:
    """All weights, norms and biases; tied embeddings once."""
    q, kv = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    hidden, inner = spec.hidden_size, spec.intermediate_size
    attention = hidden * (q + 2 * kv) + q * hidden
    mlp = 3 * hidden * inner
    norms = 2 * hidden + 2 * spec.head_dim * spec.qk_norm
    biases = (q + 2 * kv) * spec.qkv_bias + hidden * spec.o_bias + (2 * inner + hidden) * spec.mlp_bias
    embeddings = spec.vocab_size * hidden * (1 if spec.tied_embeddings else 2)
    return spec.n_layers * (attention + mlp + norms + biases) + embeddings + hidden


def kv_bytes_per_token(spec: ModelSpec, *, itemsize: int) -> int:
    """K and V of every layer."""
    return 2 * spec.n_layers * spec.n_kv_heads * spec.head_dim * itemsize


def step_bytes(spec: ModelSpec, *, max_step_tokens: int, max_batch_size: int, itemsize: int) -> int:
    """An upper estimate of what the largest step needs beside weights and KV: the widest intermediate results
    of all its tokens, and three copies of the logits in float32."""
    width = (
        4 * spec.hidden_size + 2 * (spec.n_heads + 2 * spec.n_kv_heads) * spec.head_dim
    ) + 3 * spec.intermediate_size
    return max_step_tokens * width * itemsize + 3 * max_batch_size * spec.vocab_size * 4
