"""Copies keys and values out of their blocks into one piece, for attention that reads whole tiles."""

import triton
import triton.language as tl

TOKENS = 8
"""KV positions of one program."""


@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "starts_ptr"])
def gather_kv_kernel(
    k_cache_ptr,
    v_cache_ptr,
    k_ptr,
    v_ptr,
    rows_ptr,
    starts_ptr,
    table_ptr,
    table_stride,
    scale,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    N_TOKENS: tl.constexpr,
):
    """k, v[starts[i] + t] = those at position t of row rows[i], times scale. The caches hold WIDTH values a
    position, blocks one after another. Grid: (tiles of the longest row, rows)."""
    i = tl.program_id(1)
    start = tl.load(starts_ptr + i)
    n = tl.load(starts_ptr + i + 1) - start
    first = tl.program_id(0) * N_TOKENS
    if first >= n:
        return
    t = first + tl.arange(0, N_TOKENS)
    row = tl.load(rows_ptr + i).to(tl.int64)
    block = tl.load(table_ptr + row * table_stride + t // BLOCK_SIZE, mask=t < n, other=0).to(tl.int64)
    w = tl.arange(0, WIDTH_PAD)[None, :]
    mask = (t < n)[:, None] & (w < WIDTH)
    source = (block * BLOCK_SIZE + t % BLOCK_SIZE)[:, None] * WIDTH + w
    target = (start + t).to(tl.int64)[:, None] * WIDTH + w
    k = tl.load(k_cache_ptr + source, mask=mask)
    v = tl.load(v_cache_ptr + source, mask=mask)
    kind = k_ptr.dtype.element_ty
    if k_cache_ptr.dtype.element_ty != kind:
        k = (k.to(tl.float32) * scale).to(kind)
        v = (v.to(tl.float32) * scale).to(kind)
    tl.store(k_ptr + target, k, mask=mask)
    tl.store(v_ptr + target, v, mask=mask)
