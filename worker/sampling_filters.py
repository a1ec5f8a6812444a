"""Which tokens of a row may be sampled: top-k, top-p, min-p and typical-p, in this order.

Sources: nucleus sampling (arXiv 1904.09751), locally typical sampling (arXiv 2202.00666), min-p
(arXiv 2407.01082). Whether a token survives depends on the row's logits alone, not on how many
candidates were looked at for the other rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_FIRST_LOOK = 256
"""Candidates fetched for top-p at first."""
_WIDER = 8
"""Factor of the next look, when the candidates fetched do not hold the mass yet."""
_TIES = 8
"""Candidates beyond the largest top-k, so that tokens level with the last one are kept for all rows alike."""


@dataclass(slots=True)
class FilterParams:
    """[n, 1] tensors on the logits' device; None: no row uses it."""

    top_k: torch.Tensor | None
    """int64; vocab_size where off"""
    top_p: torch.Tensor | None
    """1 where off"""
    min_p: torch.Tensor | None
    """log(min_p); -inf where off"""
    typical_p: torch.Tensor | None
    """1 where off"""
    largest_k: int
    """Largest top-k of all rows when all have one, else vocab_size."""


def apply_min_p(logits: torch.Tensor, log_min_p: torch.Tensor) -> None:
    """In place, over the whole vocabulary: no sort is needed for this one."""
    floor = logits.amax(dim=-1, keepdim=True) + log_min_p
    logits.masked_fill_(logits < floor, -torch.inf)


def candidates(logits: torch.Tensor, params: FilterParams) -> tuple[torch.Tensor, torch.Tensor]:
    """logits: [n, vocab] (temperature applied). Returns (values, ids), [n, m] each: values in descending
    order, -inf for tokens that are filtered out; at least one survives."""
    vocab = logits.shape[-1]
    if params.typical_p is not None:
        look = vocab
    elif params.largest_k < vocab:
        look = params.largest_k + _TIES
    else:
        look = _FIRST_LOOK
    total = torch.logsumexp(logits, dim=-1, keepdim=True) if params.top_p is not None else None
    while True:
        values, ids = logits.topk(min(look, vocab), dim=-1)
        if look >= vocab or params.top_p is None or params.largest_k < vocab:
            break
        assert total is not None
        mass = (values - total).exp().sum(dim=-1, keepdim=True)
        covered = mass >= params.top_p
        if params.top_k is not None:
            covered |= params.top_k <= look - _TIES
        if bool(covered.all()):
            break
        look = min(look * _WIDER, vocab)
    return _mask(values, params, total=total), ids


def _mask(values: torch.Tensor, params: FilterParams, *, total: torch.Tensor | None) -> torch.Tensor:
    if params.top_k is not None:
        last = values.gather(-1, (params.top_k - 1).clamp_(max=values.shape[-1] - 1))
        limited = params.top_k <= values.shape[-1]
        values = values.masked_fill((values < last) & limited, -torch.inf)
    if params.top_p is not None:
        assert total is not None
        if params.top_k is not None:
            # Rows with a top-k share the whole mass among its survivors.
            own = torch.logsumexp(values, dim=-1, keepdim=True)
            total = torch.where(params.top_k <= values.shape[-1], own, total)
        p = (values - total).exp_()
        before = p.cumsum(dim=-1).sub_(p)
        values = values.masked_fill((before >= params.top_p) & (params.top_p < 1), -torch.inf)
    if params.min_p is not None:
        values = values.masked_fill(values < values[:, :1] + params.min_p, -torch.inf)
    if params.typical_p is not None:
        values = _typical(values, params.typical_p)
    return values


def _typical(values: torch.Tensor, typical_p: torch.Tensor) -> torch.Tensor:
    """Keep the tokens whose surprise is closest to the entropy, up to the wanted mass."""
    log_p = torch.log_softmax(values, dim=-1)
    p = log_p.exp()
    entropy = -(p * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(dim=-1, keepdim=True)
    distance = (-log_p - entropy).abs_()
    order = distance.argsort(dim=-1, stable=True)
    mass = p.gather(-1, order)
    outside = mass.cumsum(dim=-1).sub_(mass) >= typical_p
    dropped = torch.zeros_like(outside).scatter_(-1, order, outside)
    return values.masked_fill(dropped & (typical_p < 1), -torch.inf)
