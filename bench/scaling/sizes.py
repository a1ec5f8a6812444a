"""What is sent: per device a case without and one with shared prefixes, times the number of devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.prompts import PromptShape
from bench.run_cases import PromptSource
from bench.scenarios import GPU_CASES, Case

Prompts = Sequence[str | list[int]]


@dataclass(frozen=True, slots=True)
class Prefixed:
    """Prompts of which each begins with one of a few long prefixes, in seeded random order."""

    prompts: Prompts
    prefix_of: tuple[int, ...]
    """Per prompt."""


def case_named(name: str) -> Case:
    return next(case for case in GPU_CASES if case.name == name)


def sized(case: Case, *, n_devices: int, shrink: int) -> Case:
    """The case with `n_devices` times the clients and requests. `shrink` divides clients, requests and
    tokens, for a dry run."""

    def part(n: int) -> int:
        return max(1, n // shrink)

    assert case.concurrency is not None
    clients = max(2, case.concurrency // shrink) * n_devices
    return Case(
        name=case.name,
        n_own=part(case.n_own),
        n_output=max(2, case.n_output // shrink),
        n_prefix=part(case.n_prefix) if case.n_prefix else 0,
        n_requests=clients * max(2, case.n_requests // case.concurrency),
        concurrency=clients,
    )


def prefixed(source: PromptSource, shape: PromptShape, *, n: int, n_prefixes: int, seed: int) -> Prefixed:
    """[n] prompts over `n_prefixes` prefixes. Seeds up to `seed + n_prefixes` are used."""
    picks = np.random.default_rng(seed).integers(n_prefixes, size=n)
    queues = [
        iter(source.draw(shape, n=int((picks == k).sum()), seed=seed + 1 + k)) for k in range(n_prefixes)
    ]
    return Prefixed(prompts=[next(queues[k]) for k in picks], prefix_of=tuple(picks.tolist()))
