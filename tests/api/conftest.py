"""Apps around a scripted scheduler, called in process."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import structlog

from checkpoint.chat_template import ChatTemplate
from router.api.app import create_app
from router.api.config import ApiConfig
from tests.api.scripted import ScriptedClient
from tests.api.tiny import TEMPLATE, tiny_tokenizer


@dataclass
class Api:
    """An app, its scheduler and a client that calls it."""

    scheduler: ScriptedClient
    app: Any
    http: httpx.AsyncClient

    async def chat(self, **fields: Any) -> httpx.Response:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields}
        return await self.http.post("/v1/chat/completions", json=body)

    async def complete(self, **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"model": "tiny", "prompt": "hi", **fields})


@pytest.fixture(autouse=True)
def plain_logs() -> Iterator[None]:
    """Key=value lines: coloured tracebacks take seconds."""
    structlog.configure(
        processors=[structlog.processors.format_exc_info, structlog.processors.KeyValueRenderer()]
    )
    yield
    structlog.reset_defaults()


MakeApi = Callable[..., Api]
_compiled = functools.cache(ChatTemplate)
"""Templates keep no state, and compiling one takes longer than most tests."""


@pytest.fixture
async def make_api() -> AsyncIterator[MakeApi]:
    """`make_api(script, state=…, template=…, **config)`."""
    clients: list[httpx.AsyncClient] = []

    def make(
        *args: Any,
        scheduler: ScriptedClient | None = None,
        template: str | None = TEMPLATE,
        headers: dict[str, str] | None = None,
        peer: str = "127.0.0.1",
        **config: Any,
    ) -> Api:
        scheduler = scheduler or ScriptedClient(*args)
        app = create_app(
            client=scheduler,
            config=ApiConfig(**config),
            tokenizer=tiny_tokenizer(),
            chat_template=None if template is None else _compiled(template),
        )
        transport = httpx.ASGITransport(app=app, client=(peer, 1))
        http = httpx.AsyncClient(transport=transport, base_url="http://api", headers=headers)
        clients.append(http)
        return Api(scheduler=scheduler, app=app, http=http)

    yield make
    for client in clients:
        await client.aclose()
