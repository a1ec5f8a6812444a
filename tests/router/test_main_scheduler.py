"""The scheduler's process: signals and exit codes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from router.ipc.client import RefusedError
from router.ipc.socket_client import SocketClient
from tests.router.service import Collector, ask
from tests.router.sim import text
from worker.testing import fake_worker

PROGRAM = """
import sys
from router.config import RouterConfig
from router.main_scheduler import run_scheduler
address, replica, budget = sys.argv[1:]
config = RouterConfig(
    scheduler_address=address,
    replicas=(replica,),
    shutdown_grace_s=20.0,
    max_batch_prefill_tokens=int(budget) or None,
)
sys.exit(run_scheduler(config, on_ready=lambda: print("ready", flush=True)))
"""


@contextlib.asynccontextmanager
async def process(
    address: str, replica: str, *, budget: int = 0
) -> AsyncIterator[asyncio.subprocess.Process]:
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PROGRAM,
        address,
        replica,
        str(budget),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
            await child.communicate()


async def test_sigterm_drains_and_ends_with_0(tmp_path: Path) -> None:
    """vLLM #24885, TGI #1842: not ready, new work 503, running streams end within the grace time."""
    address = f"unix:{tmp_path}/s.sock"
    async with (
        fake_worker(fake_strict=True, fake_step_ms=2.0) as worker,
        process(address, worker.address) as child,
    ):
        client = SocketClient.connect(address)
        await asyncio.wait_for(client.wait_ready(), 30)
        answers: list[Collector] = [await ask(client, text(10, seed=i), n_new=200) for i in range(10)]
        await answers[0].has(3)
        child.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            while True:
                try:
                    probe = await ask(client, text(10, seed=50), n_new=1)
                    await probe.end()
                except RefusedError as error:
                    refused = error
                    break
        assert refused.error.status == 503
        assert client.state.draining
        for answer in answers:
            await answer.end()
            answer.assert_right(worker)
        assert await asyncio.wait_for(child.wait(), 20) == 0
        await client.close()


async def test_a_budget_that_does_not_fit_ends_with_2_and_one_line(tmp_path: Path) -> None:
    async with (
        fake_worker() as worker,
        process(f"unix:{tmp_path}/s.sock", worker.address, budget=100_000) as child,
    ):
        _, errors = await asyncio.wait_for(child.communicate(), 30)
        assert child.returncode == 2
        last = errors.decode().strip().splitlines()[-1]
        assert last.startswith("error: --max-batch-prefill-tokens is 100000")
        assert "at most 4096 fits" in last
        assert "Traceback" not in errors.decode()
