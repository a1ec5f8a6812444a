"""Every row's sampling state for the general sampler: parameters, bias, end tokens, token counts.

Parameters are on the host; counts are on the device, because the tokens they count are sampled there.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from proto.worker_pb2 import Sampling
from worker.sampling_params import SamplingParams

I32 = npt.NDArray[np.int32]


class SamplingRows(SamplingParams):
    """Owns what the device holds of the rows."""

    def __init__(self, *, vocab_size: int, max_rows: int, device: torch.device) -> None:
        super().__init__(vocab_size=vocab_size, max_rows=max_rows)
        self.device = device
        self.bias: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.eos: dict[int, torch.Tensor] = {}
        self._counts: torch.Tensor | None = None
        self._in_prompt: torch.Tensor | None = None

    def admit(self, row: int, sampling: Sampling, *, tokens: I32, n_prompt: int) -> None:
        """tokens: prompt and the output committed so far. Raises ValueError, for the user, when an id is
        outside the vocabulary."""
        self.bias.pop(row, None)
        self.eos.pop(row, None)
        self.set(row, sampling, n_prompt=n_prompt)
        if self.penalised[row]:
            self._count(row, tokens, n_prompt)
        bias = self.bias_of(row, sampling)
        if bias is not None:
            self.bias[row] = (self._ids(bias[0]), torch.from_numpy(bias[1]).to(self.device))
        ends = self.end_tokens_of(sampling)
        if ends is not None:
            self.eos[row] = self._ids(ends)

    def counts(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """How often each token was sampled, int32, and whether it is in the prompt, bool: [n, vocab]."""
        assert self._counts is not None
        assert self._in_prompt is not None
        return self._counts.index_select(0, rows), self._in_prompt.index_select(0, rows)

    def add_sampled(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        assert self._counts is not None
        one = torch.ones((), dtype=self._counts.dtype, device=self.device)
        self._counts.index_put_((rows, tokens), one, accumulate=True)

    def _count(self, row: int, tokens: I32, n_prompt: int) -> None:
        if self._counts is None or self._in_prompt is None:
            # Made when the first row needs it: max_rows * vocab * 5 bytes.
            shape = (self.max_rows, self.vocab_size)
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self.device)
            self._in_prompt = torch.zeros(shape, dtype=torch.bool, device=self.device)
        ids = torch.from_numpy(tokens.astype(np.int64)).to(self.device)
        counts = torch.bincount(ids[n_prompt:], minlength=self.vocab_size)
        self._counts[row].copy_(counts)
        self._in_prompt[row].zero_()[ids[:n_prompt]] = True

    def _ids(self, ids: I32) -> torch.Tensor:
        return torch.from_numpy(ids.astype(np.int64)).to(self.device)
