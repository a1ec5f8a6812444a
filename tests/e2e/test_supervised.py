"""A process of the router itself is killed: clients get an error, never silence, and the server comes back
(TGI #3050)."""

from __future__ import annotations

import asyncio
import os
import signal

import httpx
import pytest

from tests.e2e.clients import assert_empty, complete, connected, is_ready, start, state_of, until
from tests.e2e.conftest import FAKE
from tests.e2e.serving import StartServer

pytestmark = pytest.mark.slow

BODY = {"prompt": [5, 6, 7], "max_tokens": 2000}


async def test_the_scheduler_is_killed(start_server: StartServer) -> None:
    server = await asyncio.to_thread(start_server, flags=(*FAKE, "--fake-strict"))
    async with connected(server) as client:
        expected = await complete(client, {**BODY, "max_tokens": 20})
        stream, task = start(client, BODY)
        whole = asyncio.create_task(client.post("/v1/completions", json={"ignore_eos": True, **BODY}))
        await stream.has(3)
        os.kill(server.pids("scheduler")[0], signal.SIGKILL)
        await task
        assert stream.error is not None
        assert stream.error["type"] == "server_error"
        answer: httpx.Response = await whole
        assert answer.status_code == 503, answer.text
        await until(lambda: is_ready(client), "a new scheduler serves")
        assert await complete(client, {**BODY, "max_tokens": 20}) == expected
        await assert_empty(client)


async def test_the_api_is_killed(start_server: StartServer) -> None:
    server = await asyncio.to_thread(start_server, flags=(*FAKE, "--fake-strict"))
    async with connected(server) as client:
        expected = await complete(client, {**BODY, "max_tokens": 20})
        stream, task = start(client, BODY)
        await stream.has(3)
        os.kill(server.pids("api")[0], signal.SIGKILL)
        with pytest.raises(httpx.HTTPError):
            await task

        async def back() -> bool:
            try:
                return await is_ready(client)
            except httpx.HTTPError:
                return False

        await until(back, "a new API process serves")
        assert await complete(client, {**BODY, "max_tokens": 20}) == expected
        await assert_empty(client)
        assert (await state_of(client))["replicas"][0]["generation"] > 0
