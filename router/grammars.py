"""Which replica has compiled which grammar, and what is being compiled.

A request with a grammar is queued once a live replica can take it, and placed only on replicas that can; all
other requests go on meanwhile. A replica that comes later, or comes back, compiles what live requests need
before it is given one of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from proto.worker_pb2 import Grammar, PrepareResponse
from router.core import SchedulerCore
from router.errors import InvalidRequestError, RouterError, UnavailableError
from router.replica import LinkState, LostError, ReplicaLink
from router.request import grammar_key

PREPARE_TIMEOUT_S = 60.0
"""A worker has a limit of its own for each (--grammar-timeout-s), but a cold one first loads its compiler,
and a burst of new grammars waits in line."""

_REFUSED = "the grammar can't be used"


def can_constrain(link: ReplicaLink) -> bool:
    """Whether the worker is live and knows of grammars."""
    return link.state is LinkState.LIVE and link.capacity is not None and "grammar" in link.capacity.features


class GrammarBook:
    """What is ready stands in each replica's state and goes with it."""

    def __init__(
        self,
        *,
        spawn: Callable[[Coroutine[Any, Any, None], str], None],
        on_ready: Callable[[], None],
    ) -> None:
        self._spawn = spawn
        self._on_ready = on_ready
        self._running: dict[tuple[int, int, bytes], asyncio.Future[PrepareResponse]] = {}
        """By replica, its generation and the grammar."""

    async def ensure(
        self, core: SchedulerCore, links: Iterable[ReplicaLink], grammar: Grammar, *, param: str
    ) -> None:
        """Returns as soon as one live replica has it; the others compile it too, as far as they can constrain
        text at all. Without a live replica it returns at once: the next one will be asked. Raises RouterError
        when it can't be used."""
        links = list(links)
        live = [link for link in links if can_constrain(link)]
        if not live and any(link.state is LinkState.LIVE for link in links):
            raise UnavailableError("no worker that can constrain text to a grammar is there at the moment")
        waiting = self.spread(core, live, grammar)
        if len(waiting) < len(live):
            return
        lost: LostError | None = None
        for answer in asyncio.as_completed([asyncio.shield(future) for future in waiting]):
            try:
                reply = await answer
            except LostError as error:
                lost = error
                continue
            if reply.ok:
                return
            raise InvalidRequestError(f"{_REFUSED}: {reply.error}", param=param)
        if lost is not None and any(link.state is LinkState.LIVE for link in live):
            raise UnavailableError(f"no worker could compile the grammar: {lost}")

    def spread(
        self, core: SchedulerCore, links: Iterable[ReplicaLink], grammar: Grammar
    ) -> list[asyncio.Future[PrepareResponse]]:
        """Asks each live replica that can and does not have it; their answers."""
        key = grammar_key(grammar)
        return [
            self._ask(core, link, grammar, key)
            for link in links
            if can_constrain(link)
            and (rs := core.replicas.get(link.replica_id)) is not None
            and key not in rs.grammars
        ]

    def link_up(self, core: SchedulerCore, link: ReplicaLink) -> None:
        """Lets it compile what the queued and running requests need."""
        for grammar in core.grammars():
            self.spread(core, [link], grammar)

    def _ask(
        self, core: SchedulerCore, link: ReplicaLink, grammar: Grammar, key: bytes
    ) -> asyncio.Future[PrepareResponse]:
        place = (link.replica_id, core.replicas[link.replica_id].generation, key)
        future = self._running.get(place)
        if future is None:
            future = asyncio.get_running_loop().create_future()
            self._running[place] = future
            # Whoever waits for it may have gone.
            future.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._spawn(self._prepare(core, link, grammar, place), "prepare a grammar")
        return future

    async def _prepare(
        self, core: SchedulerCore, link: ReplicaLink, grammar: Grammar, place: tuple[int, int, bytes]
    ) -> None:
        replica_id, generation, key = place
        future = self._running[place]
        try:
            reply = await link.prepare(grammar, timeout_s=PREPARE_TIMEOUT_S)
        except LostError as lost:
            future.set_exception(lost)
            if replica_id in core.replicas:  # it lives and does not answer
                self._give_up(core, key, UnavailableError(f"no worker could compile the grammar: {lost}"))
        else:
            rs = core.replicas.get(replica_id)
            if not reply.ok:
                self._give_up(core, key, InvalidRequestError(f"{_REFUSED}: {reply.error}"))
            elif rs is not None and rs.generation == generation:
                rs.add_grammar(key)
            future.set_result(reply)
        finally:
            del self._running[place]
            if not future.done():
                future.cancel()
        self._on_ready()

    def _give_up(self, core: SchedulerCore, key: bytes, error: RouterError) -> None:
        """Queued requests would wait for ever when no replica can take this grammar."""
        n_running = sum(running == key for _, _, running in self._running)  # this one among them
        if n_running <= 1 and not any(key in rs.grammars for rs in core.replicas.values()):
            core.fail_grammar(key, error)
