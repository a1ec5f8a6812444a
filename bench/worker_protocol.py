"""What the worker's side of the step protocol costs, without a model.

* `rows`: the row table applies a steady decode step (`worker/rows.py`);
* `fake`: the fake runner computes it, every block of every row checked, and the result is packed;
* `stream`: a fake worker in its own process, driven over gRPC. The router's part is played by this process.
  "Idle" is the time in which the pretended device had nothing to do before a step.

    python -m bench.worker_protocol
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import uvloop

from bench.hardware import describe_host, host_line
from bench.report import markdown_table, write_report
from proto.codec import pack_i32
from proto.version import PROTOCOL_VERSION
from proto.worker_pb2 import Open, Step, StepResult
from proto.worker_pb2_grpc import WorkerStub
from worker.config import WorkerConfig
from worker.fake import make_fake_runner
from worker.results import to_proto
from worker.rows import RowTable
from worker.runner import RunnerCapacity

RESULTS = Path(__file__).parent / "results"
N_ROWS = 256
BLOCK_SIZE = 16
N_BLOCKS = 200_000
CONTEXTS = (64, 1_000, 4_000)
STREAMS = ((20.0, 2), (5.0, 1), (5.0, 2), (5.0, 3))
"""(step time in ms, window)"""
N_PREFILL = 2_000_000
START_TIMEOUT_S = 60.0


@dataclass(slots=True, frozen=True)
class HostCost:
    part: str
    context: int
    median_us: float
    p99_us: float


@dataclass(slots=True, frozen=True)
class StreamCost:
    step_ms: float
    window: int
    measured_ms: float
    gap_p99_ms: float
    idle_p50_us: float
    worker_cpu_us: float
    worker_cpu_share: float


class Router:
    """Composes a prompt step for all rows, then steady decode steps."""

    def __init__(self, capacity: RunnerCapacity, *, context: int) -> None:
        self.mirror = RowTable.for_capacity(capacity)
        self._context = context
        self._next_block = 1

    def prompts(self) -> Step:
        random = np.random.default_rng(0)
        step = Step(
            seq=1, chunk_rows=pack_i32(range(N_ROWS)), chunk_tokens=pack_i32([self._context] * N_ROWS)
        )
        for row in range(N_ROWS):
            tokens = random.integers(0, self.mirror.vocab_size, self._context)
            blocks = self._blocks(-(-self._context // BLOCK_SIZE))
            step.admits.add(
                row=row, epoch=1, tokens=pack_i32(tokens), n_prompt=self._context, blocks=pack_i32(blocks)
            )
        self.mirror.apply(step)
        return step

    def decode(self) -> Step:
        mirror = self.mirror
        step = Step(seq=mirror.seq + 1, n_decode_rows=N_ROWS)
        grown = np.flatnonzero(mirror.lengths + 1 > mirror.table_lengths * BLOCK_SIZE)
        if len(grown):
            step.grow_rows = pack_i32(grown)
            step.grow_blocks = pack_i32(self._blocks(len(grown)))
        mirror.apply(step)
        return step

    def _blocks(self, n: int) -> range:
        first, self._next_block = self._next_block, self._next_block + n
        return range(first, first + n)


def config(*, step_ms: float = 0.0) -> WorkerConfig:
    return WorkerConfig(
        model="",
        attention="fake",
        block_size=BLOCK_SIZE,
        max_batch_size=N_ROWS,
        max_batch_prefill_tokens=N_PREFILL,
        fake_n_blocks=N_BLOCKS,
        fake_step_ms=step_ms,
    )


def measure_host(*, context: int, n_steps: int) -> list[HostCost]:
    runner = make_fake_runner(config())
    rows = RowTable.for_capacity(runner.capacity)
    router = Router(runner.capacity, context=context)
    runner.collect(runner.launch(rows.apply(router.prompts())))
    apply_us, fake_us = [], []
    for _ in range(n_steps):
        step = router.decode()
        start = time.perf_counter()
        batch = rows.apply(step)
        applied = time.perf_counter()
        to_proto(runner.collect(runner.launch(batch)), generation=1, queued_steps=0)
        apply_us.append((applied - start) * 1e6)
        fake_us.append((time.perf_counter() - applied) * 1e6)
    assert not runner.violations
    return [
        HostCost(part, context, statistics.median(times), float(np.percentile(times, 99)))
        for part, times in (("rows", apply_us), ("fake", fake_us))
    ]


async def measure_stream(*, step_ms: float, window: int, n_steps: int) -> StreamCost:
    with tempfile.TemporaryDirectory() as folder:
        port_file = Path(folder, "port")
        process = start_worker(port_file, step_ms=step_ms)
        try:
            port = await asyncio.to_thread(wait_for_port, port_file, process)
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                return await drive(
                    WorkerStub(channel), process, step_ms=step_ms, window=window, n_steps=n_steps
                )
        finally:
            process.terminate()
            process.wait()


async def drive(
    stub: Any, process: subprocess.Popen[bytes], *, step_ms: float, window: int, n_steps: int
) -> StreamCost:
    call = stub.Run()
    opening = Open(router_id="bench", generation=1, protocol_version=PROTOCOL_VERSION, window=window)
    await call.write(Step(open=opening))
    await call.read()
    router = Router(make_fake_runner(config()).capacity, context=64)
    await call.write(router.prompts())
    await call.read()
    for _ in range(window):
        await call.write(router.decode())
    idle_us, arrivals = [], [time.perf_counter()]
    cpu_before = cpu_s(process.pid)
    for _ in range(n_steps):
        result: StepResult = await call.read()
        arrivals.append(time.perf_counter())
        idle_us.append(result.idle_us)
        await call.write(router.decode())
    cpu = cpu_s(process.pid) - cpu_before
    call.cancel()
    took_s = arrivals[-1] - arrivals[0]
    return StreamCost(
        step_ms=step_ms,
        window=window,
        measured_ms=took_s / n_steps * 1e3,
        gap_p99_ms=float(np.percentile(np.diff(arrivals), 99)) * 1e3,
        idle_p50_us=statistics.median(idle_us),
        worker_cpu_us=cpu / n_steps * 1e6,
        worker_cpu_share=cpu / took_s,
    )


def start_worker(port_file: Path, *, step_ms: float) -> subprocess.Popen[bytes]:
    flags = {
        "attention": "fake",
        "model": "",
        "block-size": BLOCK_SIZE,
        "max-batch-size": N_ROWS,
        "max-batch-prefill-tokens": N_PREFILL,
        "fake-n-blocks": N_BLOCKS,
        "fake-step-ms": step_ms,
        "port-file": port_file,
        "log-level": "error",
    }
    arguments = [f"--{name}={value}" for name, value in flags.items()]
    return subprocess.Popen([sys.executable, "-m", "deploy.cli", "worker", *arguments])


def wait_for_port(port_file: Path, process: subprocess.Popen[bytes]) -> int:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not port_file.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("bench.worker_protocol: the fake worker did not start")
        time.sleep(0.05)
    return int(port_file.read_text())


def cpu_s(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / float(os.sysconf("SC_CLK_TCK"))


def tables(host: list[HostCost], streams: list[StreamCost]) -> str:
    one = markdown_table(
        ["part", "context", "median µs", "p99 µs"],
        [[c.part, f"{c.context:,}", f"{c.median_us:.0f}", f"{c.p99_us:.0f}"] for c in host],
    )
    two = markdown_table(
        [
            "step ms",
            "window",
            "measured ms",
            "gap p99 ms",
            "idle p50 µs",
            "worker CPU µs a step",
            "of a core",
        ],
        [
            [
                f"{c.step_ms:g}",
                str(c.window),
                f"{c.measured_ms:.2f}",
                f"{c.gap_p99_ms:.2f}",
                f"{c.idle_p50_us:.0f}",
                f"{c.worker_cpu_us:.0f}",
                f"{c.worker_cpu_share:.1%}",
            ]
            for c in streams
        ],
    )
    return f"{one}\n\n{two}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=500, help="timed steps per case")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the report")
    args = parser.parse_args()
    about = describe_host()
    host = [cost for context in CONTEXTS for cost in measure_host(context=context, n_steps=args.steps)]
    streams = [
        uvloop.run(measure_stream(step_ms=step_ms, window=window, n_steps=args.steps))
        for step_ms, window in STREAMS
    ]
    shown = tables(host, streams)
    print(shown)
    document = {
        "command": f"python -m bench.worker_protocol --steps {args.steps}",
        "host": about,
        "host_costs": [asdict(cost) for cost in host],
        "streams": [asdict(cost) for cost in streams],
    }
    markdown = (
        f"# The worker's side of the step protocol\n\n`{document['command']}`; {host_line(about)}.\n\n"
        f"{N_ROWS} decode rows, block size {BLOCK_SIZE}.\n\n{shown}"
    )
    for path in write_report(args.out, "worker-protocol", document, markdown):
        print(path)


if __name__ == "__main__":
    main()
