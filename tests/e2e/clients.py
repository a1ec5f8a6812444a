"""Async clients of a running server: streamed and whole completions, counters, waiting for a state."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.serving import Server, routing

Body = dict[str, Any]

LIMIT_S = 60.0
"""How long a test waits for what must happen soon."""


@dataclass
class Stream:
    """One streamed completion as it arrives."""

    status: int = 0
    headers: httpx.Headers = field(default_factory=httpx.Headers)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    """Per choice."""
    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    usage: Body = field(default_factory=dict)
    error: Body | None = None
    done: bool = False
    """[DONE] came."""
    grew: asyncio.Event = field(default_factory=asyncio.Event)

    async def has(self, n: int) -> None:
        """Waits for the n-th token of the first choice."""
        async with asyncio.timeout(LIMIT_S):
            while len(self.tokens.get(0, ())) < n:
                assert self.error is None, self.error
                self.grew.clear()
                await self.grew.wait()

    async def read(self, client: httpx.AsyncClient, body: Body) -> Stream:
        """Until it ends. A stream that breaks raises httpx.HTTPError."""
        request = {**defaults(), "stream": True, "stream_options": {"include_usage": True}, **body}
        async with client.stream("POST", "/v1/completions", json=request) as response:
            self.status, self.headers = response.status_code, response.headers
            if self.status != 200:
                self.error = json.loads(await response.aread())["error"]
                return self
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    self._take(line.removeprefix("data:").strip())
        return self

    def _take(self, data: str) -> None:
        assert not self.done, "nothing comes after the end"
        if data == "[DONE]":
            self.done = True
        else:
            event = json.loads(data)
            if "error" in event:
                self.error = event["error"]
            self.usage = event.get("usage") or self.usage
            for choice in event.get("choices", ()):
                index = choice["index"]
                self.texts[index] = self.texts.get(index, "") + choice["text"]
                self.tokens.setdefault(index, []).extend(choice.get("token_ids") or ())
                if choice["finish_reason"]:
                    self.reasons[index] = choice["finish_reason"]
        self.grew.set()

    def assert_whole(self) -> None:
        assert self.status == 200, self.error
        assert self.error is None, self.error
        assert self.done
        assert self.reasons


def defaults() -> Body:
    return {"temperature": 0, "ignore_eos": True, "return_token_ids": True}


@contextlib.asynccontextmanager
async def connected(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
        yield client


@contextlib.asynccontextmanager
async def routed(
    folder: Path, *replicas: str, n_live: int, flags: Sequence[str] = ()
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a router of its own for workers that run already; ready, with `n_live` of them live."""
    context = routing(folder, replicas=replicas, flags=flags)
    server = await asyncio.to_thread(context.__enter__)
    try:
        async with connected(server) as client:
            await until(lambda: is_ready(client), "ready")
            await until(lambda: has_live(client, n_live), f"{n_live} are live")
            yield client
    finally:
        await asyncio.to_thread(context.__exit__, None, None, None)


def start(client: httpx.AsyncClient, body: Body) -> tuple[Stream, asyncio.Task[Stream]]:
    """A stream that is read in the background; cancel its task to hang up."""
    stream = Stream()
    return stream, asyncio.create_task(stream.read(client, body))


async def complete(client: httpx.AsyncClient, body: Body) -> list[int]:
    """The tokens of one whole answer."""
    choice = await choice_of(client, body)
    tokens: list[int] = choice["token_ids"]
    return tokens


async def choice_of(client: httpx.AsyncClient, body: Body) -> Body:
    response = await client.post("/v1/completions", json={**defaults(), **body})
    assert response.status_code == 200, response.text
    choice: Body = response.json()["choices"][0]
    return choice


async def complete_all(
    client: httpx.AsyncClient, bodies: Sequence[Body], *, at_once: int | None = None
) -> list[list[int]]:
    """Answers in the order of `bodies`, `at_once` of them (all when None) side by side."""
    gate = asyncio.Semaphore(at_once or len(bodies))

    async def one(body: Body) -> list[int]:
        async with gate:
            return await complete(client, body)

    return list(await asyncio.gather(*(one(body) for body in bodies)))


async def metric(client: httpx.AsyncClient, name: str) -> float:
    """The sum over all labels of one family's sample `name`."""
    lines = (await client.get("/metrics")).text.splitlines()
    values = [line.rsplit(" ", 1)[1] for line in lines if line.split("{")[0].split(" ")[0] == name]
    assert values, f"no metric {name}"
    return sum(map(float, values))


async def state_of(client: httpx.AsyncClient) -> Body:
    state: Body = (await client.get("/admin/state")).json()
    return state


async def assert_empty(client: httpx.AsyncClient) -> None:
    """No request is left, every block is free or cached, and the allocators' invariants hold."""

    async def empty() -> bool:
        state = await state_of(client)
        leased = sum(replica["blocks"]["leased"] for replica in state["replicas"] if "blocks" in replica)
        return state["n_requests"] == 0 and leased == 0

    await until(empty, "the server is empty")
    response = await client.post("/admin/check")
    assert response.status_code == 200, response.text


async def until(condition: Callable[[], Any], what: str, *, limit_s: float = LIMIT_S) -> float:
    """Asks again and again, for states that nobody announces; returns the seconds it took."""
    began_s = time.monotonic()
    try:
        async with asyncio.timeout(limit_s):
            while True:
                answer = condition()
                if await answer if asyncio.iscoroutine(answer) else answer:
                    return time.monotonic() - began_s
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"never happened: {what}") from None


async def is_ready(client: httpx.AsyncClient) -> bool:
    return (await client.get("/health/ready")).status_code == 200


async def has_live(client: httpx.AsyncClient, n: int) -> bool:
    return await metric(client, "quire_replicas_live") == n


async def has_lost(client: httpx.AsyncClient, n: int) -> bool:
    """At least `n` replicas were lost since the start."""
    return await metric(client, "quire_replicas_lost_total") >= n
