"""The one definition of the sampler's randomness: Gumbel noise keyed by (seed, position, token id).

The 32 random bits of a token are MurmurHash3_x86_32 (Austin Appleby, public domain; hash seed 0) of the 16
little-endian bytes: seed (uint64), position (uint32), token id (uint32). With `bits`:

    u     = (bits >> 9 + 0.5) / 2**23            in (0, 1), exact in float32
    noise = -log(-log(u))                        standard Gumbel

A token is sampled as the argmax of logit / temperature + noise over the allowed tokens: by the Gumbel-max
theorem that draws from their softmax. `position` is the sampled token's own position in its text (the number of
tokens before it), so a draw depends on nothing but the request: not on its place in the batch, the batch's size,
the device, or how often it was preempted. `worker/gpu/kernels/sample.py` computes the same in Triton.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

C1 = 0xCC9E2D51
C2 = 0x1B873593
N = 0xE6546B64
F1 = 0x85EBCA6B
F2 = 0xC2B2AE35

_MASK = 0xFFFFFFFF


def _mix(h: int, word: int) -> int:
    k = (word * C1) & _MASK
    k = ((k << 15) | (k >> 17)) & _MASK
    h ^= (k * C2) & _MASK
    h = ((h << 13) | (h >> 19)) & _MASK
    return (h * 5 + N) & _MASK


def prefix(*, seed: int, position: int) -> int:
    """The hash state after seed and position: equal for all tokens of one draw."""
    h = _mix(0, seed & _MASK)
    h = _mix(h, (seed >> 32) & _MASK)
    return _mix(h, position & _MASK)


def bits(
    token_ids: npt.NDArray[np.int64] | npt.NDArray[np.int32], *, seed: int, position: int
) -> npt.NDArray[np.uint32]:
    """[n] token ids → [n] random 32-bit words."""
    with np.errstate(over="ignore"):
        k = token_ids.astype(np.uint32) * np.uint32(C1)
        k = (k << np.uint32(15)) | (k >> np.uint32(17))
        h = np.uint32(prefix(seed=seed, position=position)) ^ (k * np.uint32(C2))
        h = (h << np.uint32(13)) | (h >> np.uint32(19))
        h = h * np.uint32(5) + np.uint32(N)
        h ^= np.uint32(16)
        h ^= h >> np.uint32(16)
        h *= np.uint32(F1)
        h ^= h >> np.uint32(13)
        h *= np.uint32(F2)
        h ^= h >> np.uint32(16)
    return h


def gumbel(
    token_ids: npt.NDArray[np.int64] | npt.NDArray[np.int32], *, seed: int, position: int
) -> npt.NDArray[np.float32]:
    """[n] token ids → [n] standard Gumbel noise, float32."""
    u = (
        (bits(token_ids, seed=seed, position=position) >> np.uint32(9)).astype(np.float32) + np.float32(0.5)
    ) * np.float32(2.0**-23)
    return -np.log(-np.log(u))
