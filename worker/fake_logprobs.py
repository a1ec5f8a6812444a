"""Deterministic logprobs of the fake worker: what plain greedy would choose ranks first."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from proto.codec import pack_f32, pack_i32
from proto.worker_pb2 import Admit, PromptLogprobs
from worker.fake_text import N_TOP, FakeVocab, candidates, logprob_of
from worker.runner import SampledLogprobs

I32 = npt.NDArray[np.int32]
U64 = npt.NDArray[np.uint64]


def sampled_logprobs(tokens: I32, *, hashes: U64, n_top: I32, vocab: FakeVocab) -> SampledLogprobs | None:
    """For [n] sampled tokens. `n_top` is -1 where none were asked for; None when nobody asked."""
    index = np.flatnonzero(n_top >= 0).astype(np.int32)
    if len(index) == 0:
        return None
    ids, values = candidates(hashes[index], vocab=vocab)
    n_top = n_top[index]
    wanted = np.arange(N_TOP) < n_top[:, None]
    return SampledLogprobs(
        index=index,
        chosen=logprob_of(tokens[index], ids=ids, values=values),
        n_top=n_top,
        top_ids=ids[wanted],
        top_values=values[wanted],
    )


def prompt_logprobs_of(
    admit: Admit, *, start: int, hashes: U64, tokens: I32, vocab: FakeVocab
) -> PromptLogprobs | None:
    """For the chunk that begins at `start`: position p's hash predicts token p + 1, as far as that belongs
    to the original prompt. `tokens` are all known tokens of the row."""
    end = min(start + len(hashes), admit.n_prompt - 1)
    if end <= start:
        return None
    ids, values = candidates(hashes[: end - start], vocab=vocab)
    n_top = min(admit.sampling.prompt_logprobs - 1, N_TOP)
    return PromptLogprobs(
        row=admit.row,
        epoch=admit.epoch,
        start=start + 1,
        chosen=pack_f32(logprob_of(tokens[start + 1 : end + 1], ids=ids, values=values)),
        n_top=n_top,
        top_ids=pack_i32(ids[:, :n_top].ravel()),
        top_values=pack_f32(values[:, :n_top].ravel()),
    )
