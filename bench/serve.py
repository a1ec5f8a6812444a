"""One command: starts a server, runs the compared cases, writes a dated JSON and a Markdown table.

    python -m bench.serve --cases gpu --tokenizer DIR --model NAME -- COMMAND … --port {port}

`{port}` in the command is replaced by a free port. With `--url` a server that is already up is measured.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from bench.hardware import describe_host, host_line
from bench.load import PromptKind, Target, TransportKind, served_model
from bench.prompts import WordVocabulary, load_tokenizer
from bench.report import runs_table, write_report
from bench.run_cases import CaseResult, PromptSource, run_case
from bench.scenarios import Case, choose_cases
from bench.server import RunningServer, ServerCommand, ServerError, running, shown

RESULTS = Path(__file__).parent / "results"


def prompt_source(prompts: PromptKind, tokenizer: Path | None, vocab_size: int) -> PromptSource:
    """Raises ValueError when text prompts are wanted without a tokenizer."""
    if prompts is PromptKind.TOKENS:
        return PromptSource(words=None, vocab_size=vocab_size)
    if tokenizer is None:
        raise ValueError("--prompts text needs --tokenizer; or use --prompts tokens with --vocab-size")
    return PromptSource(words=WordVocabulary(load_tokenizer(tokenizer)), vocab_size=vocab_size)


def document(
    *,
    command: str,
    host: dict[str, Any],
    results: list[CaseResult],
    start_to_ready_s: float | None,
    seed: int,
    idle_share: float | None,
) -> dict[str, Any]:
    return {
        "command": command,
        "client": shown(["python", "-m", "bench.serve", *sys.argv[1:]]),
        "host": host,
        "seed": seed,
        "start_to_ready_s": start_to_ready_s,
        "decode_idle_share": idle_share,
        "cases": [result.as_dict() for result in results],
    }


def markdown(title: str, doc: dict[str, Any]) -> str:
    """The table with everything that one needs to measure it again."""
    rows = [(case["case"], case["median"]) for case in doc["cases"]]
    n_runs = "/".join(sorted({str(len(case["runs"])) for case in doc["cases"]}))
    ready, idle = doc["start_to_ready_s"], doc["decode_idle_share"]
    lines = [
        f"# {title}",
        "",
        host_line(doc["host"]),
        "",
        f"Server: `{doc['command']}`" + (f" (start to ready {ready:.1f} s)" if ready is not None else ""),
        "",
        f"Median of {n_runs} runs, each with its own prompts, seed {doc['seed']}.",
        "",
        runs_table(rows),
        "",
        *([] if idle is None else [f"Device idle between decode steps: {idle:.2%} (`/metrics`).", ""]),
        *(
            f"* {case['case']}: {case['load']} (spread of output tok/s over the runs {case['spread']:.1%})"
            for case in doc["cases"]
        ),
    ]
    return "\n".join(lines)


def main(
    command: Annotated[list[str] | None, typer.Argument(help="The server's command, after --")] = None,
    cases: Annotated[str, typer.Option(help="Groups (gpu, cpu) or names, comma-separated")] = "gpu",
    url: Annotated[str | None, typer.Option(help="Measure a server that is up")] = None,
    model: Annotated[str | None, typer.Option(help="Model name; unset: the first that is served")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json or its folder")] = None,
    vocab_size: Annotated[int, typer.Option(help="Ids are drawn below it (token prompts)")] = 32000,
    prompts: Annotated[PromptKind, typer.Option(help="What a prompt is sent as")] = PromptKind.TEXT,
    runs: Annotated[int, typer.Option(help="Runs of each case; the median is reported", min=1)] = 3,
    seed: Annotated[int, typer.Option(help="Of all prompts and arrivals")] = 7,
    scale: Annotated[float, typer.Option(help="Fraction of the requests, for a dry run")] = 1.0,
    transport: Annotated[TransportKind, typer.Option()] = TransportKind.LEAN,
    ready_path: Annotated[str, typer.Option(help="Answers 200 when the server is ready")] = "/health",
    ready_within_s: Annotated[float, typer.Option()] = 600.0,
    name: Annotated[str, typer.Option(help="Of the result files and in their title")] = "serve",
    out: Annotated[Path, typer.Option(help="Folder for the results")] = RESULTS,
    log: Annotated[Path | None, typer.Option(help="The server's output goes here")] = None,
) -> None:
    """Measure a server over HTTP."""
    try:
        chosen = choose_cases(cases)
        source = prompt_source(prompts, tokenizer, vocab_size)
        if (url is None) == (not command):
            raise ValueError("give either --url or the server's command after --")
        doc = _measure(
            chosen, source, command=tuple(command or ()), url=url, model=model, n_runs=runs, seed=seed,
            scale=scale, transport=transport, ready_path=ready_path, ready_within_s=ready_within_s, log=log,
        )  # fmt: skip
    except (ValueError, ServerError) as error:
        typer.echo(f"bench.serve: {error}", err=True)
        raise typer.Exit(2) from None
    text = markdown(name, doc)
    as_json, as_markdown = write_report(out, name, doc, text)
    typer.echo(f"\n{text}\n\n{as_json}\n{as_markdown}")
    if any(case["median"]["n_errors"] for case in doc["cases"]):
        raise typer.Exit(1)


def _measure(
    cases: list[Case],
    source: PromptSource,
    *,
    command: tuple[str, ...],
    url: str | None,
    model: str | None,
    n_runs: int,
    seed: int,
    scale: float,
    transport: TransportKind,
    ready_path: str,
    ready_within_s: float,
    log: Path | None,
) -> dict[str, Any]:
    host = describe_host()
    with ExitStack() as stack:
        server: RunningServer | None = None
        if url is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            server = stack.enter_context(
                running(
                    ServerCommand(command, ready_path=ready_path, ready_within_s=ready_within_s),
                    log=log or folder / "server.log",
                )
            )
            typer.echo(f"ready after {server.start_to_ready_s:.1f} s")
        address = server.url if server is not None else str(url).rstrip("/")
        target = Target(url=address, model=model or served_model(address), transport=transport)
        results = [
            run_case(target, case.scaled(scale), source, n_runs=n_runs, seed=seed, say=typer.echo)
            for case in cases
        ]
        idle_share = decode_idle_share(address)
    return document(
        command=shown(command) or f"{url} (already up)",
        host=host,
        results=results,
        start_to_ready_s=server.start_to_ready_s if server else None,
        seed=seed,
        idle_share=idle_share,
    )


def decode_idle_share(url: str) -> float | None:
    """Of all decode steps behind decode steps, from the server's own metrics; None when it has no such."""
    try:
        text = httpx.get(f"{url}/metrics", timeout=10).text
    except httpx.HTTPError:
        return None
    return idle_share_of(text)


def idle_share_of(metrics: str) -> float | None:
    total = dict.fromkeys(
        ("quire_worker_steady_seconds_total", "quire_worker_steady_idle_seconds_total"), 0.0
    )
    for line in metrics.splitlines():
        name = line.partition("{")[0]
        if name in total:
            total[name] += float(line.rpartition(" ")[2])
    busy, idle = total.values()
    return idle / (busy + idle) if busy > 0 else None


if __name__ == "__main__":
    typer.run(main)
