"""Attention over dense tensors with its log-sum-exp, so that parts of a context can be merged.

Merging: out = sum(out_i exp(lse_i)) / sum(exp(lse_i)), the identity behind FlashAttention (arXiv 2205.14135).
"""

from __future__ import annotations

import math

import torch

_FLASH_CPU = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q: [b, heads, n, d]; k, v: [b, kv_heads, m, d], any strides but the last; mask: additive, broadcastable
    to [b, heads, n, m]; causal needs n == m. Returns out [b, heads, n, d] and lse [b, heads, n] (float32).
    """
    if q.device.type == "cpu" and _FLASH_CPU is not None:
        out, lse = _FLASH_CPU(q, k, v, 0.0, causal, attn_mask=mask)
        return out, lse
    return _attend_plain(q, k, v, mask=mask, causal=causal)


def merge(out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> torch.Tensor:
    """Two parts of the same queries. out: [..., d], lse: [...]."""
    share = torch.sigmoid(lse_a - lse_b).unsqueeze(-1).to(out_a.dtype)
    return torch.lerp(out_b, out_a, share)


def _attend_plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: torch.Tensor | None, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, n, d = q.shape
    kv_heads, m = k.shape[1], k.shape[2]
    grouped = q.reshape(batch, kv_heads, heads // kv_heads * n, d)
    scores = torch.matmul(grouped, k.transpose(-1, -2)).float().mul_(1.0 / math.sqrt(d))
    scores = scores.view(batch, heads, n, m)
    if mask is not None:
        scores = scores + mask
    if causal:
        above = torch.ones(n, m, dtype=torch.bool, device=q.device).triu_(1)
        scores.masked_fill_(above, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = (scores - lse.unsqueeze(-1)).exp_().to(v.dtype)
    out = torch.matmul(weights.view(batch, kv_heads, heads // kv_heads * n, m), v)
    return out.view(batch, heads, n, d), lse
