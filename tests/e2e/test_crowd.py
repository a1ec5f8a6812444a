"""Many clients at once: more than the server takes, clients that hang up, short requests without end, and
health checks meanwhile. All with a fake worker, over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.clients import (
    Body,
    Stream,
    assert_empty,
    choice_of,
    complete,
    connected,
    defaults,
    metric,
    start,
    state_of,
    until,
)
from tests.e2e.conftest import FAKE
from tests.e2e.folders import byte_model_folder
from tests.e2e.serving import Server, StartServer, serving

pytestmark = pytest.mark.slow

FULL = os.environ.get("QUIRE_TEST_FULL") == "1"
LIMIT = 32
ROWS = 16


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    limits = (f"--max-concurrent-requests={LIMIT}", f"--max-batch-size={ROWS}")
    flags = (*FAKE, "--fake-strict", "--fake-prefill-token-us=20", *limits)
    with serving(tmp_path_factory.mktemp("crowd"), flags=flags) as server:
        yield server


async def test_ten_times_the_limit_at_once(server: Server) -> None:
    """vLLM #2901, TGI #439: exactly the surplus gets 429 with Retry-After; the accepted finish."""
    async with connected(server) as client:
        body = {**defaults(), "prompt": [5, 6, 7], "max_tokens": 300}
        requests = [client.post("/v1/completions", json=body) for _ in range(10 * LIMIT)]
        answers = await asyncio.gather(*requests)
        assert Counter(answer.status_code for answer in answers) == {200: LIMIT, 429: 9 * LIMIT}
        for answer in answers:
            if answer.status_code == 429:
                assert int(answer.headers["retry-after"]) >= 1
                assert answer.json()["error"]["type"] == "rate_limit_error"
                assert str(LIMIT) in answer.json()["error"]["message"]
            else:
                assert len(answer.json()["choices"][0]["token_ids"]) == 300
        await assert_empty(client)


async def test_n_counts_as_n(server: Server) -> None:
    async with connected(server) as client:
        body = {"prompt": [5, 6, 7], "max_tokens": 400, "n": 20, "temperature": 1}
        stream, task = start(client, body)
        await stream.has(1)
        refused = await client.post("/v1/completions", json={**defaults(), **body, "n": 13})
        assert refused.status_code == 429
        accepted = await choice_of(client, {**body, "n": 12, "max_tokens": 4})
        assert accepted["finish_reason"] == "length"
        task.cancel()
        never = await client.post("/v1/completions", json={**defaults(), **body, "n": LIMIT + 1})
        assert never.status_code == 400
        assert f"{LIMIT + 1}" in never.json()["error"]["message"]
        assert "max_concurrent_requests" in never.json()["error"]["message"]
        await assert_empty(client)


async def test_500_connections_that_drop_at_once(server: Server) -> None:
    """SGLang #36475: with nothing said, half a request, a whole one; all state returns to base."""
    whole = _raw_request('{"model": "smollm2", "prompt": [5, 6, 7], "max_tokens": 2000, "stream": true}')
    async with connected(server) as client:
        open_files = _n_open_files(server)
        for i in range(500):
            with socket.create_connection(("127.0.0.1", server.port), timeout=30) as dropped:
                dropped.sendall((b"", whole[: len(whole) // 2], whole)[i % 3])
        await assert_empty(client)
        await until(lambda: _n_open_files(server) <= open_files + 2, "all sockets are closed")
        assert await metric(client, "quire_api_running_answers") == 0
        assert len(await complete(client, {"prompt": [5, 6, 7], "max_tokens": 5})) == 5
        await assert_empty(client)


def _raw_request(body: str) -> bytes:
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return (head + body).encode()


def _n_open_files(server: Server) -> int:
    return sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in server.pids())


async def test_clients_that_read_slowly(server: Server) -> None:
    """More than the kernel keeps for them: they hold up nobody, and find the whole answer when they read."""
    n_choices, n_slow = 5, 3
    one: Body = {**defaults(), "prompt": [5, 6, 7], "max_tokens": 1200, "seed": 3}
    body = {**one, "n": n_choices, "temperature": 1, "logprobs": 20, "stream": True}
    async with connected(server) as client:
        expected = (await Stream().read(client, body)).tokens
        sockets = [_with_small_buffer(server) for _ in range(n_slow)]
        for slow in sockets:
            slow.sendall(_raw_request(json.dumps(body)))
        await until(lambda: _n_requests(client, n_slow * n_choices), "all of them run")
        assert len(await complete(client, {**one, "max_tokens": 50})) == 50
        await until(lambda: _n_requests(client, 0), "all answers are computed")
        assert await metric(client, "quire_api_running_answers") > 0, "they are not yet sent"
        for slow in sockets:
            data = await asyncio.to_thread(_read_all, slow)
            lines = [line for line in data.decode().splitlines() if line.startswith("data: ")]
            assert lines.pop() == "data: [DONE]"
            tokens: dict[int, list[int]] = {}
            for line in lines:
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    tokens.setdefault(choice["index"], []).extend(choice.get("token_ids") or ())
            assert tokens == expected
        await assert_empty(client)


def _with_small_buffer(server: Server) -> socket.socket:
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.settimeout(60)
    slow.connect(("127.0.0.1", server.port))
    return slow


def _read_all(slow: socket.socket) -> bytes:
    """Until the answer is whole; chunk sizes stand in lines of their own."""
    data = b""
    with slow:
        while not data.endswith(b"\r\n0\r\n\r\n"):
            part = slow.recv(65536)
            assert part, data[-200:]
            data += part
    return data


async def _n_requests(client: httpx.AsyncClient, n: int) -> bool:
    return bool((await state_of(client))["n_requests"] == n)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("where", ["decode", "prefill", "queue"])
async def test_a_client_that_hangs_up(server: Server, where: str, stream: bool) -> None:
    """vLLM #9428, TGI #495: streaming or not; blocks and row are free at once."""
    async with connected(server) as client:
        n_before = ROWS if where == "queue" else 0
        blocking = [start(client, {"prompt": [9 + i], "max_tokens": 4000})[1] for i in range(n_before)]
        prompt = list(range(100, 8100)) if where == "prefill" else [5, 6, 7]
        body = {**defaults(), "prompt": prompt, "max_tokens": 100, "priority": 1, "stream": stream}
        before = await metric(client, "quire_api_client_disconnects_total")
        asking = asyncio.create_task(client.post("/v1/completions", json=body))
        n_there = n_before + 1

        async def there() -> bool:
            state = await state_of(client)
            return bool(state["n_requests"] == n_there and state["n_waiting"] == (where == "queue"))

        await until(there, "it is there")
        asking.cancel()
        for task in blocking:
            task.cancel()
        await asyncio.gather(asking, *blocking, return_exceptions=True)
        await assert_empty(client)

        async def noticed() -> bool:
            return await metric(client, "quire_api_client_disconnects_total") - before == n_there

        await until(noticed, "the API noticed it")


async def test_health_while_a_long_prompt_is_computed(start_server: StartServer, tmp_path: Path) -> None:
    """TGI #2348: 100,000 tokens in steps of more than a second; health answers within one."""
    model = byte_model_folder(tmp_path / "model", max_context=131_072)
    flags = (
        *FAKE,
        "--fake-prefill-token-us=40",
        "--max-batch-prefill-tokens=32768",
        "--fake-n-blocks=8192",
        "--health-timeout-s=1",
    )
    server = await asyncio.to_thread(start_server, model=str(model), flags=flags)
    async with connected(server) as client:
        body = {"prompt": "0123456789" * 10_000, "max_tokens": 2}
        computing = asyncio.create_task(complete(client, body))
        n_polls = 0
        while not computing.done():
            answer = await client.get("/health", timeout=1)
            assert answer.status_code == 200, answer.text
            n_polls += 1
            await asyncio.sleep(0.05)
        assert len(await computing) == 2
        assert n_polls >= 10
        assert await metric(client, "quire_prefill_tokens_total") == 100_000
        assert await metric(client, "quire_replicas_lost_total") == 0


@pytest.mark.timeout(3600)
async def test_short_requests_leave_nothing_behind(server: Server) -> None:
    """TGI #801, SGLang #6914: resident memory of all processes stays flat."""
    n_requests = 50_000 if FULL else 2_000
    limits = httpx.Limits(max_connections=LIMIT)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:

        async def many(n: int, *, first: int) -> None:
            left = iter(range(n))

            async def one_after_the_other() -> None:
                for i in left:
                    prompt = [(first + i) % 40_000, *range(i % 50)]
                    await complete(client, {"prompt": prompt, "max_tokens": 2})

            await asyncio.gather(*(one_after_the_other() for _ in range(LIMIT)))

        await many(n_requests // 2, first=0)
        before = _resident(server)
        await many(n_requests // 2, first=7)
        grown = {pid: size - before[pid] for pid, size in _resident(server).items()}
        assert max(grown.values()) < 4 << 20, f"bytes grown: {grown} of {before}"
        await assert_empty(client)


def _resident(server: Server) -> dict[int, int]:
    page = os.sysconf("SC_PAGE_SIZE")
    return {pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page for pid in server.pids()}
