"""y = x · W for grouped weights, computed in float32 straight from their few bits.

The weights are those of the file to the bit; only the order of the sums differs from a dense product. A step
of few rows is bound by how fast weights come from memory: 4-bit weights take a sixth of float32's bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from checkpoint.grouped import GROUP, Grouped
from worker.native.linear_kernel import ARGUMENTS, chunk_rows, linear_kernel, scratch_floats
from worker.native.machine import REGISTERS, vector_unit
from worker.native.panel import X_PADDING, pack_panels
from worker.native.tape import Tape

N_ROWS, CHUNK_ROWS = (1 + ARGUMENTS.index(name) for name in ("n_rows", "chunk_rows"))
"""Places in an operation's line that depend on the step."""


class GroupedLinear:
    """Implements `worker.models.linear.Linear`; also a line for a tape."""

    __slots__ = ("_bias", "_function", "_n_groups", "_panels", "_tape", "_unit_panels", "n_in", "n_out")

    def __init__(self, weight: Grouped, bias: torch.Tensor | None) -> None:
        """Needs `worker.native.machine.can_keep(weight)`."""
        n_out, self._n_groups = weight.scale.shape
        self.n_in, self.n_out = self._n_groups * GROUP, n_out
        self._panels = torch.from_numpy(pack_panels(weight, lanes=_lanes()).view("i4"))
        self._bias = torch.zeros(n_out) if bias is None else bias.contiguous()
        self._function = linear_kernel(weight.bits, x_stride=self.n_in + X_PADDING).linear
        self._tape: Tape | None = None
        # While a thread is at one unit, it fetches the one that it is likely to claim next.
        self._unit_panels = 1

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._run(x, x.new_empty((x.shape[0], self.n_out)), add=0)

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self._run(x, residual, add=1)

    def line(self, x: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor, *, add: int) -> Sequence[int]:
        """The operation, for all rows of `x`, whose rows lie n_in + `X_PADDING` apart. scratch: [threads,
        `scratch_floats()`]. The caller keeps all three alive."""
        assert x.stride(0) == self.n_in + X_PADDING
        n_rows = x.shape[0]
        return (
            self._function,
            x.data_ptr(),
            self._panels.data_ptr(),
            self._bias.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            add,
            n_rows,
            chunk_rows(n_rows),
            self._panels.shape[0],
            self._n_groups,
            scratch.data_ptr(),
            scratch.stride(0),
            scratch.shape[0] * self._unit_panels * self._panels[0].numel(),
        )

    def _run(self, x: torch.Tensor, out: torch.Tensor, *, add: int) -> torch.Tensor:
        n_threads = torch.get_num_threads()
        scratch = torch.empty((n_threads, scratch_floats()))
        x = padded(x)
        if self._tape is None:
            self._tape = Tape(1)
        line = self.line(x, out, scratch, add=add)
        self._tape.ops[0, : len(line)] = line
        self._tape.run(n_threads=n_threads)
        return out


class GroupedGatedLinear(GroupedLinear):
    """Implements `worker.models.linear.GatedLinear`: silu(gate(x)) * up(x)."""

    __slots__ = ()

    def __init__(self, weight: Grouped, bias: torch.Tensor | None) -> None:
        """weight: gate rows, then up. Needs `can_gate(weight)`."""
        width = REGISTERS * _lanes()
        order = np.arange(weight.scale.shape[0]).reshape(2, -1, width).swapaxes(0, 1).reshape(-1)
        super().__init__(weight.rows(order), bias if bias is None else bias[torch.from_numpy(order)])
        self.n_out //= 2
        self._unit_panels = 2
        self._function = linear_kernel(weight.bits, x_stride=self.n_in + X_PADDING).gated


def can_gate(weight: Grouped) -> bool:
    """Whether gate and up fill panels of their own."""
    n_out = int(weight.scale.shape[0])
    return n_out % (2 * REGISTERS * _lanes()) == 0


def padded(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy of it, with `X_PADDING` floats behind each row."""
    n_rows, n_in = x.shape
    if x.stride() == (n_in + X_PADDING, 1):
        return x
    return x.new_empty((n_rows, n_in + X_PADDING))[:, :n_in].copy_(x)


def _lanes() -> int:
    unit = vector_unit()
    assert unit is not None
    return unit.lanes
