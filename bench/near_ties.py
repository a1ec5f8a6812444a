"""Are texts those of a reference? A token may differ only where the reference's own two best values, noise
included, are closer than a bound; the comparison then goes on from the text as it is.

The noise is the sampler's (`worker/sampling_noise.py`); the filters are computed from the reference's logits.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from bench.float64_decoder import Float64Decoder
from bench.run_ahead import Request
from proto.worker_pb2 import Sampling
from worker.sampling_noise import gumbel_noise

F64 = npt.NDArray[np.float64]


@dataclass(slots=True)
class Tally:
    n_places: int = 0
    n_differ: int = 0
    """Places where the reference would have gone on otherwise, all within the bound."""
    worst_gap: float = 0.0
    """Between the reference's choice and ours, in units of the logits."""
    wrong: list[str] = field(default_factory=list)
    """Beyond the bound."""

    def add(self, other: Tally) -> None:
        self.n_places += other.n_places
        self.n_differ += other.n_differ
        self.worst_gap = max(self.worst_gap, other.worst_gap)
        self.wrong += other.wrong

    @property
    def share(self) -> float:
        return self.n_differ / max(1, self.n_places)


class Judge:
    """Remembers the texts that it has judged: most runs say the same."""

    def __init__(self, reference: Float64Decoder, *, bound: float) -> None:
        """`bound`: on the difference of two logits' errors."""
        self._reference = reference
        self._bound = bound
        self._known: dict[tuple[object, ...], Tally] = {}

    def judge(self, requests: list[Request]) -> Tally:
        total = Tally()
        for request in requests:
            key = (
                tuple(request.prompt),
                tuple(request.output),
                request.sampling.SerializeToString(deterministic=True),
            )
            if key not in self._known:
                self._known[key] = self._judge(request)
            total.add(self._known[key])
        return total

    def _judge(self, request: Request) -> Tally:
        tally = Tally()
        n_prompt = len(request.prompt)
        logits = self._reference.logits(request.prompt + request.output[:-1], first=n_prompt - 1)
        for place, (values, token) in enumerate(zip(logits.cpu().numpy(), request.output, strict=True)):
            gap = gap_of(values, token, request.sampling, position=n_prompt + place, slack=self._bound)
            tally.n_places += 1
            if gap > 0:
                tally.n_differ += 1
                tally.worst_gap = max(tally.worst_gap, gap)
                if gap > self._bound:
                    tally.wrong.append(
                        f"prompt {request.prompt[:8]}… place {place}: token {token}, gap {gap:.4f} > "
                        f"{self._bound:.4f}"
                    )
        return tally


def gap_of(values: F64, token: int, sampling: Sampling, *, position: int, slack: float) -> float:
    """How far `token` lies behind the reference's choice, in units of the logits; 0: it is the choice. What
    lies within `slack` of a filter's edge may be in or out."""
    if sampling.temperature == 0:
        return float(values.max() - values[token])
    edge = filter_edge(values, sampling)
    if values[token] < edge - slack:
        return float(edge - values[token])
    ids = np.arange(len(values))
    noised = values / sampling.temperature + gumbel_noise(sampling.seed, position, ids)
    noised[(values < edge + slack) & (ids != token)] = -np.inf
    return float((noised.max() - noised[token]) * sampling.temperature)


def filter_edge(values: F64, sampling: Sampling) -> float:
    """The lowest logit that top-k, then top-p allow."""
    order = np.argsort(-values)
    if sampling.top_k:
        order = order[: sampling.top_k]
    if 0 < sampling.top_p < 1:
        p = np.exp((values[order] - values[order[0]]) / sampling.temperature)
        p /= p.sum()
        order = order[np.cumsum(p) - p < sampling.top_p]
    return float(values[order[-1]])
