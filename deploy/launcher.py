"""Brings a whole server up on this host and down again: the model, the scheduler, the API, the workers."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from checkpoint.paths import user_path
from checkpoint.resolve import resolve
from deploy.banner import banner, wait_healthy
from deploy.child import ChildSpec
from deploy.flags import as_arguments, secrets_as_environment
from deploy.gpu_claim import ClaimConfig, check_enough, wants_gpu
from deploy.gpu_devices import present_gpus
from deploy.gpu_list import allowed_gpus
from deploy.log_lines import Format, json_line, text_line
from deploy.ports import check_free
from deploy.run_dir import run_dir
from deploy.supervisor import Say, Supervisor
from router.api.keys import ApiKeys
from router.config import RouterConfig
from router.discovery import Discovery
from router.ipc.address import IpcAddress
from settings.load import load
from settings.ports import free_ports
from settings.tracing import check_otlp_endpoint
from worker.config import WorkerConfig
from worker.host_cpus import host_cpus

_STAGE_API, _STAGE_SCHEDULER, _STAGE_WORKER = 0, 1, 2
_GRACE_S = 10.0
"""For processes that have nothing to wait for, and on top of the API's own grace for running answers."""
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    settings: Mapping[str, str | None]
    """Field name to text, as the command line gave it."""
    n_workers: int
    """0: the router alone; its workers run elsewhere (`--replicas`)."""
    n_api: int
    start_timeout_s: float


def launch(plan: LaunchPlan, *, env: Mapping[str, str]) -> int:
    """Runs until a signal asks for the end; 0 then.

    Raises ConfigError, PortTakenError, CheckpointError and StartFailedError: at any of them nothing is
    left running.
    """
    router = load(RouterConfig, env=env, args=plan.settings)
    worker = load(WorkerConfig, env=env, args=_worker_settings(plan)) if plan.n_workers else None
    ApiKeys(router, clock=time.monotonic)
    check_otlp_endpoint(router.otlp_endpoint)
    if worker is None:
        Discovery(router.replicas)
        IpcAddress.parse(router.scheduler_address)
    check_free(router.host, router.port)
    on_gpus = worker is not None and _on_gpus(worker, plan, env=env)
    if router.port == 0:
        router = replace(router, port=free_ports(1)[0])
    say = _say_as(json_line if _log_format(router.log_format) == "json" else text_line)
    if worker is not None and worker.model:
        _fetch(worker, say=say)
    with run_dir() as folder:
        specs = child_specs(plan, router=router, worker=worker, folder=folder, on_gpus=on_gpus)
        secrets = secrets_as_environment(plan.settings, RouterConfig)
        supervisor = Supervisor(specs, env={**env, **secrets}, say=say)
        return asyncio.run(_run(supervisor, router=router, plan=plan, say=say))


def child_specs(
    plan: LaunchPlan,
    *,
    router: RouterConfig,
    worker: WorkerConfig | None,
    folder: Path,
    on_gpus: bool = False,
) -> list[ChildSpec]:
    """The processes of a launch. `folder` takes the socket between scheduler and API; `on_gpus`: each worker
    claims a GPU."""
    settings = dict(plan.settings)
    ports = free_ports(plan.n_workers)
    decided = {
        "port": str(router.port),
        "log_format": _log_format(router.log_format),
    }
    if plan.n_api > 1:
        decided["share_port"] = "true"
    if worker is not None:
        decided |= {
            "scheduler_address": f"unix:{folder / 'scheduler.sock'}",
            "replicas": ",".join(f"127.0.0.1:{port}" for port in ports),
            "model": "",  # the router reads tokenizer and template where the worker says they lie
        }
    elif settings.get("scheduler_address") is None:
        decided["scheduler_address"] = f"unix:{folder / 'scheduler.sock'}"
    router_args = as_arguments({**settings, **decided}, RouterConfig)
    limit_s = plan.start_timeout_s

    def spec(name: str, command: str, arguments: list[str], *, stage: int, grace_s: float) -> ChildSpec:
        argv = (sys.executable, "-m", "deploy.cli", command, *arguments)
        return ChildSpec(name=name, argv=argv, stage=stage, ready_limit_s=limit_s, grace_s=grace_s)

    specs = [spec("scheduler", "scheduler", router_args, stage=_STAGE_SCHEDULER, grace_s=_GRACE_S)]
    for i in range(plan.n_api):
        name = "api" if plan.n_api == 1 else f"api {i}"
        grace_s = router.shutdown_grace_s + _GRACE_S
        specs.append(spec(name, "api", router_args, stage=_STAGE_API, grace_s=grace_s))
    for i, port in enumerate(ports):
        arguments = _worker_settings(plan) | {"host": "127.0.0.1", "port": str(port)}
        arguments["log_format"] = decided["log_format"]
        if on_gpus:
            arguments["claim_gpu"] = "true"
        elif worker is not None and not worker.threads and plan.n_workers > 1:
            arguments["threads"] = str(max(1, host_cpus() // plan.n_workers))
        specs.append(
            spec(
                f"worker {i}" if plan.n_workers > 1 else "worker",
                "worker",
                as_arguments(arguments, WorkerConfig) + as_arguments(arguments, ClaimConfig),
                stage=_STAGE_WORKER,
                grace_s=_GRACE_S,
            )
        )
    return specs


def _on_gpus(worker: WorkerConfig, plan: LaunchPlan, *, env: Mapping[str, str]) -> bool:
    """Whether the workers compute on GPUs, one each. Raises NoGpuError when there are too few."""
    libraries = ("torch", "flashinfer")
    has_flashinfer = all(importlib.util.find_spec(name) is not None for name in libraries)
    if not wants_gpu(worker.attention, has_flashinfer=has_flashinfer):
        return False
    found = allowed_gpus(present_gpus(), env)
    if not found.gpus:
        return False  # `auto` computes on the CPU then, and `flashinfer` says what it lacks
    check_enough(found, n_workers=plan.n_workers)
    return True


def _worker_settings(plan: LaunchPlan) -> dict[str, str | None]:
    """--host and --port are the API's; a worker of a launch listens where the launcher says."""
    return {**plan.settings, "host": "127.0.0.1", "port": "0", "port_file": ""}


def _fetch(worker: WorkerConfig, *, say: Say) -> None:
    """Before any process starts, so that workers don't fetch side by side and its progress is seen."""
    resolve(
        worker.model,
        cache_dir=user_path(worker.cache_dir) if worker.cache_dir else None,
        offline=worker.offline,
        revision=worker.revision or None,
        say=lambda line: say("launcher", line),
    )


async def _run(supervisor: Supervisor, *, router: RouterConfig, plan: LaunchPlan, say: Say) -> int:
    started_s = time.monotonic()
    stop = _stop_on_signals(supervisor)
    names = ", ".join(keeper.spec.name for keeper in supervisor.keepers)
    say("launcher", f"starting {names}")
    try:
        if await _unless(stop, supervisor.start()):
            return 0
        if plan.n_workers:
            healthy = wait_healthy(router, limit_s=plan.start_timeout_s)
            if await _unless(stop, _first(healthy, supervisor.watch())):
                return 0
            supervisor.settle()
            took_s = time.monotonic() - started_s
            _show(await banner(router, n_workers=plan.n_workers, took_s=took_s), say=say)
        else:
            supervisor.settle()
            say("launcher", f"the router listens on port {router.port}")
        await _unless(stop, supervisor.watch())
        return 0
    finally:
        say("launcher", "ending")
        await supervisor.stop()


def _stop_on_signals(supervisor: Supervisor) -> asyncio.Event:
    """Set by the first signal; the second kills what still runs."""
    stop = asyncio.Event()

    def ask() -> None:
        if stop.is_set():
            supervisor.kill()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, ask)
    return stop


async def _unless(stop: asyncio.Event, work: Awaitable[None]) -> bool:
    """Waits for `work` (raising what it raises) or for `stop`, whichever comes first; True for `stop`."""
    await _first(work, stop.wait())
    return stop.is_set()


async def _first(*works: Awaitable[object]) -> None:
    """Waits for the first that ends, raises what it raised, and cancels the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _log_format(wanted: str) -> str:
    """The children write into pipes; what counts is where the launcher's own output goes."""
    if wanted != "auto":
        return wanted
    return "text" if sys.stderr.isatty() else "json"


def _show(text: str, *, say: Say) -> None:
    """On standard output; a server does not end for want of a reader there."""
    try:
        print(text, flush=True)
    except (OSError, ValueError) as error:
        say("launcher", f"can't write to standard output: {error}")
        with contextlib.suppress(OSError, ValueError):
            # Else Python tries again at its end, and the exit code would be 120.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say_as(form: Format) -> Say:
    def say(name: str, line: str) -> None:
        try:
            print(form(name, line), file=sys.stderr, flush=True)
        except OSError:
            return  # the terminal is gone; ending in order matters more

    return say
