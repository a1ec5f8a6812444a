"""The engine: takes steps from a queue, keeps the device busy, and reports results in order.

It owns the compute thread, the row table and the order of events. It knows nothing of gRPC: the service
hands it steps from any thread (never waiting), results leave through the Run's `emit`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from proto.status import RunEnd
from proto.worker_pb2 import Step, StepResult
from worker.errors import ProtocolError, RunRefused
from worker.results import to_proto
from worker.rows import RowTable
from worker.run import Run, RunState
from worker.runner import DeviceError, Pending, PollablePending, Runner
from worker.tracing import RowTraces

LINGER_S = 0.003
"""How long the engine looks closely whether a further step has come or the running one has ended: a router
that runs ahead answers a result within a millisecond or two, later only when many requests come at once."""
_POLL_S = 0.0001
_SLOW_POLL_S = 0.0005


@dataclass(frozen=True, slots=True)
class EngineHealth:
    ready: bool
    """Neither failed nor stopping."""
    running: bool
    last_seq: int
    stalled_us: int
    holder: str
    error: str


@dataclass(slots=True)
class _Launched:
    pending: Pending
    at: float
    idle_before_s: float


class Engine:
    """Thread-safe: `open`, `submit`, `close`, `stop`, `health`. One compute thread, one Run at a time."""

    def __init__(
        self,
        runner: Runner,
        *,
        max_window: int,
        on_fatal: Callable[[Exception], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        linger_s: float = LINGER_S,
        traces: RowTraces | None = None,
    ) -> None:
        self.runner = runner
        self.max_window = max_window
        self._depth = max(1, runner.capacity.launch_depth)
        self._on_fatal = on_fatal
        self._clock = clock
        self._linger_s = linger_s
        self._traces = traces
        self._rows = RowTable.for_capacity(runner.capacity)
        self._log = structlog.get_logger("worker.engine")
        self._wake = threading.Condition()
        # Guarded by _wake.
        self._run: Run | None = None
        self._steps: deque[Step] = deque()
        self._n_launched = 0
        self._stopping = False
        self._error = ""
        # Written by the compute thread (and by submit when idle), read without the lock.
        self._last_seq = 0
        self._progress_at = clock()
        # Of the compute thread alone.
        self._launched: deque[_Launched] = deque()
        self._device_free_at = clock()
        self._thread = threading.Thread(target=self._main, name="compute", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # ---- called from any thread ----

    @property
    def current_run(self) -> Run | None:
        """The Run that holds the rows, closing ones included."""
        return self._run

    def open(self, run: Run) -> None:
        """Make it the current Run: the rows are reset, then the empty result of seq 0 is emitted. Raises
        RunRefused while another holds the rows, and when the engine has failed or stops."""
        with self._wake:
            if self._error or self._stopping:
                raise RunRefused(self._error or "the worker is shutting down")
            if self._run is not None:
                raise RunRefused(f"router {self._run.router_id!r} holds this worker")
            self._run = run
            self._progress_at = self._clock()
            self._wake.notify()

    def submit(self, run: Run, step: Step) -> None:
        """Queue a step. Raises ProtocolError when more are in flight than the window allows. A step for a
        Run that has ended is dropped."""
        with self._wake:
            if run is not self._run or not run.is_open:
                return
            in_flight = len(self._steps) + self._n_launched
            if in_flight >= run.window:
                raise ProtocolError(
                    f"step {step.seq} would be number {in_flight + 1} in flight, but the window is "
                    f"{run.window}"
                )
            if in_flight == 0:
                self._progress_at = self._clock()
            self._steps.append(step)
            self._wake.notify()

    def close(self, run: Run, end: RunEnd, message: str) -> None:
        """Discard the Run's queued steps; it ends when its running step has. The first reason counts."""
        with self._wake:
            self._close(run, end, message)

    def stop(self, *, timeout_s: float | None = None) -> bool:
        """Let the running step end and report it, end the Run with SHUTDOWN, end the compute thread. False:
        the running step did not end in time."""
        with self._wake:
            self._stopping = True
            if self._run is not None:
                self._close(self._run, RunEnd.SHUTDOWN, "the worker is shutting down")
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def health(self) -> EngineHealth:
        run = self._run
        has_work = (
            bool(self._steps) or self._n_launched > 0 or (run is not None and run.state is not RunState.LIVE)
        )
        stalled_s = self._clock() - self._progress_at if has_work else 0.0
        return EngineHealth(
            ready=not self._error and not self._stopping,
            running=run is not None and run.is_open,
            last_seq=self._last_seq,
            stalled_us=max(0, round(stalled_s * 1e6)),
            holder=run.router_id if run is not None else "",
            error=self._error,
        )

    def _close(self, run: Run, end: RunEnd, message: str) -> None:
        if run is not self._run or not run.is_open:
            return
        run.move(RunState.CLOSING)
        run.end, run.end_message = end, message
        self._steps.clear()
        self._wake.notify()

    # ---- the compute thread ----

    def _main(self) -> None:
        try:
            while self._turn():
                pass
        except DeviceError as error:
            self._fail(error, RunEnd.DEVICE, f"device error: {error}")
        except Exception as error:
            self._log.exception("the compute thread failed")
            self._fail(error, RunEnd.INTERNAL, f"{type(error).__name__}: {error}")

    def _turn(self) -> bool:
        """One event. False: the thread ends."""
        step: Step | None = None
        with self._wake:
            run = self._wait_for_event()
            if run is None:
                return False
            state = run.state
            if state is RunState.LIVE and self._steps and self._n_launched < self._depth:
                step = self._steps.popleft()
                self._n_launched += 1
        if state is RunState.OPENING:
            self._begin(run)
        elif state is RunState.CLOSING:
            self._finish(run)
        elif step is not None:
            self._launch(run, step)
        else:
            self._collect(run)
        return True

    def _wait_for_event(self) -> Run | None:
        """Under the lock: wait until there is something to do for the current Run. None: stop."""
        linger_until: float | None = None
        while True:
            run = self._run
            if run is not None:
                if run.state is not RunState.LIVE or (self._steps and self._n_launched < self._depth):
                    return run
                if self._launched:
                    oldest = self._launched[0].pending
                    if self._n_launched >= min(self._depth, run.window):
                        return run
                    if not isinstance(oldest, PollablePending) or oldest.done():
                        return run
                    now = time.monotonic()
                    if linger_until is None:
                        linger_until = now + self._linger_s
                    # Not blocked in `collect`: the device would stand still after this step.
                    self._wake.wait(_POLL_S if now < linger_until else _SLOW_POLL_S)
                    continue
            elif self._stopping:
                return None
            self._wake.wait()

    def _begin(self, run: Run) -> None:
        self.runner.reset()
        self._rows.reset()
        self._last_seq = 0
        self._device_free_at = self._clock()
        with self._wake:
            if run.state is not RunState.OPENING:
                return
            run.move(RunState.LIVE)
        self._log.info("run opened", router=run.router_id, generation=run.generation, window=run.window)
        run.emit(StepResult(seq=0, generation=run.generation))

    def _launch(self, run: Run, step: Step) -> None:
        try:
            batch = self._rows.apply(step)
        except ProtocolError as error:
            self._log.error("protocol error", router=run.router_id, error=str(error))
            with self._wake:
                self._n_launched -= 1
                self._close(run, RunEnd.PROTOCOL, str(error))
            return
        now = self._clock()
        idle_s = 0.0 if self._launched else max(0.0, now - self._device_free_at)
        if self._traces is not None:
            self._traces.launched(step, now_s=now)
        pending = self.runner.launch(batch)
        self._launched.append(_Launched(pending, now, idle_s))
        self._progress_at = self._clock()

    def _collect(self, run: Run) -> None:
        """Wait for the oldest launched step and report it."""
        launched = self._launched[0]
        sampled = self.runner.collect(launched.pending)
        self._launched.popleft()
        now = self._clock()
        if sampled.step_us == 0:
            # The runner did not measure it: the step ran from its launch, or from the end of the one before.
            sampled.step_us = max(1, round((now - max(launched.at, self._device_free_at)) * 1e6))
            sampled.idle_us = round(launched.idle_before_s * 1e6)
        self._device_free_at = now
        self._progress_at = now
        self._last_seq = sampled.seq
        with self._wake:
            self._n_launched -= 1
            n_queued = len(self._steps)
            wanted = run.end is None or run.end in (RunEnd.SHUTDOWN, RunEnd.PROTOCOL)
        if wanted:
            run.emit(to_proto(sampled, generation=run.generation, queued_steps=n_queued))
        if self._traces is not None:
            self._traces.collected(sampled, now_s=now)

    def _finish(self, run: Run) -> None:
        """End a closing Run: wait for what runs, forget the rows, make room for the next."""
        while self._launched:
            self._collect(run)
        self.runner.reset()
        self._rows.reset()
        self._end(run)

    def _end(self, run: Run) -> None:
        if self._traces is not None:
            self._traces.reset(now_s=self._clock())
        with self._wake:
            run.move(RunState.CLOSED)
            self._run = None
            self._steps.clear()
            self._n_launched = 0
        assert run.end is not None
        self._log.info("run ended", router=run.router_id, generation=run.generation, end=run.end.value)
        run.on_end(run.end, run.end_message)

    def _fail(self, error: Exception, end: RunEnd, message: str) -> None:
        """Nothing can be computed any more: end the stream and tell the process."""
        with self._wake:
            self._error = message
            run = self._run
            if run is not None:
                if run.is_open:
                    run.move(RunState.CLOSING)
                run.end, run.end_message = end, message
        self._log.error("worker failed", error=message)
        if run is not None:
            self._end(run)
        if self._on_fatal is not None:
            self._on_fatal(error)
