"""Clients that treat a connection badly: gone with requests in the pipe, endless heads, silence."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

import router.api.connection as connection
from tests.api.live import Live, serving
from tests.api.scripted import Script, ScriptedClient
from tests.api.tiny import ids

LIMIT_S = 20.0


def post(**body: Any) -> bytes:
    data = json.dumps({"prompt": "hi", **body}).encode()
    return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data)


async def nothing_runs(scheduler: ScriptedClient) -> None:
    while scheduler.running:  # noqa: ASYNC110  # the scripted scheduler has no event for it
        await asyncio.sleep(0)


async def dial(live: Live) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", live.server.port)


@pytest.mark.parametrize("stream", [False, True])
async def test_running_request_is_cancelled_when_others_wait_behind_it(stream: bool) -> None:
    scheduler = ScriptedClient(Script(ids("hello"), end=None))
    async with serving(scheduler) as live:
        _, writer = await dial(live)
        writer.write(post(stream=stream) + post() + post())
        await asyncio.wait_for(scheduler.wait_submitted(1), LIMIT_S)
        writer.transport.abort()
        await asyncio.wait_for(nothing_runs(scheduler), LIMIT_S)
        assert len(scheduler.submitted) == 1  # nobody waits for the others


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with serving(ScriptedClient(Script(ids("hello")))) as live:
        reader, writer = await dial(live)
        health = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        writer.write(post() + post(stream=True) + health)
        text = (await asyncio.wait_for(reader.read(-1), LIMIT_S)).decode()
        assert text.count("HTTP/1.1 200 OK") == 3
        assert text.index('"text_completion"') < text.index("[DONE]") < text.index('"ok"')
        writer.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET /health HTTP/9.9\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
    ],
    ids=["tls", "version", "length"],
)
async def test_bytes_that_are_no_http(sent: bytes) -> None:
    async with serving(ScriptedClient()) as live:
        reader, writer = await dial(live)
        writer.write(sent)
        head, _, body = (await asyncio.wait_for(reader.read(-1), LIMIT_S)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert json.loads(body)["error"]["code"] == "invalid_http"
        writer.close()


async def test_bytes_that_are_no_http_stay_out_of_a_running_answer() -> None:
    scheduler = ScriptedClient(Script(ids("hello"), end=None))
    async with serving(scheduler) as live:
        reader, writer = await dial(live)
        writer.write(post(stream=True))
        await asyncio.wait_for(scheduler.wait_submitted(1), LIMIT_S)
        writer.write(b"garbage\r\n\r\n")
        text = await asyncio.wait_for(reader.read(-1), LIMIT_S)
        assert b"400" not in text
        await asyncio.wait_for(nothing_runs(scheduler), LIMIT_S)
        writer.close()


async def test_endless_head_is_refused() -> None:
    async with serving(ScriptedClient()) as live:
        reader, writer = await dial(live)
        writer.write(b"GET /health HTTP/1.1\r\nx: ")
        for _ in range(2 * connection.MAX_HEAD_BYTES // 65536):
            writer.write(b"a" * 65536)
        # Not drained: the server may close before it has read all of it.
        head = await asyncio.wait_for(reader.readline(), LIMIT_S)
        assert head.startswith(b"HTTP/1.1 431 ")
        writer.transport.abort()
        async with httpx.AsyncClient(base_url=live.url) as http:
            assert (await http.get("/health")).status_code == 200


async def test_large_bodies_are_not_taken_for_heads() -> None:
    async with (
        serving(ScriptedClient(Script(ids("ok")))) as live,
        httpx.AsyncClient(base_url=live.url) as http,
    ):
        for _ in range(2):
            body = {"prompt": "hi", "user": "u" * 4 * connection.MAX_HEAD_BYTES}
            assert (await http.post("/v1/completions", json=body)).status_code == 200


@pytest.mark.parametrize("sent", [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nhost: x\r\n"])
async def test_silent_client_is_let_go(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.05)
    async with serving(ScriptedClient()) as live:
        reader, writer = await dial(live)
        writer.write(sent)
        assert await asyncio.wait_for(reader.read(), LIMIT_S) == b""
        writer.close()


async def test_answer_outlives_the_time_for_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.01)
    scheduler = ScriptedClient(Script(ids("hello"), hold=True))
    async with serving(scheduler) as live:
        reader, writer = await dial(live)
        writer.write(post() + b"GET /hea")
        await asyncio.wait_for(scheduler.wait_submitted(1), LIMIT_S)
        await asyncio.sleep(0.05)
        scheduler.release()
        assert (await asyncio.wait_for(reader.readline(), LIMIT_S)).startswith(b"HTTP/1.1 200 ")
        writer.close()


@pytest.mark.parametrize(
    ("path", "told"), [("/v1/chat/completions", '"request_timeout"'), ("/generate", '"error_type":"timeout"')]
)
async def test_body_that_never_ends(path: str, told: str) -> None:
    """Part of it came; the client is told and let go."""
    async with serving(ScriptedClient(), body_timeout_s=0.05) as live:
        reader, writer = await dial(live)
        writer.write(b'POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{"mess' % path.encode())
        text = (await asyncio.wait_for(reader.read(-1), LIMIT_S)).decode()
        assert text.startswith("HTTP/1.1 408 ")
        assert told in text
        assert "body_timeout_s" in text
        writer.close()


async def test_connection_ends_with_a_body_too_large() -> None:
    """Its rest is not taken for the next request."""
    async with serving(ScriptedClient(), max_body_bytes=100) as live:
        reader, writer = await dial(live)
        writer.write(b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n" + b"x" * 200)
        text = (await asyncio.wait_for(reader.read(-1), LIMIT_S)).decode()
        assert text.startswith("HTTP/1.1 413 ")
        writer.close()
