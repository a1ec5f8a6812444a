"""Rotary embedding of q and k and the append to the paged KV cache, straight from the merged qkv product."""

import triton
import triton.language as tl

from worker.gpu.kernels.pdl import let_successor_start, wait_for_predecessor


@triton.jit(do_not_specialize_on_alignment=["token_row_ptr", "position_ptr"])
def rope_append_kernel(
    qkv_ptr,
    q_out_ptr,
    k_cache_ptr,
    v_cache_ptr,
    token_row_ptr,
    position_ptr,
    table_ptr,
    cos_ptr,
    sin_ptr,
    bias_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    table_stride,
    s_block,
    s_pos,
    s_head,
    kv_inv_scale,
    N_HEADS: tl.constexpr,
    N_KV: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BIAS: tl.constexpr,
    QK_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one head of one token. qkv [t, (N_HEADS + 2 N_KV) D]; q goes to q_out [t, N_HEADS, D], k and v
    to the cache at (table[row][position // BLOCK_SIZE], position % BLOCK_SIZE). HALF is half the rotary width;
    pairs are (i, i + HALF); the rest of a head passes unchanged. A token whose row is negative (padding) writes
    nothing. Grid: (t, N_HEADS + 2 N_KV); heads beyond N_HEADS are k, beyond N_HEADS + N_KV are v."""
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    let_successor_start(PDL)
    wait_for_predecessor(PDL)
    row = tl.load(token_row_ptr + t)
    if row < 0:
        return
    pos = tl.load(position_ptr + t)
    width = (N_HEADS + 2 * N_KV) * D
    base = qkv_ptr + t * width + h * D
    i = tl.arange(0, D)
    in_lo = i < HALF
    in_rot = i < 2 * HALF
    partner = tl.where(in_lo, i + HALF, tl.where(in_rot, i - HALF, i))
    x = tl.load(base + i).to(tl.float32)
    y = tl.load(base + partner).to(tl.float32)
    if BIAS:
        x += tl.load(bias_ptr + h * D + i).to(tl.float32)
        y += tl.load(bias_ptr + h * D + partner).to(tl.float32)
    if h < N_HEADS + N_KV:
        if QK_NORM:
            g_ptr = q_norm_ptr if h < N_HEADS else k_norm_ptr
            r = tl.rsqrt(tl.sum(x * x) / D + eps)
            x = x * r * tl.load(g_ptr + i).to(tl.float32)
            y = y * r * tl.load(g_ptr + partner).to(tl.float32)
        pair = tl.where(in_lo, i, i - HALF)
        c = tl.load(cos_ptr + pos.to(tl.int64) * HALF + pair, mask=in_rot, other=1.0)
        s = tl.load(sin_ptr + pos.to(tl.int64) * HALF + pair, mask=in_rot, other=0.0)
        x = x * c + tl.where(in_lo, -y, y) * s
    if h < N_HEADS:
        tl.store(q_out_ptr + t * N_HEADS * D + h * D + i, x.to(q_out_ptr.dtype.element_ty))
    else:
        block = tl.load(table_ptr + row.to(tl.int64) * table_stride + pos // BLOCK_SIZE).to(tl.int64)
        at = block * s_block + (pos % BLOCK_SIZE) * s_pos
        x = x * kv_inv_scale
        if h < N_HEADS + N_KV:
            tl.store(k_cache_ptr + at + (h - N_HEADS) * s_head + i, x.to(k_cache_ptr.dtype.element_ty))
        else:
            tl.store(v_cache_ptr + at + (h - N_HEADS - N_KV) * s_head + i, x.to(v_cache_ptr.dtype.element_ty))
