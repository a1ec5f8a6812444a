"""numpy ⇄ packed little-endian bytes, as `worker.proto` carries arrays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]

_LE_I32 = np.dtype("<i4")
_LE_F32 = np.dtype("<f4")


def pack_i32(values: npt.ArrayLike) -> bytes:
    """[n] integers as n × 4 bytes."""
    return np.ascontiguousarray(values, dtype=_LE_I32).tobytes()


def unpack_i32(data: bytes) -> I32:
    """A read-only [n] view. Raises ValueError when the length is not a multiple of 4."""
    return np.frombuffer(data, dtype=_LE_I32)


def pack_f32(values: npt.ArrayLike) -> bytes:
    """[n] floats as n × 4 bytes."""
    return np.ascontiguousarray(values, dtype=_LE_F32).tobytes()


def unpack_f32(data: bytes) -> F32:
    """A read-only [n] view. Raises ValueError when the length is not a multiple of 4."""
    return np.frombuffer(data, dtype=_LE_F32)
