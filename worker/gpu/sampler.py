"""Sampling on the device: two launches for lean rows, more only for what some row of the step needs.

Lean is greedy or plain temperature; top-k, top-p and min-p add one launch that finds the lowest allowed
logit. Penalties, bias, min_tokens, typical-p and grammar masks first change a copy of the logits
(`adjustments.py`). A row's token never depends on which of these its neighbours need.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from proto.worker_pb2 import Sampling
from worker.gpu.adjustments import Adjustments
from worker.gpu.buffers import SAMPLE_TILE, Buffers
from worker.gpu.head import HeadTensors
from worker.gpu.logprobs import raw_logprobs
from worker.gpu.step_plan import SampleKeys
from worker.sampling import RawLogprobs, TokenMasks
from worker.sampling_noise import row_keys
from worker.sampling_params import GREEDY_BELOW, SamplingParams

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

NO_NUMBER = -1
"""In place of a token: the logits hold NaN, or no finite value."""
NO_TOKEN = -2
"""In place of a token: what changed the logits allows none."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Of the sampled rows of a step."""

    filtered: bool
    typical: bool
    penalised: bool
    entries: bool
    masked: bool
    asked: I64
    """Places of rows that want logprobs."""

    @property
    def adjusted(self) -> bool:
        return self.typical or self.penalised or self.entries or self.masked

    @property
    def lean(self) -> bool:
        return not (self.adjusted or self.filtered)


class GpuSampler:
    """Owns the rows' sampling parameters and the ring of results."""

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
        self._pdl = pdl
        self._n_tiles = -(-vocab_size // SAMPLE_TILE)
        self.params = SamplingParams(vocab_size=vocab_size, max_rows=max_rows)
        self.ring = torch.full((n_slots, max_rows), NO_NUMBER, dtype=torch.int32, device=device)
        self._adjustments = Adjustments(
            params=self.params, buffers=buffers, head=head, ring=self.ring, device=device, n_slots=n_slots
        )

    def admit(self, row: int, sampling: Sampling, *, tokens: I32, n_prompt: int) -> None:
        """Raises ValueError, for the user, when the parameters can't be used."""
        self.params.set(row, sampling, n_prompt=n_prompt)
        self._adjustments.admit(row, sampling, tokens=tokens, n_prompt=n_prompt)

    def needs(self, rows: I32, positions: I32, *, masked: bool = False) -> Needs:
        """`masked`: a grammar constrains some of the rows."""
        p = self.params
        random = p.temperature[rows] >= GREEDY_BELOW
        typical = random & (p.typical_p[rows] < 1)
        filtered = random & ((p.top_k[rows] > 0) | (p.top_p[rows] < 1) | (p.min_p[rows] > 0))
        short = positions - p.n_prompt[rows] < p.min_new_tokens[rows]
        return Needs(
            filtered=bool(filtered.any() or typical.any()),
            typical=bool(typical.any()),
            penalised=bool(p.penalised[rows].any()),
            entries=bool(p.biased[rows].any() or short.any()),
            masked=masked,
            asked=np.flatnonzero(p.logprobs[rows]),
        )

    def keys(self, rows: I32, positions: I32) -> SampleKeys:
        p = self.params
        temperature = p.temperature[rows]
        key0, key1 = row_keys(p.seed[rows], positions)
        with np.errstate(divide="ignore"):
            log_min_p = np.log(p.min_p[rows])
        return SampleKeys(
            key0=key0,
            key1=key1,
            temperature=np.where(temperature >= GREEDY_BELOW, temperature, 0).astype(np.float32),
            top_k=p.top_k[rows].astype(np.int32),
            top_p=p.top_p[rows],
            log_min_p=log_min_p.astype(np.float32),
        )

    def sample(self, rows: I32, positions: I32, needs: Needs, *, masks: TokenMasks | None = None) -> None:
        """Sample these rows from the logits, as the step's head describes them."""
        n, more = len(rows), self._adjustments
        if needs.adjusted:
            more.send(rows, positions, masks=masks, asked=needs.asked)
            more.apply(n_rows=n, with_entries=needs.entries)
        logits = self._buffers.work if needs.adjusted else self._buffers.logits
        if needs.filtered:
            self._find_floor(logits, n_rows=n)
        if needs.typical:
            more.keep_typical(n_rows=n)
        self.launch(n_rows=n, filtered=needs.filtered, logits=logits)
        if needs.penalised:
            more.count(n_rows=n)

    def logprobs(self, rows: I32, positions: I32, needs: Needs, *, slot: int) -> RawLogprobs | None:
        """Of what was just sampled."""
        asked, n = needs.asked, len(rows)
        if not len(asked):
            return None
        if len(asked) < n and not needs.adjusted:
            self._adjustments.send(rows, positions, masks=None, asked=asked)
        return raw_logprobs(
            self._buffers.logits[:n],
            self.ring[slot, :n],
            asked=asked,
            where=self._adjustments.asked(len(asked)) if len(asked) < n else None,
            n_top=self.params.top_logprobs[rows[asked]],
        )

    def launch(self, *, n_rows: int, filtered: bool, logits: torch.Tensor | None = None) -> None:
        """Sample `n_rows` rows (padding included) from the logits. Can be captured."""
        from worker.gpu.kernels.sample import sample_final_kernel, sample_partial_kernel

        b, head = self._buffers, self._head
        sample_partial_kernel[(self._n_tiles, n_rows)](
            b.logits if logits is None else logits,
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

    def _find_floor(self, logits: torch.Tensor, *, n_rows: int) -> None:
        from worker.gpu.kernels.sample import threshold_kernel

        b, head = self._buffers, self._head
        threshold_kernel[(n_rows,)](
            logits,
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
