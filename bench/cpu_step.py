"""Times the bare runner on the CPU: decode steps by rows and context, and prompt chunks, without router,
gRPC or HTTP.

    python -m bench.cpu_step --model smollm2 --rows 1,8,32 --context 128,1024 --prefill 64,1000

The minimum is what the machine can do; a median far above it means that something else was running.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Sequence

import numpy as np

from proto.codec import pack_i32
from proto.worker_pb2 import Admit, Grammar, Sampling, Step
from worker.backend import make_runner
from worker.config import WorkerConfig
from worker.openmp import set_wait_policy
from worker.rows import RowTable
from worker.runner import Runner


class Stepper:
    """Rows with given contexts, whose KV is whatever the cache holds."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._capacity = runner.capacity
        self._epoch = 0

    def start(
        self,
        *,
        n_rows: int,
        context: int,
        shared: int,
        sampling: Sampling,
        grammars: Sequence[Grammar] = (),
    ) -> None:
        """`n_rows` rows of `context` tokens, the first `shared` of them in the same blocks; their last token
        is computed. `grammars`: of the first rows; the others are free."""
        self._runner.reset()
        self._table = RowTable.for_capacity(self._capacity)
        self._seq = 0
        size = self._capacity.block_size
        room = context + 256
        n_own = -(-room // size)
        n_shared = shared // size
        rng = np.random.default_rng(0)
        step = Step(seq=self._next())
        next_block = 1 + n_shared
        for row in range(n_rows):
            own = n_own - n_shared
            blocks = [*range(1, 1 + n_shared), *range(next_block, next_block + own)]
            next_block += own
            tokens = rng.integers(0, self._capacity.vocab_size, context)
            step.admits.append(
                Admit(
                    row=row,
                    epoch=1,
                    tokens=pack_i32(tokens),
                    n_prompt=context,
                    blocks=pack_i32(blocks),
                    n_cached=context - 1,
                    sampling=sampling,
                    grammar=grammars[row] if row < len(grammars) else None,
                )
            )
        if next_block > self._capacity.n_blocks:
            raise SystemExit(f"{n_rows} rows of {context} tokens don't fit into the KV cache")
        step.chunk_rows = pack_i32(range(n_rows))
        step.chunk_tokens = pack_i32([1] * n_rows)
        self._run(step)
        self._n_rows = n_rows

    def decode(self) -> float:
        """Seconds of one decode step of all rows."""
        return self._run(Step(seq=self._next(), n_decode_rows=self._n_rows))

    def prefill(self, n_tokens: int) -> float:
        """Seconds of one chunk of `n_tokens` of a new row."""
        self._runner.reset()
        self._table = RowTable.for_capacity(self._capacity)
        self._seq = 0
        tokens = np.random.default_rng(0).integers(0, self._capacity.vocab_size, n_tokens)
        n_blocks = n_tokens // self._capacity.block_size + 1
        admit = Admit(
            row=0,
            epoch=1,
            tokens=pack_i32(tokens),
            n_prompt=n_tokens,
            blocks=pack_i32(range(1, 1 + n_blocks)),
        )
        return self._run(
            Step(
                seq=self._next(), admits=[admit], chunk_rows=pack_i32([0]), chunk_tokens=pack_i32([n_tokens])
            )
        )

    def _run(self, step: Step) -> float:
        started = time.perf_counter()
        self._runner.collect(self._runner.launch(self._table.apply(step)))
        return time.perf_counter() - started

    def _next(self) -> int:
        self._seq += 1
        return self._seq


def main() -> None:
    args = _arguments()
    set_wait_policy()
    import torch

    runner = make_runner(
        WorkerConfig(
            model=args.model,
            attention="torch",
            block_size=args.block_size,
            dtype=args.dtype,
            threads=args.threads,
        )
    )
    stepper = Stepper(runner)
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, "
    )
    print(
        f"{runner.capacity.model_id}, {runner.capacity.dtype}, block size {args.block_size}, {args.sampling}"
    )
    print("| decode rows | context | shared | min ms | median ms | tok/s at min |")
    print("|---|---|---|---|---|---|")
    sampling = Sampling(temperature=1.0, seed=1) if args.sampling == "random" else Sampling()
    cases = [(n, c, 0) for c in args.context for n in args.rows]
    if args.shared:
        cases += [(n, args.shared + 40, args.shared) for n in args.rows if n > 1]
    for n_rows, context, shared in cases:
        stepper.start(n_rows=n_rows, context=context, shared=shared, sampling=sampling)
        for _ in range(3):
            stepper.decode()
        times = [stepper.decode() for _ in range(args.steps)]
        _row(f"{n_rows} | {context} | {shared}", times, n_tokens=n_rows)
    print("| prompt tokens | min ms | median ms | tok/s at min |")
    print("|---|---|---|---|")
    for n_tokens in args.prefill:
        stepper.prefill(n_tokens)
        _row(
            str(n_tokens),
            [stepper.prefill(n_tokens) for _ in range(max(args.steps // 5, 3))],
            n_tokens=n_tokens,
        )


def _row(label: str, times: Sequence[float], *, n_tokens: int) -> None:
    least, middle = min(times), statistics.median(times)
    print(f"| {label} | {least * 1e3:.1f} | {middle * 1e3:.1f} | {n_tokens / least:.0f} |", flush=True)


def _arguments() -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",") if part]

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rows", type=numbers, default=[1, 8, 32])
    parser.add_argument("--context", type=numbers, default=[128, 1024])
    parser.add_argument("--shared", type=int, default=1008, help="shared prefix of further cases; 0: none")
    parser.add_argument("--prefill", type=numbers, default=[64, 1000])
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--sampling", choices=("greedy", "random"), default="greedy")
    return parser.parse_args()


if __name__ == "__main__":
    main()
