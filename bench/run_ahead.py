"""Drives a GPU runner with steps in flight, as the engine does: a step is composed before the last one's
tokens are known."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from proto.codec import pack_i32
from proto.worker_pb2 import Admit, Grammar, Sampling, Step
from worker.rows import RowTable
from worker.runner import Pending, Runner, Sampled


@dataclass
class Request:
    prompt: list[int]
    max_new: int
    sampling: Sampling = field(default_factory=Sampling)
    output: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    """Given ones hold `n_cached` tokens already; more are taken."""
    n_cached: int = 0
    grammar: Grammar | None = None
    row: int = -1
    epoch: int = 0
    computed: int = 0
    n_scheduled: int = 0
    n_known: int = 0
    """Tokens at admission."""


class RunAhead:
    """Blocks come in random order and are never reused within a run."""

    def __init__(self, runner: Runner, *, window: int = 2, chunk: int = 1 << 30, seed: int = 0) -> None:
        self.runner = runner
        self.window = window
        self.chunk = chunk
        self.results: list[Sampled] = []
        runner.reset()
        self._table = RowTable.for_capacity(runner.capacity)
        self._free = np.random.default_rng(seed).permutation(np.arange(1, runner.capacity.n_blocks)).tolist()
        self._seq = 0
        self._epoch = 0
        self._in_flight: deque[Pending] = deque()
        self._by_key: dict[tuple[int, int], Request] = {}

    def run(self, requests: list[Request], *, n_rows: int | None = None) -> list[list[int]]:
        """At most `n_rows` at once: a waiting one takes an ended one's row in the step that evicts it. What
        `output` holds already is replayed."""
        waiting, running = deque(requests), list[Request]()
        free = deque(range(len(requests) if n_rows is None else n_rows))
        step = Step()
        while running or waiting:
            while waiting and free:
                request = waiting.popleft()
                self._epoch += 1
                request.row, request.epoch, request.computed = free.popleft(), self._epoch, request.n_cached
                request.n_scheduled = len(request.output)
                self._by_key[request.row, request.epoch] = request
                step.admits.append(self._admit(request))
                running.append(request)
            prefill = [r for r in running if r.computed < r.n_known]
            decode = [r for r in running if r.computed >= r.n_known]
            budget = self.runner.capacity.max_step_tokens - len(decode)
            rows, lengths = [], []
            for request in prefill:
                n = min(self.chunk, request.n_known - request.computed, budget)
                if n <= 0:
                    continue
                budget -= n
                rows.append(request.row)
                lengths.append(n)
                request.computed += n
                if request.computed == request.n_known:
                    request.n_scheduled += 1
            for request in decode:
                request.n_scheduled += 1
            step.chunk_rows, step.chunk_tokens = pack_i32(rows), pack_i32(lengths)
            step.n_decode_rows = len(decode)
            self._send(step)
            done = [r for r in running if r.n_scheduled >= r.max_new]
            running = [r for r in running if r.n_scheduled < r.max_new]
            free.extend(r.row for r in done)
            step = Step(evicts=pack_i32([r.row for r in done]))
        self._send(step)
        while self._in_flight:
            self._collect()
        return [request.output for request in requests]

    def _send(self, step: Step) -> None:
        if len(self._in_flight) == self.window:
            self._collect()
        self._seq += 1
        step.seq = self._seq
        self._in_flight.append(self.runner.launch(self._table.apply(step)))

    def _collect(self) -> None:
        result = self.runner.collect(self._in_flight.popleft())
        self.results.append(result)
        for row, epoch, token in zip(
            result.rows.tolist(), result.epochs.tolist(), result.tokens.tolist(), strict=True
        ):
            self._by_key[row, epoch].output.append(token)

    def _admit(self, request: Request) -> Admit:
        n_blocks = -(-(len(request.prompt) + request.max_new) // self.runner.capacity.block_size)
        while len(request.blocks) < n_blocks:
            request.blocks.append(self._free.pop())
        request.n_known = len(request.prompt) + len(request.output)
        return Admit(
            row=request.row,
            epoch=request.epoch,
            tokens=pack_i32(request.prompt + request.output),
            n_prompt=len(request.prompt),
            blocks=pack_i32(request.blocks),
            n_cached=request.n_cached,
            sampling=request.sampling,
            grammar=request.grammar,
        )
