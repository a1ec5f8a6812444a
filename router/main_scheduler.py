"""The scheduler's process."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from typing import Any

import structlog

from router.config import RouterConfig
from router.ipc.address import IpcAddress
from router.ipc.server import IpcServer
from router.scheduler import Scheduler
from settings.errors import ConfigError
from settings.logs import configure_logs
from settings.tracing import open_tracing

EXIT_FAILED = 1
EXIT_CONFIG = 2


def run_scheduler(config: RouterConfig, *, on_ready: Callable[[], None] | None = None) -> int:
    """Runs until SIGTERM or SIGINT; the second one cuts the drain short.

    Returns the exit code: 0 after a drain, 1 when it failed, 2 when its settings don't fit the workers.
    `on_ready` is called once API processes can connect.
    """
    configure_logs(log_format=config.log_format, log_level=config.log_level)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_main(config, on_ready))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it exists."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def _main(config: RouterConfig, on_ready: Callable[[], None] | None) -> int:
    log = structlog.get_logger("router.scheduler")
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        tracing = open_tracing(config.otlp_endpoint, service="quire-scheduler")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_CONFIG
    scheduler = Scheduler(
        config, on_limits=lambda text: log.info("kv budget", arithmetic=text), tracing=tracing
    )
    server = IpcServer(IpcAddress.parse(config.scheduler_address), scheduler)
    await server.start()
    stopping: asyncio.Future[Any] = loop.create_task(stop.wait())
    try:
        await scheduler.start()
        log.info("listening for API processes", address=str(server.address), replicas=list(config.replicas))
        if on_ready is not None:
            on_ready()
        await asyncio.wait({stopping, scheduler.failed}, return_when=asyncio.FIRST_COMPLETED)
        if not scheduler.failed.done():
            drain: asyncio.Future[Any] = loop.create_task(scheduler.drain(grace_s=config.shutdown_grace_s))
            hurrying: asyncio.Future[Any] = loop.create_task(hurry.wait())
            await asyncio.wait({drain, hurrying, scheduler.failed}, return_when=asyncio.FIRST_COMPLETED)
            drain.cancel()
            hurrying.cancel()
        return _exit_code(scheduler.failed, log)
    finally:
        stopping.cancel()
        await scheduler.close()
        await server.close()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)


def _exit_code(failed: asyncio.Future[None], log: structlog.stdlib.BoundLogger) -> int:
    if not failed.done():
        return 0
    error = failed.exception()
    if isinstance(error, ConfigError):
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_CONFIG
    log.critical("the scheduler has failed", exc_info=error)
    return EXIT_FAILED
