"""Paged attention against a plain computation, in all the ways a step can be cut."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from worker.attention import torch_math
from worker.attention.interface import AttentionBatch, KvCache
from worker.attention.torch_backend import TorchAttention
from worker.attention.torch_plan import as_run, cut
from worker.models.spec import ModelSpec, RopeSpec

CPU = torch.device("cpu")
SPEC = ModelSpec(
    architecture="test",
    n_layers=1,
    hidden_size=48,
    n_heads=6,
    n_kv_heads=2,
    head_dim=8,
    intermediate_size=1,
    vocab_size=1,
    rms_eps=1e-5,
    rope=RopeSpec(inv_freq=(0.0,) * 4, rotary_dim=8),
    max_positions=4096,
    tied_embeddings=True,
)
"""Frequencies of zero: rotation does nothing, so keys in the cache can be compared as they are."""


def expected(qkv: torch.Tensor, cache: KvCache, batch: AttentionBatch, window: int | None) -> torch.Tensor:
    heads = qkv.view(len(qkv), -1, SPEC.head_dim)
    outputs = []
    token = 0
    for row in range(len(batch.q_lens)):
        kv_len, q_len = int(batch.kv_lens[row]), int(batch.q_lens[row])
        positions = np.arange(kv_len)
        slots = (
            batch.block_tables[row, positions // cache.block_size] * cache.block_size
            + positions % cache.block_size
        )
        kv = cache.data[0, torch.from_numpy(slots).long()].double()
        keys, values = kv[:, :2].repeat_interleave(3, 1), kv[:, 2:].repeat_interleave(3, 1)
        for position in range(kv_len - q_len, kv_len):
            first = 0 if window is None else max(0, position - window + 1)
            q = heads[token, :6].double()
            scores = torch.einsum("hd,nhd->hn", q, keys[first : position + 1]) / math.sqrt(8)
            out = torch.einsum("hn,nhd->hd", scores.softmax(-1), values[first : position + 1])
            outputs.append(out.reshape(-1))
            token += 1
    return torch.stack(outputs).float()


def make_batch(
    rng: np.random.Generator, block_size: int, *, kv_lens: list[int], q_lens: list[int], n_shared: int
) -> AttentionBatch:
    """Rows own random blocks; the first `n_shared` of decode rows 0, 1 and 3 are the same."""
    width = max(kv_lens) // block_size + 2
    blocks = rng.permutation(np.arange(1, len(kv_lens) * width + 1)).astype(np.int32)
    tables = blocks.reshape(len(kv_lens), width)
    for row in (1, 3):
        tables[row, :n_shared] = tables[0, :n_shared]
    q = np.array(q_lens, dtype=np.int32)
    n_decode = int((q == 1).sum())
    return AttentionBatch(n_decode, q, np.array(kv_lens, dtype=np.int32), tables)


@pytest.mark.parametrize("plain", [False, True], ids=["flash", "plain"])
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("block_size", [1, 16])
def test_a_mixed_step(
    block_size: int, window: int | None, share: bool, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if plain:
        monkeypatch.setattr(torch_math, "_FLASH_CPU", None)
    rng = np.random.default_rng(0)
    batch = make_batch(
        rng,
        block_size,
        kv_lens=[130, 150, 300, 260, 1, 7, 64, 33],
        q_lens=[1, 1, 1, 1, 1, 7, 20, 32],
        n_shared=112 // block_size,
    )
    spec = replace(SPEC, sliding_windows=(window,) if window else ())
    cache = KvCache(
        spec,
        n_blocks=int(batch.block_tables.max()) + 1,
        block_size=block_size,
        dtype=torch.float32,
        device=CPU,
    )
    torch.manual_seed(0)
    cache.data[:, block_size:].normal_()
    attention = TorchAttention(spec, cache, share_prefixes=share)
    attention.plan(batch)
    qkv = torch.randn(int(batch.q_lens.sum()), 10 * 8)
    out = attention.run(0, qkv.clone())
    torch.testing.assert_close(out, expected(qkv, cache, batch, window), atol=2e-5, rtol=1e-4)


def test_shared_blocks_are_found_once() -> None:
    batch = make_batch(np.random.default_rng(1), 16, kv_lens=[130, 150, 300, 260], q_lens=[1] * 4, n_shared=7)
    pieces = cut(batch, block_size=16, window=None, share=True)
    assert [group.rows.tolist() for group in pieces.shared] == [[0, 1, 3]]
    assert [len(group.slots) for group in pieces.shared] == [112]
    tails = {
        row: n
        for tail in pieces.tails
        for row, n in zip(tail.rows.tolist(), tail.lengths.tolist(), strict=True)
    }
    assert tails == {0: 18, 1: 38, 2: 300, 3: 148}


def test_the_newest_token_of_a_row_is_never_part_of_a_shared_prefix() -> None:
    tables = np.arange(1, 11, dtype=np.int32)[None].repeat(2, axis=0)
    batch = AttentionBatch(2, np.ones(2, np.int32), np.array([80, 160], np.int32), tables)
    pieces = cut(batch, block_size=16, window=None, share=True)
    assert len(pieces.shared[0].slots) == 64


def test_consecutive_slots_are_read_in_place() -> None:
    assert as_run(np.arange(5, 9)) == slice(5, 9)
    assert as_run(np.array([5, 6, 8])) is None
    assert as_run(np.array([6, 5])) is None


def test_zeroed_blocks_forget() -> None:
    cache = KvCache(SPEC, n_blocks=4, block_size=2, dtype=torch.float32, device=CPU)
    cache.data.fill_(float("nan"))
    cache.zero(np.array([1, 3], dtype=np.int32))
    assert cache.data[0, :, 0, 0].isnan().tolist() == [True, True, False, False, True, True, False, False]
