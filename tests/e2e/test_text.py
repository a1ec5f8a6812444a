"""Greedy text of the default model where others' servers went wrong: shared prefixes, borders of blocks,
batches of any size, long answers, a pool that is full to the last token. Two answers are equal when they
differ only after a tie (`ties.py`)."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.clients import (
    Body,
    assert_empty,
    choice_of,
    complete,
    complete_all,
    connected,
    metric,
    start,
)
from tests.e2e.serving import Server, StartServer, serving
from tests.e2e.ties import assert_same

pytestmark = pytest.mark.slow

FULL = os.environ.get("QUIRE_TEST_FULL") == "1"
BLOCK = 16
POOL = 1024
CHUNK = 64
SEED = 7

WORDS = [
    "river",
    "stone",
    "bridge",
    "morning",
    "letter",
    "engine",
    "garden",
    "winter",
    "captain",
    "island",
    "market",
    "silver",
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Small chunks and a small pool: prompts are split, and cached blocks have to give way."""
    flags = (
        f"--max-batch-total-tokens={POOL}",
        f"--max-batch-prefill-tokens={CHUNK}",
        f"--block-size={BLOCK}",
    )
    with serving(tmp_path_factory.mktemp("text"), flags=flags) as server:
        yield server


@pytest.fixture(scope="module")
def uncached(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("uncached"), flags=("--no-prefix-caching",)) as server:
        yield server


async def test_the_longest_prompt_right_after_the_start(server: Server) -> None:
    """TGI #1374, #2744: the first request fills the pool to the last token; then others do, side by side."""
    async with connected(server) as client:
        ids = await _ids(client, _text(7000, seed=1))
        assert len(ids) >= POOL
        assert len(await complete(client, {"prompt": ids[: POOL - 1], "max_tokens": 1})) == 1
        fillers = [
            {"prompt": ids[i : i + n], "max_tokens": POOL // 4 - n}
            for i, n in enumerate((250, 240, 200, 255))
        ]
        for body, tokens in zip(fillers, await complete_all(client, fillers), strict=True):
            assert len(tokens) == body["max_tokens"]
        await assert_empty(client)


@pytest.mark.timeout(1200)
async def test_shared_prefixes(server: Server, uncached: Server) -> None:
    """TGI #2871, #3043: random shared prefixes, 32 in parallel, twice; equal to the cache switched off.
    All 200 at full size, else a seeded sample."""
    rng = random.Random(SEED)
    stems = [_text(300, seed=i) for i in range(4)]
    prompts = [
        rng.choice(stems)[: rng.randrange(20, 300)] + _text(40, seed=100 + i)
        for i in range(200 if FULL else 16)
    ]
    bodies: list[Body] = [{"prompt": prompt, "max_tokens": 10} for prompt in prompts]
    async with connected(uncached) as client:
        expected = [await choice_of(client, {**body, "logprobs": 2}) for body in bodies]
        assert await metric(client, "quire_cache_hit_tokens_total") == 0
    async with connected(server) as client:
        for _ in range(2):
            for tokens, right in zip(await complete_all(client, bodies, at_once=32), expected, strict=True):
                assert_same(right, tokens)
        assert await metric(client, "quire_cache_hit_tokens_total") > 0
        await assert_empty(client)


async def test_prefix_caching_that_is_off(uncached: Server) -> None:
    """TGI #2676, #3333: it is off, /info says so and why, nothing is ever found."""
    async with connected(uncached) as client:
        info = (await client.get("/info")).json()
        assert info["prefix_caching"] is False
        assert "--no-prefix-caching" in info["prefix_caching_reason"]
        for _ in range(2):
            body = {"prompt": list(range(100, 164)), "max_tokens": 2}
            usage = (await client.post("/v1/completions", json=body)).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        assert await metric(client, "quire_cache_hit_tokens_total") == 0
        assert await metric(client, "quire_kv_blocks_cached") == 0


async def test_the_third_of_three_prompts_is_put_back(server: Server) -> None:
    """TGI #2489: a prefill budget of 64, prompts of 32 + 32 + 40 tokens at once."""
    async with connected(server) as client:
        ids = await _ids(client, _text(600, seed=2))
        bodies: list[Body] = [
            {"prompt": ids[at : at + n], "max_tokens": 12} for at, n in ((0, 32), (32, 32), (64, 40))
        ]
        alone = []
        for body in bodies:
            await _flush(client)
            alone.append(await choice_of(client, {**body, "logprobs": 2}))
        await _flush(client)
        for _ in range(2):
            for tokens, right in zip(await complete_all(client, bodies), alone, strict=True):
                assert_same(right, tokens)


async def test_around_a_block_border(server: Server) -> None:
    """vLLM #5543, SGLang #4175: cold, warm, and with a cached prefix that ends one token before, on and after
    the border of a block."""
    async with connected(server) as client:
        ids = (await _ids(client, _text(900, seed=3)))[: 5 * BLOCK]
        body: Body = {"prompt": ids, "max_tokens": 12}
        await _flush(client)
        cold = await choice_of(client, {**body, "logprobs": 2})
        assert_same(cold, await complete(client, body))
        for end in (3 * BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 1, 5 * BLOCK - 1, 5 * BLOCK):
            await _flush(client)
            await complete(client, {"prompt": ids[:end], "max_tokens": 1})
            assert_same(cold, await complete(client, body))


async def test_batches_of_any_size(server: Server) -> None:
    """vLLM #51187: the same request gives the same tokens among 1, 7, 44 and 129."""
    async with connected(server) as client:
        body: Body = {"prompt": _text(60, seed=4), "max_tokens": 10}
        alone = await choice_of(client, {**body, "logprobs": 2})
        for n in (1, 7, 44, 129) if FULL else (7, 44):
            others: list[Body] = [
                {"prompt": _text(10 + i % 20, seed=1000 + i), "max_tokens": 6 + i % 6} for i in range(n - 1)
            ]
            tokens = (await complete_all(client, [*others, body]))[-1]
            assert_same(alone, tokens)


@pytest.mark.timeout(1200)
async def test_a_long_answer_is_one_sequence(server: Server, uncached: Server) -> None:
    """TGI #2803: one uninterrupted sequence; what its first half is followed by, when it is sent as token ids
    of a prompt, is its second half; and the streamed text is the whole text. 3,000 tokens at full size."""
    for asked, n in ((server, 900), (uncached, 3000)) if FULL else ((server, 120),):
        await _check_long_answer(asked, n)


async def _check_long_answer(server: Server, n: int) -> None:
    async with connected(server) as client:
        ids = await _ids(client, _text(60, seed=5))
        body: Body = {"prompt": ids, "max_tokens": n}
        whole = await choice_of(client, {**body, "logprobs": 2})
        stream, task = start(client, body)
        await task
        stream.assert_whole()
        assert_same(whole, stream.tokens[0])
        if stream.tokens[0] == whole["token_ids"]:
            assert stream.texts[0] == whole["text"]
        first = whole["token_ids"][: n // 2]
        rest = await complete(client, {"prompt": [*ids, *first], "max_tokens": n - n // 2})
        logprobs = {"top_logprobs": whole["logprobs"]["top_logprobs"][n // 2 :]}
        assert_same({"token_ids": whole["token_ids"][n // 2 :], "logprobs": logprobs}, rest)


async def test_seeded_answers_that_are_preempted(server: Server) -> None:
    """vLLM #57562 with sampling: penalties, min_tokens and the seed's noise survive being put back."""
    async with connected(server) as client:
        bodies: list[Body] = [
            {
                "prompt": _text(150, seed=200 + i),
                "max_tokens": 160,
                "temperature": 0.8,
                "seed": i,
                "presence_penalty": 0.3,
                "frequency_penalty": 0.2,
                "repetition_penalty": 1.1,
                "min_tokens": 160,
                "ignore_eos": False,
            }
            for i in range(7)
        ]
        # Admission guesses from recent answers: after many short ones it lets in more than fits.
        await complete_all(client, [{"prompt": [9], "max_tokens": 1, "n": 16}] * 4)
        before = await metric(client, "quire_preemptions_total")
        together = await complete_all(client, bodies)
        assert await metric(client, "quire_preemptions_total") > before
        for i in range(7) if FULL else (6,):
            assert await complete(client, bodies[i]) == together[i]


@pytest.mark.timeout(3600)
async def test_golden_prompts_after_many_cancelled_ones(server: Server) -> None:
    """TGI #3043: random requests, most of them left by their clients; then the golden texts are unchanged and
    no block is lost. 10,000 requests at full size."""
    rng = random.Random(SEED)
    stems = [_text(200, seed=50 + i) for i in range(3)]
    golden: list[Body] = [
        {"prompt": stems[i % 3][: 60 + 7 * i], "max_tokens": 12} for i in range(20 if FULL else 8)
    ]
    async with connected(server) as client:
        await _flush(client)
        expected = [await choice_of(client, {**body, "logprobs": 2}) for body in golden]
        for _ in range(10_000 // 16 if FULL else 4):
            running = []
            for _ in range(16):
                prompt = rng.choice(stems)[: rng.randrange(1, 200)]
                running.append((start(client, {"prompt": prompt, "max_tokens": 20}), rng.randrange(4)))
            for (stream, task), leave_after in running:
                if leave_after < 3:
                    await stream.has(leave_after)
                    task.cancel()
                else:
                    await task
        await assert_empty(client)
        for tokens, right in zip(await complete_all(client, golden), expected, strict=True):
            assert_same(right, tokens)


async def test_explicit_penalties_of_zero(server: Server) -> None:
    """TGI #1796, #2228: every default sent explicitly is as good as absent."""
    neutral = {
        "top_p": 1,
        "n": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "repetition_penalty": 1,
        "logit_bias": {},
        "stop": None,
        "seed": None,
        "best_of": 1,
        "echo": False,
    }
    async with connected(server) as client:
        body: Body = {"prompt": _text(40, seed=6), "max_tokens": 16, "ignore_eos": False}
        right = await choice_of(client, {**body, "logprobs": 2})
        assert_same(right, await complete(client, {**body, **neutral}))
        for name in ("presence_penalty", "top_p"):
            assert_same(right, await complete(client, {**body, name: neutral[name]}))


async def test_a_request_larger_than_the_pool(server: Server) -> None:
    """vLLM #15996: a 400 that names both numbers; others keep flowing."""
    async with connected(server) as client:
        stream, task = start(client, {"prompt": [5, 6, 7], "max_tokens": 30})
        await stream.has(1)
        body = {"prompt": list(range(100, 700)), "max_tokens": POOL - 599}
        refused = await client.post("/v1/completions", json=body)
        assert refused.status_code == 400
        message = refused.json()["error"]["message"]
        assert f"{POOL + 1}" in message
        assert f"{POOL}" in message
        await task
        stream.assert_whole()


async def test_nothing_of_the_network_is_needed(start_server: StartServer, server: Server) -> None:
    """TGI #2147: a local file, no network, no caches; beside another server on the same host (TGI #3062)."""
    path = server.get("/info").json()["settings"]["model_path"]
    nowhere = "http://127.0.0.1:9"
    env = {
        "HTTP_PROXY": nowhere,
        "HTTPS_PROXY": nowhere,
        "NO_PROXY": "127.0.0.1",
        "XDG_CACHE_HOME": "/dev/null",
    }
    flags = ("--offline", "--max-batch-total-tokens=512")
    offline = start_server(model=path, flags=flags, env=env | {"HF_HOME": "/dev/null"})
    body: Body = {"prompt": "The capital of France is", "max_tokens": 8}
    async with connected(server) as client, connected(offline) as other:
        right = await choice_of(client, {**body, "logprobs": 2})
        assert_same(right, await complete(other, body))


async def _ids(client: httpx.AsyncClient, text: str) -> list[int]:
    response = await client.post("/tokenize", json={"prompt": text})
    assert response.status_code == 200, response.text
    ids: list[int] = response.json()["tokens"]
    return ids


async def _flush(client: httpx.AsyncClient) -> None:
    assert (await client.post("/admin/cache/flush")).status_code == 200


def _text(n_chars: int, *, seed: int) -> str:
    rng = random.Random(seed)
    text = ""
    while len(text) < n_chars:
        text += rng.choice(WORDS) + rng.choice((" ", " ", " ", ", ", ". "))
    return text[:n_chars]
