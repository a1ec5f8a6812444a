"""What the scheduler tells to who watches: all replicas in short, those asked for in full."""

from __future__ import annotations

import asyncio

import pytest

from router.ipc.client import RefusedError
from router.ipc.local_client import LocalClient
from router.live import MAX_DETAILS
from tests.router.service import ask, scheduler, until
from tests.router.sim import text
from worker.testing import fake_worker


async def test_a_running_request_in_full() -> None:
    async with fake_worker(fake_step_ms=2.0) as worker, scheduler(worker.address) as s:
        client = LocalClient(s)
        prompt = text(100, seed=1)
        answer = await ask(client, prompt, n_new=10_000)
        await answer.has(3)
        value = await client.admin("live", replicas=[0], limit=4)
        (brief,) = value["replicas"]
        assert (brief["state"], brief["n_running"]) == ("live", 1)
        blocks = brief["blocks"]
        assert blocks["free"] + blocks["cached"] + blocks["leased"] == blocks["n_blocks"] - 1
        assert value["totals"]["prompt_tokens"] == len(prompt)
        assert value["totals"]["output_tokens"] >= 3
        detail = value["details"]["0"]
        assert detail["replica"] == 0
        rows = detail["rows"]
        assert (rows["prompt"], rows["target"], rows["cached"]) == ([100], [100], [0])
        assert rows["known"][0] >= 103
        assert sum(n for _, n in detail["map"]["runs"]) == detail["map"]["n_blocks"] == blocks["n_blocks"]
        client.cancel([answer.id])
        await until(lambda: s.core is not None and s.core.n_requests == 0, "the request is gone")
        again = await ask(client, prompt, n_new=2)
        await again.end()
        idle = await client.admin("live", replicas=[0], limit=4)
        assert idle["details"]["0"]["rows"]["row"] == []
        (prefix,) = idle["details"]["0"]["prefixes"]
        assert prefix["hits"] == 1
        assert prefix["first_tokens"] == prompt[:32]
        assert prefix["last_tokens"] == prompt[prefix["n_tokens"] - 12 : prefix["n_tokens"]]
        assert idle["totals"]["hit_tokens"] > 0
        assert idle["time_s"] > value["time_s"]


async def test_only_what_was_asked_for_and_the_first_live_one_for_what_is_not_there() -> None:
    async with fake_worker() as one, fake_worker() as two, scheduler(one.address, two.address) as s:
        client = LocalClient(s)
        await until(lambda: s.fleet.n_live == 2, "both are live")
        assert (await client.admin("live"))["details"] == {}
        value = await client.admin("live", replicas=[1, 99])
        assert len(value["replicas"]) == 2
        assert {asked: detail["replica"] for asked, detail in value["details"].items()} == {"1": 1, "99": 0}


async def test_before_any_worker_is_there() -> None:
    async with scheduler("127.0.0.1:1", ready=False) as s:
        client = LocalClient(s)
        await asyncio.sleep(0)
        value = await client.admin("live", replicas=[0])
        assert value["ready"] is False
        assert value["details"] == {}
        assert value["block_size"] is None
        (brief,) = value["replicas"]
        assert "blocks" not in brief


@pytest.mark.parametrize(
    ("args", "param"),
    [
        ({"limit": -1}, "limit"),
        ({"limit": 101}, "limit"),
        ({"limit": "x"}, "limit"),
        ({"replicas": 3}, "replicas"),
        ({"replicas": ["a"]}, "replicas"),
        ({"replicas": list(range(MAX_DETAILS + 1))}, "replicas"),
    ],
)
async def test_wrong_arguments(args: dict[str, object], param: str) -> None:
    async with scheduler("127.0.0.1:1", ready=False) as s:
        with pytest.raises(RefusedError) as refused:
            await LocalClient(s).admin("live", **args)
        assert refused.value.error.param == param
