"""What compiled attention works on: the shape of the heads, and one step's list of work."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from worker.native.machine import REGISTERS, vector_unit

MOST_AHEAD = 64
"""Slots behind those of an item that code may look up to fetch what will be read next."""
I64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Heads:
    """Shape of a model's attention, fixed in the code."""

    n_heads: int
    n_kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.n_heads // self.n_kv_heads

    @property
    def slot_stride(self) -> int:
        """Floats from a slot of the cache to the next: keys of all KV heads, then values."""
        return 2 * self.n_kv_heads * self.head_dim


@dataclass(slots=True, frozen=True)
class Items:
    """What one step attends to; the same for every layer."""

    items: I64Array
    """[n + 1, 3] first of its query tokens in `tokens`, their number, first of its pieces; the last line
    only ends the last item's pieces."""
    pieces: I64Array
    """[m, 5] first query token within the item, number of query tokens, first slot in `slots`, number of
    slots, and 1 when query token i sees only the slots up to n_slots - n_tokens + i."""
    tokens: I64Array
    """Places of the query tokens within the step."""
    slots: I64Array
    """Piece after piece, and `MOST_AHEAD` more, which are only fetched ahead."""
    most_tokens: int
    """Of an item; at least the KV heads that one thread takes of an item alone."""
    n_alone: int
    """The last items are of one token with one piece."""
    alone_heads: int
    """KV heads of such an item that one thread takes together: all or one."""


@dataclass(slots=True, frozen=True)
class Angles:
    """Where one step's tokens stand; the same for every layer."""

    cos: torch.Tensor
    """[n_tokens, head_dim / 2]"""
    sin: torch.Tensor
    slots: torch.Tensor
    """[n_tokens] int64"""


def heads_fit(heads: Heads) -> bool:
    """Whether code can be compiled for them here."""
    unit = vector_unit()
    if unit is None:
        return False
    return heads.head_dim % (REGISTERS * unit.lanes) == 0 and heads.n_heads % heads.n_kv_heads == 0
