"""A decoder of the Llama line in float64, without a cache and without our kernels: what bf16 is judged by."""

from __future__ import annotations

import torch

from worker.models.spec import DecoderWeights, LayerWeights


class Float64Decoder:
    """Holds the weights, as they were rounded, in float64. No biases, q/k norms or windows."""

    def __init__(self, weights: DecoderWeights) -> None:
        self.spec = weights.spec
        self._embed = weights.embed.double()
        self._head = self._embed if weights.lm_head is weights.embed else weights.lm_head.double()
        self._final_norm = weights.final_norm.double()
        self._layers = [_Layer(layer) for layer in weights.layers]
        device = weights.embed.device
        self._inv_freq = torch.tensor(self.spec.rope.inv_freq, dtype=torch.float64, device=device)

    def logits(self, tokens: list[int], *, first: int = 0) -> torch.Tensor:
        """float64 [n - first, vocab]: row i predicts the token after place first + i."""
        spec = self.spec
        x = self._embed[torch.tensor(tokens, device=self._embed.device)]
        positions = torch.arange(len(tokens), device=x.device, dtype=torch.float64)
        angles = positions[:, None] * self._inv_freq
        cos, sin = (part * spec.rope.attention_factor for part in (angles.cos(), angles.sin()))
        mask = torch.ones(len(tokens), len(tokens), dtype=torch.bool, device=x.device).triu(1)
        for layer in self._layers:
            x = x + self._attention(layer, _norm(x, layer.input_norm, spec.rms_eps), cos, sin, mask)
            gate, up = (_norm(x, layer.post_norm, spec.rms_eps) @ layer.gate_up.t()).chunk(2, -1)
            x = x + (torch.nn.functional.silu(gate) * up) @ layer.down.t()
        return _norm(x[first:], self._final_norm, spec.rms_eps) @ self._head.t()

    def _attention(
        self, layer: _Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        spec = self.spec
        qkv = (x @ layer.qkv.t()).view(len(x), -1, spec.head_dim)
        q, k, v = qkv.split([spec.n_heads, spec.n_kv_heads, spec.n_kv_heads], 1)
        group = spec.n_heads // spec.n_kv_heads
        k, v = _rotated(k, cos, sin).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", _rotated(q, cos, sin), k) * spec.head_dim**-0.5
        p = scores.masked_fill(mask, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", p, v).reshape(len(x), -1) @ layer.o.t()


class _Layer:
    def __init__(self, layer: LayerWeights) -> None:
        self.input_norm, self.post_norm = layer.input_norm.double(), layer.post_norm.double()
        self.qkv, self.o = layer.qkv.double(), layer.o.double()
        self.gate_up, self.down = layer.gate_up.double(), layer.down.double()


def _norm(x: torch.Tensor, g: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * g


def _rotated(t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    lo, hi = t.chunk(2, -1)
    return torch.cat([lo * cos[:, None] - hi * sin[:, None], hi * cos[:, None] + lo * sin[:, None]], -1)
