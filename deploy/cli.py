"""The `quire` command. Each subcommand imports what it needs when it runs, so that help is quick."""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated, NoReturn

import typer

from deploy.flags import with_settings
from deploy.gpu_claim import ClaimConfig
from deploy.process import die_with_supervisor, leave, report_ready
from router.config import RouterConfig
from settings.errors import ConfigError
from settings.load import load
from worker.config import WorkerConfig

app = typer.Typer(
    name="quire",
    help="Serves language models: a router that owns every decision, workers that only compute.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Settings = dict[str, str | None]
# `serve` decides where its processes meet; --host, --port are the API's and --model is the workers'.
_SERVE = {
    RouterConfig: ("scheduler_address", "replicas", "model", "share_port"),
    WorkerConfig: ("host", "port", "port_file"),
    ClaimConfig: ("claim_gpu",),
}

_REFUSALS = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.EACCES,
        errno.EPERM,
        errno.EMFILE,
        errno.ENFILE,
        errno.EPIPE,
        errno.ENAMETOOLONG,
        errno.ELOOP,
    }
)
"""What the system says of a full disk, missing rights, an impossible path, too few open files or a reader
that has gone: no traceback would help."""


def serve(
    *,
    settings: Settings,
    workers: Annotated[int, typer.Option(help="Worker processes on this host.", min=1)] = 1,
    api_processes: Annotated[int, typer.Option(help="HTTP processes that share the port.", min=1)] = 1,
    start_timeout_s: Annotated[
        float, typer.Option(help="How long a process may take to become ready.", min=1)
    ] = 900.0,
) -> None:
    """Serve a model on this host: a router and its workers, each in a process of its own."""
    from deploy.launcher import LaunchPlan, launch

    plan = LaunchPlan(
        settings=settings, n_workers=workers, n_api=api_processes, start_timeout_s=start_timeout_s
    )
    sys.exit(launch(plan, env=os.environ))


def router(
    *,
    settings: Settings,
    api_processes: Annotated[int, typer.Option(help="HTTP processes that share the port.", min=1)] = 1,
    start_timeout_s: Annotated[
        float, typer.Option(help="How long a process may take to become ready.", min=1)
    ] = 900.0,
) -> None:
    """Run the router alone (scheduler and HTTP API) for workers that run elsewhere."""
    from deploy.launcher import LaunchPlan, launch

    plan = LaunchPlan(settings=settings, n_workers=0, n_api=api_processes, start_timeout_s=start_timeout_s)
    sys.exit(launch(plan, env=os.environ))


def scheduler(*, settings: Settings) -> None:
    """Run the router's scheduler process alone."""
    from router.main_scheduler import run_scheduler

    die_with_supervisor()
    leave(run_scheduler(load(RouterConfig, env=os.environ, args=settings), on_ready=report_ready))


def api(*, settings: Settings) -> None:
    """Run one HTTP API process of the router alone."""
    from router.api.main import run_api

    die_with_supervisor()
    leave(run_api(load(RouterConfig, env=os.environ, args=settings), on_ready=report_ready))


def worker(*, settings: Settings) -> None:
    """Run one worker (a replica) that a router drives over gRPC."""
    die_with_supervisor()
    config = load(WorkerConfig, env=os.environ, args=settings)
    claim = load(ClaimConfig, env=os.environ, args=settings)
    if claim.claim_gpu:
        # Before torch is imported: CUDA looks at its environment once.
        _claim_gpu(claim)
    from worker.main import run_worker

    leave(run_worker(config, on_ready=report_ready))


def _claim_gpu(config: ClaimConfig) -> None:
    """Held until this process ends."""
    from deploy.gpu_claim import claim_gpu
    from deploy.gpu_devices import present_gpus

    claim, found = claim_gpu(config, present=present_gpus(), env=os.environ)
    print(f"claimed {claim.gpu} ({found.why})", file=sys.stderr, flush=True)


def chat(
    url: Annotated[str, typer.Argument(help="The server.")] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="Model name; empty: the server's first.")] = "",
    system: Annotated[str, typer.Option(help="A system message to begin with.")] = "",
    temperature: Annotated[float, typer.Option(help="Sampling temperature.", min=0)] = 0.3,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.", min=1)] = 1024,
    api_key: Annotated[str, typer.Option(help="API key.", envvar="QUIRE_API_KEY")] = "",
) -> None:
    """Talk to a server in the terminal. /reset forgets the talk, /quit ends, Ctrl-C stops an answer."""
    from deploy.chat import ChatOptions, run_chat

    options = ChatOptions(
        model=model, system=system, temperature=temperature, max_tokens=max_tokens, api_key=api_key
    )
    sys.exit(run_chat(url, options))


def fetch(
    model: Annotated[str, typer.Argument(help="`smollm2` or a hub id.")],
    revision: Annotated[str, typer.Option(help="Branch, tag or commit of a hub model.")] = "",
    cache_dir: Annotated[str, typer.Option(help="Folder for models; empty: the usual one.")] = "",
) -> None:
    """Fetch a model, so that a later start needs no network. Prints where it lies."""
    from checkpoint.paths import user_path
    from checkpoint.resolve import resolve

    checkpoint = resolve(
        model,
        cache_dir=user_path(cache_dir) if cache_dir else None,
        revision=revision or None,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(checkpoint.path)


def info(
    url: Annotated[str, typer.Argument(help="The server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[str, typer.Option(help="API key.", envvar="QUIRE_API_KEY")] = "",
) -> None:
    """Print what a running server says of itself, as JSON."""
    from deploy.info import print_info

    sys.exit(print_info(url, api_key=api_key))


def size(
    model: Annotated[str, typer.Argument(help="A hub id, a folder, a GGUF file, or `smollm2`.")],
    gpu_memory: Annotated[float, typer.Option(help="Memory of one device, in GiB.", min=0.1)],
    context: Annotated[int, typer.Option(help="Prompt plus answer of one request, in tokens.", min=1)] = 4096,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    kv_cache_dtype: Annotated[str, typer.Option(help="auto (as dtype), fp8_e4m3 or fp8_e5m2.")] = "auto",
    max_batch_size: Annotated[int, typer.Option(help="Rows.", min=1)] = 256,
    max_batch_prefill_tokens: Annotated[int, typer.Option(help="Prompt tokens of a step.", min=1)] = 4096,
    wiggle_room: Annotated[float, typer.Option(help="Share of the rest for the KV cache.", max=1)] = 0.95,
    revision: Annotated[str, typer.Option(help="Branch, tag or commit of a hub model.")] = "",
) -> None:
    """Estimate what fits into a device: weights, KV cache, requests at once."""
    from deploy.size import Wanted, config_of, report, size_of
    from worker.models.config import spec_from_config

    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")
    for option, value, allowed in (
        ("--dtype", dtype, dtypes),
        ("--kv-cache-dtype", kv_cache_dtype, ("auto", "fp8_e4m3", "fp8_e5m2", *dtypes)),
    ):
        if value not in allowed:
            raise ConfigError(f"{option} is {value!r}, but must be one of: {', '.join(allowed)}")
    wanted = Wanted(
        memory_gib=gpu_memory,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        max_batch_size=max_batch_size,
        max_batch_prefill_tokens=max_batch_prefill_tokens,
        wiggle_room=wiggle_room,
        context=context,
    )
    spec = spec_from_config(config_of(model, revision=revision or None))
    print(report(model, spec, wanted, size_of(spec, wanted)))


Project = Annotated[
    str, typer.Option(help="The compose project.", envvar="COMPOSE_PROJECT_NAME", show_default=True)
]
StartTimeout = Annotated[float, typer.Option(help="How long a new worker may take to serve.", min=1)]
DrainTimeout = Annotated[
    float, typer.Option(help="How long running answers may go on before they move elsewhere.", min=0)
]


def ps(project: Project = "quire") -> None:
    """Show the workers of a docker compose deployment: state, device, load."""
    from deploy.scaler.commands import show

    show(project)


def scale(
    workers: Annotated[str, typer.Argument(help="A number, or `auto` to follow the load.")],
    project: Project = "quire",
    n_min: Annotated[int, typer.Option("--min", help="auto: fewest workers.", min=1)] = 1,
    n_max: Annotated[
        int | None, typer.Option("--max", help="auto: most workers; unset: one per GPU of this host.", min=1)
    ] = None,
    up_wait_s: Annotated[float, typer.Option(help="auto: one more when a request waits so long.")] = 2.0,
    up_kv: Annotated[float, typer.Option(help="auto: … or this share of the KV cache is in use.")] = 0.9,
    up_after_s: Annotated[float, typer.Option(help="auto: … for so long.", min=0)] = 5.0,
    down_load: Annotated[
        float, typer.Option(help="auto: one less when the others stay below this share of rows and blocks.")
    ] = 0.6,
    down_after_s: Annotated[float, typer.Option(help="auto: … for so long.", min=0)] = 300.0,
    start_timeout_s: StartTimeout = 900.0,
    drain_timeout_s: DrainTimeout = 600.0,
) -> None:
    """Set the number of workers of a docker compose deployment, or follow the load."""
    from deploy.scaler.commands import Limits, rescale

    limits = Limits(
        n_min=n_min,
        n_max=n_max,
        up_wait_s=up_wait_s,
        up_kv=up_kv,
        up_after_s=up_after_s,
        down_load=down_load,
        down_after_s=down_after_s,
    )
    rescale(workers, project=project, limits=limits, start_s=start_timeout_s, drain_s=drain_timeout_s)


def roll(
    project: Project = "quire",
    surge: Annotated[bool, typer.Option(help="Let the new one serve before the old one goes.")] = True,
    start_timeout_s: StartTimeout = 900.0,
    drain_timeout_s: DrainTimeout = 600.0,
) -> None:
    """Replace every worker in turn (after a new image was built or pulled) without losing a request."""
    from deploy.scaler.commands import replace_all

    replace_all(project, surge=surge, start_s=start_timeout_s, drain_s=drain_timeout_s)


app.command("serve")(with_settings(serve, _SERVE))
app.command("router")(with_settings(router, {RouterConfig: ()}))
app.command("scheduler")(with_settings(scheduler, {RouterConfig: ()}))
app.command("api")(with_settings(api, {RouterConfig: ()}))
app.command("worker")(with_settings(worker, {WorkerConfig: (), ClaimConfig: ()}))
app.command("chat")(chat)
app.command("fetch")(fetch)
app.command("info")(info)
app.command("size")(size)
app.command("ps")(ps)
app.command("scale")(scale)
app.command("roll")(roll)


def main() -> NoReturn:
    """Runs a command. A user's mistake is one line and exit code 2, never a traceback."""
    try:
        app()
    except ConfigError as error:
        _fail(str(error), code=2)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _REFUSALS:
            where = f": {error.filename}" if error.filename else ""
            _fail(f"{error.strerror}{where}", code=1)
        if not _is_expected(error):
            raise
        _fail(str(error), code=getattr(error, "exit_code", 1))
    sys.exit(0)


def _is_expected(error: Exception) -> bool:
    """Whether the error's text was written for the user."""
    from checkpoint.checkpoint import CheckpointError
    from deploy.errors import DeployError
    from router.errors import RouterError
    from worker.errors import StartError

    return isinstance(error, CheckpointError | DeployError | RouterError | StartError)


def _fail(message: str, *, code: int) -> NoReturn:
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
