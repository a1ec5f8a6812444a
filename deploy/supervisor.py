"""Keeps a set of processes running: starts them, restarts what dies, ends them in order.

It knows nothing of models or requests; `deploy/launcher.py` says what to run.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from deploy.backoff import Backoff
from deploy.child import Child, ChildSpec
from deploy.errors import StartFailedError

_USAGE = 2
"""By which each of our processes says that a setting can't be used."""

Say = Callable[[str, str], None]
"""(name of the process, line)."""


class State(enum.Enum):
    STARTING = enum.auto()
    READY = enum.auto()
    PAUSED = enum.auto()
    """Between a death and the next start."""
    ENDED = enum.auto()


LEGAL: dict[State, frozenset[State]] = {
    State.STARTING: frozenset({State.READY, State.PAUSED, State.ENDED}),
    State.READY: frozenset({State.PAUSED, State.ENDED}),
    State.PAUSED: frozenset({State.STARTING, State.ENDED}),
    State.ENDED: frozenset(),
}


class Keeper:
    """One process and its successors."""

    def __init__(
        self, spec: ChildSpec, *, env: Mapping[str, str], say: Say, backoff: Backoff | None = None
    ) -> None:
        self.spec = spec
        self.state = State.STARTING
        self.was_ready = asyncio.Event()
        self.restarts = False
        """Off while the whole is starting up: a death then fails the start instead of being repeated."""
        self.child: Child | None = None
        self._env = env
        self._say = say
        self._backoff = backoff or Backoff()
        self._stop_asked = asyncio.Event()

    async def run(self) -> None:
        """Until `stop`. Raises StartFailedError when its process ends while `restarts` is off, or when the
        first one is not ready in time."""
        while True:
            code = await self._one_life()
            if self._stop_asked.is_set():
                break
            child = self.child
            assert child is not None
            pause_s = self._backoff.after_death(lived_s=child.lived_s)
            self._say(self.spec.name, f"{child.cause(code)}; starting it again in {pause_s:g} s")
            self._go(State.PAUSED)
            try:
                async with asyncio.timeout(pause_s):
                    await self._stop_asked.wait()
                break
            except TimeoutError:
                self._go(State.STARTING)
        self._go(State.ENDED)

    async def stop(self) -> None:
        """Returns when its process has ended; one that is just being started ends itself in `run`."""
        self._stop_asked.set()
        if self.child is not None:
            await self.child.stop()

    def kill(self) -> None:
        self._stop_asked.set()
        if self.child is not None:
            self.child.kill()

    async def _one_life(self) -> int:
        """From start to end; its exit code."""
        name, limit_s = self.spec.name, self.spec.ready_limit_s
        try:
            child = await Child.start(self.spec, env=self._env, say=lambda line: self._say(name, line))
        except OSError as error:
            raise StartFailedError(f"can't start {name} ({self.spec.argv[0]}): {error.strerror}") from error
        self.child = child
        self._say(name, f"process {child.pid}")
        if self._stop_asked.is_set():
            return await child.stop()
        ended = asyncio.create_task(child.wait())
        ready = asyncio.create_task(child.ready.wait())
        try:
            await asyncio.wait({ended, ready}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done() and not child.ready.is_set():
                if not self.was_ready.is_set():
                    words = child.last_words
                    await child.stop()
                    raise StartFailedError(
                        f"{name} was not ready within {limit_s:g} s (--start-timeout-s); "
                        f"its last words: {words}"
                    )
                self._say(name, f"was not ready within {limit_s:g} s")
                await child.stop()
            elif child.ready.is_set() and not ended.done():
                self._go(State.READY)
                self.was_ready.set()
            code = await ended
            if not self.restarts and not self._stop_asked.is_set():
                raise StartFailedError(
                    f"{name} {child.cause(code)}", exit_code=_USAGE if code == _USAGE else 1
                )
            return code
        finally:
            ready.cancel()
            if not ended.done():
                ended.cancel()

    def _go(self, state: State) -> None:
        if state not in LEGAL[self.state]:
            raise RuntimeError(f"{self.spec.name} can't go from {self.state.name} to {state.name}")
        self.state = state


class Supervisor:
    """Owns the keepers. `start` returns when all are ready, `watch` when one can't go on."""

    def __init__(self, specs: Sequence[ChildSpec], *, env: Mapping[str, str], say: Say) -> None:
        self.keepers = [Keeper(spec, env=env, say=say) for spec in specs]
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """All processes start side by side. Raises StartFailedError."""
        self._tasks = [asyncio.create_task(keeper.run()) for keeper in self.keepers]
        ready = asyncio.create_task(self._all_ready())
        try:
            await asyncio.wait([ready, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
            self._raise_failure()
        finally:
            ready.cancel()

    def settle(self) -> None:
        """The start is over: from now on what dies is started again."""
        for keeper in self.keepers:
            keeper.restarts = True

    async def watch(self) -> None:
        """Until every keeper has ended. Raises what one of them raised."""
        if self._tasks:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
            self._raise_failure()

    async def stop(self) -> None:
        """Stage after stage. Safe at any time, also when `start` failed or was cancelled half way."""
        by_stage = sorted(self.keepers, key=lambda keeper: keeper.spec.stage)
        for _, group in groupby(by_stage, key=lambda keeper: keeper.spec.stage):
            await asyncio.gather(*(keeper.stop() for keeper in group))
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def kill(self) -> None:
        """At once: the user asked twice."""
        for keeper in self.keepers:
            keeper.kill()

    async def _all_ready(self) -> None:
        for keeper in self.keepers:
            await keeper.was_ready.wait()

    def _raise_failure(self) -> None:
        for task in self._tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error
