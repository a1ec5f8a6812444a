"""A worker process from its settings to its exit code."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import structlog

from checkpoint.checkpoint import CheckpointError
from settings.errors import ConfigError
from settings.logs import configure_logs
from settings.tracing import Tracing, open_tracing
from worker.backend import make_runner
from worker.config import WorkerConfig
from worker.errors import StartError
from worker.runner import DeviceError, Runner
from worker.server import WorkerServer
from worker.tracing import RowTraces

_LAST_STEP_TIMEOUT_S = 60.0
"""At shutdown the running step may take this long to end."""
_FLUSH_S = 2.0
"""And clients this long to take the end of their stream."""

_PROFILED_S = 1.0


class ExitCode(enum.IntEnum):
    """How a worker process ends."""

    OK = 0
    """Told to stop (SIGTERM, SIGINT): the running step ended and was reported."""
    USAGE = 2
    """A setting, the model or the port can't be used; one line on stderr says why."""
    DEVICE = 3
    """The device is lost. Starting again may help."""
    DEFECT = 4
    """An error that nobody foresaw; its traceback is in the log."""


def run_worker(config: WorkerConfig, *, on_ready: Callable[[], object] | None = None) -> int:
    """Load the model, serve until told to stop, and return the exit code (`ExitCode`).

    `on_ready` is called once, from the event loop, when the port is bound and the model is warm;
    `config.port_file` has been written by then.
    """
    configure_logs(log_format=config.log_format, log_level=config.log_level)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop_while_loading)
    tracing: Tracing | None = None
    try:
        tracing = open_tracing(config.otlp_endpoint, service="quire-worker")
        runner = make_runner(config)
        return _serve(runner, config=config, on_ready=on_ready, tracing=tracing)
    except (ConfigError, CheckpointError, StartError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return ExitCode.USAGE
    except DeviceError as error:
        print(f"error: the device failed at start: {error}", file=sys.stderr, flush=True)
        return ExitCode.DEVICE
    finally:
        if tracing is not None:
            tracing.close()


def write_port_file(path: Path, port: int) -> None:
    """Whoever waits for the file never reads half of it. Raises StartError when it can't be written; nothing
    is left of it then."""
    partial: Path | None = None
    try:
        path = path.resolve()
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text(f"{port}\n")
        partial.replace(path)
    except (OSError, RuntimeError) as error:
        if partial is not None:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
        reason = getattr(error, "strerror", None) or error
        raise StartError(f"can't write the port to {path} (--port-file): {reason}") from error


def _stop_while_loading(number: int, frame: FrameType | None) -> None:
    raise SystemExit(ExitCode.OK)


def _serve(
    runner: Runner,
    *,
    config: WorkerConfig,
    on_ready: Callable[[], object] | None,
    tracing: Tracing | None,
) -> int:
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if sys.platform != "win32":
        import uvloop

        loop_factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=loop_factory) as loop:
        return loop.run(_Process(runner, config=config, on_ready=on_ready, tracing=tracing).run())


class _Process:
    """The serving part of a worker's life, on one event loop."""

    def __init__(
        self,
        runner: Runner,
        *,
        config: WorkerConfig,
        on_ready: Callable[[], object] | None,
        tracing: Tracing | None,
    ) -> None:
        self._runner = runner
        self._tracing = tracing
        self._config = config
        self._on_ready = on_ready
        self._log = structlog.get_logger("worker")
        self._stop = asyncio.Event()
        self._n_signals = 0
        self._fatal: Exception | None = None
        self._profiling: asyncio.Future[None] | None = None

    async def run(self) -> int:
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal, number)
        self._loop.add_signal_handler(signal.SIGUSR2, self._on_profile_signal)
        server = WorkerServer(
            self._runner,
            host=self._config.host,
            port=self._config.port,
            max_window=self._config.window,
            on_fatal=self._on_fatal_from_thread,
            traces=None
            if self._tracing is None
            else RowTraces(self._tracing, device=self._runner.capacity.device),
        )
        port = await server.start()
        if self._config.port_file:
            try:
                write_port_file(Path(self._config.port_file), port)
            except StartError:
                await asyncio.to_thread(server.engine.stop, timeout_s=_LAST_STEP_TIMEOUT_S)
                await server.stop(grace_s=0.0)
                raise
        capacity = self._runner.capacity
        self._log.info(
            "worker ready",
            host=self._config.host,
            port=port,
            worker_id=server.worker_id,
            model=capacity.model_id,
            attention=capacity.attention,
            device=capacity.device,
            max_batch_total_tokens=capacity.max_batch_total_tokens,
            memory=capacity.memory_arithmetic,
        )
        if self._on_ready is not None:
            self._on_ready()
        await self._stop.wait()
        return await self._end(server)

    async def _end(self, server: WorkerServer) -> int:
        if self._fatal is not None:
            await server.stop(grace_s=_FLUSH_S)
            return ExitCode.DEVICE if isinstance(self._fatal, DeviceError) else ExitCode.DEFECT
        self._log.info("stopping: the running step ends first")
        ended = await asyncio.to_thread(server.engine.stop, timeout_s=_LAST_STEP_TIMEOUT_S)
        await server.stop(grace_s=_FLUSH_S)
        if not ended:
            self._log.error("the running step did not end", waited_s=_LAST_STEP_TIMEOUT_S)
            # The compute thread is stuck inside the device: an orderly exit would wait for it.
            sys.stderr.flush()
            os._exit(ExitCode.DEVICE)
        self._log.info("stopped")
        return ExitCode.OK

    def _on_signal(self, number: int) -> None:
        self._n_signals += 1
        if self._n_signals > 1:
            # Asked twice: don't wait for the step.
            os._exit(128 + number)
        self._stop.set()

    def _on_profile_signal(self) -> None:
        on_gpu = self._runner.capacity.device.startswith("cuda")
        if self._config.profile_dir and on_gpu and (self._profiling is None or self._profiling.done()):
            self._profiling = asyncio.ensure_future(self._profile(Path(self._config.profile_dir)))

    async def _profile(self, folder: Path) -> None:
        from worker.gpu.profile import write_profile

        try:
            path = await asyncio.to_thread(write_profile, folder, seconds=_PROFILED_S)
        except (OSError, RuntimeError) as error:
            self._log.error("profile failed", error=str(error))
        else:
            self._log.info("profile written", path=str(path))

    def _on_fatal_from_thread(self, error: Exception) -> None:
        self._fatal = error
        # The loop is closed when the process was about to end anyway.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stop.set)
