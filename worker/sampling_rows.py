"""Sampling parameters of every row, and the token counts that penalties need.

Parameters are on the host, where each step picks those of its rows; counts are on the device, because
the tokens they count are sampled there.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from proto.codec import unpack_f32, unpack_i32
from proto.worker_pb2 import Sampling

I32 = npt.NDArray[np.int32]

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: dividing by it would overflow."""


class SamplingRows:
    """Arrays are [max_rows]; the neutral value of a parameter means that nothing is done for it."""

    def __init__(self, *, vocab_size: int, max_rows: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.max_rows = max_rows
        self.temperature = np.zeros(max_rows, dtype=np.float32)
        self.top_k = np.zeros(max_rows, dtype=np.int64)
        self.top_p = np.ones(max_rows, dtype=np.float32)
        self.min_p = np.zeros(max_rows, dtype=np.float32)
        self.typical_p = np.ones(max_rows, dtype=np.float32)
        self.repetition = np.ones(max_rows, dtype=np.float32)
        self.presence = np.zeros(max_rows, dtype=np.float32)
        self.frequency = np.zeros(max_rows, dtype=np.float32)
        self.seed = np.zeros(max_rows, dtype=np.uint64)
        self.n_prompt = np.zeros(max_rows, dtype=np.int64)
        self.min_new_tokens = np.zeros(max_rows, dtype=np.int64)
        self.logprobs = np.zeros(max_rows, dtype=np.bool_)
        self.top_logprobs = np.zeros(max_rows, dtype=np.int64)
        self.penalised = np.zeros(max_rows, dtype=np.bool_)
        self.biased = np.zeros(max_rows, dtype=np.bool_)
        self.bias: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.eos: dict[int, torch.Tensor] = {}
        self._counts: torch.Tensor | None = None
        self._in_prompt: torch.Tensor | None = None

    def admit(self, row: int, sampling: Sampling, *, tokens: I32, n_prompt: int) -> None:
        """tokens: prompt and the output committed so far. Raises ValueError, for the user, when an id is
        outside the vocabulary."""
        self.bias.pop(row, None)
        self.eos.pop(row, None)
        self.biased[row] = False
        self.temperature[row] = sampling.temperature
        self.top_k[row] = sampling.top_k if sampling.top_k < self.vocab_size else 0
        self.top_p[row] = sampling.top_p or 1.0
        self.min_p[row] = sampling.min_p
        self.typical_p[row] = sampling.typical_p or 1.0
        self.repetition[row] = sampling.repetition_penalty or 1.0
        self.presence[row] = sampling.presence_penalty
        self.frequency[row] = sampling.frequency_penalty
        self.seed[row] = np.uint64(sampling.seed)
        self.n_prompt[row] = n_prompt
        self.min_new_tokens[row] = sampling.min_new_tokens
        self.logprobs[row] = sampling.logprobs or sampling.top_logprobs > 0
        self.top_logprobs[row] = sampling.top_logprobs
        self.penalised[row] = bool(
            self.repetition[row] != 1.0 or self.presence[row] != 0.0 or self.frequency[row] != 0.0
        )
        if self.penalised[row]:
            self._count(row, tokens, n_prompt)
        if sampling.bias_ids:
            ids, values = unpack_i32(sampling.bias_ids), unpack_f32(sampling.bias_values)
            if len(ids) != len(values):
                raise ValueError(f"logit_bias has {len(ids)} ids, but {len(values)} values")
            self.bias[row] = (self._ids(ids, "logit_bias"), torch.from_numpy(values.copy()).to(self.device))
            self.biased[row] = True
        if sampling.min_new_tokens and sampling.eos_ids:
            self.eos[row] = self._ids(unpack_i32(sampling.eos_ids), "eos_ids")

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

    def _ids(self, ids: I32, what: str) -> torch.Tensor:
        wrong = ids[(ids < 0) | (ids >= self.vocab_size)]
        if len(wrong):
            raise ValueError(
                f"{what} names token {int(wrong[0])}, but the vocabulary has {self.vocab_size} tokens"
            )
        return torch.from_numpy(ids.astype(np.int64)).to(self.device)
