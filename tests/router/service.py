"""A scheduler over real gRPC, with clients that collect, for tests of the shell."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from proto.codec import pack_i32
from router.config import RouterConfig
from router.ipc.client import SchedulerClient
from router.ipc.local_client import LocalClient
from router.ipc.messages import ErrorInfo, Failed, PromptLogprob, RequestSpec, SamplingSpec, Started
from router.scheduler import Scheduler
from worker.fake import expected_tokens
from worker.testing import FakeWorker

LIMIT_S = 20.0
"""How long a test waits for what must happen soon."""

QUICK = {
    "health_interval_s": 0.05,
    "health_timeout_s": 3.0,
    "connect_timeout_s": 1.0,
    "max_backoff_s": 0.2,
    "resolve_interval_s": 0.05,
}


class Collector:
    """A TokenSink that keeps what it gets."""

    def __init__(self, prompt: list[int], n_new: int) -> None:
        self.prompt = prompt
        self.n_new = n_new
        self.tokens: list[int] = []
        self.reason = 0
        self.started: Started | None = None
        self.error: ErrorInfo | None = None
        self.ended = asyncio.Event()
        self.id = 0
        self._grew = asyncio.Event()

    def on_started(self, started: Started) -> None:
        self.started = started

    def on_token(self, token: int, reason: int, logprob: tuple[float, bytes, bytes] | None) -> None:
        self.tokens.append(token)
        self.reason = reason
        self._grew.set()
        if reason:
            self.ended.set()

    def on_prompt_logprobs(self, part: PromptLogprob) -> None: ...

    def on_failed(self, failed: Failed) -> None:
        self.error = failed.error
        self.ended.set()
        self._grew.set()

    async def has(self, n: int) -> None:
        """Waits for the n-th token."""
        async with asyncio.timeout(LIMIT_S):
            while len(self.tokens) < n:
                assert self.error is None, self.error
                self._grew.clear()
                await self._grew.wait()

    async def end(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            await self.ended.wait()

    def assert_right(self, worker: FakeWorker) -> None:
        assert self.error is None, self.error
        assert self.tokens == expected_tokens(self.prompt, n=self.n_new, vocab=worker.runner.vocab)


async def ask(client: SchedulerClient, prompt: list[int], *, n_new: int = 20, **fields: Any) -> Collector:
    (collector,) = await ask_all(client, [prompt], n_new=n_new, **fields)
    return collector


async def ask_all(
    client: SchedulerClient, prompts: list[list[int]], *, n_new: int = 20, **fields: Any
) -> list[Collector]:
    collectors = [Collector(prompt, n_new) for prompt in prompts]
    fields.setdefault("sampling", SamplingSpec(temperature=0.0))
    specs = []
    for collector in collectors:
        collector.id = client.next_id()
        spec = RequestSpec(id=collector.id, prompt=pack_i32(collector.prompt), max_new_tokens=n_new, **fields)
        specs.append(spec)
    await client.submit(specs, collectors)
    return collectors


@contextlib.asynccontextmanager
async def scheduler(*addresses: str, ready: bool = True, **config: Any) -> AsyncIterator[Scheduler]:
    made = Scheduler(RouterConfig(replicas=addresses, **{**QUICK, **config}))
    try:
        await made.start()
        if ready:
            client = LocalClient(made)
            async with asyncio.timeout(LIMIT_S):
                await client.wait_ready()
            await client.close()
        yield made
    finally:
        await made.close()
        if made.failed.done():
            made.failed.exception()


async def until(condition: Callable[[], bool], what: str) -> None:
    """Polls the event loop, not the clock's seconds: for states that nobody announces."""
    try:
        async with asyncio.timeout(LIMIT_S):
            while not condition():  # noqa: ASYNC110  (there is no event for it)
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"never happened: {what}") from None
