"""One decoder for the whole Llama line, driven by `ModelSpec`; device neutral.

Owns the weights in the form its device computes fastest, and no KV: attention is handed in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from checkpoint.grouped import Grouped
from worker.attention.interface import Attention
from worker.models.linear import GatedLinear, Linear, make_gated_linear, make_linear
from worker.models.spec import DecoderWeights, LayerWeights, ModelSpec
from worker.models.tensors import MODEL


@dataclass(slots=True)
class Layer:
    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Linear
    post_norm: torch.Tensor
    gate_up: GatedLinear
    down: Linear


class Decoder:
    def __init__(self, weights: DecoderWeights) -> None:
        """Takes the weights over: `weights.layers` is emptied as they are packed, so that at no time two
        copies of the model are in memory."""
        self.spec: ModelSpec = weights.spec
        self.embed = weights.embed
        self.final_norm = weights.final_norm
        grouped = weights.grouped
        self._lm_head = make_linear(weights.lm_head, None, grouped.pop((MODEL, "lm_head"), None))
        self.layers: list[Layer] = []
        for index in range(len(weights.layers)):
            own = {name: grouped.pop((index, name), None) for name in ("qkv", "o", "gate_up", "down")}
            self.layers.append(_layer(weights.layers.pop(0), own))

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    @property
    def device(self) -> torch.device:
        return self.embed.device

    def hidden(self, tokens: torch.Tensor, attention: Attention, wanted: torch.Tensor | None) -> torch.Tensor:
        """tokens: [n] ids; `attention` is planned for them. Returns the normed last hidden states of the
        `wanted` tokens (indices, None: all): [n_wanted, hidden]."""
        x = F.embedding(tokens, self.embed)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(self._norm(x, layer.input_norm))
            if layer.q_norm is not None and layer.k_norm is not None:
                self._norm_heads(qkv, layer.q_norm, layer.k_norm)
            attended = attention.run(index, qkv)
            if index == last and wanted is not None:
                # Past the last KV append only the wanted tokens matter.
                attended, x = attended.index_select(0, wanted), x.index_select(0, wanted)
            x = layer.o.plus(attended, x)
            x = layer.down.plus(layer.gate_up(self._norm(x, layer.post_norm)), x)
        return self._norm(x, self.final_norm)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] → [n, vocab] in float32."""
        return self._lm_head(hidden).float()

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.spec.rms_eps)

    def _norm_heads(self, qkv: torch.Tensor, q_norm: torch.Tensor, k_norm: torch.Tensor) -> None:
        spec = self.spec
        heads = qkv.view(qkv.shape[0], -1, spec.head_dim)
        q = heads[:, : spec.n_heads]
        k = heads[:, spec.n_heads : spec.n_heads + spec.n_kv_heads]
        q.copy_(self._norm(q, q_norm))
        k.copy_(self._norm(k, k_norm))


def _layer(weights: LayerWeights, grouped: Mapping[str, Grouped | None]) -> Layer:
    return Layer(
        input_norm=weights.input_norm,
        qkv=make_linear(weights.qkv, weights.qkv_bias, grouped["qkv"]),
        q_norm=weights.q_norm,
        k_norm=weights.k_norm,
        o=make_linear(weights.o, weights.o_bias, grouped["o"]),
        post_norm=weights.post_norm,
        gate_up=make_gated_linear(weights.gate_up, weights.gate_up_bias, grouped["gate_up"]),
        down=make_linear(weights.down, weights.down_bias, grouped["down"]),
    )
