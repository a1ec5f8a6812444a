"""Workers that come late, die, stop and are restarted, as real processes under a router of its own."""

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
    Stream,
    assert_empty,
    complete,
    complete_all,
    connected,
    has_live,
    has_lost,
    is_ready,
    metric,
    routed,
    start,
    state_of,
    until,
)
from tests.e2e.conftest import FAKE
from tests.e2e.serving import StartServer, Worker, worker_process

pytestmark = pytest.mark.slow

QUICK = ("--health-interval-s=0.2", "--health-timeout-s=1", "--connect-timeout-s=1", "--max-backoff-s=0.5")
FLAGS = ("--attention=fake", "--fake-step-ms=5", "--fake-strict")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A worker that serves one test's router after the other."""
    with worker_process(tmp_path_factory.mktemp("good"), flags=FLAGS) as worker:
        yield worker


def _bodies(n: int, *, n_new: int) -> list[Body]:
    return [{"prompt": list(range(10 + i, 40 + i)), "max_tokens": n_new} for i in range(n)]


async def _all_busy(client: httpx.AsyncClient) -> bool:
    return all(replica.get("n_running") for replica in (await state_of(client))["replicas"])


async def test_one_of_two_is_down_at_start(good: Worker, tmp_path: Path) -> None:
    """SGLang #3802: it serves; the second joins later without a restart, and takes its share."""
    with worker_process(tmp_path, flags=FLAGS, start=False) as late:
        async with routed(tmp_path, good.address, late.address, n_live=1, flags=QUICK) as client:
            bodies = _bodies(16, n_new=60)
            expected = await complete_all(client, bodies)
            await asyncio.to_thread(late.start)
            await until(lambda: has_live(client, 2), "the second has joined")
            answers = asyncio.create_task(complete_all(client, bodies))
            await until(lambda: _all_busy(client), "both work")
            assert await answers == expected
            await assert_empty(client)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_one_of_two_is_restarted_under_load(
    good: Worker, tmp_path: Path, number: signal.Signals
) -> None:
    """SGLang #14532: no request fails, and the share recovers."""
    bodies = _bodies(24, n_new=80)
    with worker_process(tmp_path, flags=FLAGS) as other:
        async with routed(tmp_path, good.address, other.address, n_live=2, flags=QUICK) as client:
            expected = await complete_all(client, bodies)
            rounds = 0
            stop = False

            async def load() -> None:
                nonlocal rounds
                while not stop:
                    assert await complete_all(client, bodies) == expected
                    rounds += 1

            loading = asyncio.create_task(load())
            await until(lambda: _all_busy(client), "both work")
            await asyncio.to_thread(other.end, number)
            await until(lambda: has_live(client, 1), "the loss is seen")
            await asyncio.to_thread(other.start)
            await until(lambda: has_live(client, 2), "it is back")
            await until(lambda: _all_busy(client), "the share has recovered")
            stop = True
            await loading
            assert rounds > 0
            await assert_empty(client)
            lost = await metric(client, "quire_replicas_lost_total")
            assert lost == (number == signal.SIGKILL), "an orderly end is no loss"


async def test_a_worker_that_dies_on_every_step(good: Worker, tmp_path: Path) -> None:
    """Infera #82: it comes back again and again; the other takes the load, and no request fails."""
    bodies = _bodies(12, n_new=200)
    with worker_process(tmp_path, flags=(*FLAGS, "--fake-device-error-at=3"), start=False) as bad:
        async with routed(tmp_path, good.address, bad.address, n_live=1, flags=QUICK) as client:
            expected = await complete_all(client, bodies)
            for n_deaths in (1, 2, 3):
                await asyncio.to_thread(bad.start)
                await until(partial(has_live, client, 2), "it has joined")
                answers = asyncio.create_task(complete_all(client, bodies))
                await until(partial(has_lost, client, n_deaths), "it died")
                assert await answers == expected
                assert await asyncio.to_thread(bad.end) != 0
            assert await metric(client, "quire_requests_in_server") == 0
            await assert_empty(client)


async def test_what_was_there_at_two_deaths_fails_alone(start_server: StartServer) -> None:
    """Infera #82: one worker, which dies at its 30th step and is started again with growing pauses."""
    server = await asyncio.to_thread(
        start_server, flags=(*FAKE, "--fake-device-error-at=30", "--max-backoff-s=0.5")
    )
    async with connected(server) as client:
        stream, task = start(client, {"prompt": [5, 6, 7], "max_tokens": 100})
        await task
        assert stream.error is not None
        assert stream.error["code"] == "replica_lost"
        assert len(stream.tokens[0]) < 100
        # Others are served, from the probe of the next life on.
        assert len(await complete(client, {"prompt": [5, 6, 7], "max_tokens": 8})) == 8
        await assert_empty(client)


async def test_a_stopped_worker_turns_readiness_off(good: Worker, tmp_path: Path) -> None:
    """vLLM #39863: 503 in bounded time, 200 after it goes on; the stream loses nothing."""
    async with routed(tmp_path, good.address, n_live=1, flags=QUICK) as client:
        body: Body = {"prompt": list(range(50, 90)), "max_tokens": 150}
        expected = await complete(client, body)
        assert (await client.post("/admin/cache/flush")).status_code == 200
        stream, task = start(client, body)
        await stream.has(10)
        good.send(signal.SIGSTOP)
        try:

            async def is_off() -> bool:
                return not await is_ready(client)

            await until(is_off, "readiness is off", limit_s=10)
            reason = (await client.get("/health/ready")).json()["reason"]
            assert "health-timeout-s" in reason
        finally:
            good.send(signal.SIGCONT)
        await until(lambda: is_ready(client), "readiness is back")
        await task
        stream.assert_whole()
        assert stream.tokens[0] == expected
        assert await complete(client, body) == expected
        await assert_empty(client)


async def test_no_worker_comes_back_before_the_deadline(tmp_path: Path) -> None:
    """TGI #2593: the queue holds; past the deadline comes a proper error, never a hang."""
    with worker_process(tmp_path, flags=FLAGS) as only:
        async with routed(tmp_path, only.address, n_live=1, flags=QUICK) as client:
            stream, task = start(client, {"prompt": [5, 6, 7], "max_tokens": 1000, "timeout": 3})
            await stream.has(5)
            await asyncio.to_thread(only.end, signal.SIGKILL)
            await task
            assert stream.error is not None
            assert stream.error["type"] == "timeout_error"
            late: Stream = await Stream().read(client, {"prompt": [5, 6, 7], "max_tokens": 5, "timeout": 1})
            assert late.status in (503, 504)
