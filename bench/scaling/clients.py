"""The load in several client processes, so that no client is what is measured.

Each process holds its share of clients and prompts. All begin together; time stamps are of one clock
(CLOCK_MONOTONIC), so that their records can be joined.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event

import uvloop

from bench.load import Load, Target, encode_request, record_of, run_load
from bench.measures import RequestRecord
from bench.scaling.sizes import Prompts
from bench.server import ServerError
from bench.transport import Exchange, open_transport

START_WITHIN_S = 120.0
ANSWER_WITHIN_S = 600.0
PAUSE_S = 0.1
"""After a failure, so that a server that is gone is not stormed."""
_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class Work:
    """One process's part."""

    target: Target
    prompts: Prompts
    n_input: int
    load: Load
    endless: bool
    """Until `stop` is set, beginning again with the first prompt when all were sent."""


@dataclass(frozen=True, slots=True)
class Joined:
    """Of all processes; `records` stand in the order of the prompts when the load was not endless."""

    records: list[RequestRecord]
    client_cpu_s: float


class Clients:
    """Client processes, connected and waiting for `go`."""

    def __init__(self, pipes: list[Connection], stop: Event, n_processes: int) -> None:
        self._pipes = pipes
        self._stop = stop
        self._n = n_processes

    def go(self) -> float:
        """All begin; when (on the clock of the records)."""
        for pipe in self._pipes:
            pipe.send(None)
        return time.perf_counter()

    def stop(self) -> None:
        """Requests that run are still waited for."""
        self._stop.set()

    def join(self) -> Joined:
        """Waits for the end. Raises ServerError when a process has failed."""
        parts = [_received(pipe, ANSWER_WITHIN_S) for pipe in self._pipes]
        longest = max(len(records) for records, _ in parts)
        # Prompt i went to process i % n.
        records = [r[i] for i in range(longest) for r, _ in parts if i < len(r)]
        return Joined(records=records, client_cpu_s=sum(cpu for _, cpu in parts))


@contextlib.contextmanager
def clients(
    target: Target, prompts: Prompts, load: Load, *, n_input: int, n_processes: int, endless: bool = False
) -> Iterator[Clients]:
    """Starts the processes. `load` must be a closed loop."""
    assert load.concurrency is not None
    n_processes = min(n_processes, load.concurrency)
    stop = _SPAWN.Event()
    pipes, processes = [], []
    try:
        for k in range(n_processes):
            share = prompts[k::n_processes]
            n_clients = len(range(k, load.concurrency, n_processes))
            work = Work(
                target=target, prompts=share, n_input=n_input, endless=endless,
                load=replace(load, n_requests=len(share), concurrency=n_clients),
            )  # fmt: skip
            ours, theirs = _SPAWN.Pipe()
            process = _SPAWN.Process(target=_serve, args=(theirs, stop), daemon=True)
            process.start()
            theirs.close()
            ours.send(work)
            pipes.append(ours)
            processes.append(process)
        for pipe in pipes:
            _received(pipe, START_WITHIN_S)
        yield Clients(pipes, stop, n_processes)
    finally:
        stop.set()
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.terminate()
            process.join()


def run_clients(target: Target, prompts: Prompts, load: Load, *, n_input: int, n_processes: int) -> Joined:
    """One run of a load with an end."""
    with clients(target, prompts, load, n_input=n_input, n_processes=n_processes) as started:
        started.go()
        return started.join()


def _received(pipe: Connection, within_s: float) -> tuple[list[RequestRecord], float]:
    try:
        if not pipe.poll(within_s):
            raise ServerError(f"a client process did not answer within {within_s:g} s")
        value: tuple[list[RequestRecord], float] = pipe.recv()
        return value
    except (EOFError, OSError) as error:
        raise ServerError("a client process has ended before its work") from error


def _serve(pipe: Connection, stop: Event) -> None:
    """The process."""
    work: Work = pipe.recv()
    pipe.send(([], 0.0))
    pipe.recv()
    cpu_s = time.process_time()
    if work.endless:
        records = uvloop.run(_run_endless(work, stop))
    else:
        _, records = uvloop.run(run_load(work.target, work.prompts, work.load, n_input=work.n_input))
    pipe.send((records, time.process_time() - cpu_s))


async def _run_endless(work: Work, stop: Event) -> list[RequestRecord]:
    target, load = work.target, work.load
    bodies = [encode_request(target, prompt, n_output=load.n_output) for prompt in work.prompts]
    transport = open_transport(
        target.transport.value, target.url, timeout_s=target.timeout_s, api_key=target.api_key
    )
    exchanges: list[Exchange] = []
    turn = itertools.cycle(bodies)

    async def client() -> None:
        while not stop.is_set():
            exchange = await transport.post(target.endpoint.value, next(turn))
            exchanges.append(exchange)
            if exchange.error is not None:
                await asyncio.sleep(PAUSE_S)

    try:
        await asyncio.gather(*(client() for _ in range(load.concurrency or 1)))
    finally:
        await transport.close()
    return [record_of(e, n_input=work.n_input, n_output=load.n_output, chat=False) for e in exchanges]
