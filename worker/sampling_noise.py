"""Gumbel noise as a pure function of (seed, position, token id), so that a row's text depends neither on its
place in a batch nor on what runs beside it, and survives a move to another worker.

All integers are uint32 and wrap. `>>` is a logical shift. A 64-bit seed is split into its low and high word.

    mix(x):      x ^= x >> 16;  x *= 0x7FEB352D;  x ^= x >> 15;  x *= 0x846CA68B;  x ^= x >> 16
    key0       = mix(mix(mix(seed_low ^ 0x9E3779B9) ^ seed_high) ^ position)
    key1       = mix(key0 + 0x9E3779B9)
    x          = (token * 0x9E3779B1) ^ key0
    x         ^= x >> 16;  x *= 0x7FEB352D;  x ^= x >> 15
    x          = (x + key1) * 0x846CA68B
    h          = x ^ (x >> 16)
    w          = min((float32(h >> 1) + 0.5) * 2**-31, 1 - 2**-24)      in float32
    gumbel     = -log(-log1p(-w))                                       in float32

`mix` is the 32-bit finaliser "lowbias32" (Chris Wellons, hash-prospector, public domain). Small w give the
large values, where float32 is finest: noise lies in about [-2.9, 22.2].
`position` is the absolute position of the token being sampled (the first after a prompt of n tokens: n).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

U32 = npt.NDArray[np.uint32]
F32 = npt.NDArray[np.float32]

_GOLDEN = 0x9E3779B9
_TOKEN = 0x9E3779B1
_A = 0x7FEB352D
_B = 0x846CA68B
_MOST = 1.0 - 2.0**-24


def row_keys(seeds: npt.ArrayLike, positions: npt.ArrayLike) -> tuple[U32, U32]:
    """key0 and key1 of each row, [n] each; seeds: uint64, positions: non-negative."""
    seed = np.asarray(seeds, dtype=np.uint64)
    low, high = seed.astype(np.uint32), (seed >> np.uint64(32)).astype(np.uint32)
    position = np.asarray(positions).astype(np.uint32)
    key0 = _mix(_mix(_mix(low ^ np.uint32(_GOLDEN)) ^ high) ^ position)
    return key0, _mix(key0 + np.uint32(_GOLDEN))


def gumbel_noise(seed: int, position: int, token_ids: npt.ArrayLike) -> F32:
    """The reference: noise of these tokens at one place, [n]."""
    key0, key1 = row_keys([seed], [position])
    x = np.asarray(token_ids).astype(np.uint32) * np.uint32(_TOKEN)
    x ^= key0
    x ^= x >> np.uint32(16)
    x *= np.uint32(_A)
    x ^= x >> np.uint32(15)
    x += key1
    x *= np.uint32(_B)
    x ^= x >> np.uint32(16)
    w = ((x >> np.uint32(1)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-31)
    w = np.minimum(w, np.float32(_MOST))
    noise: F32 = -np.log(-np.log1p(-w))
    return noise


def gumbel_noise_rows(key0: torch.Tensor, key1: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """key0, key1: [n] int32 (the bits of the uint32 keys); token_ids: int32 [n, m], or [m] for all rows.
    Returns float32 [n, m]. Signed 32-bit products wrap to the same bits; shifts are masked to be logical."""
    x = (token_ids * _signed(_TOKEN)).bitwise_xor(key0.unsqueeze(1))
    _xor_shift(x, 16)
    x.mul_(_A)
    _xor_shift(x, 15)
    x.add_(key1.unsqueeze(1)).mul_(_signed(_B))
    _xor_shift(x, 16)
    x.bitwise_right_shift_(1).bitwise_and_(0x7FFFFFFF)
    w = x.to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=_MOST)
    return w.neg_().log1p_().neg_().log_().neg_()


def _mix(x: U32) -> U32:
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(_A)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(_B)
    return x ^ (x >> np.uint32(16))


def _xor_shift(x: torch.Tensor, n_bits: int) -> None:
    x.bitwise_xor_((x >> n_bits).bitwise_and_((1 << (32 - n_bits)) - 1))


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value
