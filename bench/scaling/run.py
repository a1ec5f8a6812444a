"""The parts of the measurement, each against servers of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from bench.load import Load, Target, run_load, served_model
from bench.measures import median_summary
from bench.prompts import PromptShape
from bench.run_cases import PromptSource
from bench.scaling.fleet import claims, serve_command
from bench.scaling.loss import LossRun, Phases, measure_loss
from bench.scaling.measure import PrefixedRun, Run, measure, measure_prefixed, run_line
from bench.scaling.observe import Observer
from bench.scaling.sizes import Prefixed, Prompts, case_named, prefixed, sized
from bench.server import RunningServer, running

N_MANY = 16
"""Prefixes per replica of the load whose prefixes no replica can hold all."""
PLACEMENTS = ("exact", "random", "round-robin")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    base: tuple[str, ...]
    n_devices: int
    shrink: int
    runs: int
    seed: int
    n_prefixes: int
    processes_per_device: int
    phases: Phases
    placements: tuple[str, ...]
    ready_within_s: float
    logs: Path


@dataclass(slots=True)
class Found:
    """Grows part by part."""

    one: list[Run] = field(default_factory=list)
    all: list[Run] = field(default_factory=list)
    one_prefixed: PrefixedRun | None = None
    few: dict[str, PrefixedRun] = field(default_factory=dict)
    """The load of a few prefixes, by placement."""
    many: dict[str, PrefixedRun] = field(default_factory=dict)
    many_tokens: int = 0
    """KV budget of each replica there."""
    loss: LossRun | None = None
    devices: list[str] = field(default_factory=list)
    starts_s: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {
            "starts_s": self.starts_s,
            "gain": {
                "one": [run.as_dict() for run in self.one],
                "all": [run.as_dict() for run in self.all],
            },
            "one_prefixed": self.one_prefixed.as_dict() if self.one_prefixed else None,
            "few_prefixes": {name: run.as_dict() for name, run in self.few.items()},
            "many_prefixes": {name: run.as_dict() for name, run in self.many.items()},
            "many_kv_tokens": self.many_tokens,
            "loss": self.loss.as_dict() if self.loss else None,
        }


def median_of(runs: list[Run]) -> dict[str, Any]:
    return median_summary([run.summary.as_dict() for run in runs])


class Measurement:
    """Draws all prompts in the background, so that no device waits for them."""

    def __init__(self, plan: Plan, source: PromptSource, *, say: Callable[[str], None]) -> None:
        self.found = Found()
        self._plan = plan
        self._source = source
        self._say = say
        n = plan.n_devices
        plain, shared = case_named("c256"), case_named("shared")
        self._plain = [sized(plain, n_devices=k, shrink=plan.shrink) for k in (1, n)]
        self._shared = [sized(shared, n_devices=k, shrink=plan.shrink) for k in (1, n)]
        self._pool = ThreadPoolExecutor(1)
        self._drawn: dict[str, Future[Any]] = {}
        for run in range(plan.runs):
            for k, case in enumerate(self._plain):
                self._draw(f"plain {k} {run}", case.shape, n=case.n_requests, seed=100 * run + 10 * k)
        self._draw_prefixed("one", n_prefixes=plan.n_prefixes, k=0)
        self._draw("loss", self._plain[1].shape, n=2 * self._plain[1].n_requests, seed=9_000)
        self._draw_prefixed("few", n_prefixes=plan.n_prefixes, k=1)
        self._draw_prefixed("many", n_prefixes=N_MANY * n, k=1)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    # ---- parts ----

    def gain(self, *, loss: bool) -> None:
        """One replica, then all of them; and one of all killed. Raises ServerError, as all parts do."""
        plan, n = self._plan, self._plan.n_devices
        with self._serving("one", n_workers=1) as (_, target):
            for run in range(plan.runs):
                self.found.one.append(self._run_plain(target, 0, run))
            prompts: Prefixed = self._drawn["one"].result()
            self.found.one_prefixed = self._run_prefixed(target, 0, prompts, "one replica, few prefixes")
        with self._serving("all", n_workers=n) as (server, target):
            for run in range(plan.runs):
                self.found.all.append(self._run_plain(target, 1, run))
            if loss and n > 1:
                self.found.loss = measure_loss(
                    target, self._plain[1], self._drawn["loss"].result(), server_pid=server.pid,
                    phases=plan.phases, n_processes=self._processes(1),
                )  # fmt: skip
                self._say(f"killed and back: {self.found.loss.n_failed} failed or short")

    def placements(self) -> None:
        """Few prefixes that every replica can hold, then many that no replica can, by each placement."""
        plan = self._plan
        self.found.many_tokens = self._many_tokens()
        flags = (f"--max-batch-total-tokens={self.found.many_tokens}",)
        for placement in plan.placements:
            with self._serving(
                placement, n_workers=plan.n_devices, flags=(f"--placement={placement}", *flags)
            ) as (_, target):
                for name, runs in (("few", self.found.few), ("many", self.found.many)):
                    prompts: Prefixed = self._drawn[name].result()
                    runs[placement] = self._run_prefixed(target, 1, prompts, f"{placement}, {name} prefixes")

    def _many_tokens(self) -> int:
        """Room for the rows of one replica and its part of the prefixes, and a quarter more: enough when each
        prefix lives on one replica, too little for all of them."""
        case = self._shared[0]
        assert case.concurrency is not None
        rows = case.concurrency * (case.n_own + case.n_output)
        return round(1.25 * (rows + N_MANY * case.n_prefix))

    # ---- pieces ----

    def _run_plain(self, target: Target, k: int, run: int) -> Run:
        prompts: Prompts = self._drawn[f"plain {k} {run}"].result()
        found = measure(target, self._plain[k], prompts, seed=self._plan.seed, n_processes=self._processes(k))
        self._say(run_line(f"{'all' if k else 'one'} {run + 1}/{self._plan.runs}", found))
        return found

    def _run_prefixed(self, target: Target, k: int, prompts: Prefixed, name: str) -> PrefixedRun:
        found = measure_prefixed(
            target, self._shared[k], prompts, seed=self._plan.seed, n_processes=self._processes(k)
        )
        self._say(
            run_line(name, found.run)
            + f", hit rate {found.hit_rate:.1%}, computed {sum(found.computed)} times"
        )
        return found

    def _processes(self, k: int) -> int:
        return self._plan.processes_per_device * (self._plan.n_devices if k else 1)

    @contextlib.contextmanager
    def _serving(
        self, name: str, *, n_workers: int, flags: tuple[str, ...] = ()
    ) -> Iterator[tuple[RunningServer, Target]]:
        plan = self._plan
        n_clients = max(case.concurrency or 0 for case in (*self._plain, *self._shared))
        command = serve_command(
            plan.base,
            n_workers=n_workers,
            n_clients=n_clients,
            ready_within_s=plan.ready_within_s,
            flags=flags,
        )
        log = plan.logs / f"{name}.log"
        with running(command, log=log) as server:
            target = Target(url=server.url, model=served_model(server.url))
            self.found.starts_s[name] = round(server.start_to_ready_s, 2)
            self._say(f"{name}: {n_workers} workers ready after {server.start_to_ready_s:.1f} s")
            self._warm_up(target, n_workers)
            if name == "all":
                with Observer(server.url) as observer:
                    self.found.devices = [
                        f"{r['address']}: {r.get('device', 'no device')}, attention {r.get('attention', '?')}"
                        for r in observer.replicas()
                    ] + claims(log)
            yield server, target

    def _warm_up(self, target: Target, n_workers: int) -> None:
        """Every replica answers before anything is measured, with prompts that occur nowhere else."""
        shape = PromptShape(n_own=max(2, 64 // self._plan.shrink))
        n = 16 * n_workers
        prompts = self._source.draw(shape, n=n, seed=self._plan.seed - 1)
        load = Load(n_requests=n, n_output=16, concurrency=n)
        uvloop.run(run_load(target, prompts, load, n_input=shape.n_tokens))

    def _draw(self, name: str, shape: PromptShape, *, n: int, seed: int) -> None:
        seed += 1_000 * self._plan.seed
        self._drawn[name] = self._pool.submit(self._source.draw, shape, n=n, seed=seed)

    def _draw_prefixed(self, name: str, *, n_prefixes: int, k: int) -> None:
        case = self._shared[k]
        self._drawn[name] = self._pool.submit(
            prefixed, self._source, case.shape, n=case.n_requests, n_prefixes=n_prefixes,
            seed=1_000_000 * self._plan.seed + 10_000 * n_prefixes + 1_000 * k,
        )  # fmt: skip
