"""The scheduler over real gRPC: streams, losses, health, discovery, drain."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from router.config import RouterConfig
from router.ipc.client import RefusedError
from router.ipc.local_client import LocalClient
from router.replica import LinkState
from router.scheduler import Scheduler
from settings.errors import ConfigError
from tests.router.service import ask, scheduler, until
from tests.router.sim import text
from worker.fake import RowFault
from worker.testing import fake_worker


async def test_streams_to_many_clients() -> None:
    async with fake_worker(fake_strict=True) as worker, scheduler(worker.address) as s:
        client = LocalClient(s)
        answers = [await ask(client, text(10 + i, seed=i), n_new=50) for i in range(20)]
        for answer in answers:
            await answer.end()
            answer.assert_right(worker)
            assert answer.started is not None
        assert await client.admin("check") == {"ok": True}
        assert not s.failed.done()


async def test_one_of_two_workers_is_killed_in_mid_stream() -> None:
    """TGI #2593, Dynamo #984: unbroken streams, right texts."""
    async with (
        fake_worker(fake_strict=True, fake_step_ms=1.0) as one,
        fake_worker(fake_strict=True, fake_step_ms=1.0) as two,
        scheduler(one.address, two.address) as s,
    ):
        client = LocalClient(s)
        await until(lambda: client.state.n_replicas_live == 2, "both live")
        answers = [await ask(client, text(10, seed=i), n_new=150) for i in range(16)]
        for answer in answers:
            await answer.has(5)
        await one.kill()
        for answer in answers:
            await answer.end()
            answer.assert_right(two)
        assert s.stats.n_migrated > 0
        assert client.state.ready
        assert client.state.n_replicas_live == 1
        await one.restart()
        await until(lambda: client.state.n_replicas_live == 2, "the killed worker is back")


async def test_a_single_worker_comes_back_and_the_stream_goes_on() -> None:
    async with fake_worker(fake_strict=True, fake_step_ms=1.0) as worker, scheduler(worker.address) as s:
        client = LocalClient(s)
        answer = await ask(client, text(10, seed=1), n_new=120)
        await answer.has(5)
        await worker.kill()
        await until(lambda: not client.state.ready, "not ready without a worker")
        late = await ask(client, text(10, seed=2), n_new=20)
        await worker.restart()
        for waiting in (answer, late):
            await waiting.end()
            waiting.assert_right(worker)


async def test_with_no_worker_the_deadline_ends_it_with_an_error() -> None:
    async with fake_worker(fake_step_ms=1.0) as worker, scheduler(worker.address) as s:
        client = LocalClient(s)
        answer = await ask(client, text(10, seed=1), n_new=2000, deadline_s=0.3)
        await answer.has(3)
        await worker.kill()
        await answer.end()
        assert answer.error is not None
        assert answer.error.status == 504


async def test_a_cut_connection_never_hits_stale_blocks() -> None:
    async with fake_worker(fake_strict=True, fake_step_ms=1.0) as worker, scheduler(worker.address) as s:
        client = LocalClient(s)
        answers = [await ask(client, text(40, seed=i % 3), n_new=200) for i in range(8)]
        for n in (5, 20, 40):
            await answers[0].has(n)
            generation = s.fleet._generation
            worker.cut()
            await until(lambda g=generation: s.fleet._generation > g and client.state.ready, "reconnected")
        for answer in answers:  # the worker lived all the time: nobody is blamed
            await answer.end()
            answer.assert_right(worker)
        assert worker.runner.violations == []


async def test_a_stopped_worker_turns_readiness_off_and_comes_back() -> None:
    """vLLM #39863: in bounded time; the streams go on after it continues."""
    async with (
        fake_worker(fake_strict=True, fake_step_ms=1.0) as worker,
        scheduler(worker.address, health_timeout_s=0.5) as s,
    ):
        client = LocalClient(s)
        answer = await ask(client, text(10, seed=1), n_new=150)
        await answer.has(5)
        worker.pause()
        await until(lambda: not client.state.ready, "readiness is off")
        assert "health-timeout-s" in client.state.reason
        worker.resume()
        await until(lambda: client.state.ready, "readiness is back")
        await answer.end()
        answer.assert_right(worker)
        assert worker.runner.violations == []


async def test_a_worker_that_makes_no_progress_is_lost() -> None:
    async with (
        fake_worker(fake_strict=True, fake_step_ms=1.0) as stuck,
        fake_worker(fake_strict=True, fake_step_ms=1.0) as other,
        scheduler(stuck.address, ready=True, stall_timeout_s=0.3) as s,
    ):
        client = LocalClient(s)
        answer = await ask(client, text(10, seed=1), n_new=150)
        await answer.has(5)
        stuck.faults.hang()
        await until(lambda: not client.state.ready, "readiness is off")
        assert "no progress" in next(iter(s.fleet.links.values())).reason
        stuck.faults.unhang()
        await answer.end()
        answer.assert_right(other)


async def test_one_worker_of_two_is_down_at_start() -> None:
    """SGLang #3802: it serves; the second joins later without a restart."""
    async with fake_worker(fake_strict=True) as one, fake_worker(fake_strict=True) as two:
        await two.kill()
        async with scheduler(one.address, two.address) as s:
            client = LocalClient(s)
            answer = await ask(client, text(10, seed=1))
            await answer.end()
            answer.assert_right(one)
            assert client.state.n_replicas_live == 1
            await two.restart()
            await until(lambda: client.state.n_replicas_live == 2, "the second joins")


async def test_a_worker_that_dies_on_every_step() -> None:
    """Infera #82: the other takes the load, nothing fails, attempts grow apart."""
    async with (
        fake_worker(fake_device_error_at=3) as bad,
        fake_worker(fake_strict=True, fake_step_ms=1.0) as good,
        scheduler(bad.address, good.address) as s,
    ):
        client = LocalClient(s)
        answers = [await ask(client, text(10, seed=i), n_new=60) for i in range(12)]
        for answer in answers:
            await answer.end()
            answer.assert_right(good)
        assert not s.failed.done()


async def test_only_the_failing_row_fails() -> None:
    """TGI #2316."""
    async with fake_worker(fake_strict=True) as worker, scheduler(worker.address) as s:
        client = LocalClient(s)
        worker.faults.rows.append(RowFault(token=999, after=4))
        good = [await ask(client, text(20, seed=i, vocab=900)) for i in range(7)]
        bad = await ask(client, [*text(20, seed=50, vocab=900), 999])
        for answer in good:
            await answer.end()
            answer.assert_right(worker)
        await bad.end()
        assert bad.error is not None
        assert len(bad.tokens) == 4


async def test_an_exception_in_the_scheduler_is_never_silent() -> None:
    """TGI #3050: readiness turns false and `failed` is done, so that the process ends."""
    async with fake_worker() as worker, scheduler(worker.address) as s:
        client = LocalClient(s)
        assert s.core is not None

        def broken(*args: Any, **kwargs: Any) -> None:
            raise ZeroDivisionError("injected")

        s.core._policy.compose = broken  # type: ignore[method-assign]
        await ask(client, text(10, seed=1))
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(asyncio.shield(s.failed), 10)
        assert not client.state.ready


async def test_an_exception_while_a_result_is_handled_is_never_silent() -> None:
    async with fake_worker() as worker, scheduler(worker.address) as s:
        client = LocalClient(s)
        assert s.core is not None

        def broken(*args: Any, **kwargs: Any) -> None:
            raise ZeroDivisionError("injected")

        s.core._results.apply = broken  # type: ignore[method-assign]
        await ask(client, text(10, seed=1))
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(asyncio.shield(s.failed), 10)
        assert not client.state.ready


async def test_drain_lets_streams_end_and_refuses_new_work() -> None:
    """vLLM #24885, TGI #1842."""
    async with fake_worker(fake_strict=True, fake_step_ms=1.0) as worker, scheduler(worker.address) as s:
        client = LocalClient(s)
        answers = [await ask(client, text(10, seed=i), n_new=40) for i in range(10)]
        await answers[0].has(2)
        draining = asyncio.create_task(s.drain(grace_s=15))
        await until(lambda: client.state.draining, "draining is announced")
        assert not client.state.ready
        with pytest.raises(RefusedError) as refused:
            await ask(client, text(10, seed=99))
        assert refused.value.error.status == 503
        await draining
        for answer in answers:
            assert answer.ended.is_set()
            answer.assert_right(worker)


async def test_the_grace_time_has_an_end() -> None:
    async with fake_worker(fake_step_ms=1.0) as worker, scheduler(worker.address) as s:
        client = LocalClient(s)
        answer = await ask(client, text(10, seed=1), n_new=10_000)
        await answer.has(2)
        await s.drain(grace_s=0.05)
        assert answer.error is not None
        assert answer.error.status == 503


async def test_a_worker_with_another_model_is_refused_and_the_others_go_on() -> None:
    async with (
        fake_worker(fake_strict=True) as one,
        fake_worker(fake_vocab_size=500) as other,
        scheduler(one.address, other.address) as s,
    ):
        client = LocalClient(s)
        links = list(s.fleet.links.values())
        await until(lambda: any(x.state is LinkState.REFUSED for x in links), "one is refused")
        refused = next(x for x in links if x.state is LinkState.REFUSED)
        assert "vocabulary" in refused.reason
        state = await client.admin("state")
        assert [r["state"] for r in state["replicas"]].count("refused") == 1
        answer = await ask(client, text(10, seed=1, vocab=400))
        await answer.end()
        assert answer.error is None


async def test_a_worker_of_another_router_is_left_alone() -> None:
    async with fake_worker(fake_strict=True, fake_step_ms=1.0) as worker, scheduler(worker.address) as first:
        client = LocalClient(first)
        answer = await ask(client, text(10, seed=1), n_new=100)
        async with scheduler(worker.address, ready=False) as second:
            (link,) = second.fleet.links.values()
            await until(lambda: first.router_id in link.reason, "the holder is named")
            assert not second.state.ready
        await answer.end()
        answer.assert_right(worker)


async def test_the_same_worker_under_two_addresses_is_used_once() -> None:
    async with fake_worker(fake_strict=True) as worker:
        port = worker.address.rsplit(":", 1)[1]
        async with scheduler(worker.address, f"localhost:{port}") as s:
            await until(
                lambda: any(x.state is LinkState.REFUSED for x in s.fleet.links.values()), "one is refused"
            )
            client = LocalClient(s)
            answer = await ask(client, text(10, seed=1))
            await answer.end()
            answer.assert_right(worker)


async def test_a_budget_that_does_not_fit_ends_the_start() -> None:
    """TGI #1692."""
    async with (
        fake_worker() as worker,
        scheduler(worker.address, ready=False, max_batch_prefill_tokens=100_000) as s,
    ):
        with pytest.raises(ConfigError, match="max-batch-prefill-tokens is 100000"):
            await asyncio.wait_for(asyncio.shield(s.failed), 10)


async def test_names_are_resolved_again_and_again() -> None:
    async with fake_worker(fake_strict=True) as one, fake_worker(fake_strict=True, fake_step_ms=1.0) as two:
        known = [one.address]

        async def lookup(name: str, port: int) -> list[str]:
            assert (name, port) == ("workers", 50051)
            return list(known)

        config = RouterConfig(replicas=("dns:///workers:50051",), resolve_interval_s=0.02)
        s = Scheduler(config, lookup=lookup, rng=random.Random(1))
        try:
            await s.start()
            client = LocalClient(s)
            await asyncio.wait_for(client.wait_ready(), 10)
            known.append(two.address)
            await until(lambda: client.state.n_replicas_live == 2, "the second address is found")
            answers = [await ask(client, text(10, seed=i), n_new=100) for i in range(6)]
            for answer in answers:
                await answer.has(2)
            known.remove(two.address)
            await until(lambda: client.state.n_replicas_known == 1, "the second address is left")
            for answer in answers:
                await answer.end()
                answer.assert_right(one)
        finally:
            await s.close()


async def test_unknown_workers_leave_a_reason() -> None:
    async with scheduler("127.0.0.1:1", ready=False, connect_timeout_s=0.1) as s:
        client = LocalClient(s)
        await until(lambda: "not reached" in client.state.reason, "the reason is told")
        with pytest.raises(RefusedError) as refused:
            await ask(client, text(10, seed=1))
        assert refused.value.error.status == 503


async def test_a_terminated_worker_hands_its_requests_on() -> None:
    async with (
        fake_worker(fake_strict=True, fake_step_ms=1.0) as one,
        fake_worker(fake_strict=True, fake_step_ms=1.0) as two,
        scheduler(one.address, two.address) as s,
    ):
        client = LocalClient(s)
        await until(lambda: client.state.n_replicas_live == 2, "both live")
        answers = [await ask(client, text(10, seed=i), n_new=100) for i in range(8)]
        for answer in answers:
            await answer.has(3)
        await one.terminate()
        for answer in answers:
            await answer.end()
            answer.assert_right(two)
        assert s.core is not None
        assert s.core.stats.n_replicas_lost == 0


async def test_an_orderly_end_is_never_taken_for_a_loss() -> None:
    """Also when steps are on their way to the worker while it ends the stream: no request is blamed."""
    async with (
        fake_worker(fake_strict=True, fake_step_ms=0.2) as one,
        fake_worker(fake_strict=True, fake_step_ms=0.2) as two,
        scheduler(one.address, two.address) as s,
    ):
        client = LocalClient(s)
        answers = [await ask(client, text(10, seed=i), n_new=4000) for i in range(8)]
        for worker in (one, two) * 3:
            await until(lambda: client.state.n_replicas_live == 2, "both live")
            n_before = len(answers[0].tokens)
            await answers[0].has(n_before + 5)
            await worker.terminate()
            await worker.restart()
        assert s.core is not None
        assert s.core.stats.n_replicas_lost == 0
        assert s.core.stats.n_failed == {}
        assert not any(answer.error for answer in answers)
