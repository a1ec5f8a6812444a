"""How submitted requests reach the scheduler core: grammars are compiled first, off the step path."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from proto.worker_pb2 import Grammar
from router.admission import grammar_of
from router.connections import Connections
from router.core import SchedulerCore
from router.errors import RouterError, UnavailableError
from router.grammars import GrammarBook
from router.ipc.messages import Accepted, GrammarSpec, Refused, RequestSpec
from router.replica import ReplicaLink


@dataclass(slots=True, frozen=True, kw_only=True)
class IntakeHost:
    """What the intake needs to know of the scheduler around it."""

    core: Callable[[], SchedulerCore | None]
    why_not_ready: Callable[[], str]
    links: Callable[[], Iterable[ReplicaLink]]
    clock: Callable[[], float]
    spawn: Callable[[Coroutine[Any, Any, None], str], None]
    on_accepted: Callable[[], None]


class Intake:
    """Answers every submission with Accepted or Refused, unless its client has gone."""

    def __init__(
        self,
        host: IntakeHost,
        *,
        connections: Connections,
        grammars: GrammarBook,
        max_concurrent_requests: int,
        retry_after_s: float,
    ) -> None:
        self.preparing: set[tuple[int, int]] = set()
        """(connection, id) of requests whose grammar is being compiled."""
        self._host = host
        self._connections = connections
        self._grammars = grammars
        self._max_concurrent = max_concurrent_requests
        self._retry_after_s = retry_after_s

    def cancel(self, conn: int, ids: Iterable[int]) -> None:
        self.preparing.difference_update((conn, request_id) for request_id in ids)

    def disconnect(self, conn: int) -> None:
        self.preparing = {place for place in self.preparing if place[0] != conn}

    def submit(self, conn: int, requests: list[RequestSpec]) -> None:
        ids = [request.id for request in requests]
        grammars = {r.grammar for r in requests if r.grammar is not None}
        core = self._host.core()
        if (
            grammars
            and core is not None
            and "grammar" in core.limits.features
            and all(g.kind in Grammar.Kind.values() for g in grammars)
        ):
            n = len(self.preparing) + len(ids)
            if core.n_requests + n > self._max_concurrent:
                self._connections.send(conn, Refused(ids=ids, error=core.overloaded(n).info))
                return
            self.preparing.update((conn, request_id) for request_id in ids)
            self._host.spawn(self._prepare_and_accept(core, conn, requests, grammars), "accept")
            return
        self._accept(conn, ids, requests)

    def _accept(self, conn: int, ids: list[int], requests: list[RequestSpec]) -> None:
        if conn not in self._connections:
            return
        try:
            core = self._host.core()
            if core is None:
                raise UnavailableError(
                    f"not ready: {self._host.why_not_ready()}", retry_after_s=self._retry_after_s
                )
            core.submit(conn, requests, now=self._host.clock())
        except RouterError as error:
            self._connections.send(conn, Refused(ids=ids, error=error.info))
            return
        self._connections.send(conn, Accepted(ids=ids))
        self._host.on_accepted()

    async def _prepare_and_accept(
        self, core: SchedulerCore, conn: int, requests: list[RequestSpec], grammars: set[GrammarSpec]
    ) -> None:
        ids = [request.id for request in requests]
        refusal: RouterError | None = None
        try:
            for spec in grammars:
                await self._grammars.ensure(core, self._host.links(), grammar_of(spec), param=spec.param)
        except RouterError as error:
            refusal = error
        # The client may have gone meanwhile.
        kept = [request for request in requests if (conn, request.id) in self.preparing]
        self.preparing.difference_update((conn, request_id) for request_id in ids)
        if refusal is not None:
            self._connections.send(conn, Refused(ids=ids, error=refusal.info))
        elif kept:
            self._accept(conn, ids, kept)
            for spec in grammars:  # to replicas that came meanwhile
                self._grammars.spread(core, self._host.links(), grammar_of(spec))
