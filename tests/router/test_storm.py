"""A storm over three workers: killed, cut off, stopped, silent, restarted and ended in order, all at random,
while requests come, leave and time out. Every answer that ends is right, every one that doesn't has a reason,
and at the end nothing is held by anyone.

CI runs a seeded sample; QUIRE_TEST_FULL=1 all seeds."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections import Counter
from typing import Any

import pytest

from proto.worker_pb2 import Sampling
from router.ipc.client import RefusedError
from router.ipc.local_client import LocalClient
from router.ipc.messages import SamplingSpec
from router.scheduler import Scheduler
from tests.router.service import Collector, ask_all, scheduler, until
from tests.router.sim import text
from worker.fake import expected_tokens
from worker.testing import FakeWorker, fake_worker

FULL = os.environ.get("QUIRE_TEST_FULL") == "1"
N_EVENTS = 14
STEMS = [text(70, seed=i) for i in range(3)]


@pytest.mark.parametrize("seed", range(40) if FULL else range(1))
async def test_storm(seed: int) -> None:
    rng = random.Random(seed)
    worker: dict[str, Any] = {
        "fake_strict": True,
        "fake_step_ms": 1.0,
        "fake_eos_rate": rng.choice((0.0, 0.02)),
        "block_size": rng.choice((1, 4, 16)),
        "max_batch_prefill_tokens": rng.choice((80, 256)),
        "max_batch_size": rng.choice((3, 16)),
    }
    worker["fake_n_blocks"] = 800 // worker["block_size"] + 1
    router: dict[str, Any] = {
        "window": rng.choice((1, 2, 4)),
        "prefix_caching": rng.random() < 0.8,
        "prefill_chunking": rng.random() < 0.8,
        "waiting_served_ratio": rng.choice((0.0, 1.0)),
        "health_timeout_s": 0.4,
    }
    async with (
        fake_worker(**worker) as one,
        fake_worker(**worker) as two,
        fake_worker(**worker) as three,
        scheduler(one.address, two.address, three.address, **router) as s,
    ):
        client = LocalClient(s)
        asked: list[Asked] = []
        traffic = asyncio.create_task(_traffic(client, asked, random.Random(seed + 1000)))
        workers = [one, two, three]
        for _ in range(N_EVENTS):
            await asyncio.sleep(rng.uniform(0.02, 0.15))
            await _strike(rng, rng.choice(workers))
        for each in workers:
            each.resume()
            if each._server is None:
                await each.restart()
        traffic.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await traffic
        ends = await _settle(s, client, asked, one)
        assert ends["right"] > 0
        for each in workers:
            assert each.fatal == [], "a wrong or uncomputed block was read"


async def _strike(rng: random.Random, worker: FakeWorker) -> None:
    """One thing happens to one worker."""
    running = worker._server is not None
    kind = rng.choice(
        ("kill", "restart", "cut", "cut", "pause", "partition", "resume", "terminate", "restart")
    )
    if kind == "restart":
        await worker.restart()
    elif kind == "resume":
        worker.resume()
    elif running and kind == "terminate":
        worker.resume()
        await worker.terminate()
    elif running:
        result = getattr(worker, kind)()
        if result is not None:
            await result


Asked = tuple[Collector, SamplingSpec, bool]
"""What was asked, how, and whether the client left before its end."""


async def _traffic(client: LocalClient, asked: list[Asked], rng: random.Random) -> None:
    """Requests of all kinds until cancelled; `asked` keeps them."""
    while True:
        prompt = rng.choice(STEMS)[: rng.randrange(1, 70)] + text(rng.randrange(0, 6), seed=rng.randrange(99))
        sampling = SamplingSpec(temperature=0.0)
        if rng.random() < 0.4:
            sampling = SamplingSpec(
                temperature=0.8, seed=rng.randrange(1000), presence_penalty=0.3, min_new_tokens=3
            )
        n = rng.choice((1, 1, 1, 3))
        fields = {"deadline_s": rng.choice((0.05, 0.5, 60.0)), "priority": rng.choice((0, 0, 1))}
        try:
            made = await ask_all(
                client, [prompt] * n, n_new=rng.choice((1, 5, 40, 120)), sampling=sampling, **fields
            )
        except RefusedError as error:
            if error.error.status != 503:
                raise
            await asyncio.sleep(0.02)
            continue
        for collector in made:
            leaves = rng.random() < 0.2
            asked.append((collector, sampling, leaves))
            if leaves:
                client.cancel([collector.id])
        await asyncio.sleep(rng.uniform(0, 0.01))


async def _settle(s: Scheduler, client: LocalClient, asked: list[Asked], worker: FakeWorker) -> Counter[str]:
    """All that was asked comes to its end; what it came to."""
    core = s.core
    assert core is not None
    await until(lambda: core.n_requests == 0, "every request has ended")
    ends: Counter[str] = Counter()
    for collector, sampling, leaves in asked:
        expected = expected_tokens(
            collector.prompt,
            n=collector.n_new,
            vocab=worker.runner.vocab,
            sampling=Sampling(
                temperature=sampling.temperature,
                seed=sampling.seed or 0,
                presence_penalty=sampling.presence_penalty,
                min_new_tokens=sampling.min_new_tokens,
                repetition_penalty=sampling.repetition_penalty,
            ),
        )
        assert collector.tokens == expected[: len(collector.tokens)]
        if leaves:
            ends["left"] += 1
        elif collector.error is not None:
            assert collector.error.status in (500, 504), collector.error
            ends[collector.error.code or collector.error.type] += 1
        else:
            assert collector.tokens == expected
            ends["right"] += 1
    await until(lambda: client.state.n_replicas_live == 3, "all are back")
    assert await client.admin("check") == {"ok": True}
    for rs in core.replicas.values():
        assert rs.allocator.stats().leased == 0
    assert not s.failed.done()
    return ends
