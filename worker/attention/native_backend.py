"""Paged attention on the CPU in compiled code; float32, full attention, every layer alike.

Rows that begin with the same blocks read them together; a long chunk is cut into blocks of queries, so that
threads share it and none looks at positions behind its last query.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from worker.attention.interface import I32, Attention, AttentionBatch, KvCache
from worker.attention.torch_backend import TorchAttention
from worker.attention.torch_plan import find_shared, slots_of, token_slots
from worker.models.spec import ModelSpec
from worker.native.heads import MOST_AHEAD, Angles, Heads, Items, heads_fit

_MOST_TOKENS = 64
"""Query tokens of an item: enough to read a tile of keys seldom, few enough to stay in the cache."""

_MANY_ALONE = 8
"""From so many rows alone on, a thread takes a row with all its heads; below, heads are shared out."""


class NativeAttention:
    """Implements `worker.attention.interface.Attention`."""

    name = "native"

    def __init__(self, spec: ModelSpec, cache: KvCache, *, share_prefixes: bool = True) -> None:
        """Needs `can_serve(spec, cache)`."""
        from worker.native.attention import AttentionKernel
        from worker.native.tape import Tape

        self._cache = cache
        self._share = share_prefixes
        self._n_kv_heads = spec.n_kv_heads
        self._factor = spec.rope.attention_factor
        self._inv_freq = torch.tensor(spec.rope.inv_freq, dtype=torch.float32)
        self.kernel = AttentionKernel(_heads(spec))
        self._tape = Tape(2)

    def plan(self, batch: AttentionBatch) -> None:
        positions, slots = token_slots(batch, block_size=self._cache.block_size)
        angles = torch.from_numpy(positions).to(torch.float32)[:, None] * self._inv_freq
        cos, sin = angles.cos().mul_(self._factor), angles.sin().mul_(self._factor)
        self.angles = Angles(cos, sin, torch.from_numpy(slots))
        self.items = _Planner(
            batch, block_size=self._cache.block_size, share=self._share, n_kv_heads=self._n_kv_heads
        ).items()

    def run(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        out = self.kernel.out(qkv.shape[0])
        n_threads = torch.get_num_threads()
        scratch = self.kernel.scratch(self.items, n_threads=n_threads)
        append = self.kernel.append_line(qkv, self.angles, self.cache(layer))
        attend = self.kernel.attend_line(qkv, self.cache(layer), self.items, out, scratch)
        for line, op in zip((append, attend), self._tape.ops, strict=True):
            op[: len(line)] = line
        self._tape.run(n_threads=n_threads)
        return out

    def cache(self, layer: int) -> torch.Tensor:
        return self._cache.data[layer]

    def zero_blocks(self, blocks: I32) -> None:
        self._cache.zero(blocks)


class _Planner:
    """Turns a batch into the kernel's items."""

    def __init__(self, batch: AttentionBatch, *, block_size: int, share: bool, n_kv_heads: int) -> None:
        self._batch = batch
        self._n_kv_heads = n_kv_heads
        self._block_size = block_size
        self._share = share
        self._items: list[tuple[int, int, int]] = []
        self._pieces: list[tuple[int, int, int, int, int]] = []
        self._tokens: list[int] = []

    def items(self) -> Items:
        batch = self._batch
        kv_lens, q_lens = batch.kv_lens.tolist(), batch.q_lens.tolist()
        slots = [
            slots_of(table, 0, kv_len, block_size=self._block_size)
            for table, kv_len in zip(batch.block_tables, kv_lens, strict=True)
        ]
        starts = np.cumsum(batch.kv_lens, dtype=np.int64) - batch.kv_lens
        begins = starts.tolist()
        alone = set(range(batch.n_decode))
        groups = find_shared(batch, block_size=self._block_size) if self._share else []
        for group in groups:
            alone.difference_update(group.rows.tolist())
            for at in range(0, len(group.rows), _MOST_TOKENS):
                rows = group.rows[at : at + _MOST_TOKENS].tolist()
                n_shared = len(group.slots)
                self._begin(rows)
                self._pieces.append((0, len(rows), begins[rows[0]], n_shared, 0))
                for place, row in enumerate(rows):
                    self._pieces.append((place, 1, begins[row] + n_shared, kv_lens[row] - n_shared, 1))
        token = batch.n_decode
        for row in range(batch.n_decode, len(q_lens)):
            cached = kv_lens[row] - q_lens[row]
            for first in range(0, q_lens[row], _MOST_TOKENS):
                n = min(_MOST_TOKENS, q_lens[row] - first)
                self._begin(range(token + first, token + first + n))
                self._pieces.append((0, n, begins[row], cached + first + n, 1))
            token += q_lens[row]
        for row in sorted(alone):
            self._begin([row])
            self._pieces.append((0, 1, begins[row], kv_lens[row], 1))
        most = max(n for _, n, _ in self._items)
        self._items.append((len(self._tokens), 0, len(self._pieces)))
        alone_heads = self._n_kv_heads if len(alone) >= _MANY_ALONE else 1
        return Items(
            items=np.array(self._items, dtype=np.int64),
            pieces=np.array(self._pieces, dtype=np.int64),
            tokens=np.array(self._tokens, dtype=np.int64),
            slots=np.concatenate([*slots, np.zeros(MOST_AHEAD, dtype=np.int64)]),
            most_tokens=max(most, alone_heads),
            n_alone=len(alone),
            alone_heads=alone_heads,
        )

    def _begin(self, tokens: Sequence[int]) -> None:
        self._items.append((len(self._tokens), len(tokens), len(self._pieces)))
        self._tokens.extend(tokens)


def make_attention(spec: ModelSpec, cache: KvCache) -> Attention:
    """The fastest that serves the model here."""
    return NativeAttention(spec, cache) if can_serve(spec, cache) else TorchAttention(spec, cache)


def can_serve(spec: ModelSpec, cache: KvCache) -> bool:
    if cache.data.dtype != torch.float32 or cache.data.device.type != "cpu":
        return False
    if any(spec.sliding_windows) or spec.rope.rotary_dim != spec.head_dim:
        return False
    return heads_fit(_heads(spec))


def _heads(spec: ModelSpec) -> Heads:
    return Heads(spec.n_heads, spec.n_kv_heads, spec.head_dim)
