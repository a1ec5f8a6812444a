"""Sampling parameters of every row, on the host, where each step picks those of its rows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from proto.codec import unpack_f32, unpack_i32
from proto.worker_pb2 import Sampling

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: dividing by it would overflow."""


class SamplingParams:
    """Arrays are [max_rows]; the neutral value of a parameter means that nothing is done for it."""

    def __init__(self, *, vocab_size: int, max_rows: int) -> None:
        self.vocab_size = vocab_size
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

    def set(self, row: int, sampling: Sampling, *, n_prompt: int) -> None:
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

    def bias_of(self, row: int, sampling: Sampling) -> tuple[I32, F32] | None:
        """Its ids and values; marks the row. Raises ValueError, for the user, when an id is outside the
        vocabulary."""
        if not sampling.bias_ids:
            return None
        ids, values = unpack_i32(sampling.bias_ids), unpack_f32(sampling.bias_values)
        if len(ids) != len(values):
            raise ValueError(f"logit_bias has {len(ids)} ids, but {len(values)} values")
        self._check(ids, "logit_bias")
        self.biased[row] = True
        return ids.copy(), values.copy()

    def end_tokens_of(self, sampling: Sampling) -> I32 | None:
        """What `min_new_tokens` forbids. Raises ValueError as above."""
        if not (sampling.min_new_tokens and sampling.eos_ids):
            return None
        ids = unpack_i32(sampling.eos_ids)
        self._check(ids, "eos_ids")
        return ids.copy()

    def _check(self, ids: I32, what: str) -> None:
        wrong = ids[(ids < 0) | (ids >= self.vocab_size)]
        if len(wrong):
            raise ValueError(
                f"{what} names token {int(wrong[0])}, but the vocabulary has {self.vocab_size} tokens"
            )
