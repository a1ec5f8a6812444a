"""What a steady decode step costs the scheduler process, and how large its message is.

The scheduler runs in this process, a fake worker in another over gRPC, and the client of its requests in
a third over the local socket. Two figures of CPU time per step, at `--rows` running answers:

* the scheduler's own: thread CPU time from a result's arrival to the departure of its events and of the
  next step (`router/loop_stats.py`): commit, growth, composition, encoding, the local socket;
* the whole process: `time.process_time`, which adds gRPC with its threads and the event loop.

    python -m bench.scheduler_step
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
import uvloop

from bench.hardware import describe_host, host_line
from bench.report import markdown_table, write_report
from bench.server import ServerCommand, ServerError, free_port, spawned
from proto.worker_pb2 import Step
from router.config import RouterConfig
from router.ipc.address import IpcAddress
from router.ipc.messages import Failed, PromptLogprob, RequestSpec, SamplingSpec, Started
from router.ipc.server import IpcServer
from router.ipc.socket_client import SocketClient
from router.scheduler import Scheduler
from settings.logs import configure_logs

RESULTS = Path(__file__).parent / "results"
OWN_CPU_MS = 0.5
MESSAGE_BYTES = 4096
N_PROMPT = 512
SETTLE_STEPS = 64
STUCK_AFTER_S = 120.0


@dataclass(slots=True, frozen=True)
class StepFigures:
    n_rows: int
    n_steps: int
    steps_per_s: float
    own_cpu_ms: float
    """Mean per step."""
    own_cpu_worst_ms: float
    process_cpu_ms: float
    """Mean per step, gRPC included."""
    message_bytes_mean: float
    message_bytes_max: int


class _Quiet:
    """A sink that drops everything."""

    def on_started(self, started: Started) -> None: ...

    def on_token(self, token: int, reason: int, logprob: tuple[float, bytes, bytes] | None) -> None: ...

    def on_prompt_logprobs(self, part: PromptLogprob) -> None: ...

    def on_failed(self, failed: Failed) -> None:
        print(f"a request failed: {failed.error.message}", file=sys.stderr)


def feed(address: str, n_rows: int, n_output: int) -> None:
    """The client's process: submits all requests and stays until it is ended."""

    async def stay() -> None:
        client = SocketClient.connect(address)
        await client.wait_ready()
        rng = np.random.default_rng(7)
        specs = [
            RequestSpec(
                id=client.next_id(),
                prompt=rng.integers(32, 1000, size=N_PROMPT, dtype=np.int32).tobytes(),
                max_new_tokens=n_output,
                sampling=SamplingSpec(ignore_eos=True, seed=i),
            )
            for i in range(n_rows)
        ]
        await client.submit(specs, [_Quiet() for _ in specs])
        await asyncio.Event().wait()

    uvloop.run(stay())


async def measure(config: RouterConfig, *, n_rows: int, n_steps: int) -> StepFigures:
    """Raises ServerError when the rows never all decode, or an answer ends in between."""
    scheduler = Scheduler(config)
    server = IpcServer(IpcAddress.parse(config.scheduler_address), scheduler)
    await server.start()
    await scheduler.start()
    n_output = n_steps + 4 * SETTLE_STEPS + n_rows * N_PROMPT // 1024
    client = multiprocessing.get_context("spawn").Process(
        target=feed, args=(config.scheduler_address, n_rows, n_output), daemon=True
    )
    client.start()
    try:
        await _until(lambda: decode_rows(scheduler) == n_rows, "all rows decode")
        sizes = record_sizes(scheduler)
        stats = scheduler.loop_stats
        first = stats.n_steps + SETTLE_STEPS
        await _until(lambda: stats.n_steps >= first, "the steps are steady")
        sizes.clear()
        stats.worst_step_cpu_ns = 0
        n, own_ns = stats.n_steps, stats.step_cpu_ns
        process_s, wall_s = time.process_time(), time.perf_counter()
        await _until(lambda: stats.n_steps >= n + n_steps, f"{n_steps} steps have run")
        n, own_ns = stats.n_steps - n, stats.step_cpu_ns - own_ns
        process_s, wall_s = time.process_time() - process_s, time.perf_counter() - wall_s
        if (still := decode_rows(scheduler)) != n_rows:
            raise ServerError(f"only {still} of {n_rows} rows were still decoding at the end")
        return StepFigures(
            n_rows=n_rows,
            n_steps=n,
            steps_per_s=n / wall_s,
            own_cpu_ms=own_ns / n / 1e6,
            own_cpu_worst_ms=stats.worst_step_cpu_ns / 1e6,
            process_cpu_ms=process_s / n * 1e3,
            message_bytes_mean=statistics.fmean(sizes),
            message_bytes_max=max(sizes),
        )
    finally:
        client.terminate()
        client.join()
        await scheduler.close()
        await server.close()


def decode_rows(scheduler: Scheduler) -> int:
    if scheduler.core is None:
        return 0
    return sum(int(rs.decoding.sum()) for rs in scheduler.core.replicas.values())


def record_sizes(scheduler: Scheduler) -> list[int]:
    """The size of every step message sent from now on."""
    sizes: list[int] = []
    for link in scheduler.links.values():

        def send(step: Step, *, _send: Callable[[Step], None] = link.send) -> None:
            sizes.append(step.ByteSize())
            _send(step)

        link.send = send  # type: ignore[method-assign]  # the one place where a step can be seen
    return sizes


async def _until(condition: Callable[[], bool], what: str) -> None:
    until_s = time.monotonic() + STUCK_AFTER_S
    while not condition():
        if time.monotonic() > until_s:
            raise ServerError(f"waited {STUCK_AFTER_S:g} s until {what}")
        await asyncio.sleep(0.05)


def report(figures: StepFigures) -> str:
    rows = [
        ["scheduler CPU per step", f"{figures.own_cpu_ms:.3f} ms", f"under {OWN_CPU_MS} ms"],
        ["  its worst step", f"{figures.own_cpu_worst_ms:.3f} ms", ""],
        ["whole process CPU per step", f"{figures.process_cpu_ms:.3f} ms", ""],
        ["  of that gRPC and event loop", f"{figures.process_cpu_ms - figures.own_cpu_ms:.3f} ms", ""],
        ["step message, mean", f"{figures.message_bytes_mean:,.0f} B", f"under {MESSAGE_BYTES:,} B"],
        ["step message, largest", f"{figures.message_bytes_max:,} B", f"under {MESSAGE_BYTES:,} B"],
        ["steps a second", f"{figures.steps_per_s:,.0f}", ""],
    ]
    return markdown_table([f"{figures.n_rows} rows, {figures.n_steps} steps", "measured", "wanted"], rows)


def main(
    rows: Annotated[int, typer.Option(help="Running answers", min=1)] = 256,
    steps: Annotated[int, typer.Option(help="Steady steps to measure", min=1)] = 1000,
    step_ms: Annotated[float, typer.Option(help="Time of one fake step")] = 5.0,
    block_size: Annotated[int, typer.Option(help="KV positions per block")] = 16,
    out: Annotated[Path | None, typer.Option(help="Folder for the result files")] = RESULTS,
) -> None:
    """Measure the scheduler's cost of a steady decode step."""
    configure_logs(log_format="text", log_level="warning")
    host = describe_host()
    port = free_port()
    n_blocks = 2 + rows * -(-(N_PROMPT + 2 * steps + 1024) // block_size)
    worker = ServerCommand(
        (sys.executable, "-m", "deploy.cli", "worker", "--model", "", "--attention", "fake",
         "--host", "127.0.0.1", "--port", str(port), "--max-batch-size", str(rows),
         "--block-size", str(block_size), "--fake-step-ms", f"{step_ms:g}",
         "--fake-n-blocks", str(n_blocks), "--log-level", "warning"),
    )  # fmt: skip
    try:
        with tempfile.TemporaryDirectory() as folder, spawned(worker, log=Path(folder) / "worker.log"):
            config = RouterConfig(
                replicas=(f"127.0.0.1:{port}",),
                scheduler_address=f"unix:{folder}/scheduler.sock",
                log_level="warning",
            )
            figures = uvloop.run(measure(config, n_rows=rows, n_steps=steps))
    except ServerError as error:
        typer.echo(f"bench.scheduler_step: {error}", err=True)
        raise typer.Exit(2) from None
    text = "\n\n".join(["# A steady decode step in the scheduler", host_line(host), report(figures)])
    typer.echo(text)
    if out is not None:
        doc: dict[str, Any] = {"host": host, "worker": worker.line(), "figures": asdict(figures)}
        write_report(out, "scheduler-step", doc, text)


if __name__ == "__main__":
    typer.run(main)
