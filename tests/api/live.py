"""The real server on a real port, around a scripted scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from checkpoint.chat_template import ChatTemplate
from router.api.app import create_app
from router.api.config import ApiConfig
from router.api.server import ApiServer, listen
from tests.api.scripted import ScriptedClient
from tests.api.tiny import TEMPLATE, tiny_tokenizer


@dataclass
class Live:
    server: ApiServer
    scheduler: ScriptedClient
    task: asyncio.Task[None]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"


@asynccontextmanager
async def serving(
    scheduler: ScriptedClient, *, template: str = TEMPLATE, **config: Any
) -> AsyncIterator[Live]:
    app = create_app(
        client=scheduler,
        config=ApiConfig(**config),
        tokenizer=tiny_tokenizer(),
        chat_template=ChatTemplate(template),
    )
    server = ApiServer(app, listen("127.0.0.1", 0))
    task = asyncio.create_task(server.run())
    live = Live(server=server, scheduler=scheduler, task=task)
    try:
        yield live
    finally:
        server.stop()
        server.stop()
        await task
