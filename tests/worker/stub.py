"""A runner whose every step waits for the test, and a listener that hears what the engine says."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass

import numpy as np

from proto.status import RunEnd
from proto.worker_pb2 import Grammar, StepResult
from tests.worker.steps import capacity
from worker.run import Run
from worker.runner import RunnerCapacity, Sampled, StepBatch

WAIT_S = 10.0
"""A test that waits so long has failed; none waits when all is well."""


@dataclass
class StubPending:
    seq: int
    sampled: Sampled


class PollableStubPending(StubPending):
    released: threading.Event

    def done(self) -> bool:
        return self.released.is_set()


class StubRunner:
    def __init__(self, *, pollable: bool = False, **changes: object) -> None:
        self._capacity = capacity(**changes)
        self._pollable = pollable
        self.events: queue.Queue[str] = queue.Queue()
        """What the engine asked for, in order: "reset", "launch 1", "collect 1" …"""
        self.held = True
        self._released: dict[int, threading.Event] = {}
        self.launch_error: Exception | None = None
        self.collect_error: Exception | None = None
        self.step_us = 5

    @property
    def capacity(self) -> RunnerCapacity:
        return self._capacity

    def expect(self, *events: str) -> None:
        for event in events:
            assert self.events.get(timeout=WAIT_S) == event

    def release(self, *seqs: int) -> None:
        for seq in seqs:
            self._event(seq).set()

    def reset(self) -> None:
        self.events.put("reset")

    def launch(self, batch: StepBatch) -> StubPending:
        self.events.put(f"launch {batch.seq}")
        if self.launch_error is not None:
            raise self.launch_error
        n = int(batch.samples.sum())
        sampled = Sampled(
            seq=batch.seq,
            rows=batch.rows[batch.samples],
            epochs=batch.epochs[batch.samples],
            tokens=np.full(n, batch.seq, dtype=np.int32),
            step_us=self.step_us,
        )
        if not self._pollable:
            return StubPending(batch.seq, sampled)
        pending = PollableStubPending(batch.seq, sampled)
        pending.released = self._event(batch.seq)
        return pending

    def collect(self, pending: StubPending) -> Sampled:
        self.events.put(f"collect {pending.seq}")
        if self.held:
            assert self._event(pending.seq).wait(WAIT_S), f"step {pending.seq} was never released"
        if self.collect_error is not None:
            raise self.collect_error
        return pending.sampled

    def prepare(self, grammar: Grammar) -> None:
        raise ValueError("no grammars here")

    def _event(self, seq: int) -> threading.Event:
        return self._released.setdefault(seq, threading.Event())


class Listener:
    """One Run and what was heard of it."""

    def __init__(self, *, router_id: str = "router-a", generation: int = 1, window: int = 4) -> None:
        self.results: queue.Queue[StepResult] = queue.Queue()
        self.ends: queue.Queue[tuple[RunEnd, str]] = queue.Queue()
        self.run = Run(
            router_id=router_id,
            generation=generation,
            window=window,
            emit=self.results.put,
            on_end=lambda end, message: self.ends.put((end, message)),
        )

    def result(self) -> StepResult:
        return self.results.get(timeout=WAIT_S)

    def end(self) -> tuple[RunEnd, str]:
        return self.ends.get(timeout=WAIT_S)
