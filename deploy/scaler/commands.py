"""`quire ps`, `quire scale` and `quire roll`: from what was typed to the scaler."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from deploy.scaler.auto import follow
from deploy.scaler.docker_engine import DockerEngine, connect
from deploy.scaler.model import ScaleError
from deploy.scaler.policy import ScalePolicy
from deploy.scaler.steps import Patience, Scaler
from deploy.scaler.table import table
from settings.errors import ConfigError


class WallTime:
    """Implements `Time`."""

    def now_s(self) -> float:
        return time.monotonic()

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """As typed; `n_max` may be left to the number of GPUs."""

    n_min: int
    n_max: int | None
    up_wait_s: float
    up_kv: float
    up_after_s: float
    down_load: float
    down_after_s: float

    def policy(self, *, n_gpus: int | None) -> ScalePolicy:
        """Raises ConfigError."""
        n_max = self.n_max if self.n_max is not None else n_gpus
        if n_max is None:
            raise ConfigError(
                "--max is unset, but it can't be found: these workers claim no GPUs of this host"
            )
        if n_gpus is not None and n_max > n_gpus:
            raise ConfigError(f"--max is {n_max}, but this host has {n_gpus} GPUs and each worker needs one")
        return ScalePolicy(
            n_min=self.n_min,
            n_max=n_max,
            up_wait_s=self.up_wait_s,
            up_kv=self.up_kv,
            up_after_s=self.up_after_s,
            down_load=self.down_load,
            down_after_s=self.down_after_s,
        )


def show(project: str) -> None:
    """Raises ScaleError."""
    engine = DockerEngine(connect(), project=project)
    print(table(engine.workers(), engine.router().state()))


def rescale(workers: str, *, project: str, limits: Limits, start_s: float, drain_s: float) -> None:
    """Raises ScaleError and ConfigError."""
    if workers != "auto" and not workers.isdecimal():
        raise ConfigError(f"the number of workers is {workers!r}, but must be a whole number or `auto`")
    scaler = _scaler(project, start_s=start_s, drain_s=drain_s)
    with _interrupted_quietly():
        if workers != "auto":
            scaler.scale(int(workers))
            return
        policy = limits.policy(n_gpus=scaler.engine.n_gpus())
        scaler.say(f"following the load with {policy.n_min} to {policy.n_max} workers; Ctrl-C ends")
        follow(scaler, policy)


def replace_all(project: str, *, surge: bool, start_s: float, drain_s: float) -> None:
    """Raises ScaleError."""
    scaler = _scaler(project, start_s=start_s, drain_s=drain_s)
    with _interrupted_quietly():
        scaler.roll(surge=surge)


def _scaler(project: str, *, start_s: float, drain_s: float) -> Scaler:
    engine = DockerEngine(connect(), project=project)
    return Scaler(
        engine=engine,
        router=engine.router(),
        time=WallTime(),
        say=lambda line: print(line, file=sys.stderr, flush=True),
        patience=Patience(start_s=start_s, drain_s=drain_s),
    )


@contextlib.contextmanager
def _interrupted_quietly() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise ScaleError("interrupted; what was half done was undone") from None
