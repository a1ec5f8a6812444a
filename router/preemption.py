"""Which running rows give way to a request of an earlier priority class."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from router.budget import AnswerLengths
from router.placement import fits
from router.replica_state import ReplicaState
from router.request import Request


def fewest_to_preempt(
    rs: ReplicaState, request: Request, *, n_cached: int, lengths: AnswerLengths, spared: Collection[int]
) -> list[int]:
    """The fewest rows of later priority classes without which the request fits, worst first; empty when not
    even all of them are enough. spared: rows that stay."""
    found: list[tuple[tuple[int, int], int]] = []
    for row in np.flatnonzero(rs.leased).tolist():
        other = rs.requests[row]
        assert other is not None
        if other.priority > request.priority and row not in spared:
            found.append((other.key, row))
    rows = [row for _, row in sorted(found, reverse=True)]
    for n in range(1, len(rows) + 1):
        if fits(rs, request, n_cached=n_cached, lengths=lengths, without=rows[:n]):
            return rows[:n]
    return []
