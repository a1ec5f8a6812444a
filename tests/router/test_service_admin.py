"""What operators ask of a scheduler that serves: metrics, the cache, draining one worker."""

from __future__ import annotations

import pytest

from router.ipc.client import RefusedError
from router.ipc.local_client import LocalClient
from tests.router.service import ask, ask_all, scheduler, until
from tests.router.sim import text
from worker.testing import fake_worker


async def test_metrics_count_requests_and_forget_a_lost_replica() -> None:
    """TGI #2887, vLLM #19849."""
    async with (
        fake_worker(fake_step_ms=1.0) as one,
        fake_worker(fake_step_ms=1.0) as two,
        scheduler(one.address, two.address) as s,
    ):
        client = LocalClient(s)
        await until(lambda: client.state.n_replicas_live == 2, "both live")
        for answer in await ask_all(client, [text(40, seed=1)] * 10, n_new=5):
            await answer.end()
        metrics: str = await client.admin("metrics")
        assert "quire_time_to_first_token_seconds_count 10.0" in metrics
        assert "quire_inter_token_seconds_count 40.0" in metrics
        assert "quire_requests_total 10.0" in metrics
        assert f'quire_replica_output_tokens_total{{replica="{one.address}"}}' in metrics
        assert f'quire_kv_blocks_free{{replica="{one.address}"}}' in metrics
        await one.kill()
        await until(lambda: client.state.n_replicas_live == 1, "the loss is seen")
        metrics = await client.admin("metrics")
        assert one.address not in metrics
        assert f'quire_kv_blocks_free{{replica="{two.address}"}}' in metrics
        assert "quire_requests_total 10.0" in metrics
        assert "quire_replicas_lost_total 1.0" in metrics


async def test_the_cache_can_be_looked_at_and_flushed() -> None:
    async with fake_worker() as worker, scheduler(worker.address) as s:
        client = LocalClient(s)
        answer = await ask(client, text(100, seed=1), n_new=5)
        await answer.end()
        cache = await client.admin("cache", limit=5)
        assert cache["prefix_caching"] is True
        assert cache["replicas"][0]["stats"]["cached"] == 6
        assert (await client.admin("flush_cache"))["blocks_freed"] == 6
        again = await ask(client, text(100, seed=1), n_new=5)
        await again.end()
        assert again.started is not None
        assert again.started.cached_tokens == 0
        with pytest.raises(RefusedError) as unknown:
            await client.admin("nonsense")
        assert unknown.value.error.status == 400


async def test_a_worker_that_drains_ends_what_it_runs_and_gets_nothing_new() -> None:
    async with (
        fake_worker(fake_strict=True, fake_step_ms=1.0) as one,
        fake_worker(fake_strict=True, fake_step_ms=1.0) as other,
        scheduler(one.address, other.address) as s,
    ):
        client = LocalClient(s)
        long = [await ask(client, text(10, seed=i), n_new=300) for i in range(4)]
        for answer in long:
            await answer.has(1)
        assert s.core is not None
        busy = next(rs for rs in s.core.replicas.values() if rs.n_running)
        address = s.fleet.links[busy.replica_id].address
        n_running = busy.n_running
        reply = await client.admin("drain_replica", address=address)
        assert reply == {"address": address, "draining": True, "n_running": n_running}
        n_before = s.stats.n_migrated
        late = [await ask(client, text(10, seed=i), n_new=5) for i in range(100, 106)]
        for answer in late:
            await answer.end()
        assert busy.n_running <= n_running, "nothing new came"
        for answer in long:
            await answer.end()
        assert busy.n_running == 0
        assert s.stats.n_migrated == n_before, "nobody was moved"
        state = await client.admin("state")
        assert {r["address"]: r["draining"] for r in state["replicas"]}[address]
        assert state["oldest_wait_s"] == 0.0
        for answer in long + late:
            answer.assert_right(one)


async def test_with_every_worker_draining_requests_wait_until_one_is_back() -> None:
    async with fake_worker(fake_strict=True) as worker, scheduler(worker.address) as s:
        client = LocalClient(s)
        await client.admin("drain_replica", address=worker.address)
        answer = await ask(client, text(10, seed=1))
        await until(lambda: s.oldest_wait_s > 0, "it waits")
        assert not answer.tokens
        assert not s.state.ready
        assert "every worker drains" in s.state.reason
        await client.admin("drain_replica", address=worker.address, on=False)
        assert s.state.ready
        await answer.end()
        answer.assert_right(worker)


async def test_a_draining_worker_stays_so_when_its_stream_breaks() -> None:
    async with fake_worker(fake_strict=True) as worker, scheduler(worker.address) as s:
        client = LocalClient(s)
        await client.admin("drain_replica", address=worker.address)
        assert s.core is not None
        (replica_id,) = s.core.replicas
        before = s.core.replicas[replica_id]
        await s.fleet._remove(replica_id)  # its name was gone for a moment
        await s.fleet.resolve()
        core = s.core
        await until(lambda: len(core.replicas) == 1 and before not in core.replicas.values(), "it is back")
        assert all(rs.closing for rs in core.replicas.values())


async def test_draining_what_is_not_there() -> None:
    async with fake_worker(fake_strict=True) as worker, scheduler(worker.address) as s:
        client = LocalClient(s)
        with pytest.raises(RefusedError, match="no live worker has the address 'a:1'; known addresses: 127"):
            await client.admin("drain_replica", address="a:1")
        with pytest.raises(RefusedError, match="needs `address`"):
            await client.admin("drain_replica")
