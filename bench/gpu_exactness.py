"""Is the GPU worker's text right? SmolLM2 in bf16 against a float64 reference of the same (rounded) weights.

    python -m bench.gpu_exactness --model smollm2

First the error of the logits is measured; then greedy and seeded texts are compared token by token: over
every batch size from 1 to 40 and around every graph size, alone and among 200, graphs on and off, blocks of 1
and 16 tokens, with cached prefixes and without, preempted and not. A token may differ only where the
reference's two best values, noise included, are closer than the errors of two logits can explain, and below
1 % of the places do. Then the whole KV budget is filled, and the error with an 8-bit KV cache is measured.
Exit code 1 when a text is wrong or too many differ.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.float64_decoder import Float64Decoder
from bench.gpu_budget import fill_budget
from bench.hardware import describe_host, host_line
from bench.near_ties import Judge, Tally
from bench.report import markdown_table, write_report
from bench.run_ahead import Request, RunAhead
from checkpoint.resolve import resolve
from proto.worker_pb2 import Sampling
from worker.config import WorkerConfig
from worker.gpu.runner import GpuRunner
from worker.gpu.start import make_gpu_runner
from worker.runner import Sampled

PROMPTS = Path(__file__).parents[1] / "tests" / "e2e" / "reference" / "smollm2_greedy.json"
RESULTS = Path(__file__).parent / "results"
N_NEW = 16
MAX_SHARE = 0.01
PARTS = ("sizes", "eager", "block1", "budget", "fp8")
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.8, seed=7),
    Sampling(temperature=1.0, seed=11, top_k=20),
    Sampling(temperature=1.0, seed=13, top_p=0.9),
)
FEW = (1, 2, 7, 9, 33, 64, 65, 200)


class Watched(RunAhead):
    """One step at a time; keeps every sampled row's logits, float32 on the device, by row."""

    def __init__(self, runner: GpuRunner) -> None:
        super().__init__(runner, window=1)
        self.core = runner.core
        self.logits: dict[int, list[torch.Tensor]] = {}

    def _collect(self) -> None:
        super()._collect()
        result: Sampled = self.results[-1]
        for index, row in enumerate(result.rows.tolist()):
            self.logits.setdefault(row, []).append(self.core.buffers.logits[index].clone())


class Texts:
    """The same requests again and again: greedy, seeded and filtered ones in turn over real prompts."""

    def __init__(self, prompts: list[list[int]]) -> None:
        self._prompts = prompts

    def fresh(self, n: int, *, first: int = 0) -> list[Request]:
        return [
            Request(
                list(self._prompts[i % len(self._prompts)]),
                N_NEW,
                SAMPLINGS[(i + i // len(self._prompts)) % len(SAMPLINGS)],
            )
            for i in range(first, first + n)
        ]


def logit_error(reference: Float64Decoder, runner: GpuRunner, texts: Texts) -> tuple[float, float, int]:
    """(largest, root mean square, rows) over the prompts' last tokens and the decode steps of 48 rows."""
    requests = texts.fresh(48)
    watched = Watched(runner)
    watched.run(requests)
    worst, square, n = 0.0, 0.0, 0
    for request in requests:
        want = reference.logits(request.prompt + request.output[:-1], first=len(request.prompt) - 1)
        error = (torch.stack(watched.logits[request.row]).double() - want).abs()
        worst = max(worst, float(error.max()))
        square, n = square + float(error.square().mean(-1).sum()), n + len(error)
    return worst, (square / n) ** 0.5, n


def cached(runner: GpuRunner, texts: Texts, judge: Judge) -> Tally:
    """Second turns, whose blocks (prompt and answer) are in the cache."""
    driver = RunAhead(runner, chunk=64)
    firsts = texts.fresh(40)
    driver.run(firsts)
    turns, size = [], runner.capacity.block_size
    for first, more in zip(firsts, texts.fresh(40, first=40), strict=True):
        n_cached = (len(first.prompt) + len(first.output) - 1) // size * size
        prompt = first.prompt + first.output + more.prompt[:9]
        turns.append(
            Request(prompt, N_NEW, first.sampling, blocks=first.blocks[: n_cached // size], n_cached=n_cached)
        )
    driver.run(turns)
    return judge.judge(turns)


def preempted(runner: GpuRunner, texts: Texts, judge: Judge) -> Tally:
    """Texts that were taken off the device in the middle, and are computed again from what was said."""
    whole = texts.fresh(40)
    RunAhead(runner).run(whole)
    again = texts.fresh(40)
    for index, (request, said) in enumerate(zip(again, whole, strict=True)):
        request.output = said.output[: 1 + index % (N_NEW - 1)]
    RunAhead(runner, chunk=32).run(again)
    return judge.judge(again)


def alone(runner: GpuRunner, texts: Texts, judge: Judge) -> tuple[Tally, int]:
    """The first 40 of 200, and each of them alone; how many texts are not the same in all tokens."""
    together = texts.fresh(200)
    RunAhead(runner, chunk=64).run(together)
    singles = texts.fresh(40)
    for request in singles:
        RunAhead(runner).run([request])
    tally = judge.judge(together)
    tally.add(judge.judge(singles))
    n_differ = sum(one.output != other.output for one, other in zip(singles, together, strict=False))
    return tally, n_differ


def around(sizes: Sequence[int]) -> list[int]:
    near = {n for size in sizes for n in (size - 1, size, size + 1)} | set(range(1, 41))
    return sorted(n for n in near if 1 <= n <= max(sizes))


class Check:
    """All comparisons of one run."""

    def __init__(self, model: str) -> None:
        self.checkpoint = resolve(model)
        self._base: dict[str, Any] = {
            "model": model,
            "attention": "flashinfer",
            "max_batch_total_tokens": 120_000,
            "max_batch_prefill_tokens": 1024,
            "max_total_tokens": 2048,
        }
        self._texts = Texts([row["prompt_ids"] for row in json.loads(PROMPTS.read_text())["rows"]])
        self.lines: list[tuple[str, Tally]] = []
        self.fp8: dict[str, tuple[float, float]] = {}

    def main_runner(self, parts: Sequence[str]) -> None:
        """Also makes the reference and its bound."""
        runner = self._make()
        self._reference = Float64Decoder(runner.core.decoder.weights)
        self.worst, self.rms, self.n_rows = logit_error(self._reference, runner, self._texts)
        print(f"logits over {self.n_rows} rows: error {self.worst:.4f}, rms {self.rms:.5f}", flush=True)
        # Six standard deviations of the difference of two errors.
        self.bound = 6 * 2**0.5 * self.rms
        self._judge = Judge(self._reference, bound=self.bound)
        if "sizes" not in parts:
            return
        which = around(runner.capacity.graph_sizes)
        self._note(
            f"block 16, graphs on, {len(which)} sizes from 1 to {max(which)}", self._run(runner, which)
        )
        tally, n_other = alone(runner, self._texts, self._judge)
        self._note(f"alone and among 200 ({n_other} of 40 texts are not the same)", tally)
        self._turns("block 16, graphs on", runner)

    def other_runner(self, name: str, **settings: Any) -> None:
        runner = self._make(**settings)
        which = [n for n in FEW if n <= runner.capacity.max_rows]
        self._note(f"{name}, {', '.join(map(str, which))} rows", self._run(runner, which))
        self._turns(name, runner)

    def measure_fp8(self, kv_dtype: str) -> None:
        runner = self._make(kv_cache_dtype=kv_dtype, cuda_graphs="off")
        worst, rms, _ = logit_error(self._reference, runner, self._texts)
        self.fp8[kv_dtype] = worst, rms
        print(f"{kv_dtype}: largest error {worst:.3f}, rms {rms:.4f}", flush=True)

    def all(self) -> Tally:
        total = Tally()
        for _, tally in self.lines:
            total.add(tally)
        return total

    def _turns(self, name: str, runner: GpuRunner) -> None:
        self._note(f"{name}, second turns from the cache", cached(runner, self._texts, self._judge))
        self._note(f"{name}, preempted", preempted(runner, self._texts, self._judge))

    def _make(self, **settings: Any) -> GpuRunner:
        # The last runner's memory comes free.
        gc.collect()
        torch.cuda.empty_cache()
        return make_gpu_runner(WorkerConfig(**{**self._base, **settings}), self.checkpoint)

    def _run(self, runner: GpuRunner, sizes: Sequence[int]) -> Tally:
        total = Tally()
        for n in sizes:
            requests = self._texts.fresh(n)
            RunAhead(runner, chunk=64).run(requests)
            total.add(self._judge.judge(requests))
        return total

    def _note(self, what: str, tally: Tally) -> None:
        self.lines.append((what, tally))
        print(f"{what}: {tally.n_differ} of {tally.n_places}, gap {tally.worst_gap:.4f}", flush=True)
        for line in tally.wrong[:3]:
            print("  WRONG", line, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    host, started = describe_host(), time.perf_counter()
    check, filled, whole = Check(args.model), "", False
    parts = args.parts.split(",")
    try:
        check.main_runner(parts)
        if "eager" in parts:
            check.other_runner("block 16, graphs off", cuda_graphs="off")
        if "block1" in parts:
            check.other_runner("block 1, graphs on", block_size=1, max_batch_size=72)
        if "budget" in parts:
            filled = fill_budget(args.model, check.checkpoint)
        for kv_dtype in ("fp8_e4m3", "fp8_e5m2") if "fp8" in parts else ():
            check.measure_fp8(kv_dtype)
        whole = set(parts) >= set(PARTS)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    total = check.all()
    good = not total.wrong and total.share < MAX_SHARE
    body = [
        [what, f"{t.n_places:,}", str(t.n_differ), f"{t.share:.2%}", f"{t.worst_gap:.3f}", str(len(t.wrong))]
        for what, t in [*check.lines, ("all", total)]
    ]
    command = f"python -m bench.gpu_exactness --model {Path(args.model).name} --parts {args.parts}"
    paragraphs = [
        "# Texts of the GPU worker against float64",
        host_line(host),
        f"`{command}` ({time.perf_counter() - started:.0f} s)",
        f"Logits of {check.n_rows} rows in bf16: largest error {check.worst:.4f}, root mean square "
        f"{check.rms:.5f}. A token may differ where the reference's two best values, noise included, are "
        f"closer than {check.bound:.4f} (six standard deviations of the difference of two errors).",
        markdown_table(["texts", "places", "differ", "share", "worst gap", "beyond the bound"], body),
        *(
            f"KV cache in {name}: largest error of the logits {worst:.3f}, root mean square {rms:.4f}."
            for name, (worst, rms) in check.fp8.items()
        ),
        filled,
        "" if whole else "Not all parts were run.",
        _verdict(total),
    ]
    text = "\n\n".join(part for part in paragraphs if part)
    print(text, flush=True)
    document = {
        "host": host,
        "command": command,
        "largest_error": check.worst,
        "rms": check.rms,
        "fp8": check.fp8,
        "budget": filled,
        "lines": [{"what": what, **asdict(tally)} for what, tally in check.lines],
    }
    write_report(args.out, "gpu-exactness", document, text)
    return 0 if good else 1


def _verdict(total: Tally) -> str:
    if total.wrong:
        return f"Wrong: {len(total.wrong)} differences are beyond the bound."
    near = "No difference is beyond the bound"
    if total.share < MAX_SHARE:
        return f"{near}, and they are below {MAX_SHARE:.0%} of the places."
    return f"{near}, but they are {total.share:.2%} of the places; the aim is below {MAX_SHARE:.0%}."


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_exactness", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated; all when left out")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
