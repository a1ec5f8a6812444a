"""SIGTERM with streams in flight: nothing new, the running ones end as they should, exit code 0."""

from __future__ import annotations

import asyncio
import signal

import httpx
import pytest

from tests.e2e.clients import connected, defaults, is_ready, start, until
from tests.e2e.conftest import FAKE
from tests.e2e.serving import StartServer

pytestmark = pytest.mark.slow

BODY = {"prompt": [5, 6, 7], "max_tokens": 400}


async def test_ten_streams_end_whole(start_server: StartServer) -> None:
    """vLLM #24885, TGI #1842."""
    server = await asyncio.to_thread(start_server, flags=(*FAKE, "--fake-step-ms=5"))
    async with connected(server) as client:
        streams, tasks = zip(*(start(client, BODY) for _ in range(10)), strict=True)
        for stream in streams:
            await stream.has(3)
        server.process.send_signal(signal.SIGTERM)

        async def is_off() -> bool:
            return not await is_ready(client)

        await until(is_off, "readiness is off")
        refused = await client.post("/v1/completions", json={**defaults(), **BODY})
        assert refused.status_code == 503
        assert not any(task.done() for task in tasks), "the streams still run"
        await asyncio.gather(*tasks)
        for stream in streams:
            stream.assert_whole()
            assert len(stream.tokens[0]) == 400
    assert await asyncio.to_thread(server.process.wait, 30) == 0
    assert "Traceback" not in server.log_text()


async def test_past_the_grace_time_a_stream_ends_with_an_error(start_server: StartServer) -> None:
    flags = (*FAKE, "--fake-step-ms=20", "--shutdown-grace-s=1")
    server = await asyncio.to_thread(start_server, flags=flags)
    async with connected(server) as client:
        stream, task = start(client, {**BODY, "max_tokens": 8000})
        whole = asyncio.create_task(
            client.post("/v1/completions", json={**defaults(), "max_tokens": 8000, "prompt": [8]})
        )
        await stream.has(3)
        server.process.send_signal(signal.SIGTERM)
        await task
        assert stream.error is not None
        assert stream.error["code"] == "shutting_down"
        answer: httpx.Response = await whole
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "shutting_down"
    assert await asyncio.to_thread(server.process.wait, 30) == 0
