"""How many tokens a second one API process streams over HTTP, and how much it delays them.

Starts a scheduler, one API process and a fake worker whose step takes a fixed time, and streams to many
clients at once from this process; all share this machine's cores.

    python -m bench.api_stream --clients 256 --step-ms 20
"""

from __future__ import annotations

import asyncio
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
import uvloop

from bench.hardware import describe_host, host_line
from bench.load import Load, Target, run_load, served_model
from bench.measures import RequestRecord, distribution_ms
from bench.prompts import PromptShape, random_token_lists
from bench.report import markdown_table, write_report
from bench.server import RunningServer, ServerCommand, ServerError, cpu_s, process_tree, running

RESULTS = Path(__file__).parent / "results"
TOKENS_PER_S = 12_000
ADDED_P99_MS = 20.0
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
    """CPU seconds a second that each process used, by its role."""


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
    _, records = await running_load
    return Sample(records=records, begin_s=begin_s, end_s=end_s, cores=cores)


def server_command(model: str, *, step_ms: float, extra: Sequence[str]) -> ServerCommand:
    argv = (
        sys.executable, "-m", "deploy.cli", "serve", "--host", "127.0.0.1", "--port", "{port}",
        "--model", model, "--attention", "fake", "--fake-step-ms", f"{step_ms:g}",
        "--fake-n-blocks", "32768", "--log-level", "warning", *extra,
    )  # fmt: skip
    return ServerCommand(argv, ready_within_s=120.0)


def report(figures: StreamFigures, cores: dict[str, float], *, clients: int, step_ms: float) -> str:
    rows = [
        ["tokens a second", f"{figures.tokens_per_s:,.0f}", f"at least {TOKENS_PER_S:,}"],
        ["delay between tokens, p50 / p99", f"{figures.gap_p50_ms:.1f} / {figures.gap_p99_ms:.1f} ms", ""],
        ["added delay, p99", f"{figures.added_p99_ms:.1f} ms", f"under {ADDED_P99_MS:g} ms"],
        ["events a second", f"{figures.events_per_s:,.0f}", ""],
        ["errors, short answers", f"{figures.n_errors}, {figures.n_short}", "none"],
        *([f"cores: {name}", f"{used:.2f}", ""] for name, used in sorted(cores.items())),
    ]
    head = [f"{clients} clients, fake step {step_ms:g} ms, {figures.window_s:.1f} s", "measured", "wanted"]
    return markdown_table(head, rows)


def main(
    clients: Annotated[int, typer.Option(help="Streams at once", min=1)] = 256,
    step_ms: Annotated[float, typer.Option(help="Time of one fake step")] = 20.0,
    window_s: Annotated[float, typer.Option(help="How long the steady part is", min=1.0)] = 8.0,
    model: Annotated[str, typer.Option(help="Whose tokenizer is used")] = "smollm2",
    vocab_size: Annotated[int, typer.Option(help="Prompt ids are drawn below it")] = 49152,
    out: Annotated[Path | None, typer.Option(help="Folder for the result files")] = RESULTS,
    log: Annotated[Path | None, typer.Option(help="The server's output goes here")] = None,
    extra: Annotated[list[str] | None, typer.Argument(help="Further server flags, after --")] = None,
) -> None:
    """Measure streaming through one API process."""
    host = describe_host()
    command = server_command(model, step_ms=step_ms, extra=extra or ())
    n_output = math.ceil((RAMP_S + window_s + 2.0) / (step_ms / 1e3))
    load = Load(n_requests=clients, n_output=n_output, concurrency=clients, seed=7)
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            running(command, log=log or Path(folder) / "server.log") as server,
        ):
            target = Target(url=server.url, model=served_model(server.url))
            sample = uvloop.run(
                stream_and_sample(target, load, server, vocab_size=vocab_size, window_s=window_s)
            )
        figures = steady_figures(sample.records, begin_s=sample.begin_s, end_s=sample.end_s, step_ms=step_ms)
    except (ValueError, ServerError) as error:
        typer.echo(f"bench.api_stream: {error}", err=True)
        raise typer.Exit(2) from None
    table = report(figures, sample.cores, clients=clients, step_ms=step_ms)
    text = (
        f"# Streaming through one API process\n\n{host_line(host)}\n\nServer: `{command.line()}`\n\n{table}"
    )
    typer.echo(text)
    if out is not None:
        doc = {
            "host": host, "command": command.line(), "clients": clients, "step_ms": step_ms,
            "output_tokens": n_output, "cores": sample.cores,
            "figures": {name: getattr(figures, name) for name in figures.__slots__},
        }  # fmt: skip
        write_report(out, "api-stream", doc, text)
    if figures.n_errors:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
