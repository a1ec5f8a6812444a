"""Decode attention over the paged cache: rope, append, attention and the merge of splits in one launch.

Nothing is planned on the host but the rows that share a prefix: lengths and block tables are read on the
device, so a captured graph serves any lengths. The softmax is the online form of Milakov and Gimelshein
(2018); splits are merged as in FlashDecoding. Rows that share their first blocks attend to them together,
as many as fill one tensor core tile: the shared keys are then read once for all of them.
"""

import triton
import triton.language as tl

from worker.gpu.kernels.pdl import let_successor_start, wait_for_predecessor


@triton.jit
def _n_splits(n, chunk, n_splits, BLOCK_T: tl.constexpr):
    """(splits, positions of one) for n positions; (0, …) when there are none."""
    size = tl.maximum(tl.cdiv(n, n_splits), chunk)
    size = tl.cdiv(size, BLOCK_T) * BLOCK_T
    return tl.cdiv(n, size), size


@triton.jit
def _merge(
    part_ptr,
    ml_ptr,
    out_ptr,
    slot0,
    n_own,
    n_shared,
    n_splits,
    out_row,
    kv_scale,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    D: tl.constexpr,
):
    """Combine a row's splits: its own first, then the shared ones, always in this order."""
    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, D)
    mask = g < GROUP
    inner = g[:, None] * D + d[None, :]
    m_t = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    l_t = tl.zeros([GROUP_PAD], tl.float32)
    acc_t = tl.zeros([GROUP_PAD, D], tl.float32)
    for index in range(n_own + n_shared):
        slot = slot0 + tl.where(index < n_own, index, n_splits + index - n_own)
        m_s = tl.load(ml_ptr + slot * (2 * GROUP) + g, mask=mask, other=0.0, cache_modifier=".cg")
        l_s = tl.load(ml_ptr + slot * (2 * GROUP) + GROUP + g, mask=mask, other=1.0, cache_modifier=".cg")
        a_s = tl.load(
            part_ptr + slot * (GROUP * D) + inner, mask=mask[:, None], other=0.0, cache_modifier=".cg"
        )
        m_n = tl.maximum(m_t, m_s)
        w_t = tl.exp2(m_t - m_n)
        w_s = tl.exp2(m_s - m_n)
        l_t = l_t * w_t + l_s * w_s
        acc_t = acc_t * w_t[:, None] + a_s * w_s[:, None]
        m_t = m_n
    tl.store(
        out_row + inner, (acc_t * (kv_scale / l_t)[:, None]).to(out_ptr.dtype.element_ty), mask=mask[:, None]
    )


@triton.jit(do_not_specialize=["n_splits", "window", "n_rows"])
def decode_attention_kernel(
    qkv_ptr,
    out_ptr,
    k_cache_ptr,
    v_cache_ptr,
    row_ptr,
    len_ptr,
    prefix_ptr,
    member_ptr,
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
    n_rows,
    N_HEADS: tl.constexpr,
    N_KV: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SHARED: tl.constexpr,
    BIAS: tl.constexpr,
    QK_NORM: tl.constexpr,
    WINDOW: tl.constexpr,
    PDL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program: one split of one KV head of one row, or of what several rows share. Grid: (N_KV, n_rows
    + groups, n_splits): the splits that do work come before those that end at once, so that they spread
    evenly over the multiprocessors.

    qkv [rows, (N_HEADS + 2 N_KV) D] holds this step's token, not yet rotated. The program of a row's last
    split writes the new k and v to the cache. `len` counts the new token; 0 marks a padding row: nothing is
    read or written for it. D is the rotary width and a power of two. WINDOW: only the last `window`
    positions count. chunk: int32 [1], the positions that one split should hold, chosen by the host so that
    all programs run at once; a row has at most n_splits.

    SHARED: prefix [rows] counts the leading positions that a row's group attends to for it; member [groups,
    R], with R = GROUP_PAD // GROUP, lists the groups' rows, -1 for none (the first tells whether there is a
    group).

    part: float32 [rows, N_KV, 2 n_splits, GROUP, D]; ml: float32 [rows, N_KV, 2 n_splits, 2, GROUP]; count:
    int32 [rows, N_KV], zero, left zero."""
    R: tl.constexpr = GROUP_PAD // GROUP
    HALF: tl.constexpr = D // 2
    kv = tl.program_id(0)
    unit = tl.program_id(1)
    split = tl.program_id(2)
    let_successor_start(PDL)
    # Rows, lengths and block tables are written before the chain of PDL kernels of this step starts.
    chunk = tl.load(chunk_ptr)
    m = tl.arange(0, GROUP_PAD)
    g = m % GROUP
    is_group = False
    lead = unit
    prefix = 0
    if SHARED:
        is_group = unit >= n_rows
        if is_group:
            lead = tl.load(member_ptr + (unit - n_rows) * R)
            if lead < 0:
                wait_for_predecessor(PDL)
                return
        prefix = tl.load(prefix_ptr + lead)
    length = tl.load(len_ptr + lead)
    if length == 0:
        wait_for_predecessor(PDL)
        return
    first = prefix
    if WINDOW:
        first = tl.maximum(length - window, 0)
    n_own, own_chunk = _n_splits(length - 1 - first, chunk, n_splits, BLOCK_T)
    n_own = tl.maximum(n_own, 1)
    n_shared, shared_chunk = _n_splits(prefix, chunk, n_splits, BLOCK_T)
    n_mine = n_own
    start = first + split * own_chunk
    end = tl.minimum(start + own_chunk, length - 1)
    if is_group:
        n_mine = n_shared
        start = split * shared_chunk
        end = tl.minimum(start + shared_chunk, prefix)
    if split >= n_mine:
        wait_for_predecessor(PDL)
        return

    # Row of each line of the tile: one row's heads, or those of several rows.
    b_m = tl.zeros([GROUP_PAD], tl.int32) + lead
    ok_m = m < GROUP
    if SHARED:
        if is_group:
            b_m = tl.load(member_ptr + (unit - n_rows) * R + m // GROUP, mask=m < R * GROUP, other=-1)
            ok_m = b_m >= 0
            b_m = tl.maximum(b_m, 0)
    i = tl.arange(0, HALF)
    d = tl.arange(0, D)
    pos_m = tl.load(len_ptr + b_m, mask=ok_m, other=1) - 1
    cos = tl.load(cos_ptr + pos_m[:, None].to(tl.int64) * HALF + i[None, :])
    sin = tl.load(sin_ptr + pos_m[:, None].to(tl.int64) * HALF + i[None, :])
    head = kv * GROUP + g
    table_row = table_ptr + tl.load(row_ptr + lead).to(tl.int64) * table_stride
    wait_for_predecessor(PDL)
    q_ptrs = qkv_ptr + b_m[:, None].to(tl.int64) * ((N_HEADS + 2 * N_KV) * D) + head[:, None] * D + i[None, :]
    q_lo = tl.load(q_ptrs, mask=ok_m[:, None], other=0.0).to(tl.float32)
    q_hi = tl.load(q_ptrs + HALF, mask=ok_m[:, None], other=0.0).to(tl.float32)
    if BIAS:
        q_lo += tl.load(bias_ptr + head[:, None] * D + i[None, :]).to(tl.float32)
        q_hi += tl.load(bias_ptr + head[:, None] * D + HALF + i[None, :]).to(tl.float32)
    if QK_NORM:
        r = tl.rsqrt((tl.sum(q_lo * q_lo, 1) + tl.sum(q_hi * q_hi, 1)) / D + eps)
        q_lo = q_lo * r[:, None] * tl.load(q_norm_ptr + i).to(tl.float32)[None, :]
        q_hi = q_hi * r[:, None] * tl.load(q_norm_ptr + HALF + i).to(tl.float32)[None, :]
    dtype = qkv_ptr.dtype.element_ty
    # exp2 is the machine's own: the logarithm's base goes into the scale.
    qk_scale = scale * kv_scale * 1.4426950408889634
    ql = (q_lo * cos - q_hi * sin).to(dtype)
    qh = (q_hi * cos + q_lo * sin).to(dtype)

    m_i = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    l_i = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, D], tl.float32)
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

    if (split == n_own - 1) & (not is_group):
        pos = length - 1
        cos1 = tl.load(cos_ptr + pos.to(tl.int64) * HALF + i)
        sin1 = tl.load(sin_ptr + pos.to(tl.int64) * HALF + i)
        token = qkv_ptr + lead.to(tl.int64) * ((N_HEADS + 2 * N_KV) * D)
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
        kl = ((k_lo1 * cos1 - k_hi1 * sin1) / kv_scale).to(kv_type)
        kh = ((k_hi1 * cos1 + k_lo1 * sin1) / kv_scale).to(kv_type)
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

    if (n_own + n_shared == 1) & (not is_group):
        out = out_ptr + lead.to(tl.int64) * (N_HEADS * D) + head[:, None] * D + d[None, :]
        tl.store(out, (acc * (kv_scale / l_i)[:, None]).to(dtype), mask=ok_m[:, None])
        return
    slot = tl.where(is_group, n_splits + split, split)
    slot_m = (b_m.to(tl.int64) * N_KV + kv) * (2 * n_splits) + slot
    tl.store(part_ptr + slot_m[:, None] * (GROUP * D) + g[:, None] * D + d[None, :], acc, mask=ok_m[:, None])
    tl.store(ml_ptr + slot_m * (2 * GROUP) + g, m_i, mask=ok_m)
    tl.store(ml_ptr + slot_m * (2 * GROUP) + GROUP + g, l_i, mask=ok_m)
    tl.debug_barrier()
    n_members = 1
    if SHARED:
        if is_group:
            n_members = R
    for r in range(n_members):
        b = lead
        if SHARED:
            if is_group:
                b = tl.load(member_ptr + (unit - n_rows) * R + r)
        if b >= 0:
            arrived = tl.atomic_add(count_ptr + b * N_KV + kv, 1, sem="acq_rel", scope="gpu")
            own = n_own
            if SHARED:
                if is_group:
                    own, _ = _n_splits(tl.load(len_ptr + b) - 1 - prefix, chunk, n_splits, BLOCK_T)
                    own = tl.maximum(own, 1)
            if arrived == own + n_shared - 1:
                tl.store(count_ptr + b * N_KV + kv, 0)
                _merge(
                    part_ptr,
                    ml_ptr,
                    out_ptr,
                    (b.to(tl.int64) * N_KV + kv) * (2 * n_splits),
                    own,
                    n_shared,
                    n_splits,
                    out_ptr + b.to(tl.int64) * (N_HEADS * D) + kv * (GROUP * D),
                    kv_scale,
                    GROUP,
                    GROUP_PAD,
                    D,
                )
