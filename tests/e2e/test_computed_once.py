"""Equal prompts sent at once are computed once, over HTTP, counted by the server's own counters."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.clients import (
    assert_empty,
    complete,
    complete_all,
    connected,
    metric,
    start,
    state_of,
    until,
)
from tests.e2e.conftest import FAKE
from tests.e2e.serving import Server, serving

BLOCK = 16
CHUNK = 64
N = 32
PREFILLED = "quire_prefill_tokens_total"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A fake worker whose prompts take time: about 9 ms a chunk."""
    flags = (
        *FAKE,
        "--fake-strict",
        "--fake-prefill-token-us=100",
        f"--block-size={BLOCK}",
        f"--max-batch-prefill-tokens={CHUNK}",
    )
    with serving(tmp_path_factory.mktemp("once"), flags=flags) as server:
        yield server


def _prompt(n: int, *, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100, 40_000) for _ in range(n)]


@pytest.mark.parametrize("n_tokens", [40, 64, 1000])
async def test_32_equal_prompts(server: Server, n_tokens: int) -> None:
    """Shorter than a chunk, just one chunk, and many."""
    async with connected(server) as client:
        before = await metric(client, PREFILLED)
        body = {"prompt": _prompt(n_tokens, seed=n_tokens), "max_tokens": 4}
        answers = await complete_all(client, [body] * N)
        assert len(set(map(tuple, answers))) == 1
        assert await metric(client, PREFILLED) - before <= n_tokens + (N - 1) * BLOCK
        await assert_empty(client)


@pytest.mark.parametrize("stream", [True, False])
async def test_the_first_of_them_leaves_in_mid_prefill(server: Server, stream: bool) -> None:
    n_tokens = 6000
    async with connected(server) as client:
        before = await metric(client, PREFILLED)
        body = {"prompt": _prompt(n_tokens, seed=stream), "max_tokens": 4, "stream": stream}
        first = asyncio.create_task(_ask(client, body))

        async def n_prefilled() -> float:
            return await metric(client, PREFILLED) - before

        async def begun() -> bool:
            return await n_prefilled() > 0

        await until(begun, "the first prompt is in prefill")
        others = asyncio.create_task(complete_all(client, [{**body, "stream": False}] * (N - 1)))

        async def all_there() -> bool:
            return bool((await state_of(client))["n_requests"] == N)

        await until(all_there, "the others wait for it")
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)

        async def gone() -> bool:
            return bool((await state_of(client))["n_requests"] < N)

        await until(gone, "the first has left")
        assert await n_prefilled() < n_tokens, "it left in mid-prefill"
        answers = await others
        assert len(set(map(tuple, answers))) == 1
        assert await n_prefilled() <= n_tokens + (N - 1) * BLOCK
        assert await complete(client, {**body, "stream": False}) == answers[0]
        await assert_empty(client)


async def _ask(client: httpx.AsyncClient, body: dict[str, object]) -> None:
    if body["stream"]:
        await start(client, body)[1]
    else:
        await complete(client, body)


async def test_the_second_turn_recomputes_only_its_new_words(server: Server) -> None:
    async with connected(server) as client:
        prompt = _prompt(200, seed=9)
        answer = await complete(client, {"prompt": prompt, "max_tokens": 40})
        turn = [*prompt, *answer, *_prompt(20, seed=10)]
        before = await metric(client, PREFILLED)
        response = await client.post(
            "/v1/completions", json={"model": "smollm2", "prompt": turn, "max_tokens": 4, "ignore_eos": True}
        )
        cached = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        # The last token of the answer never had KV, and blocks are whole.
        assert cached == (len(prompt) + len(answer) - 1) // BLOCK * BLOCK
        assert await metric(client, PREFILLED) - before == len(turn) - cached
