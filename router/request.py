"""A request as the scheduler knows it: what was asked, how far it came, and where it runs."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from proto.worker_pb2 import Grammar, Sampling

if TYPE_CHECKING:
    from router.replica_state import ReplicaState
    from settings.tracing import Span

I32 = npt.NDArray[np.int32]


class RequestState(enum.Enum):
    QUEUED = enum.auto()
    PREFILL = enum.auto()
    """On a replica; some of its known tokens are still to be placed in a step."""
    DECODE = enum.auto()
    """On a replica; all known tokens are placed, each further step samples one more."""
    DRAINING = enum.auto()
    """The step that samples its last token is sent and its row evicted; results are awaited."""
    FINISHED = enum.auto()
    FAILED = enum.auto()
    CANCELLED = enum.auto()


TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    RequestState.QUEUED: frozenset(
        {RequestState.PREFILL, RequestState.FAILED, RequestState.CANCELLED},
    ),
    RequestState.PREFILL: frozenset(
        {RequestState.DECODE, RequestState.QUEUED, RequestState.FAILED, RequestState.CANCELLED}
    ),
    RequestState.DECODE: frozenset(
        {
            RequestState.DRAINING,
            RequestState.QUEUED,
            RequestState.FINISHED,
            RequestState.FAILED,
            RequestState.CANCELLED,
        }
    ),
    RequestState.DRAINING: frozenset(
        {RequestState.QUEUED, RequestState.FINISHED, RequestState.FAILED, RequestState.CANCELLED}
    ),
    RequestState.FINISHED: frozenset(),
    RequestState.FAILED: frozenset(),
    RequestState.CANCELLED: frozenset(),
}

RUNNING = frozenset({RequestState.PREFILL, RequestState.DECODE, RequestState.DRAINING})
TERMINAL = frozenset({RequestState.FINISHED, RequestState.FAILED, RequestState.CANCELLED})


@dataclass(slots=True)
class PrefixWait:
    """Waits until `row` of `replica` has scheduled `until` tokens: the request will then find them cached."""

    replica: ReplicaState
    row: int
    epoch: int
    until: int

    @property
    def holds(self) -> bool:
        rs, row = self.replica, self.row
        return (
            rs.alive
            and rs.takes_new
            and int(rs.epoch[row]) == self.epoch
            and int(rs.n_scheduled[row]) < self.until
        )


@dataclass(slots=True, eq=False)
class Request:
    """One choice of one client request. Owned by the scheduler core, from submit to its end."""

    conn: int
    """The API connection it came from."""
    id: int
    """Unique within that connection."""
    order: int
    """Arrival number. Kept through preemption and migration."""
    arrival_s: float
    priority: int
    deadline_s: float
    """Absolute, on the scheduler's clock."""
    tokens: I32
    """Prompt + committed output. While the request is on a replica, the replica's row holds the truth."""
    n_prompt: int
    end_len: int
    """Total tokens at which it ends with reason LENGTH."""
    sampling: Sampling
    grammar: Grammar | None = None
    grammar_key: bytes = b""
    """Stands for the grammar; empty without one."""
    adapter_id: str = ""
    salt: str = ""
    """Roots its prefix trie; includes the adapter."""
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    request_id: str = ""

    tie_break: float = 0.0
    """In [0, 1): which of several equally good replicas it takes."""

    state: RequestState = RequestState.QUEUED
    replica: ReplicaState | None = None
    row: int = -1
    wait: PrefixWait | None = None
    sent: I32 | None = None
    """Set when committed tokens were taken back (they may rest on a damaged block): the text that the client
    already has. Tokens computed again are compared with it instead of being sent twice."""
    n_passed: int = 0
    """How often a request behind it was scheduled first because this one did not fit."""
    n_preempted: int = 0
    n_deaths: int = 0
    """Replicas lost while it was on them."""
    n_damaged: int = 0
    """How often it was computed again because a block it read was damaged."""
    n_prompt_logprobs_sent: int = 0
    """Prompt positions whose logprobs the client already has, counted from the start."""
    n_cached: int = 0
    """Tokens found in the cache when it first met a replica."""
    started_s: float = field(default=-1.0)
    """When it first met a replica; negative: not yet."""
    last_token_s: float = field(default=-1.0)
    first_token_s: float = field(default=-1.0)
    span: Span | None = None
    """Open while the request is traced."""

    @property
    def key(self) -> tuple[int, int]:
        """Queue order: smaller runs first and is preempted last."""
        return (self.priority, self.order)

    def move(self, state: RequestState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise AssertionError(
                f"request {self.conn}/{self.id}: {self.state.name} can't become {state.name}"
            )
        self.state = state


def grammar_key(grammar: Grammar) -> bytes:
    """Equal for equal grammars."""
    data = f"{grammar.kind} {grammar.strict:d} {grammar.source}".encode()
    return hashlib.blake2b(data, digest_size=16).digest()
