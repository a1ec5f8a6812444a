"""Drives a runner as the engine does: a tiny scheduler that gives each request its own blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from proto.codec import pack_i32
from proto.worker_pb2 import Admit, Sampling, Step
from worker.rows import RowTable
from worker.runner import Runner, Sampled


@dataclass
class Request:
    tokens: list[int]
    """Prompt, then output as it is sampled."""
    n_prompt: int
    max_new: int
    sampling: Sampling = field(default_factory=Sampling)
    blocks: list[int] = field(default_factory=list)
    """Taken from the free ones when empty or too short."""
    n_cached: int = 0
    row: int = -1
    computed: int = 0
    known: int = 0

    @property
    def output(self) -> list[int]:
        return self.tokens[self.n_prompt :]


class Driver:
    """Blocks come in random order and are never reused; prompts go in chunks of `chunk` tokens."""

    def __init__(self, runner: Runner, *, chunk: int = 1 << 30, seed: int = 0) -> None:
        self.runner = runner
        self.chunk = chunk
        self.results: list[Sampled] = []
        self._table = RowTable.for_capacity(runner.capacity)
        self._seq = 0
        self._epoch = 0
        self._free = np.random.default_rng(seed).permutation(np.arange(1, runner.capacity.n_blocks)).tolist()
        self._rows = list(range(runner.capacity.max_rows))
        runner.reset()

    def run(self, requests: list[Request]) -> list[list[int]]:
        """All at once, until each has its `max_new` tokens; returns the outputs."""
        running = list(requests)
        step = Step()
        for request in running:
            self._admit(request, step)
        while running:
            prefill = [r for r in running if r.computed < r.known]
            lengths = [min(self.chunk, r.known - r.computed) for r in prefill]
            step.chunk_rows = pack_i32([r.row for r in prefill])
            step.chunk_tokens = pack_i32(lengths)
            step.n_decode_rows = len(running) - len(prefill)
            result = self.step(step)
            tokens = dict(zip(result.rows.tolist(), result.tokens.tolist(), strict=True))
            for request, n in zip(prefill, lengths, strict=True):
                request.computed += n
            for request in running:
                if request.row in tokens:
                    request.tokens.append(tokens[request.row])
            done = [r for r in running if len(r.output) >= r.max_new]
            step = Step(evicts=pack_i32([r.row for r in done]))
            self._rows.extend(r.row for r in done)
            running = [r for r in running if r not in done]
        if step.evicts:
            self.step(step)
        return [request.output for request in requests]

    def step(self, step: Step) -> Sampled:
        self._seq += 1
        step.seq = self._seq
        result = self.runner.collect(self.runner.launch(self._table.apply(step)))
        self.results.append(result)
        return result

    def _admit(self, request: Request, step: Step) -> None:
        size = self.runner.capacity.block_size
        while len(request.blocks) * size < request.n_prompt + request.max_new:
            request.blocks.append(self._free.pop())
        self._epoch += 1
        request.row = self._rows.pop(0)
        request.computed = request.n_cached
        request.known = len(request.tokens)
        step.admits.append(
            Admit(
                row=request.row,
                epoch=self._epoch,
                tokens=pack_i32(request.tokens),
                n_prompt=request.n_prompt,
                blocks=pack_i32(request.blocks),
                n_cached=request.n_cached,
                sampling=request.sampling,
            )
        )
