"""What one router carries: replicas, requests and tokens a second, and the CPU that they cost it.

`quire router` (one scheduler process, `--api-processes` HTTP processes) serves streamed completions from fake
replicas, whose steps take `--step-ms` whatever they hold, as those of a GPU do. The replicas (one process),
the router and the load client share this host, so that with few cores it is the host that is full, not the
router: the figures to go by are the tokens per second of CPU time that each of the router's processes used.

    python -m bench.router_capacity --replicas 1,4,16,64
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop

from bench.hardware import describe_host, host_line
from bench.load import Load, Target, TransportKind, run_load
from bench.measures import Summary
from bench.prompts import PromptShape, random_token_lists
from bench.report import markdown_table, write_report
from bench.server import ServerCommand, ServerError, cpu_s, process_tree, running
from checkpoint.resolve import resolve
from checkpoint.smollm2 import SMOLLM2
from settings.logs import configure_logs
from worker.config import WorkerConfig
from worker.fake import make_fake_runner
from worker.server import WorkerServer

RESULTS = Path(__file__).parent / "results"
N_INPUT = 64
N_OUTPUT = 128
VOCAB = 32000
READY_WITHIN_S = 120.0


@dataclass(slots=True, frozen=True)
class Capacity:
    n_replicas: int
    n_clients: int
    n_requests: int
    duration_s: float
    requests_per_s: float
    tokens_per_s: float
    scheduler_cpu_s: float
    api_cpu_s: float
    """Of all API processes together."""
    replicas_cpu_s: float
    client_cpu_s: float
    ttft_p50_ms: float | None
    itl_p50_ms: float | None
    itl_p99_ms: float | None
    n_errors: int

    @property
    def n_tokens(self) -> float:
        return self.tokens_per_s * self.duration_s

    @property
    def scheduler_tokens_per_core_s(self) -> float:
        return self.n_tokens / max(1e-9, self.scheduler_cpu_s)

    @property
    def api_tokens_per_core_s(self) -> float:
        return self.n_tokens / max(1e-9, self.api_cpu_s)

    @property
    def scheduler_load(self) -> float:
        """Share of one core."""
        return self.scheduler_cpu_s / self.duration_s


def serve_replicas(n: int, n_rows: int, step_ms: float, ports: Connection) -> None:
    """The replicas' process: sends their ports, then serves until the other end is closed."""

    configure_logs(log_format="text", log_level="warning")

    async def serve() -> None:
        servers = []
        config = WorkerConfig(
            model=SMOLLM2,
            attention="fake",
            fake_step_ms=step_ms,
            max_batch_size=n_rows,
            fake_n_blocks=2 + n_rows * (2 + (N_INPUT + N_OUTPUT) // 16),
        )
        checkpoint = resolve(SMOLLM2)
        for _ in range(n):
            runner = make_fake_runner(config, checkpoint)
            server = WorkerServer(
                runner, host="127.0.0.1", port=0, max_window=config.window, on_fatal=_say_fatal
            )
            servers.append((server, await server.start()))
        ports.send([port for _, port in servers])
        await asyncio.to_thread(_until_closed, ports)

    uvloop.run(serve())


def _say_fatal(error: Exception) -> None:
    print(f"a replica failed: {error}", file=sys.stderr, flush=True)


def _until_closed(pipe: Connection) -> None:
    with contextlib.suppress(EOFError):
        pipe.recv()


@contextlib.contextmanager
def replicas(n: int, *, n_rows: int, step_ms: float) -> Iterator[tuple[int, list[int]]]:
    """(process id, ports)."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=serve_replicas, args=(n, n_rows, step_ms, theirs), daemon=True
    )
    process.start()
    theirs.close()
    try:
        if not ours.poll(READY_WITHIN_S):
            raise ServerError(f"{n} replicas did not start within {READY_WITHIN_S:g} s")
        assert process.pid is not None
        yield process.pid, ours.recv()
    finally:
        ours.close()
        process.terminate()
        process.join()


def measure(
    n_replicas: int, *, n_rows: int, step_ms: float, n_api: int, seconds: float, folder: Path
) -> Capacity:
    """Raises ServerError."""
    with replicas(n_replicas, n_rows=n_rows, step_ms=step_ms) as (replicas_pid, ports):
        n_clients = n_replicas * n_rows
        command = ServerCommand(
            (sys.executable, "-m", "deploy.cli", "router", "--host=127.0.0.1", "--port={port}",
             f"--replicas={','.join(f'127.0.0.1:{port}' for port in ports)}", f"--model={SMOLLM2}",
             f"--api-processes={n_api}", f"--max-concurrent-requests={2 * n_clients}",
             "--log-level=warning"),
        )  # fmt: skip
        with running(command, log=folder / f"router-{n_replicas}.log") as server:
            roles = _roles(server.pid)

            async def run(n_requests: int) -> Summary:
                target = Target(url=server.url, model=SMOLLM2, transport=TransportKind.LEAN)
                prompts = random_token_lists(VOCAB, PromptShape(n_own=N_INPUT), n=n_requests, seed=n_requests)
                load = Load(n_requests=n_requests, n_output=N_OUTPUT, concurrency=n_clients)
                summary, _ = await run_load(target, prompts, load, n_input=N_INPUT)
                return summary

            begin_s = time.monotonic()
            uvloop.run(run(n_clients))  # warm, and how long a round takes
            round_s = time.monotonic() - begin_s
            n_requests = n_clients * max(1, round(seconds / round_s))
            before = {pid: cpu_s(pid) for pid in (*roles, replicas_pid)}
            summary = uvloop.run(run(n_requests))
            used = {pid: cpu_s(pid) - before[pid] for pid in before}
    return Capacity(
        n_replicas=n_replicas,
        n_clients=n_clients,
        n_requests=n_requests,
        duration_s=summary.duration_s,
        requests_per_s=summary.request_s,
        tokens_per_s=summary.output_tok_s,
        scheduler_cpu_s=sum(used[pid] for pid, role in roles.items() if role == "scheduler"),
        api_cpu_s=sum(used[pid] for pid, role in roles.items() if role == "api"),
        replicas_cpu_s=used[replicas_pid],
        client_cpu_s=summary.client_cpu * summary.duration_s,
        ttft_p50_ms=summary.ttft_ms.p50,
        itl_p50_ms=summary.itl_ms.p50,
        itl_p99_ms=summary.itl_ms.p99,
        n_errors=summary.n_errors,
    )


def _roles(pid: int) -> dict[int, str]:
    """The router's processes and what each is."""
    found = {}
    for child in process_tree(pid):
        words = Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0")
        role = next((word for word in words[:5] if word in ("scheduler", "api")), None)
        if role is not None:
            found[child] = role
    return found


def table(results: list[Capacity]) -> str:
    head = [
        "replicas", "streams", "requests/s", "tokens/s", "scheduler, of a core",
        "tokens per scheduler core-s", "tokens per API core-s", "ITL p50 ms", "ITL p99 ms", "errors",
    ]  # fmt: skip
    rows = [
        [
            f"{r.n_replicas}",
            f"{r.n_clients:,}",
            f"{r.requests_per_s:,.0f}",
            f"{r.tokens_per_s:,.0f}",
            f"{r.scheduler_load:.0%}",
            f"{r.scheduler_tokens_per_core_s:,.0f}",
            f"{r.api_tokens_per_core_s:,.0f}",
            "–" if r.itl_p50_ms is None else f"{r.itl_p50_ms:,.1f}",
            "–" if r.itl_p99_ms is None else f"{r.itl_p99_ms:,.1f}",
            f"{r.n_errors}",
        ]
        for r in results
    ]
    return markdown_table(head, rows)


def main(
    replicas: Annotated[str, typer.Option(help="Numbers of fake replicas, comma-separated")] = "1,4,16,64",
    rows: Annotated[int, typer.Option(help="Running answers per replica", min=1)] = 16,
    step_ms: Annotated[float, typer.Option(help="Time of one fake step")] = 20.0,
    api_processes: Annotated[int, typer.Option(help="HTTP processes", min=1)] = 1,
    seconds: Annotated[float, typer.Option(help="About how long each is measured")] = 20.0,
    out: Annotated[Path | None, typer.Option(help="Folder for the result files")] = RESULTS,
) -> None:
    """Measure one router with a growing number of replicas."""
    host = describe_host()
    results = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            for text in replicas.split(","):
                result = measure(
                    int(text), n_rows=rows, step_ms=step_ms, n_api=api_processes, seconds=seconds,
                    folder=Path(folder),
                )  # fmt: skip
                print(f"{text} replicas: {result.tokens_per_s:,.0f} tokens/s", file=sys.stderr, flush=True)
                results.append(result)
    except (ServerError, ValueError) as error:
        typer.echo(f"bench.router_capacity: {error}", err=True)
        raise typer.Exit(2) from None
    command = f"python -m bench.router_capacity {' '.join(sys.argv[1:])}".strip()
    caption = (
        f"Streamed completions of {N_INPUT} + {N_OUTPUT} tokens, {rows} at a time per replica; a fake step "
        f"takes {step_ms:g} ms; {api_processes} API process(es). `{command}`"
    )
    text = "\n\n".join(["# What one router carries", host_line(host), caption, table(results)])
    typer.echo(text)
    if out is not None:
        document: dict[str, Any] = {
            "host": host, "command": command, "results": [asdict(result) for result in results],
        }  # fmt: skip
        write_report(out, "router-capacity", document, text)


if __name__ == "__main__":
    typer.run(main)
