"""The load client: drives any OpenAI-speaking server and measures it (definitions: bench/measures.py).

    python -m bench.load --url http://127.0.0.1:3000 --model NAME --tokenizer DIR \\
        --input-tokens 512 --output-tokens 256 --requests 1024 --concurrency 256 --ignore-eos --seed 7
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import httpx
import msgspec
import typer
import uvloop

from bench.arrivals import poisson_arrivals_s
from bench.measures import RequestRecord, Summary, summarize
from bench.prompts import PromptShape, WordVocabulary, load_tokenizer, random_texts, random_token_lists
from bench.report import runs_table
from bench.sse import measure_stream
from bench.transport import Exchange, Transport, open_transport


class Endpoint(StrEnum):
    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"


class PromptKind(StrEnum):
    TEXT = "text"
    TOKENS = "tokens"


class TransportKind(StrEnum):
    HTTPX = "httpx"
    LEAN = "lean"


@dataclass(slots=True, frozen=True, kw_only=True)
class Load:
    """What is sent, and when. Exactly one of `concurrency` and `rate_per_s` bounds it."""

    n_requests: int
    n_output: int
    concurrency: int | None = None
    rate_per_s: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate_per_s is None):
            raise ValueError("give either --concurrency (closed loop) or --rate (open loop)")
        if self.concurrency is not None and self.concurrency < 1:
            raise ValueError(f"--concurrency {self.concurrency}: must be at least 1")
        if self.n_requests < 1:
            raise ValueError(f"--requests {self.n_requests}: must be at least 1")


@dataclass(slots=True, frozen=True)
class Target:
    """The server under test, and how to speak to it."""

    url: str
    model: str
    endpoint: Endpoint = Endpoint.COMPLETIONS
    transport: TransportKind = TransportKind.LEAN
    timeout_s: float = 1800.0
    api_key: str | None = None
    ignore_eos: bool = True
    temperature: float = 0.0


def served_model(url: str) -> str:
    """The first model that the server lists. Raises ValueError when it lists none."""
    try:
        answer = httpx.get(f"{url}/v1/models", timeout=30.0).raise_for_status().json()
        return str(answer["data"][0]["id"])
    except (httpx.HTTPError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{url}/v1/models names no model ({error}): give --model") from None


def encode_request(target: Target, prompt: str | list[int], *, n_output: int) -> bytes:
    """The JSON body of one streamed request."""
    body: dict[str, Any] = {
        "model": target.model,
        "max_tokens": n_output,
        "temperature": target.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if target.ignore_eos:
        body["ignore_eos"] = True
    if target.endpoint is Endpoint.CHAT:
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    return msgspec.json.encode(body)


async def drive(send: Callable[[int], Awaitable[None]], load: Load) -> None:
    """Calls `send(i)` for every request, in order of i, as the load prescribes; returns when all ended."""
    if load.concurrency is not None:
        indices = iter(range(load.n_requests))

        async def client() -> None:
            for i in indices:
                await send(i)

        await asyncio.gather(*(client() for _ in range(min(load.concurrency, load.n_requests))))
        return
    assert load.rate_per_s is not None
    loop = asyncio.get_running_loop()
    begin = loop.time()
    tasks = []
    times = poisson_arrivals_s(n=load.n_requests, rate_per_s=load.rate_per_s, seed=load.seed)
    for i, at_s in enumerate(times):
        if (wait_s := begin + at_s - loop.time()) > 0:
            await asyncio.sleep(wait_s)
        tasks.append(asyncio.ensure_future(send(i)))
    await asyncio.gather(*tasks)


async def run_load(
    target: Target, prompts: Sequence[str | list[int]], load: Load, *, n_input: int
) -> tuple[Summary, list[RequestRecord]]:
    """One run. Answers are parsed after the last has ended, so that parsing delays no time stamp."""
    bodies = [encode_request(target, prompt, n_output=load.n_output) for prompt in prompts]
    transport = open_transport(
        target.transport.value, target.url, timeout_s=target.timeout_s, api_key=target.api_key
    )
    exchanges: list[Exchange | None] = [None] * load.n_requests
    try:
        cpu_s = time.process_time()
        await drive(_sender(transport, target.endpoint, bodies, exchanges), load)
        cpu_s = time.process_time() - cpu_s
    finally:
        await transport.close()
    records = [
        record_of(e, n_input=n_input, n_output=load.n_output, chat=target.endpoint is Endpoint.CHAT)
        for e in exchanges
        if e is not None
    ]
    return summarize(records, client_cpu_s=cpu_s), records


def _sender(
    transport: Transport, endpoint: Endpoint, bodies: Sequence[bytes], exchanges: list[Exchange | None]
) -> Callable[[int], Awaitable[None]]:
    async def send(i: int) -> None:
        exchanges[i] = await transport.post(endpoint.value, bodies[i % len(bodies)])

    return send


def record_of(exchange: Exchange, *, n_input: int, n_output: int, chat: bool) -> RequestRecord:
    """What an exchange that has ended says of its request."""
    record = RequestRecord(start_s=exchange.start_s, n_input=n_input, n_expected=n_output)
    record.error = exchange.error
    if record.error is None and exchange.status != 200:
        text = b"".join(data for _, data in exchange.body())[:300].decode(errors="replace")
        record.error = f"HTTP {exchange.status}: {text}"
    if record.error is None:
        measure_stream(record, exchange.body(), chat=chat)
    return record


def main(
    url: Annotated[str, typer.Option(help="Server, e.g. http://127.0.0.1:3000")],
    model: Annotated[str | None, typer.Option(help="Model name; unset: the first that is served")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json or its folder")] = None,
    vocab_size: Annotated[int, typer.Option(help="Ids are drawn below it (token prompts)")] = 32000,
    prompts: Annotated[PromptKind, typer.Option(help="What a prompt is sent as")] = PromptKind.TEXT,
    input_tokens: Annotated[int, typer.Option(help="Random tokens of each prompt")] = 128,
    prefix_tokens: Annotated[int, typer.Option(help="Tokens that all prompts share, before those")] = 0,
    output_tokens: Annotated[int, typer.Option(help="max_tokens")] = 128,
    requests: Annotated[int, typer.Option(help="How many")] = 100,
    concurrency: Annotated[int | None, typer.Option(help="Closed loop: so many at a time")] = None,
    rate: Annotated[float | None, typer.Option(help="Open loop: so many a second (Poisson)")] = None,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals")] = 0,
    ignore_eos: Annotated[bool, typer.Option(help="Ask for exactly max_tokens")] = False,
    temperature: Annotated[float, typer.Option()] = 0.0,
    endpoint: Annotated[Endpoint, typer.Option()] = Endpoint.COMPLETIONS,
    transport: Annotated[
        TransportKind, typer.Option(help="lean: many events a second")
    ] = TransportKind.HTTPX,
    timeout_s: Annotated[float, typer.Option(help="For one answer")] = 1800.0,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the run here")] = None,
) -> None:
    """Drive a server with random prompts and print what it did."""
    shape = PromptShape(n_own=input_tokens, n_prefix=prefix_tokens)
    try:
        load = Load(
            n_requests=requests, n_output=output_tokens, concurrency=concurrency, rate_per_s=rate, seed=seed
        )
        texts: Sequence[str | list[int]]
        if prompts is PromptKind.TOKENS:
            texts = random_token_lists(vocab_size, shape, n=requests, seed=seed)
        elif tokenizer is None:
            raise ValueError("--prompts text needs --tokenizer; or use --prompts tokens")
        else:
            words = WordVocabulary(load_tokenizer(tokenizer))
            texts = random_texts(words, shape, n=requests, seed=seed)
        url = url.rstrip("/")
        target = Target(
            url=url, model=model or served_model(url), endpoint=endpoint, transport=transport,
            timeout_s=timeout_s, api_key=api_key, ignore_eos=ignore_eos, temperature=temperature,
        )  # fmt: skip
        summary, _ = uvloop.run(run_load(target, texts, load, n_input=shape.n_tokens))
    except ValueError as error:
        typer.echo(f"bench.load: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(runs_table([("run", summary.as_dict())]))
    if summary.errors:
        typer.echo("\n".join(f"error: {text}" for text in summary.errors), err=True)
    if json_path is not None:
        json_path.write_text(json.dumps(summary.as_dict(), indent=1) + "\n")
    if summary.n_errors:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
