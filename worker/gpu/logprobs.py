"""Raw logprobs of sampled tokens, computed on the device: nothing waits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from worker.sampling import RawLogprobs

I64 = npt.NDArray[np.int64]


def raw_logprobs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    *,
    asked: I64,
    where: torch.Tensor | None,
    n_top: I64,
) -> RawLogprobs:
    """logits: [n, vocab] unmodified; tokens: int32 [n], negative where none was sampled; asked: places that
    want logprobs; where: the same on the device, or None for all n; n_top: [m] of each that asked."""
    raw, chosen = logits, tokens
    if where is not None:
        raw, chosen = logits.index_select(0, where), tokens.index_select(0, where)
    total = torch.logsumexp(raw, dim=-1, keepdim=True)
    value = raw.gather(-1, chosen.clamp(min=0).long().unsqueeze(-1)) - total
    ids, values = top_logprobs(raw, total, n_top=min(int(n_top.max()), logits.shape[-1]))
    return RawLogprobs(asked, value.squeeze(-1), n_top, ids, values)


def top_logprobs(
    logits: torch.Tensor, total: torch.Tensor, *, n_top: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """ids int32 and logprobs, [n, n_top] each, the largest first. total: [n, 1] log of the sum of exp."""
    if not n_top:
        empty = logits[:, :0]
        return empty.to(torch.int32), empty
    top = logits.topk(n_top, dim=-1)
    return top.indices.to(torch.int32), top.values - total
