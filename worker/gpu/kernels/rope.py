"""Rotary embedding of q and k and the append to the paged KV cache, straight from the merged qkv product."""

import triton
import triton.language as tl

from worker.gpu.kernels.pdl import let_successor_start, wait_for_predecessor


@triton.jit
def _rotated(
    base_ptr,
    bias_ptr,
    norm_ptr,
    cos,
    sin,
    eps,
    N: tl.constexpr,
    N_PAD: tl.constexpr,
    D: tl.constexpr,
    BIAS: tl.constexpr,
    QK_NORM: tl.constexpr,
):
    """N heads of one token: (lower halves, upper halves), float32 [N_PAD, D / 2] each."""
    HALF: tl.constexpr = D // 2
    h = tl.arange(0, N_PAD)[:, None]
    i = tl.arange(0, HALF)[None, :]
    mask = h < N
    lo = tl.load(base_ptr + h * D + i, mask=mask, other=0.0).to(tl.float32)
    hi = tl.load(base_ptr + h * D + HALF + i, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        lo += tl.load(bias_ptr + h * D + i, mask=mask, other=0.0).to(tl.float32)
        hi += tl.load(bias_ptr + h * D + HALF + i, mask=mask, other=0.0).to(tl.float32)
    if QK_NORM:
        r = tl.rsqrt((tl.sum(lo * lo, 1) + tl.sum(hi * hi, 1)) / D + eps)[:, None]
        lo = lo * r * tl.load(norm_ptr + i).to(tl.float32)
        hi = hi * r * tl.load(norm_ptr + HALF + i).to(tl.float32)
    return lo * cos - hi * sin, hi * cos + lo * sin


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
    N_HEADS_PAD: tl.constexpr,
    N_KV_PAD: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BIAS: tl.constexpr,
    QK_NORM: tl.constexpr,
    LEAVE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one token. qkv [t, (N_HEADS + 2 N_KV) D]; q goes to q_out [t, N_HEADS, D], k and v to
    the cache at (table[row][position // BLOCK_SIZE], position % BLOCK_SIZE). Pairs are (i, i + D / 2). A
    token whose row is negative (padding, a decode row) writes nothing. LEAVE: k as it is rotated, and v with
    its bias, also take the place of what they came from."""
    t = tl.program_id(0).to(tl.int64)
    let_successor_start(PDL)
    HALF: tl.constexpr = D // 2
    # Rows, positions and tables were written before the pass began.
    row = tl.load(token_row_ptr + t)
    if row < 0:
        wait_for_predecessor(PDL)
        return
    pos = tl.load(position_ptr + t)
    i = tl.arange(0, HALF)[None, :]
    cos = tl.load(cos_ptr + pos.to(tl.int64) * HALF + i)
    sin = tl.load(sin_ptr + pos.to(tl.int64) * HALF + i)
    block = tl.load(table_ptr + row.to(tl.int64) * table_stride + pos // BLOCK_SIZE).to(tl.int64)
    at = block * s_block + (pos % BLOCK_SIZE) * s_pos
    wait_for_predecessor(PDL)
    token = qkv_ptr + t * ((N_HEADS + 2 * N_KV) * D)
    lo, hi = _rotated(token, bias_ptr, q_norm_ptr, cos, sin, eps, N_HEADS, N_HEADS_PAD, D, BIAS, QK_NORM)
    h = tl.arange(0, N_HEADS_PAD)[:, None]
    out = q_out_ptr + t * (N_HEADS * D) + h * D + i
    tl.store(out, lo.to(q_out_ptr.dtype.element_ty), mask=h < N_HEADS)
    tl.store(out + HALF, hi.to(q_out_ptr.dtype.element_ty), mask=h < N_HEADS)

    kv_type = k_cache_ptr.dtype.element_ty
    g = tl.arange(0, N_KV_PAD)[:, None]
    g_mask = g < N_KV
    lo, hi = _rotated(
        token + N_HEADS * D,
        bias_ptr + N_HEADS * D,
        k_norm_ptr,
        cos,
        sin,
        eps,
        N_KV,
        N_KV_PAD,
        D,
        BIAS,
        QK_NORM,
    )
    tl.store(k_cache_ptr + at + g * s_head + i, (lo * kv_inv_scale).to(kv_type), mask=g_mask)
    tl.store(k_cache_ptr + at + g * s_head + HALF + i, (hi * kv_inv_scale).to(kv_type), mask=g_mask)
    if LEAVE:
        own = token + N_HEADS * D + g * D + i
        tl.store(own, lo.to(qkv_ptr.dtype.element_ty), mask=g_mask)
        tl.store(own + HALF, hi.to(qkv_ptr.dtype.element_ty), mask=g_mask)
    d = tl.arange(0, D)[None, :]
    v = tl.load(token + (N_HEADS + N_KV) * D + g * D + d, mask=g_mask, other=0.0).to(tl.float32)
    if BIAS:
        v += tl.load(bias_ptr + (N_HEADS + N_KV) * D + g * D + d, mask=g_mask, other=0.0).to(tl.float32)
    tl.store(v_cache_ptr + at + g * s_head + d, (v * kv_inv_scale).to(kv_type), mask=g_mask)
    if LEAVE and BIAS:
        tl.store(token + (N_HEADS + N_KV) * D + g * D + d, v.to(qkv_ptr.dtype.element_ty), mask=g_mask)
