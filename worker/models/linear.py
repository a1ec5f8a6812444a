"""Linear layers of the decoder, each with the fusions its device offers.

On a CPU with float32 or bfloat16, weights are packed once for oneDNN: measured on AVX-512, its packed
products run 2 to 3 times faster than the default at every batch size. Weights that a file holds in few bits
stay as they are (`worker.native`).
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from checkpoint.grouped import Grouped


class Linear(Protocol):
    """x: [n, in_features] → [n, out_features]."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual + linear(x); `residual` may be overwritten."""
        ...


class GatedLinear(Protocol):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """silu(gate(x)) * up(x): [n, in_features] → [n, intermediate]."""
        ...


class DenseLinear:
    """Any device."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual.add_(F.linear(x, self._weight, self._bias))


class DenseGatedLinear:
    """Any device."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, gate_up: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = gate_up
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(x, self._weight, self._bias).chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


class GatedOutput:
    """Over a linear layer that computes gate and up side by side."""

    __slots__ = ("_gate_up",)

    def __init__(self, gate_up: Linear) -> None:
        self._gate_up = gate_up

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


class PackedLinear:
    """oneDNN's own weight layout. The weight it was made from is no longer needed."""

    __slots__ = ("_bias", "_packed")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return y

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            x, residual, self._packed, self._bias, "add"
        )
        return y


class PackedGatedLinear:
    """Two packed products: the activation and the multiplication are fused into them."""

    __slots__ = ("_gate", "_gate_bias", "_up", "_up_bias")

    def __init__(self, gate_up: torch.Tensor, bias: torch.Tensor | None) -> None:
        gate, up = gate_up.chunk(2)
        self._gate = torch.ops.mkldnn._reorder_linear_weight(gate.contiguous(), None)
        self._up = torch.ops.mkldnn._reorder_linear_weight(up.contiguous(), None)
        self._gate_bias: torch.Tensor | None = None
        self._up_bias: torch.Tensor | None = None
        if bias is not None:
            self._gate_bias, self._up_bias = bias.chunk(2)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate = torch.ops.mkldnn._linear_pointwise(x, self._gate, self._gate_bias, "swish", [], "")
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, gate, self._up, self._up_bias, "mul")
        return y


def can_pack(weight: torch.Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and torch._C._has_mkldnn
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None, grouped: Grouped | None = None) -> Linear:
    """With `grouped`, `weight` is not looked at."""
    if grouped is not None:
        from worker.native.grouped_linear import GroupedLinear

        return GroupedLinear(grouped, bias)
    return PackedLinear(weight, bias) if can_pack(weight) else DenseLinear(weight, bias)


def make_gated_linear(
    gate_up: torch.Tensor, bias: torch.Tensor | None, grouped: Grouped | None = None
) -> GatedLinear:
    if grouped is not None:
        from worker.native.grouped_linear import GroupedGatedLinear, can_gate

        if can_gate(grouped):
            return GroupedGatedLinear(grouped, bias)
        return GatedOutput(make_linear(gate_up, bias, grouped))
    return PackedGatedLinear(gate_up, bias) if can_pack(gate_up) else DenseGatedLinear(gate_up, bias)
