from __future__ import annotations

import json

import pytest
import uvloop

from bench.load import Endpoint, Load, Target, TransportKind, run_load
from bench.measures import Summary
from bench.transport import open_transport
from tests.bench.sse_server import HEAD, Answer, chunk, echo, event, serving, token_event

KINDS = list(TransportKind)


async def run(url: str, kind: TransportKind, load: Load, *, timeout_s: float = 20.0) -> Summary:
    target = Target(url=url, model="m", transport=kind, timeout_s=timeout_s)
    summary, _ = await run_load(target, [f"prompt {i}" for i in range(load.n_requests)], load, n_input=2)
    return summary


@pytest.mark.parametrize("kind", KINDS)
async def test_closed_loop(kind: TransportKind) -> None:
    async with serving() as (url, bodies):
        summary = await run(url, kind, Load(n_requests=12, n_output=5, concurrency=3))
    assert (summary.n_requests, summary.n_errors, summary.n_short) == (12, 0, 0)
    assert summary.output_tokens == 60
    assert summary.n_events == 60
    sent = [json.loads(body) for body in bodies]
    assert {s["prompt"] for s in sent} == {f"prompt {i}" for i in range(12)}
    assert all(s["ignore_eos"] and s["stream_options"] == {"include_usage": True} for s in sent)


@pytest.mark.parametrize("kind", KINDS)
async def test_open_loop_sends_all(kind: TransportKind) -> None:
    async with serving() as (url, bodies):
        summary = await run(url, kind, Load(n_requests=20, n_output=1, rate_per_s=2000.0, seed=3))
    assert len(bodies) == 20
    assert summary.output_tokens == 20


@pytest.mark.parametrize("kind", KINDS)
async def test_every_byte_in_a_packet_of_its_own(kind: TransportKind) -> None:
    def drip(body: bytes) -> list[bytes]:
        return [bytes([b]) for piece in echo(body) for b in piece]

    async with serving(drip) as (url, _):
        summary = await run(url, kind, Load(n_requests=2, n_output=2, concurrency=1))
    assert (summary.n_errors, summary.output_tokens) == (0, 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda _: [b"HTTP/1.1 429 Too Many\r\ncontent-length: 4\r\n\r\nfull"], "HTTP 429: full"),
        (lambda _: [HEAD, chunk(token_event("a")), b""], "(?i)lost|closed|incomplete"),
        (lambda _: [HEAD, chunk(token_event("a")), b"0\r\n\r\n"], "without"),
        (lambda _: [HEAD, b"0\r\n\r\n"], "without"),
    ],
)
async def test_failures_are_told(kind: TransportKind, answer: Answer, why: str) -> None:
    async with serving(answer) as (url, _):
        summary = await run(url, kind, Load(n_requests=2, n_output=1, concurrency=1))
    assert summary.n_errors == 2
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(summary.errors)


@pytest.mark.parametrize("kind", KINDS)
async def test_time_out(kind: TransportKind) -> None:
    async with serving(lambda _: [HEAD, chunk(token_event("a"))]) as (url, _):
        summary = await run(url, kind, Load(n_requests=1, n_output=1, concurrency=1), timeout_s=0.05)
    assert summary.errors == ("no complete answer within 0.05 s",)


@pytest.mark.parametrize("kind", KINDS)
async def test_nobody_listens(kind: TransportKind) -> None:
    async with serving() as (url, _):
        pass
    summary = await run(url, kind, Load(n_requests=1, n_output=1, concurrency=1))
    assert summary.n_errors == 1


@pytest.mark.parametrize("kind", KINDS)
def test_on_the_loop_that_the_command_uses(kind: TransportKind) -> None:
    async def both_sides() -> Summary:
        async with serving() as (url, _):
            return await run(url, kind, Load(n_requests=4, n_output=3, concurrency=2))

    assert uvloop.run(both_sides()).output_tokens == 12


async def test_lean_connections_are_reused_and_replaced_when_the_server_closed_them() -> None:
    seen = 0

    def once(body: bytes) -> list[bytes]:
        nonlocal seen
        seen += 1
        return [*echo(body), b""] if seen == 1 else echo(body)

    async with serving(once) as (url, _):
        summary = await run(url, TransportKind.LEAN, Load(n_requests=3, n_output=1, concurrency=1))
    assert summary.n_errors == 0


async def test_an_answer_without_length_ends_with_the_connection() -> None:
    body = token_event("a") + event("[DONE]")
    async with serving(lambda _: [b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n", body, b""]) as (url, _):
        summary = await run(url, TransportKind.LEAN, Load(n_requests=2, n_output=1, concurrency=1))
    assert (summary.n_errors, summary.output_tokens) == (0, 2)


def test_lean_refuses_https() -> None:
    with pytest.raises(ValueError, match="--transport httpx"):
        open_transport("lean", "https://example.org", timeout_s=1.0)


def test_a_load_has_exactly_one_bound() -> None:
    with pytest.raises(ValueError, match="either --concurrency"):
        Load(n_requests=1, n_output=1)
    with pytest.raises(ValueError, match="either --concurrency"):
        Load(n_requests=1, n_output=1, concurrency=1, rate_per_s=1.0)


def test_chat_bodies_carry_messages() -> None:
    from bench.load import encode_request

    target = Target(url="", model="m", endpoint=Endpoint.CHAT, ignore_eos=False)
    body = json.loads(encode_request(target, "hello", n_output=3))
    assert body["messages"] == [{"role": "user", "content": "hello"}]
    assert "ignore_eos" not in body
