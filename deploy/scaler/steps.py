"""The moves of scaling: start one and wait until it serves; drain one and take it away; replace all in turn.

Whatever fails, nothing half-started stays behind, and a worker is never taken away before it is drained.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from deploy.scaler.model import Engine, Router, ScaleError, Time, Worker, by_load

POLL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    start_s: float = 900.0
    """A new worker may fetch and load a model for so long."""
    drain_s: float = 600.0
    """Running answers may go on for so long; then the worker ends, and they go on elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaler:
    engine: Engine
    router: Router
    time: Time
    say: Callable[[str], None]
    patience: Patience = Patience()

    def scale(self, n: int) -> None:
        """To exactly `n` workers. Raises ScaleError."""
        if n < 1:
            raise ScaleError(f"{n} workers can't serve: at least 1 (`docker compose stop` ends everything)")
        workers = self.engine.workers()
        n_gpus = self.engine.n_gpus()
        if n_gpus is not None and n > n_gpus:
            raise ScaleError(
                f"{n} workers need {n} GPUs, one each, but this host has {n_gpus}: at most {n_gpus} fits"
            )
        for _ in range(n - len(workers)):
            self.add()
        surplus = len(workers) - n
        if surplus > 0:
            for worker in by_load(workers, self.router.state())[:surplus]:
                self.take_away(worker)

    def add(self) -> Worker:
        """One more worker, in use when this returns. Raises ScaleError; then it is gone again."""
        worker = self.engine.start()
        self.say(f"{worker.name}: started")
        try:
            self._wait_live(worker)
        except BaseException:
            with contextlib.suppress(ScaleError):
                self.engine.remove(worker)
            raise
        return worker

    def take_away(self, worker: Worker) -> None:
        """Drains the worker, then removes it. Interrupted, it is put back to work."""
        load = self.router.state().at(worker.address)
        if load is not None and load.live:
            self.router.drain(worker.address, on=True)
            try:
                self._wait_drained(worker)
            except BaseException:
                with contextlib.suppress(ScaleError):
                    self.router.drain(worker.address, on=False)
                raise
        self.engine.remove(worker)
        self.say(f"{worker.name}: removed")

    def roll(self, *, surge: bool = True) -> None:
        """Replaces every worker in turn. With `surge` the new one serves before the old one goes; where there
        is no room for it (a GPU each) and others can carry on, the old one goes first. Raises ScaleError."""
        workers = self.engine.workers()
        if not workers:
            raise ScaleError("there is no worker to replace: `docker compose up` starts the first")
        for i, worker in enumerate(workers):
            self.say(f"replacing {worker.name} ({i + 1} of {len(workers)})")
            if surge:
                try:
                    self.add()
                except ScaleError as error:
                    if i or len(workers) < 2:
                        raise
                    self.say(f"no room for one more: {error}. The old one goes first, then")
                    surge = False
                else:
                    self.take_away(worker)
                    continue
            if self._n_other_live(worker) < 1:
                raise ScaleError(
                    f"{worker.name} is the only one that serves: nothing could take over its requests"
                )
            self.take_away(worker)
            self.add()

    def _n_other_live(self, worker: Worker) -> int:
        loads = self.router.state().loads
        return sum(load.live and not load.draining and load.address != worker.address for load in loads)

    def _wait_live(self, worker: Worker) -> None:
        until_s = self.time.now_s() + self.patience.start_s
        reason = ""
        while self.time.now_s() < until_s:
            now = next((other for other in self.engine.workers() if other.id == worker.id), None)
            if now is None or not now.running:
                words = self.engine.last_words(worker)
                raise ScaleError(f"{worker.name} has ended: {words}")
            load = self.router.state().at(now.address)
            if load is not None and load.live:
                self.say(f"{worker.name}: serves at {now.address} ({load.device})")
                return
            if load is not None and load.state == "refused":
                raise ScaleError(f"{worker.name} can't serve beside the others: {load.reason}")
            reason = load.reason if load is not None else "the router does not know it yet"
            self.time.wait(POLL_S)
        raise ScaleError(
            f"{worker.name} did not serve within {self.patience.start_s:g} s (--start-timeout-s): {reason}"
        )

    def _wait_drained(self, worker: Worker) -> None:
        until_s = self.time.now_s() + self.patience.drain_s
        said = -1
        while True:
            load = self.router.state().at(worker.address)
            if load is None or not load.live or load.n_running == 0:
                return
            if load.n_running != said:
                said = load.n_running
                self.say(f"{worker.name}: drains, {said} running")
            if self.time.now_s() >= until_s:
                self.say(
                    f"{worker.name}: {said} still running after {self.patience.drain_s:g} s go on elsewhere"
                )
                return
            self.time.wait(POLL_S)
