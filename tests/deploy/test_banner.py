from __future__ import annotations

import json
import re
import shlex
from typing import Any

import httpx
import pytest

from deploy import banner
from router.config import RouterConfig


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What is printed when the server's /info says so."""

    async def show(info: dict[str, Any], **config: Any) -> str:
        made = RouterConfig(**config)

        def client(_: RouterConfig) -> httpx.AsyncClient:
            transport = httpx.MockTransport(lambda request: httpx.Response(200, json=info))
            return httpx.AsyncClient(transport=transport, base_url=banner.base_url(made))

        monkeypatch.setattr(banner, "_client", client)
        return await banner.banner(made, n_workers=2, took_s=1.25)

    return show


def _curl(text: str) -> tuple[str, dict[str, Any]]:
    """Its address and body, as a shell reads the line."""
    (line,) = (line for line in text.splitlines() if line.strip().startswith("curl"))
    words = shlex.split(line)
    body: dict[str, Any] = json.loads(words[words.index("-d") + 1])
    return words[1], body


async def test_a_model_that_chats_is_asked_in_a_chat(shown: Any) -> None:
    text = await shown({"model_id": "org/name", "chat_template": True}, port=8123)
    assert "Ready: org/name at http://127.0.0.1:8123 (2 workers, started in 1." in text
    url, body = _curl(text)
    assert url == "http://127.0.0.1:8123/v1/chat/completions"
    assert body["messages"][0]["role"] == "user"
    assert "make chat PORT=8123" in text


async def test_a_model_without_a_chat_template_is_asked_to_go_on(shown: Any) -> None:
    text = await shown({"model_id": "org/base", "chat_template": False})
    url, body = _curl(text)
    assert url.endswith("/v1/completions")
    assert body["prompt"]
    assert "make chat" not in text


async def test_a_key_is_named_not_shown(shown: Any) -> None:
    text = await shown({"model_id": "m", "chat_template": True}, api_keys=("hunter2",))
    assert re.search(r"Authorization: Bearer \$QUIRE_API_KEY", text)
    assert "hunter2" not in text
