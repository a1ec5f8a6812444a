"""When the server answers, and what to type then."""

from __future__ import annotations

import asyncio
import json
import shlex

import httpx

from checkpoint.paths import user_path
from deploy.errors import StartFailedError
from router.api.keys import read_key_file
from router.config import RouterConfig

_POLL_S = 0.05
_REQUEST_S = 5.0


def base_url(config: RouterConfig) -> str:
    """Where a client on this host reaches the API."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{config.port}"


async def wait_healthy(config: RouterConfig, *, limit_s: float) -> None:
    """Until /health says that requests can be served. Raises StartFailedError with its reason."""
    reason = "it did not answer"
    try:
        async with asyncio.timeout(limit_s), _client(config) as client:
            while True:
                try:
                    response = await client.get("/health")
                    if response.is_success:
                        return
                    reason = response.text.strip()[:300]
                except httpx.HTTPError as error:
                    reason = str(error) or type(error).__name__
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise StartFailedError(
            f"the server was not ready within {limit_s:g} s (--start-timeout-s): {reason}"
        ) from None


async def banner(config: RouterConfig, *, n_workers: int, took_s: float) -> str:
    """What to type next; the curl line works as it stands."""
    async with _client(config) as client:
        info = (await client.get("/info")).json()
    model = info.get("model_id", "default")
    url = base_url(config)
    key = ' -H "Authorization: Bearer $QUIRE_API_KEY"' if _first_key(config) else ""
    chats = bool(info.get("chat_template"))
    route = "chat/completions" if chats else "completions"
    asked = (
        {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
        if chats
        else {"prompt": "The capital of France is"}
    )
    question = {"model": model, **asked, "temperature": 0, "max_tokens": 100 if chats else 20}
    workers = "1 worker" if n_workers == 1 else f"{n_workers} workers"
    return (
        f"\nReady: {model} at {url} ({workers}, started in {took_s:.1f} s)\n\n"
        f"  curl {url}/v1/{route} -H 'Content-Type: application/json'{key} "
        f"-d {shlex.quote(json.dumps(question))}\n\n"
        + (
            f"Chat and see the engine at work in a browser: {url}/\n"
            f"Talk to it in another terminal: make chat PORT={config.port}\n"
            if chats
            else f"See the engine at work in a browser: {url}/ (this model has no chat template)\n"
        )
        + "Ctrl-C ends it.\n"
    )


def _first_key(config: RouterConfig) -> str:
    """Empty when no key is asked for."""
    if config.api_keys:
        return config.api_keys[0]
    if config.api_key_file is None:
        return ""
    return next((key.decode("latin-1") for key in read_key_file(user_path(config.api_key_file))), "")


def _client(config: RouterConfig) -> httpx.AsyncClient:
    key = _first_key(config)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.AsyncClient(base_url=base_url(config), headers=headers, timeout=_REQUEST_S)
