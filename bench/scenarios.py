"""The cases that are compared: what each sends, and how."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from bench.load import Load
from bench.prompts import PromptShape


@dataclass(slots=True, frozen=True)
class Case:
    """One named load. Token counts are per request; `n_prefix` tokens are shared by all requests of a run."""

    name: str
    n_own: int
    n_output: int
    n_requests: int
    n_prefix: int = 0
    concurrency: int | None = None
    rate_per_s: float | None = None

    @property
    def shape(self) -> PromptShape:
        return PromptShape(n_own=self.n_own, n_prefix=self.n_prefix)

    def load(self, seed: int) -> Load:
        return Load(
            n_requests=self.n_requests,
            n_output=self.n_output,
            concurrency=self.concurrency,
            rate_per_s=self.rate_per_s,
            seed=seed,
        )

    def seed(self, *, base: int, run: int) -> int:
        """Differs between cases and runs, so that no run finds another's prompts in the server's cache."""
        return zlib.crc32(f"{base}/{self.name}/{run}".encode())

    def describe(self) -> str:
        how = f"{self.concurrency} at a time" if self.concurrency else f"{self.rate_per_s:g} a second"
        prompt = f"{self.n_prefix:,} shared + {self.n_own:,}" if self.n_prefix else f"{self.n_own:,}"
        return f"{prompt} / {self.n_output}, {self.n_requests:,} requests, {how}"

    def scaled(self, factor: float) -> Case:
        """The same case with fewer requests (at least one per client), for a dry run."""
        n = max(self.concurrency or 1, round(self.n_requests * factor))
        return Case(
            name=self.name, n_own=self.n_own, n_output=self.n_output, n_requests=n,
            n_prefix=self.n_prefix, concurrency=self.concurrency, rate_per_s=self.rate_per_s,
        )  # fmt: skip


GPU_CASES = (
    Case("c1", n_own=128, n_output=256, n_requests=4, concurrency=1),
    Case("c256", n_own=512, n_output=256, n_requests=1024, concurrency=256),
    Case("shared", n_prefix=2048, n_own=128, n_output=128, n_requests=512, concurrency=64),
    Case("long", n_own=30_000, n_output=64, n_requests=16, concurrency=4),
    Case("rate16", n_own=1024, n_output=128, n_requests=320, rate_per_s=16.0),
)
"""Llama-3.1-8B shape on one large GPU."""

CPU_CASES = (
    Case("cpu1", n_own=64, n_output=64, n_requests=6, concurrency=1),
    Case("cpu8", n_own=64, n_output=64, n_requests=32, concurrency=8),
    Case("cpu32", n_own=64, n_output=64, n_requests=64, concurrency=32),
    Case("cpushared", n_prefix=1000, n_own=20, n_output=32, n_requests=24, concurrency=8),
)
"""A model of some hundred million weights on two CPU cores."""

GROUPS: dict[str, tuple[Case, ...]] = {"gpu": GPU_CASES, "cpu": CPU_CASES}


def choose_cases(names: str) -> list[Case]:
    """From a comma-separated list of cases or groups. Raises ValueError naming what there is."""
    known = {case.name: case for group in GROUPS.values() for case in group}
    chosen: list[Case] = []
    for name in names.split(","):
        if name in GROUPS:
            chosen += GROUPS[name]
        elif name in known:
            chosen.append(known[name])
        else:
            raise ValueError(f"--cases {name!r}: choose among {', '.join([*GROUPS, *known])}")
    return chosen
