"""Decode attention over the paged cache: rope, append, attention and the merge of splits in one launch.

Nothing is planned on the host: lengths and block tables are read on the device, so a captured graph serves any
lengths. The softmax is the online form of Milakov and Gimelshein (2018); splits are merged as in FlashDecoding.
"""

import triton
import triton.language as tl

from worker.gpu.kernels.pdl import let_successor_start, wait_for_predecessor


@triton.jit(do_not_specialize=["n_splits", "window"])
def decode_attention_kernel(
    qkv_ptr,
    out_ptr,
    k_cache_ptr,
    v_cache_ptr,
    row_ptr,
    len_ptr,
    table_ptr,
    cos_ptr,
    sin_ptr,
    bias_ptr,
    q_norm_ptr,
    k_norm_ptr,
    part_ptr,
    ml_ptr,
    count_ptr,
    chunk_ptr,
    eps,
    scale,
    kv_scale,
    window,
    table_stride,
    s_block,
    s_pos,
    s_head,
    n_splits,
    N_HEADS: tl.constexpr,
    N_KV: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BIAS: tl.constexpr,
    QK_NORM: tl.constexpr,
    WINDOW: tl.constexpr,
    PDL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program: one split of one KV head of one row. Grid: (N_KV, rows, n_splits): the
    splits that do work come before those that end at once, so that they spread evenly over the multiprocessors.

    qkv [rows, (N_HEADS + 2 N_KV) D] holds this step's token, not yet rotated. The program of the last split
    writes the new k and v to the cache. `len` counts the new token; 0 marks a padding row: nothing is read or
    written for it. part: float32 [rows, N_KV, n_splits, GROUP_PAD, D]; ml: float32 [rows, N_KV, n_splits, 2,
    GROUP_PAD]; count: int32 [rows, N_KV], zero, left zero. D is the rotary width and a power of two.
    WINDOW: only the last `window` positions count. chunk: int32 [1], the positions that one split should hold, chosen
    by the host so that the splits of all rows together fill the device once; a row has at most n_splits."""
    kv = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    let_successor_start(PDL)
    # Row, length and block table are written before the chain of PDL kernels of this step starts.
    length = tl.load(len_ptr + b)
    if length == 0:
        wait_for_predecessor(PDL)
        return
    row = tl.load(row_ptr + b).to(tl.int64)
    first = 0
    if WINDOW:
        first = tl.maximum(length - window, 0)
    n_old = length - 1 - first
    chunk = tl.maximum(tl.cdiv(n_old, n_splits), tl.load(chunk_ptr))
    chunk = tl.cdiv(chunk, BLOCK_T) * BLOCK_T
    n_active = tl.maximum(tl.cdiv(n_old, chunk), 1)
    if split >= n_active:
        wait_for_predecessor(PDL)
        return
    start = first + split * chunk
    end = tl.minimum(start + chunk, length - 1)

    HALF: tl.constexpr = D // 2
    g = tl.arange(0, GROUP_PAD)
    i = tl.arange(0, HALF)
    d = tl.arange(0, D)
    g_mask = (g < GROUP)[:, None]
    pos = length - 1
    cos = tl.load(cos_ptr + pos.to(tl.int64) * HALF + i)
    sin = tl.load(sin_ptr + pos.to(tl.int64) * HALF + i)
    if BIAS:
        q_bias_lo = tl.load(bias_ptr + (kv * GROUP + g)[:, None] * D + i[None, :], mask=g_mask, other=0.0)
        q_bias_hi = tl.load(
            bias_ptr + (kv * GROUP + g)[:, None] * D + HALF + i[None, :], mask=g_mask, other=0.0
        )
    wait_for_predecessor(PDL)
    token = qkv_ptr + b * ((N_HEADS + 2 * N_KV) * D)
    q_ptrs = token + (kv * GROUP + g)[:, None] * D + i[None, :]
    q_lo = tl.load(q_ptrs, mask=g_mask, other=0.0).to(tl.float32)
    q_hi = tl.load(q_ptrs + HALF, mask=g_mask, other=0.0).to(tl.float32)
    if BIAS:
        q_lo += q_bias_lo.to(tl.float32)
        q_hi += q_bias_hi.to(tl.float32)
    if QK_NORM:
        r = tl.rsqrt((tl.sum(q_lo * q_lo, 1) + tl.sum(q_hi * q_hi, 1)) / D + eps)
        q_lo = q_lo * r[:, None] * tl.load(q_norm_ptr + i).to(tl.float32)[None, :]
        q_hi = q_hi * r[:, None] * tl.load(q_norm_ptr + HALF + i).to(tl.float32)[None, :]
    dtype = qkv_ptr.dtype.element_ty
    # exp2 is the machine's own: the logarithm's base goes into the scale.
    qk_scale = scale * kv_scale * 1.4426950408889634
    ql = (q_lo * cos[None, :] - q_hi * sin[None, :]).to(dtype)
    qh = (q_hi * cos[None, :] + q_lo * sin[None, :]).to(dtype)

    m_i = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    l_i = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, D], tl.float32)
    table_row = table_ptr + row * table_stride
    k_head = k_cache_ptr + kv * s_head
    v_head = v_cache_ptr + kv * s_head
    t = tl.arange(0, BLOCK_T)
    for t0 in tl.range(start, end, BLOCK_T, num_stages=STAGES):
        p = t0 + t
        ok = p < end
        block = tl.load(table_row + p // BLOCK_SIZE, mask=ok, other=0).to(tl.int64)
        at = block * s_block + (p % BLOCK_SIZE) * s_pos
        k_lo = tl.load(k_head + at[None, :] + i[:, None], mask=ok[None, :], other=0.0)
        k_hi = tl.load(k_head + at[None, :] + HALF + i[:, None], mask=ok[None, :], other=0.0)
        s = tl.dot(ql, k_lo.to(dtype))
        s = tl.dot(qh, k_hi.to(dtype), s) * qk_scale
        s = tl.where(ok[None, :], s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1))
        alpha = tl.exp2(m_i - m_new)
        pr = tl.exp2(s - m_new[:, None])
        l_i = l_i * alpha + tl.sum(pr, 1)
        v = tl.load(v_head + at[:, None] + d[None, :], mask=ok[:, None], other=0.0)
        acc = tl.dot(pr.to(dtype), v.to(dtype), acc * alpha[:, None])
        m_i = m_new

    if split == n_active - 1:
        k_ptrs = token + (N_HEADS + kv) * D + i
        k_lo1 = tl.load(k_ptrs).to(tl.float32)
        k_hi1 = tl.load(k_ptrs + HALF).to(tl.float32)
        v1 = tl.load(token + (N_HEADS + N_KV + kv) * D + d).to(tl.float32)
        if BIAS:
            k_lo1 += tl.load(bias_ptr + (N_HEADS + kv) * D + i).to(tl.float32)
            k_hi1 += tl.load(bias_ptr + (N_HEADS + kv) * D + HALF + i).to(tl.float32)
            v1 += tl.load(bias_ptr + (N_HEADS + N_KV + kv) * D + d).to(tl.float32)
        if QK_NORM:
            r1 = tl.rsqrt((tl.sum(k_lo1 * k_lo1) + tl.sum(k_hi1 * k_hi1)) / D + eps)
            k_lo1 = k_lo1 * r1 * tl.load(k_norm_ptr + i).to(tl.float32)
            k_hi1 = k_hi1 * r1 * tl.load(k_norm_ptr + HALF + i).to(tl.float32)
        kv_type = k_cache_ptr.dtype.element_ty
        kl = ((k_lo1 * cos - k_hi1 * sin) / kv_scale).to(kv_type)
        kh = ((k_hi1 * cos + k_lo1 * sin) / kv_scale).to(kv_type)
        vn = (v1 / kv_scale).to(kv_type)
        block1 = tl.load(table_row + pos // BLOCK_SIZE).to(tl.int64)
        at1 = block1 * s_block + (pos % BLOCK_SIZE) * s_pos
        tl.store(k_head + at1 + i, kl)
        tl.store(k_head + at1 + HALF + i, kh)
        tl.store(v_head + at1 + d, vn)
        s1 = tl.sum(ql.to(tl.float32) * kl.to(tl.float32)[None, :], 1)
        s1 += tl.sum(qh.to(tl.float32) * kh.to(tl.float32)[None, :], 1)
        s1 = s1 * qk_scale
        m_new = tl.maximum(m_i, s1)
        alpha = tl.exp2(m_i - m_new)
        p1 = tl.exp2(s1 - m_new)
        l_i = l_i * alpha + p1
        acc = acc * alpha[:, None] + p1[:, None] * vn.to(tl.float32)[None, :]
        m_i = m_new

    out_ptrs = out_ptr + b * (N_HEADS * D) + (kv * GROUP + g)[:, None] * D + d[None, :]
    if n_active == 1:
        tl.store(out_ptrs, (acc * (kv_scale / l_i)[:, None]).to(dtype), mask=g_mask)
    else:
        slot = (b * N_KV + kv) * n_splits
        inner = g[:, None] * D + d[None, :]
        tl.store(part_ptr + (slot + split) * (GROUP_PAD * D) + inner, acc)
        tl.store(ml_ptr + (slot + split) * (2 * GROUP_PAD) + g, m_i)
        tl.store(ml_ptr + (slot + split) * (2 * GROUP_PAD) + GROUP_PAD + g, l_i)
        tl.debug_barrier()
        arrived = tl.atomic_add(count_ptr + b * N_KV + kv, 1, sem="acq_rel", scope="gpu")
        if arrived == n_active - 1:
            tl.store(count_ptr + b * N_KV + kv, 0)
            m_t = tl.full([GROUP_PAD], float("-inf"), tl.float32)
            l_t = tl.zeros([GROUP_PAD], tl.float32)
            acc_t = tl.zeros([GROUP_PAD, D], tl.float32)
            for s_i in range(n_active):
                m_s = tl.load(ml_ptr + (slot + s_i) * (2 * GROUP_PAD) + g, cache_modifier=".cg")
                l_s = tl.load(ml_ptr + (slot + s_i) * (2 * GROUP_PAD) + GROUP_PAD + g, cache_modifier=".cg")
                a_s = tl.load(part_ptr + (slot + s_i) * (GROUP_PAD * D) + inner, cache_modifier=".cg")
                m_n = tl.maximum(m_t, m_s)
                w_t = tl.exp2(m_t - m_n)
                w_s = tl.exp2(m_s - m_n)
                l_t = l_t * w_t + l_s * w_s
                acc_t = acc_t * w_t[:, None] + a_s * w_s[:, None]
                m_t = m_n
            tl.store(out_ptrs, (acc_t * (kv_scale / l_t)[:, None]).to(dtype), mask=g_mask)
