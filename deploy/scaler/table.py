"""What `quire ps` prints."""

from __future__ import annotations

from collections.abc import Sequence

from deploy.scaler.model import Load, RouterState, Worker

_HEAD = ("WORKER", "STATE", "DEVICE", "RUNNING", "KV", "VERSION", "ADDRESS", "REASON")


def table(workers: Sequence[Worker], state: RouterState) -> str:
    """One line per worker: containers first, then what only the router knows; then the queue."""
    seen = {worker.address for worker in workers if worker.address}
    rows = [_row(worker.name, worker.status, worker.address, state.at(worker.address)) for worker in workers]
    rows += [_row("-", "", load.address, load) for load in state.loads if load.address not in seen]
    lines = [_HEAD, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_HEAD))]
    text = "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
    waiting = f"{state.n_waiting} waiting"
    if state.n_waiting:
        waiting += f", the first for {state.oldest_wait_s:.1f} s"
    ready = "ready" if state.ready else f"not ready: {state.reason}"
    return f"{text}\n\nrouter: {ready}; {waiting}"


def _row(name: str, status: str, address: str, load: Load | None) -> tuple[str, ...]:
    if load is None:
        return (name, status or "unknown", "", "", "", "", address, "")
    state = "draining" if load.draining and load.live else load.state
    running = f"{load.n_running}/{load.n_rows}" if load.live else ""
    kv = f"{load.n_blocks_used / load.n_blocks:.0%}" if load.live and load.n_blocks else ""
    return (name, state, load.device, running, kv, load.version, address, load.reason)
