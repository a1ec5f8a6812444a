"""A tiny streaming server whose packets a test decides."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

Answer = Callable[[bytes], Sequence[bytes]]
"""From a request's body to the raw pieces of its answer, each written as one packet."""

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(document: object) -> bytes:
    text = document if isinstance(document, str) else json.dumps(document)
    return b"data: " + text.encode() + b"\n\n"


def token_event(text: str) -> bytes:
    return event({"choices": [{"text": text}]})


def usage_event(n_output: int, *, n_cached: int = 0) -> bytes:
    usage = {"completion_tokens": n_output, "prompt_tokens_details": {"cached_tokens": n_cached}}
    return event({"choices": [], "usage": usage})


def echo(body: bytes) -> list[bytes]:
    """As many tokens as asked for, each in a packet of its own."""
    n = json.loads(body)["max_tokens"]
    tokens = [chunk(token_event(f" t{i}")) for i in range(n)]
    return [HEAD, *tokens, chunk(usage_event(n)), chunk(event("[DONE]")), b"0\r\n\r\n"]


@asynccontextmanager
async def serving(answer: Answer = echo) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Yields the address and the bodies received so far."""
    bodies: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                bodies.append(await reader.readexactly(length))
                for piece in answer(bodies[-1]):
                    if piece == b"":
                        writer.close()
                        return
                    writer.write(piece)
                    await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}", bodies
    finally:
        server.close()
