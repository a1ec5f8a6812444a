"""What operators read after a known number of requests (TGI #2887), and what refused requests leave in it
(SGLang #25811)."""

from __future__ import annotations

import asyncio

from tests.e2e.clients import Body, assert_empty, complete_all, connected, defaults, metric, state_of
from tests.e2e.conftest import FAKE
from tests.e2e.serving import StartServer

REFUSED: list[Body] = [
    {"prompt": [], "max_tokens": 4},
    {"prompt": [5, 10**6], "max_tokens": 4},
    {"prompt": [5], "max_tokens": 10**6},
    {"prompt": [5], "temperature": -1},
    {"prompt": [5], "logit_bias": {"999999": 1}},
    {"prompt": [5], "model": "another"},
    {"prompt": 7},
]


async def test_ten_requests_then_refused_ones(start_server: StartServer) -> None:
    server = await asyncio.to_thread(start_server, flags=FAKE)
    async with connected(server) as client:
        bodies: list[Body] = [
            {"prompt": list(range(10 * i + 10, 10 * i + 60)), "max_tokens": 5} for i in range(10)
        ]
        await complete_all(client, bodies)
        assert await metric(client, "quire_requests_total") == 10
        assert await metric(client, "quire_time_to_first_token_seconds_count") == 10
        assert await metric(client, "quire_inter_token_seconds_count") == 40
        assert await metric(client, "quire_api_time_to_first_token_seconds_count") == 10
        for name in ("used", "cached", "free"):
            assert await metric(client, f"quire_kv_blocks_{name}") >= 0
        assert await metric(client, "quire_kv_blocks_used") == 0
        assert await metric(client, "quire_kv_blocks_cached") > 0
        for name in ("waiting", "running"):
            assert await metric(client, f"quire_requests_{name}") == 0

        for body in REFUSED * 5:
            answer = await client.post("/v1/completions", json={**defaults(), **body})
            assert 400 <= answer.status_code < 500, answer.text
            assert answer.json()["error"]["message"]
        assert await metric(client, "quire_replicas_lost_total") == 0
        assert await metric(client, "quire_replicas_live") == 1
        (replica,) = (await state_of(client))["replicas"]
        assert replica["state"] == "live"
        assert not replica["half_open"]
        assert await metric(client, "quire_requests_total") == 10
        assert len((await complete_all(client, bodies))[0]) == 5
        await assert_empty(client)
