"""Sampling: the largest of logit / temperature + Gumbel noise, greedy rows included, in two launches.

The noise is that of `worker/sampling_noise.py`, computed bit for bit in the integers. A row's filters come as
one lowest allowed logit (`threshold_kernel`), so the draw itself needs no sort.
"""

import triton
import triton.language as tl

from worker.gpu.kernels.pdl import let_successor_start, wait_for_predecessor


@triton.jit
def _gumbel(key0, key1, token):
    x = token.to(tl.uint32) * 0x9E3779B1
    x = x ^ key0
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x + key1
    x = x * 0x846CA68B
    x = x ^ (x >> 16)
    w = ((x >> 1).to(tl.float32) + 0.5) * 4.656612873077393e-10
    w = tl.minimum(w, 0.99999994)
    # -log1p(-w): the series where 1 - w would round, the logarithm elsewhere.
    series = w * (1.0 + w * (0.5 + w * (0.33333333 + w * (0.25 + w * 0.2))))
    return -tl.log(tl.where(w < 0.01, series, -tl.log(1.0 - w)))


@triton.jit
def sample_partial_kernel(
    logits_ptr,
    live_ptr,
    key0_ptr,
    key1_ptr,
    temperature_ptr,
    floor_ptr,
    best_ptr,
    best_id_ptr,
    vocab,
    n_tiles,
    BLOCK: tl.constexpr,
    FILTERED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Best value and token of one tile of one row. Grid: (n_tiles, rows). logits: float32 [rows, vocab].
    live: row ids, negative for padding. temperature 0: greedy. floor: lowest allowed logit (FILTERED). NaN
    anywhere in a tile makes its best value NaN."""
    tile = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    let_successor_start(PDL)
    row = tl.load(live_ptr + b)
    wait_for_predecessor(PDL)
    if row < 0:
        return
    temperature = tl.load(temperature_ptr + b)
    token = tile * BLOCK + tl.arange(0, BLOCK)
    mask = token < vocab
    x = tl.load(logits_ptr + b * vocab + token, mask=mask, other=float("-inf"))
    is_bad = tl.max((x != x).to(tl.int32), 0)
    if FILTERED:
        x = tl.where(x >= tl.load(floor_ptr + b), x, float("-inf"))
    if temperature > 0:
        key0 = tl.load(key0_ptr + b).to(tl.uint32, bitcast=True)
        key1 = tl.load(key1_ptr + b).to(tl.uint32, bitcast=True)
        x = x / temperature + _gumbel(key0, key1, token)
    x = tl.where(mask, x, float("-inf"))
    best = tl.max(x, 0)
    best_id = tl.min(tl.where(x == best, token, 0x7FFFFFFF), 0)
    best = tl.where(is_bad > 0, float("nan"), best)
    tl.store(best_ptr + b * n_tiles + tile, best)
    tl.store(best_id_ptr + b * n_tiles + tile, best_id)


@triton.jit
def sample_final_kernel(
    live_ptr,
    best_ptr,
    best_id_ptr,
    slot_ptr,
    last_ptr,
    ring_ptr,
    n_tiles,
    max_rows,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The row's token: into last[row], from where the next step takes it, and into ring[slot, i] for the
    host. There -1 when the logits held NaN or infinity, -2 when all were forbidden, and token 0 for the next
    step. Equal values: the lowest token id wins."""
    b = tl.program_id(0)
    let_successor_start(PDL)
    row = tl.load(live_ptr + b)
    slot = tl.load(slot_ptr)
    wait_for_predecessor(PDL)
    if row < 0:
        return
    i = tl.arange(0, BLOCK)
    mask = i < n_tiles
    value = tl.load(best_ptr + b * n_tiles + i, mask=mask, other=float("-inf"))
    token = tl.load(best_id_ptr + b * n_tiles + i, mask=mask, other=0x7FFFFFFF)
    is_bad = tl.max((value != value).to(tl.int32), 0)
    best = tl.max(tl.where(value == value, value, float("-inf")), 0)
    chosen = tl.min(tl.where(value == best, token, 0x7FFFFFFF), 0)
    usable = (is_bad == 0) & (best > float("-inf")) & (best < float("inf"))
    tl.store(last_ptr + row, tl.where(usable, chosen, 0))
    forbidden = (is_bad == 0) & (best == float("-inf"))
    tl.store(ring_ptr + slot * max_rows + b, tl.where(usable, chosen, tl.where(forbidden, -2, -1)))


@triton.jit
def threshold_kernel(
    logits_ptr,
    live_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    log_min_p_ptr,
    floor_ptr,
    vocab,
    BLOCK: tl.constexpr,
    K_PASSES: tl.constexpr,
    P_PASSES: tl.constexpr,
):
    """The lowest logit that top-k, top-p (over what top-k leaves) and min-p allow. One program per row.

    top-k bisects the value until exactly k logits lie at or above it, or values can't be told apart any
    more (then ties with the k-th are all kept). top-p bisects for the largest value with enough mass at or
    above it. top_k 0, top_p 1 and log_min_p -inf are off."""
    b = tl.program_id(0).to(tl.int64)
    row = tl.load(live_ptr + b)
    if row < 0:
        return
    temperature = tl.load(temperature_ptr + b)
    top_k = tl.load(top_k_ptr + b)
    top_p = tl.load(top_p_ptr + b)
    log_min_p = tl.load(log_min_p_ptr + b)
    floor = float("-inf")
    if temperature > 0:
        i = tl.arange(0, BLOCK)
        x_ptr = logits_ptr + b * vocab
        high = float("-inf")
        low = float("inf")
        for t in range(0, vocab, BLOCK):
            mask = t + i < vocab
            x = tl.load(x_ptr + t + i, mask=mask, other=float("-inf"))
            high = tl.maximum(high, tl.max(x, 0))
            low = tl.minimum(low, tl.min(tl.where(mask & (x > float("-inf")), x, float("inf")), 0))
        if top_k > 0:
            # Invariant: at least k logits are >= below, fewer than k are >= above.
            below = low
            above = high + 1.0
            found = 0
            n_pass = 0
            while (found == 0) & (n_pass < K_PASSES):
                middle = below + (above - below) * 0.5
                n_at = 0
                for t in range(0, vocab, BLOCK):
                    x = tl.load(x_ptr + t + i, mask=t + i < vocab, other=float("-inf"))
                    n_at += tl.sum((x >= middle).to(tl.int32), 0)
                if n_at >= top_k:
                    below = middle
                else:
                    above = middle
                if n_at == top_k:
                    found = 1
                n_pass += 1
            floor = below
        if top_p < 1.0:
            total = 0.0
            for t in range(0, vocab, BLOCK):
                x = tl.load(x_ptr + t + i, mask=t + i < vocab, other=float("-inf"))
                e = tl.where(x >= floor, tl.exp((x - high) / temperature), 0.0)
                total += tl.sum(e, 0)
            wanted = top_p * total
            # What lies 32 temperatures under the best has no mass that float32 could add.
            below_p = tl.maximum(tl.maximum(floor, low), high - 32.0 * temperature)
            above_p = high + 1e-6
            for _ in range(P_PASSES):
                middle_p = below_p + (above_p - below_p) * 0.5
                mass = 0.0
                for t in range(0, vocab, BLOCK):
                    x = tl.load(x_ptr + t + i, mask=t + i < vocab, other=float("-inf"))
                    mass += tl.sum(tl.where(x >= middle_p, tl.exp((x - high) / temperature), 0.0), 0)
                if mass >= wanted:
                    below_p = middle_p
                else:
                    above_p = middle_p
            floor = tl.maximum(floor, below_p)
        floor = tl.maximum(floor, high + log_min_p * temperature)
        floor = tl.minimum(floor, high)
    tl.store(floor_ptr + b, floor)
