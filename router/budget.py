"""How many blocks the running requests will need at their peak, from the tokens still to come."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


def peak_blocks(*, own: I64, slack: I64, remaining: I64, block_size: int) -> int:
    """Most blocks that these rows hold of their own at any later moment.

    own: [n] blocks each holds now (shared prefixes left out). slack: [n] positions it can still write into
    them. remaining: [n] tokens expected to come. Rows end in the order of `remaining`; at the end of the
    k-th longest, the k longest live: the peak is the largest of those n sums. Rounding up to whole blocks
    is charged at its mean of half a block per row.
    """
    if len(own) == 0:
        return 0
    order = np.argsort(-remaining, kind="stable")
    left = remaining[order]
    held = np.cumsum(own[order])
    room = np.cumsum(slack[order])
    k = np.arange(1, len(order) + 1)
    growth = np.maximum(k * left - room, 0) / block_size
    rounding = np.minimum(growth, k * 0.5 * (block_size > 1))
    return int(np.ceil(np.max(held + growth + rounding)))


class AnswerLengths:
    """What recent answers teach about how many tokens one still has to come.

    Before `min_samples` answers have ended nothing is assumed beyond `prior` tokens: preemption is the
    safety net for a guess too low, and a guess too high would reserve whole answers.
    """

    def __init__(self, *, n_samples: int = 256, min_samples: int = 16, prior: int = 256) -> None:
        self._lengths: deque[int] = deque(maxlen=n_samples)
        self._min_samples = min_samples
        self._prior = prior
        self._sorted: I64 | None = None
        self._suffix_mean: npt.NDArray[np.float64] = np.zeros(0)

    def add(self, n_output: int) -> None:
        self._lengths.append(n_output)
        self._sorted = None

    def expected(self, n_output: I64) -> I64:
        """[n] output tokens so far → [n] tokens still to come, were there no limit."""
        if len(self._lengths) < self._min_samples:
            return np.maximum(self._prior, n_output)
        if self._sorted is None:
            self._sorted = np.sort(np.fromiter(self._lengths, dtype=np.int64, count=len(self._lengths)))
            ordered = self._sorted.astype(np.float64)
            counts = np.arange(len(ordered), 0, -1)
            self._suffix_mean = np.cumsum(ordered[::-1])[::-1] / counts
        at = np.searchsorted(self._sorted, n_output, side="right")
        known = at < len(self._sorted)
        mean = self._suffix_mean[np.minimum(at, len(self._sorted) - 1)]
        # Longer than every recent answer: expect it to double.
        return np.where(known, np.ceil(mean - n_output), np.maximum(n_output, 16)).astype(np.int64)
