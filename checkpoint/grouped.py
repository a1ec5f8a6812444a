"""Weights in groups of 32 with a scale and a minimum each: what GGUF's simple quantised formats hold.

    weight = scale * q + minimum        (float32; scale * q is exact, so one rounding at most)

q is unsigned; signed formats are shifted. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]

GROUP = 32
"""Weights of a group: consecutive inputs of one output."""


@dataclass(slots=True, frozen=True)
class Grouped:
    """One weight matrix [n_out, n_groups * 32]."""

    bits: int
    """4 or 8"""
    words: U32
    """[n_out, n_groups, bits]. 8 bits: byte i of word w is q of input 4 w + i. 4 bits: the low half of byte i
    of word w belongs to input 4 w + i, the high half to input 4 w + i + 16."""
    scale: F32
    """[n_out, n_groups]"""
    minimum: F32
    """[n_out, n_groups]"""

    def rows(self, order: npt.NDArray[np.intp]) -> Grouped:
        """With the outputs in another order."""
        return Grouped(self.bits, self.words[order], self.scale[order], self.minimum[order])


def join(parts: Sequence[Grouped]) -> Grouped | None:
    """The parts' outputs one after another; None when their bits differ."""
    if len(parts) == 1:
        return parts[0]
    if len({part.bits for part in parts}) != 1:
        return None
    return Grouped(
        parts[0].bits,
        np.concatenate([part.words for part in parts]),
        np.concatenate([part.scale for part in parts]),
        np.concatenate([part.minimum for part in parts]),
    )


def decode(kind: str, blocks: U8) -> Grouped | None:
    """blocks: [n_out, n_groups, bytes of a block] of the ggml type `kind`; None when not of this form."""
    reader = _READERS.get(kind)
    return reader(blocks) if reader is not None else None


def _q4_0(blocks: U8) -> Grouped:
    scale = _half(blocks, 0)
    return Grouped(4, _words(blocks[..., 2:]), scale, scale * np.float32(-8))


def _q4_1(blocks: U8) -> Grouped:
    return Grouped(4, _words(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: U8) -> Grouped:
    scale = _half(blocks, 0)
    return Grouped(8, _words(blocks[..., 2:]) ^ np.uint32(0x80808080), scale, scale * np.float32(-128))


_READERS: dict[str, Callable[[U8], Grouped]] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0}


def _half(blocks: U8, at: int) -> F32:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2")[..., 0].astype(np.float32)


def _words(quants: U8) -> U32:
    return np.ascontiguousarray(quants).view("<u4").astype(np.uint32, copy=False)
