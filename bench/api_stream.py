"""How many tokens a second API processes stream over HTTP, how much they delay them, and what a token costs.

Starts a scheduler, API processes and a fake worker whose step takes a fixed time, and streams to many clients
at once from this process; all share this machine's cores. Then the same while prompts of 100,000 tokens come
as text, one after another: they are tokenised, and refused, for the model's context is shorter.

    python -m bench.api_stream                                      # one process, 12,800 tokens a second
    python -m bench.api_stream --processes 1,2,4 --clients 640      # 32,000 tokens a second are asked for
"""

from __future__ import annotations

import asyncio
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import typer
import uvloop

from bench.hardware import describe_host, host_line
from bench.load import Load, Target, TransportKind, run_load, served_model
from bench.measures import RequestRecord, distribution_ms
from bench.prompts import PromptShape, random_token_lists
from bench.report import markdown_table, write_report
from bench.server import RunningServer, ServerCommand, ServerError, cpu_s, process_tree, running

RESULTS = Path(__file__).parent / "results"
TOKENS_PER_S = {1: 12_000, 2: 20_000}
"""Wanted, by processes; of more as much as of two."""
ADDED_P99_MS = 20.0
LONG_PROMPT_TOKENS = 100_000
ADDED_BY_LONG_MS = 50.0
PROMPT = PromptShape(n_own=16)
RAMP_S = 2.0
"""Left out at the beginning: prompts are computed and connections made."""


@dataclass(slots=True, frozen=True)
class StreamFigures:
    """Of the steady part, in which every client streams."""

    tokens_per_s: float
    events_per_s: float
    window_s: float
    gap_p50_ms: float
    gap_p99_ms: float
    added_p99_ms: float
    """Beyond the fake step time."""
    n_errors: int
    n_short: int


def steady_figures(
    records: Sequence[RequestRecord], *, begin_s: float, end_s: float, step_ms: float
) -> StreamFigures:
    """Events between `begin_s` and `end_s` of the records' clock. An event that carries several tokens
    counts as the request's mean tokens per event. Raises ValueError when nothing arrived."""
    good = [r for r in records if r.ok]
    tokens = events = 0.0
    gaps: list[np.ndarray[Any, np.dtype[np.float64]]] = []
    for record in good:
        at = np.asarray(record.event_s)
        inside = at[(at >= begin_s) & (at <= end_s)]
        events += len(inside)
        tokens += len(inside) * record.n_output / len(at)
        gaps.append(np.diff(inside))
    if not events:
        raise ValueError(
            "no token arrived in the steady part: " + "; ".join({r.error or "" for r in records})
        )
    gap = distribution_ms(np.concatenate(gaps))
    window_s = end_s - begin_s
    return StreamFigures(
        tokens_per_s=tokens / window_s,
        events_per_s=events / window_s,
        window_s=window_s,
        gap_p50_ms=gap.p50 or 0.0,
        gap_p99_ms=gap.p99 or 0.0,
        added_p99_ms=(gap.p99 or 0.0) - step_ms,
        n_errors=len(records) - len(good),
        n_short=sum(r.n_output < r.n_expected for r in good),
    )


def process_names(pid: int) -> dict[int, str]:
    """The server's processes by their role on its command line."""
    names = {}
    for each in process_tree(pid):
        words = Path(f"/proc/{each}/cmdline").read_text().split("\0")
        role = next((w for w in ("scheduler", "api", "worker", "serve") if w in words), "other")
        names[each] = role
    return names


@dataclass(slots=True, frozen=True)
class Sample:
    """What the steady part looks like from outside."""

    records: list[RequestRecord]
    begin_s: float
    end_s: float
    cores: dict[str, float]
    """CPU seconds a second that the processes used, by their role."""
    long_end_s: float
    """From `end_s` to here long prompts arrived."""
    n_long: int


@dataclass(slots=True, frozen=True)
class Run:
    """With one number of API processes."""

    n_processes: int
    command: str
    figures: StreamFigures
    cores: dict[str, float]
    n_long: int
    longest_gap_ms: float
    """Between two tokens of one stream in the steady part."""
    longest_gap_beside_long_ms: float
    errors: tuple[str, ...]

    @property
    def cpu_us_per_token(self) -> float:
        """Of all API processes together."""
        return self.cores["api"] / self.figures.tokens_per_s * 1e6

    @property
    def added_by_long_ms(self) -> float:
        return self.longest_gap_beside_long_ms - self.longest_gap_ms

    def document(self) -> dict[str, Any]:
        return {
            "n_processes": self.n_processes,
            "command": self.command,
            "figures": {name: getattr(self.figures, name) for name in self.figures.__slots__},
            "cores": self.cores,
            "cpu_us_per_token": self.cpu_us_per_token,
            "n_long": self.n_long,
            "longest_gap_ms": self.longest_gap_ms,
            "longest_gap_beside_long_ms": self.longest_gap_beside_long_ms,
        }


def longest_gap_ms(records: Sequence[RequestRecord], *, begin_s: float, end_s: float) -> float:
    """Between two events of one stream that both fall between the two times; 0 without any."""
    longest = 0.0
    for record in records:
        at = np.asarray(record.event_s)
        inside = at[(at >= begin_s) & (at <= end_s)]
        if record.ok and len(inside) > 1:
            longest = max(longest, float(np.diff(inside).max()))
    return longest * 1e3


async def send_long_prompts(url: str, *, until_s: float) -> int:
    """One after another; how many were sent. Raises ValueError when they are not refused for their length."""
    rng = np.random.default_rng(7)
    words = rng.choice(
        ["river", "stone", "paper", "light", "seven", "over", "and", "the"], LONG_PROMPT_TOKENS
    )
    body = {"prompt": " ".join(words), "max_tokens": 1}
    n_sent = 0
    async with httpx.AsyncClient(base_url=url, timeout=60.0) as client:
        while time.perf_counter() < until_s:
            response = await client.post("/v1/completions", json=body)
            if response.status_code != 400 or "tokens" not in response.text:
                raise ValueError(
                    f"the long prompt was answered with {response.status_code}: {response.text[:200]}"
                )
            n_sent += 1
    return n_sent


async def stream_and_sample(
    target: Target, load: Load, server: RunningServer, *, vocab_size: int, window_s: float
) -> Sample:
    """Runs the load, and watches the processes for `window_s` once it is under way."""
    prompts = random_token_lists(vocab_size, PROMPT, n=load.n_requests, seed=load.seed)
    running_load = asyncio.ensure_future(run_load(target, prompts, load, n_input=PROMPT.n_tokens))
    await asyncio.sleep(RAMP_S)
    names = process_names(server.pid)
    before = {pid: cpu_s(pid) for pid in names}
    begin_s, own_s = time.perf_counter(), time.process_time()
    await asyncio.sleep(window_s)
    end_s, own_s = time.perf_counter(), time.process_time() - own_s
    cores = {"client": own_s / (end_s - begin_s)}
    for pid, name in names.items():
        cores[name] = cores.get(name, 0.0) + (cpu_s(pid) - before[pid]) / (end_s - begin_s)
    long_end_s = end_s + window_s
    n_long = await send_long_prompts(server.url, until_s=long_end_s)
    _, records = await running_load
    return Sample(
        records=records, begin_s=begin_s, end_s=end_s, cores=cores, long_end_s=long_end_s, n_long=n_long
    )


def server_command(
    model: str, *, n_processes: int, clients: int, step_ms: float, extra: Sequence[str]
) -> ServerCommand:
    argv = (
        sys.executable, "-m", "deploy.cli", "serve", "--host", "127.0.0.1", "--port", "{port}",
        "--model", model, "--attention", "fake", "--fake-step-ms", f"{step_ms:g}",
        "--fake-n-blocks", "65536", "--max-batch-size", str(max(256, clients)),
        "--max-concurrent-requests", str(2 * clients), "--api-processes", str(n_processes),
        "--log-level", "warning", *extra,
    )  # fmt: skip
    return ServerCommand(argv, ready_within_s=120.0)


def measure(
    model: str,
    *,
    n_processes: int,
    clients: int,
    step_ms: float,
    window_s: float,
    vocab_size: int,
    log: Path,
    extra: Sequence[str],
) -> Run:
    """Raises ValueError and ServerError."""
    command = server_command(model, n_processes=n_processes, clients=clients, step_ms=step_ms, extra=extra)
    n_output = math.ceil((RAMP_S + 2 * window_s + 3.0) / (step_ms / 1e3))
    load = Load(n_requests=clients, n_output=n_output, concurrency=clients, seed=7)
    with running(command, log=log) as server:
        target = Target(url=server.url, model=served_model(server.url), transport=TransportKind.LEAN)
        sample = uvloop.run(stream_and_sample(target, load, server, vocab_size=vocab_size, window_s=window_s))
    times = {"begin_s": sample.begin_s, "end_s": sample.end_s}
    return Run(
        n_processes=n_processes,
        command=command.line(),
        figures=steady_figures(sample.records, **times, step_ms=step_ms),
        cores=sample.cores,
        n_long=sample.n_long,
        longest_gap_ms=longest_gap_ms(sample.records, **times),
        longest_gap_beside_long_ms=longest_gap_ms(
            sample.records, begin_s=sample.end_s, end_s=sample.long_end_s
        ),
        errors=tuple(sorted({record.error for record in sample.records if record.error})),
    )


def report(runs: Sequence[Run], *, clients: int, step_ms: float) -> str:
    def row(name: str, cell: Callable[[Run], str], wanted: str) -> list[str]:
        return [name, *map(cell, runs), wanted]

    wanted = ", ".join(f"{TOKENS_PER_S[min(run.n_processes, 2)]:,}" for run in runs)
    roles = sorted({role for run in runs for role in run.cores})

    def cores(role: str) -> Callable[[Run], str]:
        return lambda run: f"{run.cores.get(role, 0.0):.2f}"

    rows = [
        row("tokens a second", lambda run: f"{run.figures.tokens_per_s:,.0f}", f"at least {wanted}"),
        row("events a second", lambda run: f"{run.figures.events_per_s:,.0f}", ""),
        row("API's CPU for a token", lambda run: f"{run.cpu_us_per_token:.1f} µs", ""),
        row(
            "delay between tokens, p50 / p99",
            lambda run: f"{run.figures.gap_p50_ms:.1f} / {run.figures.gap_p99_ms:.1f} ms",
            "",
        ),
        row(
            "added delay, p99",
            lambda run: f"{run.figures.added_p99_ms:.1f} ms",
            f"under {ADDED_P99_MS:g} ms",
        ),
        row("longest delay", lambda run: f"{run.longest_gap_ms:.1f} ms", ""),
        row(
            f"longest delay while {LONG_PROMPT_TOKENS:,}-token prompts arrive",
            lambda run: f"{run.longest_gap_beside_long_ms:.1f} ms ({run.n_long} prompts)",
            f"at most {ADDED_BY_LONG_MS:g} ms more",
        ),
        row("errors, short answers", lambda run: f"{run.figures.n_errors}, {run.figures.n_short}", "none"),
        *(row(f"cores: {role}", cores(role), "") for role in roles),
    ]
    head = [f"{clients} clients, fake step {step_ms:g} ms, {runs[0].figures.window_s:.1f} s"]
    head += [f"{run.n_processes} API process{'es' if run.n_processes > 1 else ''}" for run in runs]
    return markdown_table([*head, "wanted"], rows)


def main(
    processes: Annotated[str, typer.Option(help="API processes; several numbers are runs, as 1,2,4")] = "1",
    clients: Annotated[int, typer.Option(help="Streams at once", min=1)] = 256,
    step_ms: Annotated[float, typer.Option(help="Time of one fake step")] = 20.0,
    window_s: Annotated[float, typer.Option(help="How long the steady part is", min=1.0)] = 8.0,
    model: Annotated[str, typer.Option(help="Whose tokenizer is used")] = "smollm2",
    vocab_size: Annotated[int, typer.Option(help="Prompt ids are drawn below it")] = 49152,
    out: Annotated[Path | None, typer.Option(help="Folder for the result files")] = RESULTS,
    log: Annotated[Path | None, typer.Option(help="The server's output goes here")] = None,
    extra: Annotated[list[str] | None, typer.Argument(help="Further server flags, after --")] = None,
) -> None:
    """Measure streaming through API processes."""
    host = describe_host()
    try:
        counts = [int(number) for number in processes.split(",")]
        with tempfile.TemporaryDirectory() as folder:
            runs = [
                measure(
                    model,
                    n_processes=n,
                    clients=clients,
                    step_ms=step_ms,
                    window_s=window_s,
                    vocab_size=vocab_size,
                    log=log or Path(folder) / "server.log",
                    extra=extra or (),
                )
                for n in counts
            ]
    except (ValueError, ServerError) as error:
        typer.echo(f"bench.api_stream: {error}", err=True)
        raise typer.Exit(2) from None
    table = report(runs, clients=clients, step_ms=step_ms)
    text = (
        f"# Streaming through API processes\n\n{host_line(host)}\n\nServer: `{runs[-1].command}`\n\n{table}"
    )
    typer.echo(text)
    if out is not None:
        doc = {
            "host": host,
            "clients": clients,
            "step_ms": step_ms,
            "runs": [run.document() for run in runs],
        }
        write_report(out, "api-stream", doc, text)
    if any(run.figures.n_errors for run in runs):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
