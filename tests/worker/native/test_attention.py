"""Compiled attention against the one in torch, in all the ways a step can be cut."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from worker.attention.interface import AttentionBatch, KvCache
from worker.attention.native_backend import NativeAttention, can_serve, make_attention
from worker.attention.torch_backend import TorchAttention
from worker.models.spec import ModelSpec, RopeSpec
from worker.native.machine import vector_unit

if vector_unit() is None:
    pytest.skip("no vector unit that is served", allow_module_level=True)

N_BLOCKS = 400


def make_spec(n_heads: int, n_kv_heads: int, head_dim: int) -> ModelSpec:
    frequencies = tuple(10000.0 ** (-np.arange(0, head_dim, 2) / head_dim))
    return ModelSpec(
        architecture="test",
        n_layers=2,
        hidden_size=n_heads * head_dim,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        intermediate_size=1,
        vocab_size=1,
        rms_eps=1e-5,
        rope=RopeSpec(frequencies, head_dim, attention_factor=1.1),
        max_positions=4096,
        tied_embeddings=True,
    )


def make_batch(
    rng: np.random.Generator, *, kv_lens: list[int], q_lens: list[int], n_shared: int, block_size: int
) -> AttentionBatch:
    """All rows begin with the same `n_shared` blocks; those beyond are each row's own."""
    order = 1 + rng.permutation(N_BLOCKS - 1).astype(np.int32)
    tables = np.zeros((len(kv_lens), N_BLOCKS), dtype=np.int32)
    at = n_shared
    for row, kv_len in enumerate(kv_lens):
        own = max(-(-kv_len // block_size) - n_shared, 0)
        tables[row, :n_shared] = order[:n_shared]
        tables[row, n_shared : n_shared + own] = order[at : at + own]
        at += own
    n_decode = sum(1 for n in q_lens if n == 1)
    lens = np.array(q_lens, dtype=np.int32), np.array(kv_lens, dtype=np.int32)
    return AttentionBatch(n_decode, *lens, tables)


CASES = [
    pytest.param([1], [1], 0, id="first token"),
    pytest.param([31, 32, 33, 64, 65], [1] * 5, 0, id="around a tile's end"),
    pytest.param([130, 150, 128 + 1, 260], [1] * 4, 8, id="shared prefix"),
    pytest.param([150 + i for i in range(70)], [1] * 70, 9, id="more sharers than one item takes"),
    pytest.param([5, 63, 64, 65, 200], [5, 63, 64, 65, 200], 0, id="whole prompts"),
    pytest.param([90, 17, 300, 140], [1, 1, 100, 67], 0, id="decode rows and later chunks"),
]


@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 4, 32), (8, 1, 128)], ids=str)
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize(("kv_lens", "q_lens", "n_shared"), CASES)
def test_equals_torch(
    kv_lens: list[int], q_lens: list[int], n_shared: int, heads: tuple[int, int, int], share: bool
) -> None:
    spec = make_spec(*heads)
    batch = make_batch(
        np.random.default_rng(0), kv_lens=kv_lens, q_lens=q_lens, n_shared=n_shared, block_size=16
    )
    generator = torch.Generator().manual_seed(1)
    shape = (int(batch.q_lens.sum()), (spec.n_heads + 2 * spec.n_kv_heads) * spec.head_dim)
    # Large values make the softmax sharp: maxima move from tile to tile.
    qkv = torch.randn(shape, generator=generator) * 2
    results = []
    for kind in (NativeAttention, TorchAttention):
        cache = KvCache(
            spec, n_blocks=N_BLOCKS, block_size=16, dtype=torch.float32, device=torch.device("cpu")
        )
        cache.data.copy_(torch.randn(cache.data.shape, generator=torch.Generator().manual_seed(2)))
        attention = kind(spec, cache, share_prefixes=share)
        attention.plan(batch)
        results.append((attention.run(1, qkv.clone()), cache.data))
    (out, data), (expected, expected_data) = results
    torch.testing.assert_close(out, expected, atol=5e-5, rtol=1e-4)
    torch.testing.assert_close(data, expected_data, atol=1e-5, rtol=1e-5)


def test_models_that_it_does_not_serve_go_to_torch() -> None:
    spec = make_spec(4, 2, 64)
    for other in (
        replace(spec, sliding_windows=(64, None)),
        replace(spec, head_dim=20, rope=replace(spec.rope, rotary_dim=20)),
        replace(spec, rope=replace(spec.rope, rotary_dim=32)),
    ):
        cache = KvCache(other, n_blocks=2, block_size=2, dtype=torch.float32, device=torch.device("cpu"))
        assert not can_serve(other, cache)
    half = KvCache(spec, n_blocks=2, block_size=2, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert isinstance(make_attention(spec, half), TorchAttention)
