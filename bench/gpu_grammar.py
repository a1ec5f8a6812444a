"""What constrained rows cost the free rows beside them on a GPU: decode steps with and without a JSON schema
on every tenth row, two steps in flight as the engine runs them, in alternating rounds of one run.

    python -m bench.gpu_grammar --model FOLDER --load-format dummy --rows 64

All rows of a step take the same time, so the ratio of the steps' times is the free rows' pace. A step with
constrained rows waits for the masks, which follow from the tokens of the step before and are computed while
its own forward pass runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.grammar import ENDLESS
from bench.hardware import describe_host, host_line
from bench.report import markdown_table, write_report
from bench.run_ahead import Request, RunAhead
from checkpoint.resolve import resolve
from proto.worker_pb2 import Grammar, Sampling
from worker.config import WorkerConfig
from worker.gpu.start import make_gpu_runner
from worker.runner import Runner

RESULTS = Path(__file__).parent / "results"
N_WARM = 8


class Timed(RunAhead):
    """Notes when each step's result is there."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self.at_s: list[float] = []

    def _collect(self) -> None:
        super()._collect()
        self.at_s.append(time.perf_counter())


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    config = WorkerConfig(
        model=args.model,
        attention="flashinfer",
        load_format=args.load_format,
        max_total_tokens=4096,
        max_batch_total_tokens=args.rows * 2048,
    )
    runner = make_gpu_runner(config, resolve(args.model))
    if "grammar" not in runner.capacity.features:
        raise SystemExit("this worker has no grammars: pip install '.[worker]' in a checkout")
    grammar = Grammar(kind=Grammar.JSON_SCHEMA, source=json.dumps(ENDLESS), strict=True)
    runner.prepare(grammar)
    host, rng = describe_host(), np.random.default_rng(1)
    every = max(1, round(1 / args.share))

    def step_ms(*, bound: bool) -> list[float]:
        requests = [
            Request(
                rng.integers(3, runner.capacity.vocab_size, args.context).tolist(),
                args.steps,
                Sampling(temperature=1.0, seed=row),
                grammar=grammar if bound and row % every == 0 else None,
            )
            for row in range(args.rows)
        ]
        driver = Timed(runner)
        driver.run(requests)
        errors = {error.message for result in driver.results for error in result.errors}
        if errors:
            raise SystemExit(f"rows failed: {errors}")
        whole = [len(result.rows) == args.rows for result in driver.results]
        first = whole.index(True) + N_WARM
        last = len(whole) - whole[::-1].index(True)
        return [float(seconds) * 1e3 for seconds in np.diff(driver.at_s[first:last])]

    step_ms(bound=True)
    rounds = [(step_ms(bound=False), step_ms(bound=True)) for _ in range(args.rounds)]
    free, mixed = ([statistics.median(part[i]) for part in rounds] for i in (0, 1))
    head = ["rows", "constrained", "free ms", "mixed ms", "pace of free rows"]
    f, m = statistics.median(free), statistics.median(mixed)
    body = [[str(args.rows), str(-(-args.rows // every)), f"{f:.3f}", f"{m:.3f}", f"{f / m:.3f}"]]
    name = Path(args.model).name
    command = (
        f"python -m bench.gpu_grammar --model {name} --load-format {args.load_format} --rows {args.rows} "
        f"--share {args.share}"
    )
    text = "\n\n".join(
        [
            "# Constrained rows beside free ones on a GPU",
            f"`{command}`: medians of {args.rounds} alternating rounds of {args.steps} steps, context "
            f"{args.context} and more.",
            host_line(host),
            markdown_table(head, body),
        ]
    )
    print(text)
    write_report(args.out, "gpu-grammar", {"host": host, "command": command, "rounds": rounds}, text)
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_grammar", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--share", type=float, default=0.1, help="of the rows that have a grammar")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
