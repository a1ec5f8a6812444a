"""Placement that looks at neither cache nor load: what exact placement is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from router.replica_state import ReplicaState
from router.request import Request


class Placement(StrEnum):
    """How a request finds its replica."""

    EXACT = "exact"
    """By what it would cost there: router/placement.py."""
    RANDOM = "random"
    ROUND_ROBIN = "round-robin"


def dealt(placement: Placement, request: Request, takers: Sequence[ReplicaState]) -> ReplicaState:
    """Which of the replicas that may take it the request belongs to: the same one at every composition, as
    long as these are the same."""
    takers = sorted(takers, key=lambda rs: rs.replica_id)
    if placement is Placement.RANDOM:
        return takers[int(request.tie_break * len(takers))]
    return takers[request.order % len(takers)]
