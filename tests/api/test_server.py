"""The real server on a real port: the official client, disconnects, the orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from typing import Any

import httpx
import openai
import pytest

from router.api.server import listen
from settings.errors import ConfigError
from tests.api.live import serving
from tests.api.scripted import Script, ScriptedClient
from tests.api.sse import events, open_events
from tests.api.tiny import byte_ids, ids, tiny_tokenizer

HI = [{"role": "user", "content": "hi"}]


async def test_official_async_client() -> None:
    async with serving(ScriptedClient(Script(ids("hello world"))), api_keys=("k",)) as live:
        client = openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="k")
        models = await client.models.list()
        assert [model.id for model in models.data] == ["org/tiny"]
        assert (await client.models.retrieve("org/tiny")).id == "org/tiny"

        answer = await client.chat.completions.create(
            model="org/tiny", messages=HI, logprobs=True, top_logprobs=2
        )
        assert answer.choices[0].message.content == "hello world"
        assert answer.choices[0].logprobs is not None
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None

        stream = await client.chat.completions.create(
            model="org/tiny", messages=HI, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hello world"
        assert chunks[-1].usage is not None

        text = await client.completions.create(model="org/tiny", prompt=["a", "b"], logprobs=2, n=2)
        assert [choice.text for choice in text.choices] == ["hello world"] * 4

        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="nope", messages=HI)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model="org/tiny", messages=HI, temperature=7)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.AuthenticationError):
            await openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="x").models.list()
        await client.close()


async def test_official_sync_client() -> None:
    def talk(url: str) -> tuple[str, str]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            whole = client.chat.completions.create(model="tiny", messages=HI)
            stream = client.completions.create(model="tiny", prompt="hi", stream=True)
            return whole.choices[0].message.content or "", "".join(c.choices[0].text for c in stream)

    async with serving(ScriptedClient(Script(ids("hello world")))) as live:
        assert await asyncio.to_thread(talk, live.url) == ("hello world", "hello world")


@pytest.mark.parametrize("stream", [True, False])
async def test_closed_connection_cancels(stream: bool) -> None:
    scheduler = ScriptedClient(Script(ids("hello world"), end=None))
    async with serving(scheduler) as live:
        reader, writer = await asyncio.open_connection("127.0.0.1", live.server.port)
        body = json.dumps({"messages": HI, "stream": stream}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await scheduler.on_submit.wait()
        if stream:
            await reader.readuntil(b"data: ")
        writer.close()
        await scheduler.on_cancel.wait()
        assert scheduler.running == {}


async def test_500_connections_that_drop_at_once_leave_nothing() -> None:
    scheduler = ScriptedClient(Script(ids("hello world"), end=None), admin_values={"metrics": ""})
    async with serving(scheduler) as live:
        body = json.dumps({"messages": HI, "stream": True}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        for _ in range(500):
            _, writer = await asyncio.open_connection("127.0.0.1", live.server.port)
            writer.write(head.encode() + body)
            await writer.drain()
            writer.transport.abort()
        async with httpx.AsyncClient(base_url=live.url) as http:
            while "quire_api_running_answers 0.0" not in (await http.get("/metrics")).text:
                pass
        assert scheduler.running == {}


async def test_running_streams_end_within_the_grace_time() -> None:
    """SIGTERM's own path: readiness goes, new work gets 503, ten live streams end with [DONE]."""
    scheduler = ScriptedClient(Script(byte_ids("hello world"), hold=False), manual=True)
    async with serving(scheduler) as live, httpx.AsyncClient(base_url=live.url, timeout=30) as http:
        body = {"messages": HI, "stream": True}
        posts = [asyncio.create_task(http.post("/v1/chat/completions", json=body)) for _ in range(10)]
        await scheduler.wait_submitted(10)
        scheduler.step()
        async with httpx.AsyncClient(base_url=live.url) as other:
            assert (await other.get("/health/ready")).status_code == 200
            live.server.stop()
            assert (await other.get("/health/ready")).status_code == 503
            refused = await other.post("/v1/chat/completions", json={"messages": HI})
            assert refused.status_code == 503
        while scheduler.running:
            scheduler.step()
            await asyncio.sleep(0)
        for response in await asyncio.gather(*posts):
            chunks = events(response.text)
            assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "hello world"
        await live.task


async def test_streams_past_the_grace_time_are_told() -> None:
    scheduler = ScriptedClient(Script(ids("hello"), end=None))
    async with serving(scheduler, shutdown_grace_s=0.0) as live:
        async with httpx.AsyncClient(base_url=live.url) as http:
            request = http.build_request(
                "POST", "/v1/chat/completions", json={"messages": HI, "stream": True}
            )
            response = await http.send(request, stream=True)
            waiting = asyncio.create_task(http.post("/v1/completions", json={"prompt": "hi"}))
            await scheduler.wait_submitted(2)
            live.server.stop()
            *_, error, done = open_events((await response.aread()).decode())
            assert error["error"]["code"] == "shutting_down"
            assert done == "[DONE]"
            assert (await waiting).status_code == 503
        await live.task
        assert scheduler.running == {}


async def test_long_prompt_does_not_hold_up_others() -> None:
    """While a prompt of a few hundred thousand characters is tokenised the loop goes on turning."""
    text = "word " * 60_000
    tokenizer = tiny_tokenizer()
    inside, release = threading.Event(), threading.Event()

    class Slow:
        def encode_batch(self, texts: list[str], *, special: bool) -> Any:
            inside.set()
            release.wait(20)
            return tokenizer.encode_batch([text[:50] for text in texts], special=special)

    async with (
        serving(ScriptedClient(Script(ids("ok")))) as live,
        httpx.AsyncClient(base_url=live.url) as http,
    ):
        context = live.server._context
        context.text.encoder._tokenizer = Slow()  # type: ignore[assignment]  # only encode_batch is used
        long = asyncio.create_task(http.post("/v1/completions", json={"prompt": text}))
        assert await asyncio.to_thread(inside.wait, 20)
        assert (await http.get("/health")).status_code == 200
        release.set()
        assert (await long).status_code == 200


def test_port_in_use_names_the_flag() -> None:
    with contextlib.closing(listen("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}.*--port"):
            listen("127.0.0.1", port)


def test_port_that_processes_share() -> None:
    with contextlib.closing(listen("127.0.0.1", 0, shared=True)) as first:
        listen("127.0.0.1", first.getsockname()[1], shared=True).close()


async def test_a_body_that_still_comes_at_the_shutdown_gets_an_answer() -> None:
    scheduler = ScriptedClient(Script(ids("hello")))
    async with serving(scheduler, shutdown_grace_s=0.0) as live:
        reader, writer = await asyncio.open_connection("127.0.0.1", live.server.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        await writer.drain()
        async with httpx.AsyncClient(base_url=live.url) as http:
            assert (await http.get("/health/live")).status_code == 200  # the server has read the line above
        live.server.stop()
        assert b" 503 " in await reader.readline()
        assert b"shutting down" in await reader.read()
        writer.close()
        await live.task
