"""One table of several engines on the same model, machine and run: ours, llama-server, vLLM's CPU build.

    python -m bench.peers --gguf model.Q4_1.gguf --gguf-f32 model-f32.gguf --safetensors DIR \\
        --llama-server PATH/llama-server --vllm PATH/vllm

`bench.peer_models` makes the float32 forms. Engines whose paths are not given are left out. llama-server is
started anew for each case with as many slots as there are clients, which suits it best.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.hardware import describe_host, host_line
from bench.load import Target, served_model
from bench.prompts import WordVocabulary, load_tokenizer
from bench.report import cell, markdown_table, write_report
from bench.run_cases import CaseResult, PromptSource, run_case
from bench.scenarios import Case, choose_cases
from bench.server import ServerCommand, ServerError, running, shown

RESULTS = Path(__file__).parent / "results"
CONTEXT = 2048
"""Positions per request that every engine is given; the longest case needs 1,052."""
OURS = "Quire, float32"


@dataclass(slots=True, frozen=True)
class Engine:
    name: str
    command: Callable[[Case], ServerCommand]
    is_f32: bool
    version_argv: tuple[str, ...] = ()
    """Prints the version; empty: ours."""
    per_case: bool = False
    """Started anew for each case, because its best flags depend on the case."""

    def version(self) -> str:
        """One line, empty when the engine does not say."""
        if not self.version_argv:
            return ""
        answer = subprocess.run(self.version_argv, capture_output=True, text=True, check=False)
        lines = [line.strip() for line in (answer.stderr + answer.stdout).splitlines() if line.strip()]
        found = next((line for line in lines if line.startswith("version")), lines[-1] if lines else "")
        return found.partition(" (")[0]


@dataclass(slots=True, frozen=True)
class Paths:
    """What the engines are started with; None leaves an engine out."""

    gguf: Path
    gguf_f32: Path | None = None
    safetensors: Path | None = None
    llama_server: Path | None = None
    vllm: Path | None = None


def engines(paths: Paths, *, n_threads: int) -> list[Engine]:
    """Ours first, then every peer whose paths are given."""
    found = [Engine(OURS, lambda case: _ours(paths.gguf), is_f32=True)]
    if paths.llama_server is not None:
        server = paths.llama_server
        quantised = paths.gguf
        found.append(
            Engine(
                f"llama-server, {_kind(quantised)}",
                lambda case: _llama(server, quantised, case, n_threads),
                is_f32=False,
                version_argv=(str(server), "--version"),
                per_case=True,
            )
        )
        if (wide := paths.gguf_f32) is not None:
            found.append(
                Engine(
                    "llama-server, float32",
                    lambda case: _llama(server, wide, case, n_threads),
                    is_f32=True,
                    version_argv=(str(server), "--version"),
                    per_case=True,
                )
            )
    if paths.vllm is not None and paths.safetensors is not None:
        vllm, folder = paths.vllm, paths.safetensors
        found.append(
            Engine(
                "vLLM CPU, float32",
                lambda case: _vllm(vllm, folder, n_threads),
                is_f32=True,
                version_argv=(str(vllm), "--version"),
            )
        )
    return found


def _kind(gguf: Path) -> str:
    """`Q4_1` of model.Q4_1.gguf."""
    return gguf.stem.rpartition(".")[2] or gguf.stem


def _ours(gguf: Path) -> ServerCommand:
    return ServerCommand(
        (sys.executable, "-m", "deploy.cli", "serve", "--model", str(gguf), "--attention", "torch",
         "--dtype", "float32", "--host", "127.0.0.1", "--port", "{port}", "--log-level", "warning"),
    )  # fmt: skip


def _llama(server: Path, gguf: Path, case: Case, n_threads: int) -> ServerCommand:
    slots = case.concurrency or 8
    return ServerCommand(
        (str(server), "-m", str(gguf), "--host", "127.0.0.1", "--port", "{port}", "-t", str(n_threads),
         "-np", str(slots), "-c", str(slots * CONTEXT), "--no-webui"),
    )  # fmt: skip


def _vllm(vllm: Path, folder: Path, n_threads: int) -> ServerCommand:
    return ServerCommand(
        (str(vllm), "serve", str(folder), "--dtype", "float32", "--max-model-len", str(CONTEXT),
         "--host", "127.0.0.1", "--port", "{port}"),
        env={
            "PATH": f"{vllm.parent}:{os.environ.get('PATH', '')}",
            "VLLM_CPU_KVCACHE_SPACE": "4",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{n_threads - 1}",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        },
        ready_within_s=900.0,
    )  # fmt: skip


def measure(
    engine: Engine, cases: Sequence[Case], source: PromptSource, *, n_runs: int, seed: int, log: Path
) -> list[CaseResult]:
    """All cases of one engine, on one server or on a fresh one for each case. Raises ServerError."""
    groups = [[case] for case in cases] if engine.per_case else [list(cases)]
    results = []
    for group in groups:
        with running(engine.command(group[0]), log=log) as server:
            typer.echo(f"{engine.name}: ready after {server.start_to_ready_s:.1f} s")
            target = Target(url=server.url, model=served_model(server.url))
            results += [run_case(target, c, source, n_runs=n_runs, seed=seed, say=typer.echo) for c in group]
    return results


def comparison_table(results: dict[str, list[CaseResult]]) -> str:
    """One row per engine: output tokens a second (median time to the first token) for each case."""
    cases = next(iter(results.values()))
    head = ["engine", *(result.case.name for result in cases)]
    rows = []
    for name, per_case in results.items():
        cells = []
        for result in per_case:
            median = result.median
            rate, ttft_ms = cell(median, ["output_tok_s"], ",.1f"), median["ttft_ms"]["p50"]
            failed = f", {median['n_errors']} errors" if median["n_errors"] else ""
            cells.append(f"{rate} ({'–' if ttft_ms is None else f'{ttft_ms / 1e3:.2f}'} s{failed})")
        rows.append([name, *cells])
    return markdown_table(head, rows)


def lead_table(results: dict[str, list[CaseResult]], f32: set[str]) -> str:
    """Ours against the best peer and the best float32 peer of each case, as ratios."""
    rows = []
    for i, ours in enumerate(results[OURS]):
        rates = {name: r[i].median["output_tok_s"] for name, r in results.items() if name != OURS}
        own = ours.median["output_tok_s"]
        row = [ours.case.name]
        for chosen in (rates, {name: rate for name, rate in rates.items() if name in f32}):
            best = max(chosen, key=lambda name: chosen[name], default=None)
            row.append(f"{own / chosen[best]:.2f} × {best}" if best is not None and chosen[best] else "–")
        rows.append(row)
    return markdown_table(["case", "ours / best peer", "ours / best float32 peer"], rows)


def main(
    gguf: Annotated[Path, typer.Option(help="The model, as ours and llama.cpp read it")],
    gguf_f32: Annotated[Path | None, typer.Option(help="The same in float32, for llama.cpp")] = None,
    safetensors: Annotated[Path | None, typer.Option(help="The same as a folder, for vLLM")] = None,
    llama_server: Annotated[Path | None, typer.Option(help="llama.cpp's server")] = None,
    vllm: Annotated[Path | None, typer.Option(help="The vllm command of a CPU build")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Default: the safetensors folder")] = None,
    cases: Annotated[str, typer.Option(help="Groups or names, comma-separated")] = "cpu",
    runs: Annotated[int, typer.Option(help="Runs of each case; the median is reported", min=1)] = 3,
    scale: Annotated[float, typer.Option(help="Fraction of the requests, for a dry run")] = 1.0,
    seed: Annotated[int, typer.Option()] = 7,
    only: Annotated[str, typer.Option(help="Measure only engines whose name contains this")] = "",
    out: Annotated[Path, typer.Option(help="Folder for the results")] = RESULTS,
) -> None:
    """Measure ours beside other engines, one after the other."""
    paths = Paths(gguf=gguf, gguf_f32=gguf_f32, safetensors=safetensors, llama_server=llama_server, vllm=vllm)
    host = describe_host()
    n_threads = host["cores"]
    try:
        chosen = [case.scaled(scale) for case in choose_cases(cases)]
        words = WordVocabulary(load_tokenizer(tokenizer or safetensors or gguf.parent))
        source = PromptSource(words=words, vocab_size=0)
        listed = [e for e in engines(paths, n_threads=n_threads) if only.lower() in e.name.lower()]
        results: dict[str, list[CaseResult]] = {}
        with tempfile.TemporaryDirectory() as folder:
            for engine in listed:
                log = Path(folder) / "server.log"
                results[engine.name] = measure(engine, chosen, source, n_runs=runs, seed=seed, log=log)
    except (ValueError, ServerError) as error:
        typer.echo(f"bench.peers: {error}", err=True)
        raise typer.Exit(2) from None
    commands = {e.name: e.command(chosen[-1]).line() for e in listed}
    versions = {e.name: e.version() for e in listed}
    f32 = {e.name for e in listed if e.is_f32}
    text = markdown(host, commands, versions, results, f32=f32, n_runs=runs)
    doc: dict[str, Any] = {
        "host": host,
        "commands": commands,
        "client": shown(["python", "-m", "bench.peers", *sys.argv[1:]]),
        "versions": versions,
        "seed": seed,
        "engines": {name: [r.as_dict() for r in per_case] for name, per_case in results.items()},
    }
    as_json, as_markdown = write_report(out, "peers", doc, text)
    typer.echo(f"\n{text}\n\n{as_json}\n{as_markdown}")


def markdown(
    host: dict[str, Any],
    commands: dict[str, str],
    versions: dict[str, str],
    results: dict[str, list[CaseResult]],
    *,
    f32: set[str],
    n_runs: int,
) -> str:
    some = next(iter(results.values()))
    lines = [
        "# Engines side by side",
        "",
        host_line(host),
        "",
        f"Output tokens a second (median time to the first token); median of {n_runs} runs.",
        "",
        comparison_table(results),
        "",
        *([lead_table(results, f32), ""] if OURS in results and len(results) > 1 else []),
        *(f"* {result.case.name}: {result.case.describe()}" for result in some),
        "",
        "Commands (of the last case where they differ by case):",
        "",
        *(
            f"* {name}{f' ({versions[name]})' if versions[name] else ''}: `{line}`"
            for name, line in commands.items()
        ),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(main)
