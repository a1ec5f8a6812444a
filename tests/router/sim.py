"""The scheduler core against fake workers in one thread, without gRPC: steps and results move when told."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from proto.codec import pack_i32, unpack_i32
from proto.version import PROTOCOL_VERSION
from proto.worker_pb2 import Capacity, Sampling, Step, StepResult
from router.config import RouterConfig
from router.core_factory import make_core
from router.ipc.messages import ErrorInfo, FinishReason, RequestSpec, SamplingSpec, Started, StepEvents
from router.limits import resolve_limits, shape_of
from settings.tracing import Tracing
from worker.config import WorkerConfig
from worker.fake import FakeRunner, FakeTiming, expected_tokens, make_fake_runner
from worker.results import to_proto
from worker.rows import RowTable

CONN = 1


def capacity_of(runner: FakeRunner, *, worker_id: str = "w") -> Capacity:
    c = runner.capacity
    return Capacity(
        protocol_version=PROTOCOL_VERSION,
        worker_id=worker_id,
        model_id=c.model_id,
        model_hash=c.model_hash,
        block_size=c.block_size,
        n_blocks=c.n_blocks,
        max_rows=c.max_rows,
        max_step_tokens=c.max_step_tokens,
        max_context=c.max_context,
        vocab_size=c.vocab_size,
        max_batch_total_tokens=c.max_batch_total_tokens,
        attention=c.attention,
        eos_token_ids=c.eos_token_ids,
        max_logprobs=c.max_logprobs,
        max_window=8,
        features=c.features,
    )


@dataclass
class SimReplica:
    """A worker's rows and runner, and the steps that were sent to it but not computed yet."""

    runner: FakeRunner
    table: RowTable
    generation: int
    sent: deque[Step] = field(default_factory=deque)
    computed: deque[StepResult] = field(default_factory=deque)

    def compute(self) -> None:
        """Runs the oldest step that was sent."""
        batch = self.table.apply(self.sent.popleft())
        sampled = self.runner.collect(self.runner.launch(batch))
        self.computed.append(to_proto(sampled, generation=self.generation, queued_steps=len(self.sent)))


@dataclass
class Answer:
    spec: RequestSpec
    tokens: list[int] = field(default_factory=list)
    reason: FinishReason = FinishReason.NONE
    error: ErrorInfo | None = None
    started: Started | None = None
    logprobs: list[tuple[float, bytes, bytes]] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    cancelled: bool = False

    @property
    def done(self) -> bool:
        return self.cancelled or self.error is not None or self.reason is not FinishReason.NONE


class Sim:
    """One core, any number of replicas."""

    def __init__(
        self,
        *,
        n_replicas: int = 1,
        seed: int = 0,
        check: bool = True,
        config: dict[str, Any] | None = None,
        tracing: Tracing | None = None,
        **worker: Any,
    ) -> None:
        self.config = RouterConfig(**(config or {}))
        worker.setdefault("max_batch_size", 8)
        worker.setdefault("max_batch_prefill_tokens", 64)
        worker.setdefault("fake_n_blocks", 65)
        self.worker_config = WorkerConfig(model="", attention="fake", fake_step_ms=0.0, **worker)
        self._check_each = check
        self.now = 0.0
        self.replicas: dict[int, SimReplica] = {}
        self.answers: dict[int, Answer] = {}
        self.events: list[StepEvents] = []
        self._generation = 0
        self._next_id = 0
        self.n_prefill_of_dead = 0
        runner = self._runner()
        self.vocab = runner.vocab
        self.capacity = capacity_of(runner)
        self.limits = resolve_limits(self.config, self.capacity)
        self.core = make_core(self.config, self.limits, rng=random.Random(seed), tracing=tracing)
        for i in range(n_replicas):
            self.up(i)

    def _runner(self) -> FakeRunner:
        timing = FakeTiming(clock=lambda: 0.0, wait=lambda s: None)
        return make_fake_runner(self.worker_config, timing=timing)

    # ---- replicas ----

    def up(self, replica_id: int, *, probing: bool = False) -> SimReplica:
        self._generation += 1
        runner = self._runner()
        replica = SimReplica(
            runner=runner, table=RowTable.for_capacity(runner.capacity), generation=self._generation
        )
        self.replicas[replica_id] = replica
        self.core.replica_up(
            replica_id,
            shape=shape_of(self.limits, self.config, capacity_of(runner)),
            generation=self._generation,
            probing=probing,
        )
        self.settle()
        return replica

    def down(self, replica_id: int) -> None:
        replica = self.replicas.pop(replica_id)
        assert not replica.runner.violations
        self.n_prefill_of_dead += replica.runner.n_prefill_tokens
        self.core.replica_down(replica_id)
        self.settle()

    @property
    def n_prefill_tokens(self) -> int:
        return sum(r.runner.n_prefill_tokens for r in self.replicas.values()) + self.n_prefill_of_dead

    # ---- requests ----

    def submit(self, *prompts: list[int], n_new: int | None = 8, **fields: Any) -> list[int]:
        sampling = fields.pop("sampling", SamplingSpec(temperature=0.0))
        ids = list(range(self._next_id, self._next_id + len(prompts)))
        self._next_id += len(prompts)
        specs = [
            RequestSpec(
                id=request_id,
                prompt=pack_i32(np.array(prompt, dtype=np.int32)),
                max_new_tokens=n_new,
                sampling=sampling,
                **fields,
            )
            for request_id, prompt in zip(ids, prompts, strict=True)
        ]
        self.core.submit(CONN, specs, now=self.now)
        for spec in specs:
            self.answers[spec.id] = Answer(spec=spec)
        self.settle()
        return ids

    def cancel(self, *ids: int) -> None:
        self.core.cancel(CONN, ids)
        for request_id in ids:
            if not self.answers[request_id].done:
                self.answers[request_id].cancelled = True
        self.settle()

    # ---- motion ----

    def compose(self, replica_id: int = 0) -> Step | None:
        step = self.core.compose(replica_id, now=self.now)
        if step is not None:
            self.replicas[replica_id].sent.append(Step.FromString(step.SerializeToString()))
        self.settle()
        return step

    def compute(self, replica_id: int = 0) -> None:
        self.replicas[replica_id].compute()

    def apply(self, replica_id: int = 0) -> StepResult:
        result = self.replicas[replica_id].computed.popleft()
        self.core.apply_result(replica_id, result, now=self.now)
        self.settle()
        return result

    def turn(self) -> bool:
        """Fills every window, then computes and applies one step of each replica. Whether anything moved."""
        moved = False
        composed = True
        while composed:
            composed = False
            for replica_id in list(self.replicas):
                while self.compose(replica_id) is not None:
                    moved = composed = True
        for replica_id, replica in list(self.replicas.items()):
            if replica.sent:
                self.compute(replica_id)
            if replica.computed:
                self.apply(replica_id)
                moved = True
        self.now += 0.01
        return moved

    def run(self, *, max_turns: int = 20_000) -> None:
        """Until every request has ended."""
        for _ in range(max_turns):
            if self.core.n_requests == 0:
                break
            assert self.turn() or self.core.n_requests == 0, "nothing moves, but requests are left"
        assert self.core.n_requests == 0, "requests are left"
        while any(r.sent or r.computed for r in self.replicas.values()):
            self.turn()

    def settle(self) -> None:
        """Takes the events, and checks every invariant."""
        for conn, events in self.core.outbox.take():
            assert conn == CONN
            self.events.append(events)
            self._receive(events)
        if self._check_each:
            self.core.check()

    def _receive(self, events: StepEvents) -> None:
        ids = np.frombuffer(events.ids, dtype="<i8").tolist()
        tokens = unpack_i32(events.tokens).tolist()
        logprobs = {part.entry: part for part in events.logprobs}
        for i, (request_id, token, reason) in enumerate(zip(ids, tokens, events.reasons, strict=True)):
            answer = self.answers[request_id]
            assert not answer.done, f"request {request_id} got a token after its end"
            answer.tokens.append(token)
            answer.reason = FinishReason(reason)
            if i in logprobs:
                part = logprobs[i]
                answer.logprobs.append((part.chosen, part.top_ids, part.top_values))
        for started in events.started:
            assert self.answers[started.id].started is None
            self.answers[started.id].started = started
        for part in events.prompt_logprobs:
            self.answers[part.id].prompt_logprobs.append(part)
        for failed in events.failed:
            answer = self.answers[failed.id]
            assert not answer.done
            answer.error = failed.error

    # ---- what is right ----

    def expected(self, request_id: int) -> list[int]:
        spec = self.answers[request_id].spec
        prompt = unpack_i32(spec.prompt)
        n = spec.max_new_tokens
        if n is None:
            n = self.limits.max_total_tokens - len(prompt)
        s = spec.sampling
        sampling = Sampling(
            temperature=s.temperature,
            top_p=s.top_p,
            seed=s.seed or 0,
            repetition_penalty=s.repetition_penalty,
            presence_penalty=s.presence_penalty,
            frequency_penalty=s.frequency_penalty,
            min_new_tokens=s.min_new_tokens,
        )
        return expected_tokens(prompt, n=n, vocab=self.vocab, sampling=sampling, stop_at_eos=not s.ignore_eos)

    def assert_right(self, *ids: int) -> None:
        """Ended requests have the undisturbed text, the others a beginning of it."""
        for request_id in ids or self.answers:
            answer = self.answers[request_id]
            expected = self.expected(request_id)
            if answer.done and not answer.cancelled and answer.error is None:
                assert answer.tokens == expected, f"request {request_id}"
            else:
                assert answer.tokens == expected[: len(answer.tokens)], f"request {request_id}"

    def assert_empty(self) -> None:
        """Nothing is held by anyone."""
        self.core.check()
        assert self.core.n_requests == 0
        for rs in self.core.replicas.values():
            stats = rs.allocator.stats()
            assert stats.leased == 0
            assert stats.n_leases == 0
            assert len(rs.free_rows) == rs.shape.max_rows
            assert stats.free + stats.cached == stats.n_blocks - 1
        for replica in self.replicas.values():
            assert replica.runner.violations == []


def text(n: int, *, seed: int, vocab: int = 1000) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, vocab) for _ in range(n)]
