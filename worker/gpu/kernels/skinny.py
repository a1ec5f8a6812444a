"""Linear layers over few rows: the step is bound by reading weights once, at memory speed.

Both kernels compute `x @ w.T` for x [m, k] and w [n, k] (bf16 or fp16, accumulation in float32) with the
neighbours of the product folded in:
  * `NORM`: x is RMS-normalised on the fly: sum(w x g) is scaled by rsqrt(mean(x²) + eps) at the end;
  * `GATED`: w holds [gate; up] and the result is silu(gate) * up;
  * `RESIDUAL`: the result is added to `res` in place.
"""

import triton
import triton.language as tl

from worker.gpu.kernels.pdl import let_successor_start, wait_for_predecessor


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def matvec_kernel(
    x_ptr,
    w_ptr,
    out_ptr,
    g_ptr,
    bias_ptr,
    eps,
    n,
    k,
    M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    N_ITER: tl.constexpr,
    EVEN_K: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_N outputs of M (1 or 2) rows on the plain cores. n % BLOCK_N == 0.
    The first tile of weights is fetched before the predecessor has ended."""
    pid = tl.program_id(0)
    rn = pid * BLOCK_N + tl.arange(0, BLOCK_N)
    rk = tl.arange(0, BLOCK_K)
    w_row = w_ptr + rn[:, None].to(tl.int64) * k
    up_row = w_row + n.to(tl.int64) * k
    if EVEN_K:
        w = tl.load(w_row + rk[None, :], eviction_policy="evict_first")
    else:
        w = tl.load(w_row + rk[None, :], mask=rk[None, :] < k, other=0.0, eviction_policy="evict_first")
    if GATED:
        if EVEN_K:
            u = tl.load(up_row + rk[None, :], eviction_policy="evict_first")
        else:
            u = tl.load(up_row + rk[None, :], mask=rk[None, :] < k, other=0.0, eviction_policy="evict_first")
    let_successor_start(PDL)
    wait_for_predecessor(PDL)
    acc0 = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc1 = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    uacc0 = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    uacc1 = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    sq0 = tl.zeros([BLOCK_K], tl.float32)
    sq1 = tl.zeros([BLOCK_K], tl.float32)
    for i in tl.static_range(N_ITER):
        kk = i * BLOCK_K + rk
        if i > 0:
            if EVEN_K:
                w = tl.load(w_row + kk[None, :], eviction_policy="evict_first")
                if GATED:
                    u = tl.load(up_row + kk[None, :], eviction_policy="evict_first")
            else:
                w = tl.load(
                    w_row + kk[None, :], mask=kk[None, :] < k, other=0.0, eviction_policy="evict_first"
                )
                if GATED:
                    u = tl.load(
                        up_row + kk[None, :], mask=kk[None, :] < k, other=0.0, eviction_policy="evict_first"
                    )
        wf = w.to(tl.float32)
        if NORM:
            g = tl.load(g_ptr + kk, mask=kk < k, other=0.0).to(tl.float32)
        x0 = tl.load(x_ptr + kk, mask=kk < k, other=0.0).to(tl.float32)
        if NORM:
            sq0 += x0 * x0
            x0 = x0 * g
        acc0 += wf * x0[None, :]
        if GATED:
            uf = u.to(tl.float32)
            uacc0 += uf * x0[None, :]
        if M > 1:
            x1 = tl.load(x_ptr + k + kk, mask=kk < k, other=0.0).to(tl.float32)
            if NORM:
                sq1 += x1 * x1
                x1 = x1 * g
            acc1 += wf * x1[None, :]
            if GATED:
                uacc1 += uf * x1[None, :]
    n_out = n.to(tl.int64)
    if BIAS:
        b = tl.load(bias_ptr + rn).to(tl.float32)
        if GATED:
            ub = tl.load(bias_ptr + n + rn).to(tl.float32)
    y = tl.sum(acc0, 1)
    if NORM:
        r = tl.rsqrt(tl.sum(sq0) / k + eps)
        y = y * r
    if BIAS:
        y += b
    if GATED:
        yu = tl.sum(uacc0, 1)
        if NORM:
            yu = yu * r
        if BIAS:
            yu += ub
        y = _silu(y) * yu
    if RESIDUAL:
        y += tl.load(out_ptr + rn).to(tl.float32)
    tl.store(out_ptr + rn, y.to(out_ptr.dtype.element_ty))
    if M > 1:
        y = tl.sum(acc1, 1)
        if NORM:
            r = tl.rsqrt(tl.sum(sq1) / k + eps)
            y = y * r
        if BIAS:
            y += b
        if GATED:
            yu = tl.sum(uacc1, 1)
            if NORM:
                yu = yu * r
            if BIAS:
                yu += ub
            y = _silu(y) * yu
        if RESIDUAL:
            y += tl.load(out_ptr + n_out + rn).to(tl.float32)
        tl.store(out_ptr + n_out + rn, y.to(out_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["m"])
def dot_kernel(
    x_ptr,
    w_ptr,
    out_ptr,
    g_ptr,
    bias_ptr,
    part_ptr,
    count_ptr,
    eps,
    m,
    n,
    k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program: BLOCK_N outputs of up to BLOCK_M rows on the tensor cores, the weights as the left
    operand. n % BLOCK_N == 0 and k % (BLOCK_K SPLIT_K) == 0. With SPLIT_K > 1 the last program of a tile to
    arrive adds the parts in their order, so the sum does not depend on who came last. `part`: float32 [n
    tiles, SPLIT_K, 1 or 2, BLOCK_N, BLOCK_M]; `count`: int32 [n tiles], zero, left zero."""
    pid_n = tl.program_id(0)
    pid_k = tl.program_id(1)
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rm = tl.arange(0, BLOCK_M)
    rk = tl.arange(0, BLOCK_K)
    m_mask = rm < m
    per_split = k // SPLIT_K
    k0 = pid_k * per_split
    w_ptrs = w_ptr + rn[:, None].to(tl.int64) * k + (k0 + rk)[None, :]
    u_ptrs = w_ptrs + n.to(tl.int64) * k
    x_ptrs = x_ptr + rm[None, :] * k + (k0 + rk)[:, None]
    let_successor_start(PDL)
    wait_for_predecessor(PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    uacc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    sq = tl.zeros([BLOCK_K, BLOCK_M], tl.float32)
    for i in tl.range(0, per_split, BLOCK_K, num_stages=STAGES):
        w = tl.load(w_ptrs + i, eviction_policy="evict_first")
        x = tl.load(x_ptrs + i, mask=m_mask[None, :], other=0.0)
        if NORM:
            g = tl.load(g_ptr + k0 + i + rk).to(tl.float32)
            xf = x.to(tl.float32)
            sq += xf * xf
            x = (xf * g[:, None]).to(w.dtype)
        acc = tl.dot(w, x, acc)
        if GATED:
            u = tl.load(u_ptrs + i, eviction_policy="evict_first")
            uacc = tl.dot(u, x, uacc)
    if SPLIT_K > 1:
        # NORM is not combined with SPLIT_K: each part would hold only its own share of the squares.
        tile = BLOCK_N * BLOCK_M
        n_acc: tl.constexpr = 2 if GATED else 1
        inner = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + rm[None, :]
        base = part_ptr + (pid_n * SPLIT_K).to(tl.int64) * n_acc * tile
        mine = base + pid_k * n_acc * tile
        tl.store(mine + inner, acc)
        if GATED:
            tl.store(mine + tile + inner, uacc)
        tl.debug_barrier()
        arrived = tl.atomic_add(count_ptr + pid_n, 1, sem="acq_rel", scope="gpu")
        if arrived != SPLIT_K - 1:
            return
        tl.store(count_ptr + pid_n, 0)
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        uacc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for s in tl.static_range(SPLIT_K):
            acc += tl.load(base + s * n_acc * tile + inner, cache_modifier=".cg")
            if GATED:
                uacc += tl.load(base + s * n_acc * tile + tile + inner, cache_modifier=".cg")
    if NORM:
        r = tl.rsqrt(tl.sum(sq, 0) / k + eps)
        acc = acc * r[None, :]
        if GATED:
            uacc = uacc * r[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + rn).to(tl.float32)[:, None]
        if GATED:
            uacc += tl.load(bias_ptr + n + rn).to(tl.float32)[:, None]
    if GATED:
        acc = _silu(acc) * uacc
    out_ptrs = out_ptr + rm[None, :].to(tl.int64) * n + rn[:, None]
    if RESIDUAL:
        acc += tl.load(out_ptrs, mask=m_mask[None, :], other=0.0).to(tl.float32)
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=m_mask[None, :])
