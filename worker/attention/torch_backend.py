"""Paged attention in plain torch, for CPUs and for any device without a better backend.

Only the blocks that a step's rows hold are read, never the whole cache; a row whose blocks are
consecutive is read in place. Decode rows that begin with the same blocks attend to them together, as one
matrix product, and merge that with their own tails.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from worker.attention.interface import I32, AttentionBatch, KvCache
from worker.attention.torch_math import attend, merge
from worker.attention.torch_plan import I64, Pieces, as_run, cut, token_slots
from worker.models.spec import ModelSpec

_Place = slice | torch.Tensor


@dataclass(slots=True)
class _Tails:
    rows: torch.Tensor | None
    """None: all decode rows in order."""
    n: int
    place: _Place
    mask: torch.Tensor | None


@dataclass(slots=True)
class _Chunk:
    start: int
    q_len: int
    place: _Place
    mask: torch.Tensor | None
    """None: causal from the first token on."""


@dataclass(slots=True)
class _LayerPlan:
    shared: list[tuple[torch.Tensor, _Place]]
    tails: list[_Tails]
    chunks: list[_Chunk]


class TorchAttention:
    """Implements `worker.attention.interface.Attention`."""

    name = "torch"

    def __init__(self, spec: ModelSpec, cache: KvCache, *, share_prefixes: bool = True) -> None:
        self._spec = spec
        self._cache = cache
        self._device = cache.data.device
        self._share = share_prefixes
        self._inv_freq = torch.tensor(spec.rope.inv_freq, dtype=torch.float32, device=self._device)
        self._windows = spec.sliding_windows or (None,) * spec.n_layers
        self._plans: dict[int | None, _LayerPlan] = {}
        self._n_decode = 0
        self._slots = torch.empty(0, dtype=torch.int64)
        self._cos = self._sin = torch.empty(0)

    def plan(self, batch: AttentionBatch) -> None:
        positions, slots = token_slots(batch, block_size=self._cache.block_size)
        self._n_decode = batch.n_decode
        self._slots = self._tensor(slots)
        angles = self._tensor(positions).to(torch.float32)[:, None] * self._inv_freq
        factor, dtype = self._spec.rope.attention_factor, self._cache.data.dtype
        cos, sin = angles.cos().mul_(factor).to(dtype), angles.sin().mul_(factor).to(dtype)
        self._cos = torch.cat((cos, cos), dim=-1).unsqueeze(1)
        self._sin = sin.unsqueeze(1)
        self._plans = {}
        longest = int(batch.kv_lens.max(initial=0))
        for window in set(self._windows):
            # A window that nobody exceeds is full attention.
            key = window if window is not None and window < longest else None
            plan = self._plans.get(key) or self._lay_out(
                cut(batch, block_size=self._cache.block_size, window=key, share=self._share), window=key
            )
            self._plans[key] = self._plans[window] = plan

    def run(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        spec = self._spec
        n_tokens = qkv.shape[0]
        heads = qkv.view(n_tokens, spec.n_heads + 2 * spec.n_kv_heads, spec.head_dim)
        rotated = self._rotate(heads[:, : spec.n_heads + spec.n_kv_heads])
        cache = self._cache.data[layer]
        cache[:, : spec.n_kv_heads].index_copy_(0, self._slots, rotated[:, spec.n_heads :])
        cache[:, spec.n_kv_heads :].index_copy_(0, self._slots, heads[:, spec.n_heads + spec.n_kv_heads :])
        q = rotated[:, : spec.n_heads]
        plan = self._plans[self._windows[layer]]
        out = qkv.new_empty((n_tokens, spec.n_heads, spec.head_dim))
        if self._n_decode:
            self._decode(q[: self._n_decode], out[: self._n_decode], cache, plan)
        for chunk in plan.chunks:
            self._chunk(q, out, cache, chunk)
        return out.view(n_tokens, spec.n_heads * spec.head_dim)

    def zero_blocks(self, blocks: I32) -> None:
        self._cache.zero(blocks)

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        """x: [n, heads, head_dim] → the same with the first rotary_dim dimensions of each head turned."""
        rotary = self._spec.rope.rotary_dim
        half = rotary // 2
        turned = x[..., :rotary] * self._cos
        turned[..., :half].addcmul_(x[..., half:rotary], self._sin, value=-1)
        turned[..., half:].addcmul_(x[..., :half], self._sin)
        return turned if rotary == x.shape[-1] else torch.cat((turned, x[..., rotary:]), dim=-1)

    def _decode(self, q: torch.Tensor, out: torch.Tensor, cache: torch.Tensor, plan: _LayerPlan) -> None:
        """The query heads of one KV head stand in the place of query positions: no key is repeated."""
        n_kv = self._spec.n_kv_heads
        grouped = q.reshape(q.shape[0], n_kv, -1, q.shape[-1])
        target = out.view(grouped.shape)
        lse = q.new_empty(grouped.shape[:-1], dtype=torch.float32) if plan.shared else None
        for tails in plan.tails:
            part = grouped if tails.rows is None else grouped.index_select(0, tails.rows)
            k, v = self._keys_values(cache, tails.place, tails.n)
            part_out, part_lse = attend(part, k, v, mask=tails.mask)
            if tails.rows is None:
                target.copy_(part_out)
            else:
                target.index_copy_(0, tails.rows, part_out)
            if lse is not None:
                if tails.rows is None:
                    lse.copy_(part_lse)
                else:
                    lse.index_copy_(0, tails.rows, part_lse)
        for rows, place in plan.shared:
            assert lse is not None
            m = len(rows)
            part = grouped.index_select(0, rows).transpose(0, 1)
            k, v = self._keys_values(cache, place, 1)
            flat = part.reshape(1, n_kv, -1, q.shape[-1])
            part_out, part_lse = attend(flat, k, v)
            part_out = part_out.reshape(n_kv, m, -1, q.shape[-1]).transpose(0, 1)
            part_lse = part_lse.reshape(n_kv, m, -1).transpose(0, 1)
            merged = merge(part_out, part_lse, target.index_select(0, rows), lse.index_select(0, rows))
            target.index_copy_(0, rows, merged)

    def _chunk(self, q: torch.Tensor, out: torch.Tensor, cache: torch.Tensor, chunk: _Chunk) -> None:
        own = slice(chunk.start, chunk.start + chunk.q_len)
        k, v = self._keys_values(cache, chunk.place, 1)
        part = q[own].transpose(0, 1).unsqueeze(0)
        part_out, _ = attend(part, k, v, mask=chunk.mask, causal=chunk.mask is None)
        out[own].copy_(part_out[0].transpose(0, 1))

    def _keys_values(self, cache: torch.Tensor, place: _Place, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, n_kv_heads, length, head_dim] each; views of the cache when the slots are consecutive."""
        n_kv = self._spec.n_kv_heads
        kv = cache[place] if isinstance(place, slice) else cache.index_select(0, place)
        kv = kv.view(n, -1, 2 * n_kv, kv.shape[-1]).transpose(1, 2)
        return kv[:, :n_kv], kv[:, n_kv:]

    def _lay_out(self, pieces: Pieces, *, window: int | None) -> _LayerPlan:
        shared = [(self._tensor(group.rows), self._place(group.slots)) for group in pieces.shared]
        tails = []
        for tail in pieces.tails:
            everyone = len(tail.rows) == self._n_decode
            longest = tail.slots.shape[1]
            mask = None
            if (tail.lengths != longest).any():
                padded = np.where(np.arange(longest) < tail.lengths[:, None], np.float32(0), -np.inf)
                mask = self._mask(padded[:, None, None, :].astype(np.float32))
            rows = None if everyone else self._tensor(tail.rows)
            tails.append(_Tails(rows, len(tail.rows), self._place(tail.slots.reshape(-1)), mask))
        chunks = [
            _Chunk(c.start, c.q_len, self._place(c.slots), self._chunk_mask(c.q_len, len(c.slots), window))
            for c in pieces.chunks
        ]
        return _LayerPlan(shared, tails, chunks)

    def _chunk_mask(self, q_len: int, kv_len: int, window: int | None) -> torch.Tensor | None:
        if q_len == kv_len and window is None:
            return None
        query = torch.arange(kv_len - q_len, kv_len, device=self._device)[:, None]
        key = torch.arange(kv_len, device=self._device)
        hidden = key > query
        if window is not None:
            hidden |= key <= query - window
        mask = torch.zeros((q_len, kv_len), dtype=self._cache.data.dtype, device=self._device)
        return mask.masked_fill_(hidden, -math.inf)[None, None]

    def _mask(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(device=self._device, dtype=self._cache.data.dtype)

    def _place(self, slots: I64) -> _Place:
        return as_run(slots) or self._tensor(slots)

    def _tensor(self, values: I64) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)
