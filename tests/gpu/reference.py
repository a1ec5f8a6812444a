"""A decoder in float64 without a cache, and a small random model: what the GPU's texts are compared with."""

from __future__ import annotations

import torch

from worker.models.config import spec_from_config
from worker.models.spec import DecoderWeights, LayerWeights, ModelSpec
from worker.weights import dummy_weights

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 1024,
    "vocab_size": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def tiny_weights(*, device: torch.device, dtype: torch.dtype, **overrides: object) -> DecoderWeights:
    """Random, but scaled so that logits are as far apart as a trained model's."""
    weights = dummy_weights(spec_from_config({**TINY, **overrides}), device=device, dtype=dtype, seed=1)
    with torch.no_grad():
        weights.embed.mul_(50.0)
        weights.lm_head.mul_(6.0)
        for layer in weights.layers:
            for w in (layer.qkv, layer.o, layer.gate_up, layer.down):
                w.mul_(1.2 / (0.02 * w.shape[1] ** 0.5))
            layer.input_norm.uniform_(0.5, 1.5)
            layer.post_norm.uniform_(0.5, 1.5)
    return weights


def reference_logits(weights: DecoderWeights, tokens: torch.Tensor) -> torch.Tensor:
    """tokens [t] → float64 [t, vocab]: row i predicts token i + 1."""
    spec = weights.spec
    x = weights.embed[tokens].double()
    positions = torch.arange(len(tokens), device=tokens.device, dtype=torch.float64)
    angles = positions[:, None] * torch.tensor(spec.rope.inv_freq, dtype=torch.float64, device=tokens.device)
    cos, sin = angles.cos() * spec.rope.attention_factor, angles.sin() * spec.rope.attention_factor
    for layer in weights.layers:
        x = x + _attention(spec, layer, _norm(x, layer.input_norm, spec.rms_eps), cos, sin)
        gate, up = (_norm(x, layer.post_norm, spec.rms_eps) @ layer.gate_up.double().t()).chunk(2, -1)
        x = x + (torch.nn.functional.silu(gate) * up) @ layer.down.double().t()
    return _norm(x, weights.final_norm, spec.rms_eps) @ weights.lm_head.double().t()


def _norm(x: torch.Tensor, g: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * g.double()


def _attention(
    spec: ModelSpec, layer: LayerWeights, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    n, d = len(x), spec.head_dim
    qkv = (x @ layer.qkv.double().t()).view(n, -1, d)
    q, k, v = qkv.split([spec.n_heads, spec.n_kv_heads, spec.n_kv_heads], 1)

    def rope(t: torch.Tensor) -> torch.Tensor:
        lo, hi = t.chunk(2, -1)
        return torch.cat([lo * cos[:, None] - hi * sin[:, None], hi * cos[:, None] + lo * sin[:, None]], -1)

    group = spec.n_heads // spec.n_kv_heads
    k, v = rope(k).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", rope(q), k) * d**-0.5
    mask = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
    p = scores.masked_fill(mask, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", p, v).reshape(n, -1) @ layer.o.double().t()
