"""The compiled forward pass against the same decoder in torch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from checkpoint.grouped import Grouped
from worker.attention.interface import AttentionBatch, KvCache
from worker.attention.native_backend import NativeAttention
from worker.models.compiled import fastest
from worker.models.decoder import Decoder
from worker.models.spec import DecoderWeights, LayerWeights, ModelSpec, RopeSpec
from worker.native.machine import vector_unit

if vector_unit() is None:
    pytest.skip("no vector unit that is served", allow_module_level=True)

from worker.native.forward import CompiledDecoder

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB = 128, 4, 2, 32, 192, 96
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
SPEC = ModelSpec(
    architecture="test",
    n_layers=3,
    hidden_size=HIDDEN,
    n_heads=HEADS,
    n_kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    intermediate_size=INNER,
    vocab_size=VOCAB,
    rms_eps=1e-5,
    rope=RopeSpec(tuple(10000.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)), HEAD_DIM),
    max_positions=1024,
    tied_embeddings=True,
)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def random_grouped(rng: np.random.Generator, n_out: int, n_in: int, *, bits: int) -> Grouped:
    shape = (n_out, n_in // 32)
    scale = (rng.random(shape) * 0.02).astype(np.float16).astype(np.float32)
    minimum = (scale * -(2 ** (bits - 1))).astype(np.float32)
    return Grouped(bits, rng.integers(0, 2**32, (*shape, bits), dtype=np.uint32), scale, minimum)


def make_decoder(*, biased: bool) -> Decoder:
    rng, generator = np.random.default_rng(3), torch.Generator().manual_seed(4)
    shapes = {"qkv": (QKV, HIDDEN), "o": (HIDDEN, HEADS * HEAD_DIM), "down": (HIDDEN, INNER)}
    shapes["gate_up"] = (2 * INNER, HIDDEN)
    layers, grouped = [], {}
    for index in range(SPEC.n_layers):
        for field, (n_out, n_in) in shapes.items():
            # The last layer is kept in other bits, as mixed files do.
            bits = 8 if index == SPEC.n_layers - 1 else 4
            grouped[index, field] = random_grouped(rng, n_out, n_in, bits=bits)
        nothing = torch.empty(0, device="meta")
        biases = {
            f"{field}_bias": torch.randn(n_out, generator=generator) for field, (n_out, _) in shapes.items()
        }
        layers.append(
            LayerWeights(
                input_norm=1 + 0.1 * torch.randn(HIDDEN, generator=generator),
                post_norm=1 + 0.1 * torch.randn(HIDDEN, generator=generator),
                **dict.fromkeys(shapes, nothing),
                **(biases if biased else {}),
            )
        )
    embed = torch.randn(VOCAB, HIDDEN, generator=generator)
    norm = 1 + 0.1 * torch.randn(HIDDEN, generator=generator)
    return Decoder(DecoderWeights(SPEC, embed, norm, embed, layers, grouped))


STEPS = [
    pytest.param([1], [1], [0], id="one token"),
    pytest.param([70, 5, 131], [70, 5, 131], [0, 1, 2], id="whole prompts"),
    pytest.param([40, 90, 33, 100], [1, 1, 1, 50], [0, 1, 2], id="decode rows beside a part of a prompt"),
    pytest.param([64], [64], [], id="nothing is wanted"),
    pytest.param([20 + i for i in range(40)], [1] * 40, None, id="many rows, all wanted"),
]


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize(("kv_lens", "q_lens", "rows"), STEPS)
def test_equals_torch(
    kv_lens: list[int], q_lens: list[int], rows: list[int] | None, biased: bool, threads: int
) -> None:
    decoder = make_decoder(biased=biased)
    n_tokens = sum(q_lens)
    tokens = torch.from_numpy(np.random.default_rng(5).integers(0, VOCAB, n_tokens).astype(np.int32))
    wanted = torch.from_numpy(np.cumsum(q_lens)[rows] - 1) if rows is not None else None
    n_blocks = sum(-(-n // 16) for n in kv_lens) + 1
    tables = np.zeros((len(kv_lens), max(-(-n // 16) for n in kv_lens)), dtype=np.int32)
    at = 1
    for row, kv_len in enumerate(kv_lens):
        own = -(-kv_len // 16)
        tables[row, :own] = range(at, at + own)
        at += own
    n_decode = sum(1 for n in q_lens if n == 1)
    lens = np.array(q_lens, dtype=np.int32), np.array(kv_lens, dtype=np.int32)
    results = []
    for compiled in (True, False):
        cache = KvCache(
            SPEC, n_blocks=n_blocks, block_size=16, dtype=torch.float32, device=torch.device("cpu")
        )
        cache.data.copy_(torch.randn(cache.data.shape, generator=torch.Generator().manual_seed(6)))
        attention = NativeAttention(SPEC, cache)
        model = fastest(decoder, attention) if compiled else decoder
        assert isinstance(model, CompiledDecoder) == compiled
        for _ in range(2):  # the second pass meets the buffers of the first
            attention.plan(AttentionBatch(n_decode, *lens, tables))
            out = model.hidden(tokens, attention, wanted).clone()
        results.append((out, cache.data))
    (out, data), (expected, expected_data) = results
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(data, expected_data, atol=1e-4, rtol=1e-4)


def test_buffers_grow() -> None:
    decoder = make_decoder(biased=False)
    cache = KvCache(SPEC, n_blocks=30, block_size=16, dtype=torch.float32, device=torch.device("cpu"))
    attention = NativeAttention(SPEC, cache)
    model = fastest(decoder, attention)
    for n in (3, 200, 3):
        lens = np.array([n], dtype=np.int32)
        tables = np.arange(1, 20, dtype=np.int32)[None]
        tokens = torch.arange(n, dtype=torch.int32) % VOCAB
        attention.plan(AttentionBatch(0, lens, lens, tables))
        out = model.hidden(tokens, attention, None).clone()
        attention.plan(AttentionBatch(0, lens, lens, tables))
        torch.testing.assert_close(out, decoder.hidden(tokens, attention, None), atol=1e-4, rtol=1e-4)
