"""One Run (stream) as the engine sees it, and the legal moves of its life."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from proto.status import RunEnd
from proto.worker_pb2 import StepResult


class RunState(enum.Enum):
    OPENING = "opening"
    """Accepted; the compute thread has not reset the rows yet."""
    LIVE = "live"
    CLOSING = "closing"
    """No further step is taken; the running ones have not ended yet."""
    CLOSED = "closed"


LEGAL_MOVES: dict[RunState, frozenset[RunState]] = {
    RunState.OPENING: frozenset({RunState.LIVE, RunState.CLOSING}),
    RunState.LIVE: frozenset({RunState.CLOSING}),
    RunState.CLOSING: frozenset({RunState.CLOSED}),
    RunState.CLOSED: frozenset(),
}


@dataclass(slots=True, kw_only=True, eq=False)
class Run:
    """`emit` and `on_end` are called from the compute thread and must not block. `on_end` is called once,
    after the running step has ended and the rows were reset: from then on another Run may be opened."""

    router_id: str
    generation: int
    window: int
    emit: Callable[[StepResult], None]
    on_end: Callable[[RunEnd, str], None]
    state: RunState = field(default=RunState.OPENING)
    end: RunEnd | None = None
    """Why it is closing."""
    end_message: str = ""

    def move(self, state: RunState) -> None:
        """Raises ValueError for a move that the table does not allow."""
        if state not in LEGAL_MOVES[self.state]:
            raise ValueError(f"a Run can't go from {self.state.value} to {state.value}")
        self.state = state

    @property
    def is_open(self) -> bool:
        return self.state in (RunState.OPENING, RunState.LIVE)
