from __future__ import annotations

import itertools

import numpy as np
import pytest

from allocator.errors import LeaseError
from allocator.lease import TRANSITIONS, BlockLease, LeaseState


def lease(n_blocks: int = 3) -> BlockLease:
    table = np.arange(1, n_blocks + 1, dtype=np.int32)
    return BlockLease(None, table, n_cached=0, n_published=0, node=None)


@pytest.mark.parametrize(("here", "there"), list(itertools.product(LeaseState, repeat=2)))
def test_only_listed_transitions_are_legal(here: LeaseState, there: LeaseState) -> None:
    one = lease()
    one.state = here
    if there in TRANSITIONS[here]:
        one.enter(there)
        assert one.state is there
    else:
        with pytest.raises(LeaseError, match=f"is {here.name}, it can't become {there.name}"):
            one.enter(there)


def test_the_table_can_not_be_changed_from_outside() -> None:
    with pytest.raises(ValueError, match="read-only"):
        lease().blocks[0] = 7


def test_views_stay_true_while_the_table_grows() -> None:
    one = lease(2)
    first = one.blocks
    for block in range(3, 100):
        assert one.extend(np.array([block], dtype=np.int32)).tolist() == [block]
    assert first.tolist() == [1, 2]
    assert one.blocks.tolist() == list(range(1, 100))
