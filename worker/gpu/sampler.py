"""Sampling on the device: lean rows in two launches, all else through the general sampler.

Lean is greedy or plain temperature; top-k, top-p and min-p add one launch that finds the lowest allowed
logit. Penalties, bias, min_tokens, typical-p and logprobs go through `worker/sampling.py`, whose rows this
one also keeps.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch

from proto.worker_pb2 import Sampling
from worker.gpu.buffers import SAMPLE_TILE, Buffers
from worker.gpu.head import HeadTensors
from worker.gpu.step_plan import SampleKeys
from worker.sampling import RawLogprobs, Sampler
from worker.sampling_noise import row_keys
from worker.sampling_rows import GREEDY_BELOW, SamplingRows

I32 = npt.NDArray[np.int32]


class Level(IntEnum):
    """What the sampled rows of a step need."""

    LEAN = 0
    FILTERED = 1
    GENERAL = 2


class GpuSampler:
    """Owns the rows' sampling state and the ring of results."""

    def __init__(
        self,
        *,
        buffers: Buffers,
        head: HeadTensors,
        last: torch.Tensor,
        vocab_size: int,
        max_rows: int,
        n_slots: int,
        device: torch.device,
        pdl: bool,
    ) -> None:
        self._buffers = buffers
        self._head = head
        self._last = last
        self._vocab = vocab_size
        self._max_rows = max_rows
        self._device = device
        self._pdl = pdl
        self._n_tiles = -(-vocab_size // SAMPLE_TILE)
        self.general = Sampler(vocab_size=vocab_size, max_rows=max_rows, device=device)
        self.ring = torch.full((n_slots, max_rows), -1, dtype=torch.int32, device=device)

    @property
    def _state(self) -> SamplingRows:
        return self.general.rows

    def admit(self, row: int, sampling: Sampling, *, tokens: I32, n_prompt: int) -> None:
        """Raises ValueError, for the user, when the parameters can't be used."""
        self.general.admit(row, sampling, tokens=tokens, n_prompt=n_prompt)

    def level(self, rows: I32, positions: I32) -> Level:
        state = self._state
        if (
            state.penalised[rows].any()
            or state.biased[rows].any()
            or state.logprobs[rows].any()
            or (state.typical_p[rows] < 1).any()
            or (positions - state.n_prompt[rows] < state.min_new_tokens[rows]).any()
        ):
            return Level.GENERAL
        random = state.temperature[rows] >= GREEDY_BELOW
        filtered = (state.top_k[rows] > 0) | (state.top_p[rows] < 1) | (state.min_p[rows] > 0)
        return Level.FILTERED if (random & filtered).any() else Level.LEAN

    def keys(self, rows: I32, positions: I32) -> SampleKeys:
        state = self._state
        temperature = state.temperature[rows]
        key0, key1 = row_keys(state.seed[rows], positions)
        with np.errstate(divide="ignore"):
            log_min_p = np.log(state.min_p[rows])
        return SampleKeys(
            key0=key0,
            key1=key1,
            temperature=np.where(temperature >= GREEDY_BELOW, temperature, 0).astype(np.float32),
            top_k=state.top_k[rows].astype(np.int32),
            top_p=state.top_p[rows],
            log_min_p=log_min_p.astype(np.float32),
        )

    def launch(self, *, n_rows: int, filtered: bool) -> None:
        """Sample `n_rows` rows (padding included) from the logits. Can be captured."""
        from worker.gpu.kernels.sample import sample_final_kernel, sample_partial_kernel, threshold_kernel

        b, head = self._buffers, self._head
        if filtered:
            threshold_kernel[(n_rows,)](
                b.logits,
                head.sample_rows,
                head.temperature,
                head.top_k,
                head.top_p,
                head.log_min_p,
                b.floor,
                self._vocab,
                BLOCK=8192,
                K_PASSES=40,
                P_PASSES=24,
                num_warps=16,
            )
        sample_partial_kernel[(self._n_tiles, n_rows)](
            b.logits,
            head.sample_rows,
            head.key0,
            head.key1,
            head.temperature,
            b.floor,
            b.best,
            b.best_id,
            self._vocab,
            self._n_tiles,
            BLOCK=SAMPLE_TILE,
            FILTERED=filtered,
            PDL=self._pdl,
            num_warps=4,
            launch_pdl=self._pdl,
        )
        sample_final_kernel[(n_rows,)](
            head.sample_rows,
            b.best,
            b.best_id,
            head.slot,
            self._last,
            self.ring,
            self._n_tiles,
            self._max_rows,
            BLOCK=max(16, 1 << (self._n_tiles - 1).bit_length()),
            PDL=self._pdl,
            num_warps=1,
            launch_pdl=self._pdl,
        )

    def sample_general(self, *, rows: I32, positions: I32, slot: int) -> RawLogprobs | None:
        """Through the general sampler; the result lands in the same places."""
        n = len(rows)
        result = self.general.sample(self._buffers.logits[:n], rows, positions)
        tokens = result.tokens.to(torch.int32)
        zero = torch.zeros((), dtype=torch.int32, device=self._device)
        self._last.index_copy_(0, self._head.sample_rows[:n].long(), torch.where(result.usable, tokens, zero))
        self.ring[slot, :n].copy_(torch.where(result.usable, tokens, zero - 1))
        return result.logprobs
