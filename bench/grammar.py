"""What constrained rows cost the free rows beside them: decode steps of the bare CPU runner with and without
a JSON schema on every tenth row, in alternating rounds of one run.

    python -m bench.grammar --model smollm2 --rows 20

All rows of a step take the same time, so the ratio of the steps' times is that of the free rows' pace. All
of them sample at temperature 1. The least time is what the machine can do; a median far above it means that
other things were running.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.cpu_step import Stepper
from bench.hardware import describe_host, host_line
from bench.report import markdown_table, write_report
from proto.worker_pb2 import Grammar, Sampling
from worker.backend import make_runner
from worker.config import WorkerConfig
from worker.openmp import set_wait_policy

RESULTS = Path(__file__).parent / "results"
N_WARM = 5
ENDLESS = {
    "type": "array",
    "minItems": 100_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "kind": {"enum": ["house", "tree", "river"]},
            "size": {"type": "number"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["name", "kind", "size", "tags"],
        "additionalProperties": False,
    },
}
"""No row ends while it is measured."""


@dataclass(frozen=True, slots=True)
class Round:
    """Times of steps in ms."""

    free: list[float]
    """Without a grammar."""
    mixed: list[float]
    """With grammars on some rows."""


def main() -> None:
    args = _arguments()
    set_wait_policy()
    runner = make_runner(WorkerConfig(model=args.model, attention="torch", threads=args.threads))
    if "grammar" not in runner.capacity.features:
        raise SystemExit("this worker has no grammars: pip install '.[worker]' in a checkout")
    host = describe_host()
    n_bound = max(1, round(args.rows * args.share))
    grammar = Grammar(kind=Grammar.JSON_SCHEMA, source=json.dumps(ENDLESS), strict=True)
    runner.prepare(grammar)
    stepper = Stepper(runner)

    def steps_ms(n: int) -> list[float]:
        stepper.start(
            n_rows=args.rows,
            context=args.context,
            shared=0,
            sampling=Sampling(temperature=1.0, seed=1),
            grammars=[grammar] * n,
        )
        for _ in range(N_WARM):
            stepper.decode()
        return [stepper.decode() * 1e3 for _ in range(args.steps)]

    steps_ms(n_bound)
    rounds = [Round(steps_ms(0), steps_ms(n_bound)) for _ in range(args.rounds)]
    head = ["rows", "constrained", "of all steps", "free ms", "mixed ms", "pace of free rows"]
    free = [ms for r in rounds for ms in r.free]
    mixed = [ms for r in rounds for ms in r.mixed]
    body = [
        [str(args.rows), str(n_bound), name, f"{f:.2f}", f"{m:.2f}", f"{f / m:.3f}"]
        for name, f, m in (
            ("least", min(free), min(mixed)),
            ("first decile", statistics.quantiles(free, n=10)[0], statistics.quantiles(mixed, n=10)[0]),
            ("median", statistics.median(free), statistics.median(mixed)),
        )
    ]
    command = f"python -m bench.grammar --model {args.model} --rows {args.rows} --share {args.share}"
    text = "\n\n".join(
        [
            "# Constrained rows beside free ones",
            f"`{command}`: {args.rounds} rounds of {args.steps} steps each, context {args.context}.",
            host_line(host),
            markdown_table(head, body),
        ]
    )
    print(text)
    if args.save:
        document = {"host": host, "command": command, "rounds": [asdict(r) for r in rounds]}
        write_report(RESULTS, "grammar", document, text)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rows", type=int, default=20)
    parser.add_argument("--share", type=float, default=0.1, help="of the rows that have a grammar")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--save", action="store_true", help="keep the result in bench/results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
