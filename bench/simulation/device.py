"""How long a step takes on a device, as a formula: products by tokens, attention by what it reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModel:
    """Milliseconds per step. A step of decode rows alone and one with prompt chunks are told apart, because
    they run different kernels."""

    decode_ms: tuple[tuple[int, float], ...]
    """(decode rows, time of a step of them alone without attention), ascending."""
    decode_position_ms: float
    """Attention in it, per position read."""
    decode_shared_ms: float
    """The same for a position that another row of the step has read already."""
    chunk_least_ms: float
    chunk_base_ms: float
    chunk_token_ms: float
    """Per token of a step with chunks, decode rows among them."""
    chunk_position_ms: float
    chunk_shared_ms: float
    """Attention of decode rows beside chunks, per position."""
    chunk_pair_ms: float
    """Attention of chunks, per pair of query and position."""
    gather_ms: float
    """Per position of a chunk longer than `long_kv`, whose keys are gathered first."""
    long_kv: int
    small_chunk: int
    """Chunks under so many tokens are dearer …"""
    small_token_ms: float
    """… per token of the step's chunks …"""
    small_pair_ms: float
    """… and, where they are long, per pair."""

    def step_ms(self, *, decode_kv: I64, n_shared: int, chunk_q: I64, chunk_kv: I64) -> float:
        """decode_kv: [n] KV lengths of the decode rows, of which `n_shared` positions in all lie in blocks
        read for another row. chunk_q, chunk_kv: [m] tokens of each chunk, KV length at its end."""
        n_shared = min(n_shared, int(decode_kv.sum()))
        n_own = int(decode_kv.sum()) - n_shared
        if not len(chunk_q):
            sizes, times = zip(*self.decode_ms, strict=True)
            base = float(np.interp(len(decode_kv), sizes, times))
            return base + n_own * self.decode_position_ms + n_shared * self.decode_shared_ms
        n_tokens = len(decode_kv) + int(chunk_q.sum())
        base = max(self.chunk_least_ms, self.chunk_base_ms + self.chunk_token_ms * n_tokens)
        pairs = float((chunk_q * (chunk_kv - chunk_q / 2)).sum())
        decode = n_own * self.chunk_position_ms + n_shared * self.chunk_shared_ms
        is_long = chunk_kv > self.long_kv
        extra = float(chunk_kv[is_long].sum()) * self.gather_ms
        if int(chunk_q.sum()) < self.small_chunk:
            extra += int(chunk_q.sum()) * self.small_token_ms
            extra += float((chunk_q * (chunk_kv - chunk_q / 2))[is_long].sum()) * self.small_pair_ms
        return base + decode + pairs * self.chunk_pair_ms + extra


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """Milliseconds that a request and a token spend outside the device."""

    in_ms: float
    """From the client to an API process, and from it to the scheduler."""
    request_ms: float
    """What an API process is busy with for one request …"""
    token_ms: float
    """… and for one token of its prompt."""
    n_api: int
    send_ms: float
    """From the scheduler to the device."""
    result_ms: float
    """From the device to the scheduler."""
    out_ms: float
    """From the scheduler to the client."""


H200_LLAMA_8B = DeviceModel(
    decode_ms=(
        (1, 4.2), (2, 4.6), (4, 4.7), (24, 4.85), (32, 4.9), (48, 5.2), (64, 5.2), (128, 6.0), (256, 8.24),
    ),
    decode_position_ms=32.0e-6,
    decode_shared_ms=10.0e-6,
    chunk_least_ms=5.5,
    chunk_base_ms=0.4,
    chunk_token_ms=21.5e-3,
    chunk_position_ms=41.0e-6,
    chunk_shared_ms=18.0e-6,
    chunk_pair_ms=0.83e-6,
    gather_ms=70.0e-6,
    long_kv=2048,
    small_chunk=2000,
    small_token_ms=1.2e-3,
    small_pair_ms=0.17e-6,
)  # fmt: skip
"""One NVIDIA H200, Llama-3.1-8B shape in bfloat16: fitted to the steps of a served run under constant load
(its clock is then limited by power, so a prompt token costs more than in a short burst)."""

SERVED = Paths(in_ms=1.5, request_ms=1.0, token_ms=3.4e-3, n_api=4, send_ms=0.4, result_ms=0.8, out_ms=1.5)
"""Client, router and worker on that host, four API processes."""
