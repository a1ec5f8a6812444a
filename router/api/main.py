"""The API process: connects to the scheduler, reads the tokenizer, serves HTTP until it is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

import structlog
from prometheus_client import disable_created_metrics

from checkpoint.chat_template import load_chat_template
from checkpoint.checkpoint import Checkpoint, CheckpointError
from checkpoint.paths import user_path
from checkpoint.resolve import is_model_name, resolve
from checkpoint.tokenizer import load_tokenizer
from router.api.app import create_app
from router.api.context import ApiContext
from router.api.keys import ApiKeys
from router.api.open_files import raise_open_files
from router.api.server import ApiServer, listen, run_loop
from router.api.text_model import TextModel, text_model
from router.config import RouterConfig
from router.ipc.address import IpcAddress
from router.ipc.client import SchedulerClient
from router.ipc.socket_client import SocketClient
from settings.errors import ConfigError
from settings.logs import configure_logs
from settings.tracing import open_tracing

_SHARED_START_S = 2.0

_log = structlog.get_logger("quire.api")


def run_api(config: RouterConfig, *, on_ready: Callable[[], None] = lambda: None) -> int:
    """The process's exit code. `on_ready` is called once it listens; /health tells whether there is a model
    to serve."""
    configure_logs(log_format=config.log_format, log_level=config.log_level)
    raise_open_files()
    disable_created_metrics()  # type: ignore[no-untyped-call]  # the library has no annotation here
    try:
        IpcAddress.parse(config.scheduler_address)
        ApiKeys(config, clock=time.monotonic)
        text = load_text_model(config, config.model) if config.model else None
        tracing = open_tracing(config.otlp_endpoint, service="quire-api")
        listener = listen(config.host, config.port, shared=config.share_port)
    except (CheckpointError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    async def main() -> int:
        client = SocketClient.connect(config.scheduler_address)
        app = create_app(client=client, config=config, tokenizer=None, tracing=tracing)
        context: ApiContext = app.state.context
        context.loaded = text
        server = ApiServer(app, listener)
        failures: list[str] = []
        reader = asyncio.create_task(_read_when_known(context, config, server, failures))
        try:
            if config.share_port:
                await _wait_for_siblings_sake(client)
            await server.run(on_listening=lambda _: on_ready())
        finally:
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader
            await client.close()
            if tracing is not None:
                await asyncio.to_thread(tracing.close)
        for failure in failures:
            print(f"error: {failure}", file=sys.stderr)
        return 1 if failures else 0

    return run_loop(main)


async def _wait_for_siblings_sake(client: SchedulerClient) -> None:
    """The kernel gives this process its share of the connections at once: they wait a moment rather than be
    refused by it, while others could have served them."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(client.wait_ready(), _SHARED_START_S)


def load_text_model(config: RouterConfig, name: str) -> TextModel:
    """Raises CheckpointError naming the model and ConfigError for an unreadable chat template."""
    return _text_model(config, resolve(name, weights=False))


def _text_model(config: RouterConfig, checkpoint: Checkpoint) -> TextModel:
    source = None
    if config.chat_template is not None:
        try:
            source = user_path(config.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--chat-template {config.chat_template} can't be read: {error}") from error
    tokenizer = load_tokenizer(checkpoint)
    return text_model(config, tokenizer, load_chat_template(tokenizer, source=source))


async def _read_when_known(
    context: ApiContext, config: RouterConfig, server: ApiServer, failures: list[str]
) -> None:
    """Without --model: waits for a worker to say where the model lies. If it can't be read the process
    ends."""
    if context.loaded is not None:
        return
    try:
        name = await _model_place(context.client)
        context.loaded = await asyncio.to_thread(load_text_model, config, name)
        _log.info("tokenizer read", model=name)
    except (CheckpointError, ConfigError) as error:
        failures.append(f"{error} (--model names another place for the tokenizer)")
        server.stop()


async def _model_place(client: SchedulerClient) -> str:
    """The worker's own copy; for a worker on another host its model's name, where that is one."""
    await client.wait_ready()
    model = client.state.model
    path = "" if model is None else str(model.settings.get("model_path", ""))
    if model is not None and path and not _is_here(path) and is_model_name(model.model_id):
        return model.model_id
    if not path:
        raise CheckpointError("the worker does not say where its model lies: --model must name it")
    return path


def _is_here(path: str) -> bool:
    return Path(path).exists()
