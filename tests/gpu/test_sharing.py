"""Which rows attend to a shared prefix together."""

from __future__ import annotations

import numpy as np

from worker.gpu.sharing import MIN_TOKENS, SharingCache, find_sharing

BLOCK = 16
WIDE = MIN_TOKENS // BLOCK + 4


def tables(*rows: list[int]) -> np.ndarray:
    out = np.zeros((len(rows), WIDE + 8), dtype=np.int32)
    for index, row in enumerate(rows):
        out[index, : len(row)] = row
    return out


def row(shared: int, own: int, *, first: int = 1) -> list[int]:
    """`shared` blocks of a family, then blocks of its own."""
    return [*range(first, first + shared), *range(1000 + own * 100, 1000 + own * 100 + WIDE + 4 - shared)]


def lens(n: int) -> np.ndarray:
    return np.full(n, (WIDE + 2) * BLOCK + 5, dtype=np.int32)


def test_rows_of_a_family_fill_groups() -> None:
    found = find_sharing(
        tables(*(row(WIDE, own) for own in range(6))), lens(6), block_size=BLOCK, group_rows=4, max_groups=9
    )
    assert found.members.tolist() == [[0, 1, 2, 3], [4, 5, -1, -1]]
    assert found.prefix.tolist() == [WIDE * BLOCK] * 6
    assert found.n_positions == 2 * WIDE * BLOCK


def test_strangers_and_short_prefixes_stay_alone() -> None:
    short = MIN_TOKENS // BLOCK - 1
    found = find_sharing(
        tables(row(short, 0), row(short, 1), row(WIDE, 2, first=500)),
        lens(3),
        block_size=BLOCK,
        group_rows=4,
        max_groups=9,
    )
    assert not len(found.members)
    assert not found.prefix.any()


def test_the_best_groups_are_kept() -> None:
    found = find_sharing(
        tables(row(WIDE - 2, 0), row(WIDE - 2, 1), row(WIDE, 2, first=500), row(WIDE, 3, first=500)),
        lens(4),
        block_size=BLOCK,
        group_rows=4,
        max_groups=1,
    )
    assert found.members.tolist() == [[2, 3, -1, -1]]
    assert found.prefix.tolist() == [0, 0, WIDE * BLOCK, WIDE * BLOCK]


def test_the_new_tokens_block_is_never_shared() -> None:
    kv_lens = np.full(2, WIDE * BLOCK, dtype=np.int32)
    found = find_sharing(
        tables(row(WIDE, 0), row(WIDE, 1)), kv_lens, block_size=BLOCK, group_rows=4, max_groups=9
    )
    assert found.prefix.tolist() == [(WIDE - 1) * BLOCK] * 2


def test_a_new_row_or_epoch_is_looked_at_again() -> None:
    cache = SharingCache(block_size=BLOCK, group_rows=4)
    block_tables = tables(row(WIDE, 0), row(WIDE, 1))
    rows, epochs = np.arange(2, dtype=np.int32), np.ones(2, dtype=np.int32)

    def find(epochs: np.ndarray) -> int:
        answer = cache.find(
            rows=rows, epochs=epochs, kv_lens=lens(2), block_tables=block_tables, max_groups=2
        )
        return len(answer.members)

    assert find(epochs) == 1
    block_tables[1] = tables(row(WIDE, 1, first=700))[0]
    assert find(epochs) == 1
    assert find(epochs + 1) == 0
