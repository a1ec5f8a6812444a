"""What each batching parameter does, on a device of known cost: `quire serve` with a fake worker whose step
takes `--step-ms` + `--row-us` per row + `--token-us` per prompt token. The router is the real one; the
device's cost is given, so that a parameter's effect is seen and not the host's.

    python -m bench.tuning
    python -m bench.tuning --page docs/operations.md    put the tables into the page too
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop

from bench.hardware import describe_host, host_line
from bench.load import Load, Target, TransportKind, run_load
from bench.measures import Summary
from bench.prompts import PromptShape, random_token_lists
from bench.report import markdown_table, write_report
from bench.server import ServerCommand, ServerError, running

RESULTS = Path(__file__).parent / "results"
MODEL = "smollm2"
VOCAB = 32000
_LARGE_EVERY = 8
_BEGIN, _END = "<!-- python -m bench.tuning -->", "<!-- end -->"
"""Between these lines of a page are the tables."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One line of the table: flags, and the load that shows their effect."""

    flags: tuple[str, ...]
    shape: PromptShape
    n_output: int
    concurrency: int
    large: PromptShape | None = None
    """Of every eighth request instead of `shape`."""

    @property
    def name(self) -> str:
        return " ".join(self.flags) or "(defaults)"


_CHAT = PromptShape(n_own=256)
_LONG = PromptShape(n_own=4096)
_LARGE = PromptShape(n_own=3072)
_SHARED = PromptShape(n_prefix=1536, n_own=128)

GROUPS: dict[str, tuple[Setting, ...]] = {
    "64 chats at once, 256 + 128 tokens": tuple(
        Setting(flags, _CHAT, 128, 64)
        for flags in (
            (),
            ("--max-batch-size=16",),
            ("--max-batch-size=32",),
            ("--window=1",),
            ("--waiting-served-ratio=0.5", "--max-waiting-tokens=20"),
            ("--waiting-served-ratio=0.5", "--max-waiting-tokens=100"),
            ("--mixed-step-tokens=256",),
            ("--mixed-step-tokens=4096",),
            ("--decode-pause-ratio=0",),
            ("--max-batch-total-tokens=8192",),
        )
    ),
    "64 at once, 256 + 128 tokens, every eighth prompt 3,072, a KV budget of 8,192": tuple(
        Setting(("--max-batch-total-tokens=8192", *flags), _CHAT, 128, 64, large=_LARGE)
        for flags in ((), ("--max-queue-passes=0",), ("--max-total-tokens=3264",))
    ),
    "16 long prompts at once, 4,096 + 64 tokens": tuple(
        Setting(flags, _LONG, 64, 16)
        for flags in (
            (),
            ("--max-batch-prefill-tokens=512",),
            ("--max-batch-prefill-tokens=2048",),
            ("--no-prefill-chunking",),
        )
    ),
    "32 at once, 1,536 shared + 128 own + 64 tokens": tuple(
        Setting(flags, _SHARED, 64, 32) for flags in ((), ("--no-prefix-caching",))
    ),
}


def measure(setting: Setting, *, cost: tuple[str, ...], n_rounds: int, log: Path) -> Summary:
    """Raises ServerError."""
    argv = (
        sys.executable, "-m", "deploy.cli", "serve", "--host=127.0.0.1", "--port={port}", f"--model={MODEL}",
        "--attention=fake", "--log-level=warning", "--fake-n-blocks=16384",
    )  # fmt: skip
    n_requests = setting.concurrency * n_rounds
    prompts = random_token_lists(VOCAB, setting.shape, n=n_requests, seed=7)
    if setting.large is not None:
        prompts[::_LARGE_EVERY] = random_token_lists(
            VOCAB, setting.large, n=len(prompts[::_LARGE_EVERY]), seed=8
        )
    with running(ServerCommand((*argv, *cost, *setting.flags)), log=log) as server:
        target = Target(url=server.url, model=MODEL, transport=TransportKind.LEAN)
        load = Load(n_requests=n_requests, n_output=setting.n_output, concurrency=setting.concurrency)
        summary, _ = uvloop.run(run_load(target, prompts, load, n_input=setting.shape.n_tokens))
    if summary.n_errors:
        raise ServerError(f"{setting.name}: {summary.n_errors} errors: {summary.errors[0]}")
    return summary


def table(rows: list[tuple[str, Summary]]) -> str:
    head = ["setting", "output tok/s", "TTFT p50 ms", "TTFT p99 ms", "ITL p50 ms", "ITL p99 ms"]
    body = [
        [
            f"`{name}`" if name.startswith("-") else name,
            f"{s.output_tok_s:,.0f}",
            *(
                "–" if value is None else f"{value:,.0f}"
                for value in (s.ttft_ms.p50, s.ttft_ms.p99, s.itl_ms.p50, s.itl_ms.p99)
            ),
        ]
        for name, s in rows
    ]
    return markdown_table(head, body)


def into_page(page: str, tables: str) -> str:
    """`page` with the tables in the place of those it had. Raises ValueError when it marks no place."""
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"the page has no lines {_BEGIN} and {_END}")
    return f"{before}{_BEGIN}\n{tables}\n{_END}{after}"


def main(
    step_ms: Annotated[float, typer.Option(help="Cost of a step")] = 8.0,
    row_us: Annotated[float, typer.Option(help="Cost of a row of a step")] = 30.0,
    token_us: Annotated[float, typer.Option(help="Cost of a prompt token")] = 40.0,
    rounds: Annotated[int, typer.Option(help="Requests per client", min=1)] = 4,
    out: Annotated[Path | None, typer.Option(help="Folder for the result files")] = RESULTS,
    page: Annotated[Path | None, typer.Option(help="Page whose tables are replaced")] = None,
) -> None:
    """Measure the effect of each batching parameter."""
    cost = (
        f"--fake-step-ms={step_ms:g}", f"--fake-row-us={row_us:g}", f"--fake-prefill-token-us={token_us:g}",
    )  # fmt: skip
    host = describe_host()
    parts: list[str] = []
    document: dict[str, Any] = {"host": host, "cost": cost, "groups": {}}
    try:
        with tempfile.TemporaryDirectory() as folder:
            for title, settings in GROUPS.items():
                rows = []
                for i, setting in enumerate(settings):
                    log = Path(folder) / f"{len(parts)}-{i}.log"
                    rows.append((setting.name, measure(setting, cost=cost, n_rounds=rounds, log=log)))
                    print(f"{title}: {setting.name} done", file=sys.stderr, flush=True)
                parts.append(f"**{title}**\n\n{table(rows)}")
                document["groups"][title] = {name: summary.as_dict() for name, summary in rows}
    except (ServerError, ValueError) as error:
        typer.echo(f"bench.tuning: {error}", err=True)
        raise typer.Exit(2) from None
    caption = (
        f"A step of the fake device takes {step_ms:g} ms + {row_us:g} µs a row + {token_us:g} µs a "
        "prompt token."
    )
    text = "\n\n".join(["# What each batching parameter does", host_line(host), caption, *parts])
    typer.echo(text)
    if out is not None:
        write_report(out, "tuning", document, text)
    if page is not None:
        measured = f"Measured {datetime.now(tz=UTC):%Y-%m-%d} on: {host_line(host)}"
        tables = "\n\n".join([measured, *parts])
        page.write_text(into_page(page.read_text(encoding="utf-8"), tables), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
