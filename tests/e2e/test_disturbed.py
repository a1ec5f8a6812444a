"""Workers with the real model whose connection is cut or which are stopped and go on later: clients see one
unbroken stream, and what is cached afterwards is right (vLLM #39863, TGI #2593)."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.e2e.clients import (
    Body,
    assert_empty,
    choice_of,
    complete_all,
    has_live,
    has_lost,
    routed,
    start,
    state_of,
    until,
)
from tests.e2e.serving import Worker, worker_process
from tests.e2e.ties import assert_same
from worker.testing import Relay

pytestmark = pytest.mark.slow

STORY = "Once upon a time, in a small town by the sea, there lived an old"
PROMPTS = [f"{STORY} {who}" for who in ("man", "man", "woman and her three", "dog")]
BODIES: list[Body] = [{"prompt": prompt, "max_tokens": 50} for prompt in PROMPTS]
QUICK = ("--health-interval-s=0.3", "--health-timeout-s=1.5", "--connect-timeout-s=1", "--max-backoff-s=0.3")


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Worker, Worker]]:
    folder = tmp_path_factory.mktemp("workers")
    flags = ("--threads=1", "--max-batch-total-tokens=8192")
    with worker_process(folder, flags=flags) as one, worker_process(folder, flags=flags) as two:
        yield one, two


async def _undisturbed(client: httpx.AsyncClient) -> list[Body]:
    answers = await asyncio.gather(*(choice_of(client, {**body, "logprobs": 2}) for body in BODIES))
    assert (await client.post("/admin/cache/flush")).status_code == 200
    return list(answers)


async def test_a_cut_connection(workers: tuple[Worker, Worker], tmp_path: Path) -> None:
    """The worker lives on; all that it held is forgotten on both sides."""
    relay = Relay()
    relay.target_port = workers[0].port
    await relay.open()
    async with routed(tmp_path, f"127.0.0.1:{relay.port}", n_live=1, flags=QUICK) as client:
        expected = await _undisturbed(client)
        streams, tasks = zip(*(start(client, body) for body in BODIES), strict=True)
        for n_cuts, n_tokens in ((1, 3), (2, 15), (3, 30)):
            await streams[0].has(n_tokens)
            relay.cut()
            await until(partial(has_lost, client, n_cuts), "the loss is seen")
        await asyncio.gather(*tasks)
        for stream, right in zip(streams, expected, strict=True):
            stream.assert_whole()
            assert_same(right, stream.tokens[0])
        for tokens, right in zip(await complete_all(client, BODIES), expected, strict=True):
            assert_same(right, tokens)
        await assert_empty(client)
    await relay.close()


async def test_a_stopped_worker(workers: tuple[Worker, Worker], tmp_path: Path) -> None:
    """Its streams go on with the other one; it joins again when it goes on, and knows nothing old."""
    async with routed(tmp_path, *(w.address for w in workers), n_live=2, flags=QUICK) as client:
        expected = await _undisturbed(client)
        streams, tasks = zip(*(start(client, body) for body in BODIES), strict=True)
        await streams[0].has(5)
        state = await state_of(client)
        busiest = max(state["replicas"], key=lambda replica: replica["n_running"])
        stopped = next(worker for worker in workers if worker.address == busiest["address"])
        stopped.send(signal.SIGSTOP)
        try:
            await asyncio.gather(*tasks)
            assert await has_live(client, 1)
        finally:
            stopped.send(signal.SIGCONT)
        for stream, right in zip(streams, expected, strict=True):
            stream.assert_whole()
            assert_same(right, stream.tokens[0])
        await until(lambda: has_live(client, 2), "the stopped worker is back")
        # Warm on one replica, cold on the other, both at once.
        both = [*BODIES, *BODIES]
        for tokens, right in zip(await complete_all(client, both), expected * 2, strict=True):
            assert_same(right, tokens)
        await assert_empty(client)
