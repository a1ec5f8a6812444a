from __future__ import annotations

import numpy as np
import pytest

from allocator.errors import ArgumentError
from allocator.pool import Pool


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_hands_out_ascending_ids_and_never_the_reserved_one() -> None:
    pool = Pool(6)
    assert pool.n_free == 5
    assert pool.take(5).tolist() == [1, 2, 3, 4, 5]
    assert pool.n_free == 0


def test_what_came_back_last_goes_out_first() -> None:
    pool = Pool(6)
    pool.take(4)
    pool.give(ids(2, 3))
    assert pool.take(3).tolist() == [2, 3, 5]


@pytest.mark.parametrize("n_blocks", [1, 0, -3])
def test_a_pool_without_a_block_is_refused(n_blocks: int) -> None:
    with pytest.raises(ArgumentError, match=rf"n_blocks is {n_blocks}; at least 2"):
        Pool(n_blocks)


def test_check_finds_a_block_that_is_free_twice() -> None:
    pool = Pool(6)
    pool.take(3)
    pool.give(ids(4))
    with pytest.raises(AssertionError, match="block 4 is free 2 times"):
        pool.check()


def test_dirty_blocks_are_told_once() -> None:
    pool = Pool(8)
    pool.mark_dirty(ids(2, 5))
    pool.mark_dirty(ids(5, 6))
    assert pool.take_dirty(ids(1, 2, 3)).tolist() == [2]
    assert pool.take_dirty(ids(1, 2, 3)).tolist() == []
    assert sorted(pool.take_dirty(ids(7, 6, 5)).tolist()) == [5, 6]
    pool.check()
