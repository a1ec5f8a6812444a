"""Logits before they are sampled: penalties, a grammar's mask, bias, forbidden end tokens, typical-p.

The meanings are those of `worker/sampling.py`. A token's place in `seen` ([rows of the table, vocab], int32)
counts how often the row has sampled it; IN_PROMPT is added for a token of its prompt.
"""

import triton
import triton.language as tl

_IN_PROMPT: tl.constexpr = tl.constexpr(1 << 30)
_COUNT: tl.constexpr = tl.constexpr((1 << 30) - 1)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["rows_ptr", "tokens_ptr"])
def count_known_kernel(rows_ptr, tokens_ptr, seen_ptr, n, vocab, BLOCK: tl.constexpr):
    """Tokens of newly admitted rows, whose lines of `seen` are zero. rows: the row for a token of the
    output, its bitwise complement (negative) for one of the prompt."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    row = tl.load(rows_ptr + i, mask=mask, other=0)
    token = tl.load(tokens_ptr + i, mask=mask, other=0)
    of_prompt = row < 0
    at = seen_ptr + tl.where(of_prompt, ~row, row).to(tl.int64) * vocab + token
    tl.atomic_or(at, _IN_PROMPT, mask=mask & of_prompt)
    tl.atomic_add(at, 1, mask=mask & (row >= 0))


@triton.jit(do_not_specialize=["n"])
def count_sampled_kernel(
    live_ptr,
    slot_ptr,
    ring_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    seen_ptr,
    n,
    vocab,
    max_rows,
    BLOCK: tl.constexpr,
):
    """What the rows with penalties have just sampled (ring[slot, i]; negative: nothing)."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    row = tl.load(live_ptr + i, mask=mask, other=0).to(tl.int64)
    token = tl.load(ring_ptr + tl.load(slot_ptr) * max_rows + i, mask=mask, other=-1)
    repetition = tl.load(repetition_ptr + i, mask=mask, other=1.0)
    presence = tl.load(presence_ptr + i, mask=mask, other=0.0)
    frequency = tl.load(frequency_ptr + i, mask=mask, other=0.0)
    counts = mask & (token >= 0) & ((repetition != 1.0) | (presence != 0.0) | (frequency != 0.0))
    at = seen_ptr + row * vocab + token
    tl.store(at, tl.load(at, mask=counts, other=0) + 1, mask=counts)


@triton.jit(
    do_not_specialize=["n"],
    do_not_specialize_on_alignment=["at_ptr", "ids_ptr", "values_ptr", "until_ptr"],
)
def scatter_entries_kernel(
    at_ptr,
    ids_ptr,
    values_ptr,
    until_ptr,
    table_ids_ptr,
    table_values_ptr,
    table_until_ptr,
    n,
    BLOCK: tl.constexpr,
):
    """table[at[i]] = entry i; values travel as float32 bits."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    at = tl.load(at_ptr + i, mask=mask, other=0)
    tl.store(table_ids_ptr + at, tl.load(ids_ptr + i, mask=mask, other=0), mask=mask)
    tl.store(table_values_ptr + at, tl.load(values_ptr + i, mask=mask, other=0), mask=mask)
    tl.store(table_until_ptr + at, tl.load(until_ptr + i, mask=mask, other=0), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["bits_ptr"])
def adjust_kernel(
    logits_ptr,
    work_ptr,
    live_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    line_ptr,
    seen_ptr,
    bits_ptr,
    vocab,
    n_mask_words,
    BLOCK: tl.constexpr,
):
    """work = logits with penalties and mask. Grid: (tiles, rows). line: the row's line of `bits`
    ([lines, n_mask_words], bit t % 32 of word t // 32 allows token t), negative for none. NaN stays, so that
    a mask can't hide that the pass failed."""
    b = tl.program_id(1).to(tl.int64)
    row = tl.load(live_ptr + b).to(tl.int64)
    if row < 0:
        return
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = token < vocab
    x = tl.load(logits_ptr + b * vocab + token, mask=mask, other=0.0)
    repetition = tl.load(repetition_ptr + b)
    presence = tl.load(presence_ptr + b)
    frequency = tl.load(frequency_ptr + b)
    if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
        seen = tl.load(seen_ptr + row * vocab + token, mask=mask, other=0)
        count = seen & _COUNT
        x = tl.where(seen != 0, tl.where(x > 0, x / repetition, x * repetition), x)
        x = x - tl.where(count > 0, presence, 0.0)
        x = x - frequency * count.to(tl.float32)
    line = tl.load(line_ptr + b).to(tl.int64)
    if line >= 0:
        word = tl.load(bits_ptr + line * n_mask_words + token // 32, mask=mask, other=0)
        allowed = (word >> (token % 32)) & 1
        x = tl.where((allowed != 0) | (x != x), x, float("-inf"))
    tl.store(work_ptr + b * vocab + token, x, mask=mask)


@triton.jit
def add_entries_kernel(
    work_ptr,
    live_ptr,
    at_ptr,
    n_entries_ptr,
    ids_ptr,
    values_ptr,
    until_ptr,
    vocab,
    stride,
    BLOCK: tl.constexpr,
):
    """work[b, id] += value for the row's entries whose `until` lies behind its position. Grid: (rows,)."""
    b = tl.program_id(0).to(tl.int64)
    row = tl.load(live_ptr + b).to(tl.int64)
    if row < 0:
        return
    position = tl.load(at_ptr + b)
    n = tl.load(n_entries_ptr + b)
    i = tl.arange(0, BLOCK)
    for start in range(0, n, BLOCK):
        mask = start + i < n
        at = row * stride + start + i
        until = tl.load(until_ptr + at, mask=mask, other=0)
        token = tl.load(ids_ptr + at, mask=mask, other=0)
        value = tl.load(values_ptr + at, mask=mask, other=0).to(tl.float32, bitcast=True)
        # A token may be biased and be an end token: two entries.
        tl.atomic_add(work_ptr + b * vocab + token, value, mask=mask & (position < until))


@triton.jit
def typical_kernel(work_ptr, live_ptr, temperature_ptr, typical_ptr, floor_ptr, vocab, BLOCK: tl.constexpr):
    """Forbid what typical-p (arXiv 2202.00666) leaves out of the tokens at or above `floor`: of those, the
    ones whose surprise is closest to the entropy stay, up to the wanted mass. One program per row.

    The largest distance that stays is found by bisection over the bits of its float32, so it is exact."""
    b = tl.program_id(0).to(tl.int64)
    if tl.load(live_ptr + b) < 0:
        return
    temperature = tl.load(temperature_ptr + b)
    typical = tl.load(typical_ptr + b)
    if (temperature <= 0.0) | (typical >= 1.0):
        return
    floor = tl.load(floor_ptr + b)
    i = tl.arange(0, BLOCK)
    x_ptr = work_ptr + b * vocab
    high = float("-inf")
    for t in range(0, vocab, BLOCK):
        high = tl.maximum(high, tl.max(tl.load(x_ptr + t + i, mask=t + i < vocab, other=float("-inf")), 0))
    total = 0.0
    weighted = 0.0
    for t in range(0, vocab, BLOCK):
        x = tl.load(x_ptr + t + i, mask=t + i < vocab, other=float("-inf"))
        stays = (x >= floor) & (x > float("-inf"))
        z = tl.where(stays, (x - high) / temperature, 0.0)
        e = tl.where(stays, tl.exp(z), 0.0)
        total += tl.sum(e, 0)
        weighted += tl.sum(e * z, 0)
    # Entropy = log(total) - mean z and surprise = log(total) - z: their distance is |mean z - z|.
    mean = weighted / total
    wanted = typical * total
    inside = -1
    outside = 0x7F800000
    while outside - inside > 1:
        middle = inside + (outside - inside) // 2
        limit = tl.cast(middle, tl.float32, bitcast=True)
        mass = 0.0
        for t in range(0, vocab, BLOCK):
            x = tl.load(x_ptr + t + i, mask=t + i < vocab, other=float("-inf"))
            z = (x - high) / temperature
            stays = (x >= floor) & (x > float("-inf")) & (tl.abs(z - mean) <= limit)
            mass += tl.sum(tl.where(stays, tl.exp(z), 0.0), 0)
        if mass >= wanted:
            outside = middle
        else:
            inside = middle
    limit = tl.cast(outside, tl.float32, bitcast=True)
    for t in range(0, vocab, BLOCK):
        mask = t + i < vocab
        x = tl.load(x_ptr + t + i, mask=mask, other=float("-inf"))
        far = tl.abs((x - high) / temperature - mean) > limit
        tl.store(x_ptr + t + i, float("-inf"), mask=mask & far & (x == x))
