"""The servers that are measured: `quire serve` with one worker or one on each device."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from bench.server import ServerCommand, ServerError, process_tree

FAKE_MODEL = "smollm2"
FAKE_VOCAB = 32000
_CLAIM = re.compile(r"claimed GPU [^\n\"]*?\) \([^()\n]*\)")


class Device(StrEnum):
    GPU = "gpu"
    FAKE = "fake"
    """Workers without a model whose steps take time as on a GPU."""


@dataclass(frozen=True, slots=True)
class FakeCost:
    """Of a step of a fake worker."""

    step_ms: float
    row_us: float
    token_us: float

    def flags(self) -> tuple[str, ...]:
        return (
            f"--fake-step-ms={self.step_ms:g}",
            f"--fake-row-us={self.row_us:g}",
            f"--fake-prefill-token-us={self.token_us:g}",
        )


def fake_command(cost: FakeCost) -> tuple[str, ...]:
    return (
        sys.executable, "-m", "deploy.cli", "serve", "--host=127.0.0.1", "--port={port}",
        f"--model={FAKE_MODEL}", "--attention=fake", "--fake-n-blocks=32768", *cost.flags(),
    )  # fmt: skip


def serve_command(
    base: tuple[str, ...],
    *,
    n_workers: int,
    n_clients: int,
    ready_within_s: float,
    flags: tuple[str, ...] = (),
) -> ServerCommand:
    """The base command with so many workers, and room in the queue for all clients."""
    return ServerCommand(
        (*base, f"--workers={n_workers}", f"--max-concurrent-requests={max(1024, 2 * n_clients)}", *flags),
        ready_within_s=ready_within_s,
    )


def worker_pid(server_pid: int, address: str) -> int:
    """The process of the worker that listens at host:port. Raises ServerError when there is none."""
    port = address.rpartition(":")[2]
    for pid in process_tree(server_pid):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            if "worker" in words and f"--port={port}" in words:
                return pid
    raise ServerError(f"no worker process listens on port {port}")


def kill_worker(server_pid: int, address: str) -> int:
    """kill -9; the process id."""
    pid = worker_pid(server_pid, address)
    os.kill(pid, signal.SIGKILL)
    return pid


def claims(log: Path) -> list[str]:
    """What the workers said of the devices that they took."""
    return _CLAIM.findall(log.read_text(errors="replace"))
