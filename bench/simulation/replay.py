"""A load on the real scheduler core, before a device that exists as a formula: discrete events, no waiting.

Everything that decides is the server's own code (`router/core.py`, its queue, allocator and policy, and the
worker's row table, which checks every step). Only time is made up.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bench.arrivals import poisson_arrivals_s
from bench.measures import RequestRecord
from bench.scenarios import Case
from bench.simulation.device import DeviceModel, Paths
from proto.codec import pack_i32
from proto.version import PROTOCOL_VERSION
from proto.worker_pb2 import Capacity, Step, StepResult
from router.config import RouterConfig
from router.core import SchedulerCore
from router.core_factory import make_core
from router.ipc.messages import RequestSpec, SamplingSpec
from router.limits import resolve_limits, shape_of
from worker.rows import RowTable

N_SPECIAL = 16
"""Token ids that no prompt has."""
_CONN = 1
_REPLICA = 0
_TOKEN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerShape:
    """What the simulated worker says of itself."""

    max_rows: int = 256
    max_batch_prefill_tokens: int = 8192
    n_blocks: int = 55_000
    block_size: int = 16
    max_context: int = 65_536
    vocab_size: int = 128_256

    def capacity(self) -> Capacity:
        return Capacity(
            protocol_version=PROTOCOL_VERSION,
            worker_id="simulated",
            model_id="simulated",
            block_size=self.block_size,
            n_blocks=self.n_blocks,
            max_rows=self.max_rows,
            max_step_tokens=self.max_batch_prefill_tokens + self.max_rows,
            max_context=self.max_context,
            vocab_size=self.vocab_size,
            max_batch_total_tokens=(self.n_blocks - 1) * self.block_size,
            attention="fake",
            max_window=8,
        )


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """One step as it ran; for looking at what the policy did."""

    start_s: float
    time_s: float
    n_decode: int
    n_prompt_tokens: int


class Replay:
    """One run of one case."""

    def __init__(
        self,
        *,
        case: Case,
        config: RouterConfig,
        worker: WorkerShape,
        device: DeviceModel,
        paths: Paths,
        seed: int = 7,
    ) -> None:
        self.case = case
        self.worker = worker
        self.device = device
        self.paths = paths
        self.steps: list[SimulatedStep] = []
        self.records: list[RequestRecord] = []
        self._seed = seed
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        """A heap of (when, order of equal times, what)."""
        self._n_events = 0
        self._device_free_s = 0.0
        self._api_free_s = [0.0] * paths.n_api
        self._rng = np.random.default_rng(seed)
        self._prefix = self._rng.integers(N_SPECIAL, worker.vocab_size, size=case.n_prefix)
        self._table = RowTable(
            max_rows=worker.max_rows,
            max_context=worker.max_context,
            block_size=worker.block_size,
            n_blocks=worker.n_blocks,
            vocab_size=worker.vocab_size,
            max_step_tokens=worker.max_batch_prefill_tokens + worker.max_rows,
        )
        self._core = _core(config, worker.capacity(), seed=seed)

    def run(self) -> list[RequestRecord]:
        """All answers, as the load client would have recorded them."""
        case = self.case
        if case.concurrency is not None:
            for _ in range(min(case.concurrency, case.n_requests)):
                self._send_next(0.0)
        else:
            assert case.rate_per_s is not None
            for at_s in poisson_arrivals_s(n=case.n_requests, rate_per_s=case.rate_per_s, seed=self._seed):
                self._at(at_s, self._send_next)
        while self._events:
            now, _, act = heapq.heappop(self._events)
            act(now)
        assert self._core.n_requests == 0, "requests are left, but nothing moves"
        return self.records

    def _at(self, time_s: float, act: Callable[[float], None]) -> None:
        self._n_events += 1
        heapq.heappush(self._events, (time_s, self._n_events, act))

    # ---- clients ----

    def _send_next(self, now: float) -> None:
        i = len(self.records)
        if i == self.case.n_requests:
            return
        case = self.case
        own = self._rng.integers(N_SPECIAL, self.worker.vocab_size, size=case.n_own)
        prompt = np.concatenate([self._prefix, own]).astype(np.int32)
        self.records.append(
            RequestRecord(start_s=now, n_input=len(prompt), n_expected=case.n_output, n_output=case.n_output)
        )
        k = int(np.argmin(self._api_free_s))
        busy_ms = self.paths.request_ms + self.paths.token_ms * len(prompt)
        ready = max(now + self.paths.in_ms / 1e3, self._api_free_s[k]) + busy_ms / 1e3
        self._api_free_s[k] = ready
        self._at(ready, lambda t: self._submit(t, i, prompt))

    def _submit(self, now: float, i: int, prompt: np.ndarray) -> None:
        spec = RequestSpec(
            id=i,
            prompt=pack_i32(prompt),
            max_new_tokens=self.case.n_output,
            sampling=SamplingSpec(temperature=0.0, ignore_eos=True),
        )
        self._core.submit(_CONN, [spec], now=now)
        self._pump(now)

    # ---- the router's shell ----

    def _pump(self, now: float) -> None:
        while (step := self._core.compose(_REPLICA, now=now)) is not None:
            self._compute(now + self.paths.send_ms / 1e3, step)
        for _, events in self._core.outbox.take():
            ids = np.frombuffer(events.ids, dtype="<i8").tolist()
            assert not events.failed, events.failed
            for request_id, reason in zip(ids, events.reasons, strict=True):
                self._token(now + self.paths.out_ms / 1e3, request_id, ended=bool(reason))

    def _token(self, at_s: float, request_id: int, *, ended: bool) -> None:
        self.records[request_id].event_s.append(at_s)
        if ended and self.case.concurrency is not None:
            self._at(at_s, self._send_next)

    # ---- the worker ----

    def _compute(self, arrived_s: float, step: Step) -> None:
        batch = self._table.apply(step)
        n = batch.n_decode
        kv = batch.kv_lens.astype(np.int64)
        start = max(arrived_s, self._device_free_s)
        time_s = 1e-3 * self.device.step_ms(
            decode_kv=kv[:n],
            n_shared=self.case.n_prefix * max(0, n - 1),
            chunk_q=batch.q_lens[n:].astype(np.int64),
            chunk_kv=kv[n:],
        )
        self._device_free_s = start + time_s
        self.steps.append(SimulatedStep(start, time_s, n, int(batch.q_lens[n:].sum())))
        rows = batch.rows[batch.samples].astype(np.int32)
        result = StepResult(
            seq=step.seq,
            generation=1,
            rows=pack_i32(rows),
            epochs=pack_i32(batch.epochs[batch.samples].astype(np.int32)),
            tokens=pack_i32(np.full(len(rows), _TOKEN, dtype=np.int32)),
            step_us=round(time_s * 1e6),
        )
        self._at(self._device_free_s + self.paths.result_ms / 1e3, lambda t: self._apply(t, result))

    def _apply(self, now: float, result: StepResult) -> None:
        self._core.apply_result(_REPLICA, result, now=now)
        self._pump(now)


def _core(config: RouterConfig, capacity: Capacity, *, seed: int) -> SchedulerCore:
    limits = resolve_limits(config, capacity)
    core = make_core(config, limits, rng=random.Random(seed))
    core.replica_up(_REPLICA, shape=shape_of(limits, config, capacity), generation=1)
    return core
