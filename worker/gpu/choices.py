"""Which kernel computes which product: measured choices for measured shapes, rules for the rest.

Measured on one NVIDIA H200 (`python -m bench.kernels linear`, results in bench/results/).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from worker.gpu.linear import CUBLAS, Kernel, LinearChoice

MAX_SKINNY_ROWS = 64
"""More rows than this always go to cuBLAS."""


class Role(StrEnum):
    """A product's place in the decoder: it decides what is folded into it."""

    QKV = "qkv"
    O = "o"  # noqa: E741 (the projection's usual name)
    GATE_UP = "gate_up"
    DOWN = "down"
    HEAD = "head"


def _matvec(block_n: int, block_k: int, warps: int) -> LinearChoice:
    return LinearChoice(
        kernel=Kernel.MATVEC, block_n=block_n, block_k=block_k, warps=warps, block_m=1, fuse_norm=True
    )


def _dot(
    block_m: int, block_n: int, block_k: int, stages: int, split_k: int = 1, warps: int = 4
) -> LinearChoice:
    return LinearChoice(
        kernel=Kernel.DOT,
        block_n=block_n,
        block_k=block_k,
        warps=warps,
        stages=stages,
        split_k=split_k,
        block_m=block_m,
    )


# (role, n, k) → choices by the largest number of rows that each serves. n counts outputs.
_MEASURED: dict[tuple[Role, int, int], tuple[tuple[int, LinearChoice], ...]] = {
    (Role.QKV, 6144, 4096): (
        (1, _matvec(4, 1024, 8)),
        (16, _dot(16, 64, 256, 3)),
        (32, _dot(32, 64, 128, 5)),
        (64, CUBLAS),
    ),
    (Role.O, 4096, 4096): (
        (1, _matvec(2, 1024, 4)),
        (16, _dot(16, 64, 128, 4, 2)),
        (32, _dot(32, 64, 128, 5)),
        (64, CUBLAS),
    ),
    (Role.GATE_UP, 14336, 4096): (
        (1, _matvec(2, 1024, 4)),
        (16, _dot(16, 64, 128, 5)),
        (32, _dot(32, 64, 128, 5)),
        (64, _dot(64, 64, 64, 6)),
    ),
    (Role.DOWN, 4096, 14336): (
        (16, _dot(16, 64, 128, 4, 2)),
        (32, _dot(32, 64, 128, 4, 2)),
        (64, _dot(64, 64, 128, 4, 2)),
    ),
    (Role.HEAD, 128256, 4096): (
        (16, _dot(16, 128, 128, 3, warps=8)),
        (32, _dot(32, 64, 128, 3)),
        (64, _dot(64, 64, 128, 3)),
    ),
}


def choose(role: Role, *, n: int, k: int, m: int, sm_major: int = 9) -> LinearChoice:
    """For m rows of a product with n outputs over k inputs."""
    if m > MAX_SKINNY_ROWS:
        return CUBLAS
    if sm_major == 9:
        for most, choice in _MEASURED.get((role, n, k), ()):
            if m <= most:
                return choice
    return _rule(role, n=n, k=k, m=m)


def _rule(role: Role, *, n: int, k: int, m: int) -> LinearChoice:
    if m == 1 and n % 2 == 0:
        return _matvec(2, min(1024, _power_of_two(k)), 4)
    block_k = 128 if k % 128 == 0 else 64
    if n % 64 or k % block_k:
        return CUBLAS
    block_m = 16 if m <= 16 else 32 if m <= 32 else 64
    gated = role is Role.GATE_UP
    split_k = 2 if not gated and n // 64 < 132 and k % (2 * block_k) == 0 and k >= 1024 else 1
    stages = 4 if block_k == 128 and not (gated and block_m == 64) else 3
    return _dot(block_m, 64, block_k, stages, split_k)


def _power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """Tile sizes of the decode attention kernel."""

    block_t: int
    warps: int
    stages: int


PROGRAMS_PER_SM = 4
"""Decode attention programs that a multiprocessor holds at once with the tiles below."""
_MIN_CHUNK = 64


def decode_tiles(rows: int) -> DecodeTiles:
    """Two warps a program and one program a row and KV head are best where those fill the device; fewer
    rows want more bytes in flight per program."""
    return DecodeTiles(128, 4, 2) if rows == 1 or 8 < rows < 32 else DecodeTiles(64, 2, 3)


def decode_splits(*, rows: int, n_kv_heads: int, n_sms: int) -> int:
    """The most splits of one row's KV range: enough that a long row among short ones is shared out."""
    return max(2, min(64, 4 * PROGRAMS_PER_SM * n_sms // max(1, rows * n_kv_heads)))


def most_decode_programs(*, max_rows: int, n_kv_heads: int, n_sms: int) -> int:
    """Of any launch: what the partial results are sized by."""
    return max(
        rows * n_kv_heads * decode_splits(rows=rows, n_kv_heads=n_kv_heads, n_sms=n_sms)
        for rows in range(1, max_rows + 1)
    )


def decode_chunk(*, n_positions: int, n_kv_heads: int, n_sms: int) -> int:
    """Positions that one split should hold, so that all programs run at once; a quarter more than an even
    share, so that rows of nearly equal length stay whole. n_positions: of all rows together, what they
    share once."""
    share = n_positions * n_kv_heads / (PROGRAMS_PER_SM * n_sms)
    return max(_MIN_CHUNK, int(share * 1.25))


def shared_group_rows(*, group: int, windows: bool) -> int:
    """Rows that attend to a shared prefix together: as many as fill a tile of 16 query heads; 1: none."""
    return 1 if windows else max(1, 16 // group)


def max_groups(*, n_rows: int, group_rows: int) -> int:
    """Groups that a decode launch of `n_rows` rows has room for."""
    return n_rows // group_rows if group_rows > 1 and n_rows >= 2 * group_rows else 0
