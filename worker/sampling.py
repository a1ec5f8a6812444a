"""From logits to tokens: penalties, bias, filters, noise, raw logprobs. Vectorised over rows, device neutral.

Work is done only for what some row of the step uses; greedy rows without penalties cost one maximum.
A sampled token is the largest of logit / temperature + Gumbel noise among the tokens that the filters
leave, which is an exact draw from their softmax (the Gumbel-max trick).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from proto.worker_pb2 import Sampling
from worker.sampling_filters import FilterParams, apply_min_p, candidates
from worker.sampling_noise import gumbel_noise_rows, row_keys
from worker.sampling_params import GREEDY_BELOW
from worker.sampling_rows import SamplingRows

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


@dataclass(slots=True)
class RawLogprobs:
    """Log-softmax of the unmodified logits, for the rows that asked."""

    index: I64
    """[m] their places in the step's sampled rows."""
    chosen: torch.Tensor
    """[m]"""
    n_top: I64
    """[m] how many of the top entries each asked for."""
    top_ids: torch.Tensor
    """[m, max(n_top)]"""
    top_values: torch.Tensor


class TokenMasks(Protocol):
    """What a grammar allows (`worker.grammar.rows.Masks`)."""

    @property
    def index(self) -> I64:
        """[m] places among the sampled rows, ascending."""
        ...

    @property
    def bits(self) -> I32:
        """[m, ceil(vocab / 32)], little-endian: bit i % 32 of word i // 32 allows token i."""
        ...

    @property
    def ends(self) -> npt.NDArray[np.bool_]:
        """[m] only stop tokens are allowed: `min_new_tokens` gives way."""
        ...


@dataclass(slots=True)
class SampleResult:
    tokens: torch.Tensor
    """[n] int64"""
    usable: torch.Tensor
    """[n] bool; False where the logits hold NaN or leave no token."""
    finite: torch.Tensor
    """[n] bool; False where the logits themselves hold no usable number, whatever was masked."""
    logprobs: RawLogprobs | None


class Sampler:
    """Owns the rows' sampling state; never changes the logits it is given."""

    def __init__(self, *, vocab_size: int, max_rows: int, device: torch.device) -> None:
        self._rows = SamplingRows(vocab_size=vocab_size, max_rows=max_rows, device=device)
        self._device = device
        self._vocab = vocab_size
        self._all_ids = torch.arange(vocab_size, dtype=torch.int32, device=device)

    @property
    def rows(self) -> SamplingRows:
        """The rows' parameters, for a runner that samples simple rows itself."""
        return self._rows

    def admit(self, row: int, sampling: Sampling, *, tokens: I32, n_prompt: int) -> None:
        """Raises ValueError, for the user, when the parameters can't be used."""
        self._rows.admit(row, sampling, tokens=tokens, n_prompt=n_prompt)

    def sample(
        self, logits: torch.Tensor, rows: I32, positions: I32, *, masks: TokenMasks | None = None
    ) -> SampleResult:
        """logits: [n, vocab] float32; rows: [n]; positions: [n], absolute, of the tokens to sample."""
        state = self._rows
        best, tokens = _largest(logits)
        finite = best.isfinite()
        usable = finite.clone()
        random = state.temperature[rows] >= GREEDY_BELOW
        short = positions - state.n_prompt[rows] < state.min_new_tokens[rows]
        penalised = state.penalised[rows]
        changes = random | penalised | state.biased[rows] | short
        if masks is not None:
            short[masks.index] &= ~masks.ends
            changes[masks.index] = True
        changed = np.flatnonzero(changes)
        if len(changed):
            where = self._ids(changed)
            work = logits.index_select(0, where)
            self._change(work, rows[changed], short[changed])
            if masks is not None:
                self._mask(work, np.searchsorted(changed, masks.index), masks.bits)
            chosen, possible = self._choose(work, rows[changed], positions[changed], random[changed])
            tokens.index_copy_(0, where, chosen)
            usable.index_copy_(0, where, possible & usable.index_select(0, where))
        if penalised.any():
            counted = np.flatnonzero(penalised)
            state.add_sampled(self._ids(rows[counted]), tokens.index_select(0, self._ids(counted)))
        asked = np.flatnonzero(state.logprobs[rows])
        logprobs = self._raw(logits, tokens, asked, state.top_logprobs[rows[asked]]) if len(asked) else None
        return SampleResult(tokens, usable, finite, logprobs)

    def _change(self, work: torch.Tensor, rows: I32, short: npt.NDArray[np.bool_]) -> None:
        """Penalties, bias and masked end tokens, in place."""
        state = self._rows
        penalised = np.flatnonzero(state.penalised[rows])
        if len(penalised):
            where = self._ids(penalised)
            part = work if len(penalised) == len(rows) else work.index_select(0, where)
            part = self._penalise(part, rows[penalised])
            work.index_copy_(0, where, part)
        for index in np.flatnonzero(state.biased[rows]):
            ids, values = state.bias[int(rows[index])]
            work[index].index_add_(0, ids, values)
        for index in np.flatnonzero(short):
            eos = state.eos.get(int(rows[index]))
            if eos is not None:
                work[index].index_fill_(0, eos, -torch.inf)

    def _mask(self, work: torch.Tensor, places: I64, bits: I32) -> None:
        """Forbid what the masks don't allow, in place."""
        if self._device.type == "cpu":
            allowed = np.unpackbits(np.ascontiguousarray(bits).view(np.uint8), axis=1, bitorder="little")
            forbidden = torch.from_numpy(allowed[:, : self._vocab] == 0)
        else:  # the words travel, not the bits
            words = torch.from_numpy(bits).to(self._device).unsqueeze(-1)
            shifts = torch.arange(32, dtype=torch.int32, device=self._device)
            forbidden = ((words >> shifts) & 1 == 0).flatten(1)[:, : self._vocab]
        for line, place in enumerate(places.tolist()):
            work[place].masked_fill_(forbidden[line], -torch.inf)

    def _penalise(self, work: torch.Tensor, rows: I32) -> torch.Tensor:
        """Repetition: positive logits of seen tokens are divided, negative ones multiplied (CTRL, arXiv
        1909.05858). Presence and frequency: OpenAI's definition, over the output."""
        state = self._rows
        counts, in_prompt = state.counts(self._ids(rows))
        sampled = counts > 0
        if (state.repetition[rows] != 1.0).any():
            factor = self._column(state.repetition[rows])
            scaled = torch.where(work > 0, work / factor, work * factor)
            work = torch.where(sampled | in_prompt, scaled, work)
        work = work - self._column(state.presence[rows]) * sampled
        return work - self._column(state.frequency[rows]) * counts

    def _choose(
        self, work: torch.Tensor, rows: I32, positions: I32, random: npt.NDArray[np.bool_]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens, and whether any was possible, of rows whose logits are ready. `work` may be overwritten."""
        best, tokens = work.max(dim=-1)
        possible = best.isfinite()
        state = self._rows
        filtered = random & ((state.top_k[rows] > 0) | (state.top_p[rows] < 1) | (state.typical_p[rows] < 1))
        for group, draw in ((random & ~filtered, self._draw_any), (filtered, self._draw_filtered)):
            index = np.flatnonzero(group)
            if not len(index):
                continue
            where = self._ids(index)
            part = work if len(index) == len(rows) else work.index_select(0, where)
            part = part.div_(self._column(state.temperature[rows[index]]))
            tokens.index_copy_(0, where, draw(part, rows[index], positions[index]))
        return tokens, possible

    def _draw_any(self, work: torch.Tensor, rows: I32, positions: I32) -> torch.Tensor:
        min_p = self._rows.min_p[rows]
        if (min_p > 0).any():
            apply_min_p(work, self._log_min_p(min_p))
        return work.add_(self._noise(rows, positions, self._all_ids)).argmax(dim=-1)

    def _draw_filtered(self, work: torch.Tensor, rows: I32, positions: I32) -> torch.Tensor:
        values, ids = candidates(work, self._filter_params(rows))
        best = (values + self._noise(rows, positions, ids.to(torch.int32))).argmax(dim=-1, keepdim=True)
        return ids.gather(-1, best).squeeze(-1)

    def _filter_params(self, rows: I32) -> FilterParams:
        state = self._rows
        top_k, min_p = state.top_k[rows], state.min_p[rows]
        all_limited = bool((top_k > 0).all())
        return FilterParams(
            top_k=self._column(np.where(top_k > 0, top_k, self._vocab)) if (top_k > 0).any() else None,
            top_p=self._column(state.top_p[rows]) if (state.top_p[rows] < 1).any() else None,
            min_p=self._log_min_p(min_p) if (min_p > 0).any() else None,
            typical_p=self._column(state.typical_p[rows]) if (state.typical_p[rows] < 1).any() else None,
            largest_k=int(top_k.max()) if all_limited else self._vocab,
        )

    def _noise(self, rows: I32, positions: I32, ids: torch.Tensor) -> torch.Tensor:
        key0, key1 = row_keys(self._rows.seed[rows], positions)
        keys = [torch.from_numpy(key.view(np.int32)).to(self._device) for key in (key0, key1)]
        return gumbel_noise_rows(keys[0], keys[1], ids)

    def _raw(self, logits: torch.Tensor, tokens: torch.Tensor, asked: I64, n_top: I64) -> RawLogprobs:
        where = self._ids(asked)
        raw = logits if len(asked) == len(logits) else logits.index_select(0, where)
        total = torch.logsumexp(raw, dim=-1, keepdim=True)
        chosen = raw.gather(-1, tokens.index_select(0, where).unsqueeze(-1)) - total
        top = raw.topk(min(int(n_top.max()), self._vocab), dim=-1)
        return RawLogprobs(asked, chosen.squeeze(-1), n_top, top.indices, top.values - total)

    def _log_min_p(self, min_p: npt.NDArray[np.float32]) -> torch.Tensor:
        with np.errstate(divide="ignore"):
            return self._column(np.log(min_p))

    def _ids(self, values: npt.NDArray[np.integer]) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._device)

    def _column(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device).unsqueeze(1)


def _largest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's largest value and its first place; NaN where there is one."""
    if logits.device.type != "cpu":
        best, tokens = logits.max(dim=-1)
        return best, tokens
    # numpy's takes a sixth of the time of torch's on a CPU.
    tokens = torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), tokens
