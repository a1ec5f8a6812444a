"""Runs cases several times against one server that is up, and keeps every run and the median."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import uvloop

from bench.load import Load, PromptKind, Target, run_load
from bench.measures import Summary, median_summary
from bench.prompts import PromptShape, WordVocabulary, random_texts, random_token_lists
from bench.scenarios import Case

WARM_UP = PromptShape(n_own=64)


@dataclass(slots=True, frozen=True)
class PromptSource:
    """Where prompts come from: words of a tokenizer (sent as text) or ids below a vocabulary size."""

    words: WordVocabulary | None
    vocab_size: int

    @property
    def kind(self) -> PromptKind:
        return PromptKind.TEXT if self.words is not None else PromptKind.TOKENS

    def draw(self, shape: PromptShape, *, n: int, seed: int) -> Sequence[str | list[int]]:
        if self.words is not None:
            return random_texts(self.words, shape, n=n, seed=seed)
        return random_token_lists(self.vocab_size, shape, n=n, seed=seed)


@dataclass(slots=True, frozen=True)
class CaseResult:
    case: Case
    runs: tuple[Summary, ...]

    @property
    def median(self) -> dict[str, Any]:
        return median_summary([run.as_dict() for run in self.runs])

    def spread(self) -> float:
        """(largest - smallest) / median output tok/s of the runs."""
        rates = [run.output_tok_s for run in self.runs]
        middle = statistics.median(rates)
        return (max(rates) - min(rates)) / middle if middle else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "case": self.case.name,
            "load": self.case.describe(),
            "median": self.median,
            "spread": self.spread(),
            "runs": [run.as_dict() for run in self.runs],
        }


def warm_up(target: Target, source: PromptSource, *, n: int, seed: int) -> None:
    """A few short answers before anything is measured; their prompts occur in no case."""
    prompts = source.draw(WARM_UP, n=n, seed=seed)
    load = Load(n_requests=n, n_output=16, concurrency=n)
    uvloop.run(run_load(target, prompts, load, n_input=WARM_UP.n_tokens))


def run_case(
    target: Target,
    case: Case,
    source: PromptSource,
    *,
    n_runs: int,
    seed: int,
    say: Callable[[str], None],
) -> CaseResult:
    """`n_runs` runs of one case, each with prompts of its own."""
    warm_up(target, source, n=min(case.concurrency or 8, 8), seed=case.seed(base=seed, run=-1))
    runs = []
    for run in range(n_runs):
        run_seed = case.seed(base=seed, run=run)
        prompts = source.draw(case.shape, n=case.n_requests, seed=run_seed)
        summary, _ = uvloop.run(run_load(target, prompts, case.load(run_seed), n_input=case.shape.n_tokens))
        runs.append(summary)
        say(
            f"{case.name} run {run + 1}/{n_runs}: {summary.output_tok_s:,.1f} output tok/s, "
            f"TTFT p50 {summary.ttft_ms.p50 or 0:,.1f} ms, TPOT p50 {summary.tpot_ms.p50 or 0:,.2f} ms, "
            f"{summary.n_errors} errors, {summary.n_short} short, client {summary.client_cpu:.2f} cores"
        )
        for text in summary.errors:
            say(f"  error: {text}")
    return CaseResult(case=case, runs=tuple(runs))
