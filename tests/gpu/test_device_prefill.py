"""On a Hopper GPU: prefill attention over gathered keys equals float64 attention over the same blocks, for
keys of 16 and of 8 bits, one plan after another in every turn."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="needs a Hopper GPU",
    ),
]

BLOCK_SIZE = 16
N_BLOCKS = 2048
BATCHES = (
    ((700,), (3000,)),
    ((1, 130, 513), (1, 2000, 513)),
    ((2048,), (2048,)),
    ((64, 1000), (4097, 9000)),
)
"""(queries, keys) of the chunks"""


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_gathered_attention(kv_dtype: torch.dtype) -> None:
    from bench.step import LLAMA_8B
    from worker.attention.flashinfer_backend import ChunkTables, FlashInferPrefill, PrefillShape
    from worker.models.config import spec_from_config

    spec = spec_from_config(LLAMA_8B)
    device = torch.device("cuda")
    prefill = FlashInferPrefill(
        spec,
        block_size=BLOCK_SIZE,
        dtype=torch.bfloat16,
        kv_dtype=kv_dtype,
        device=device,
        n_turns=2,
        fa3=True,
        max_context=16384,
    )
    shape = (N_BLOCKS, BLOCK_SIZE, spec.n_kv_heads, spec.head_dim)
    k, v = (torch.randn(shape, device=device).to(kv_dtype) for _ in range(2))
    for q_lens, kv_lens in BATCHES:
        n_pages = [-(-n // BLOCK_SIZE) for n in kv_lens]
        table = torch.zeros((len(q_lens) + 2, max(n_pages)), dtype=torch.int32, device=device)
        blocks = torch.randperm(N_BLOCKS - 1, device=device).to(torch.int32) + 1
        rows = list(range(len(q_lens), 0, -1))
        for row, n in zip(rows, n_pages, strict=True):
            table[row, :n], blocks = blocks[:n], blocks[n:]
        starts = np.concatenate(([0], np.cumsum(kv_lens))).astype(np.int32)
        tables = ChunkTables(
            rows=torch.tensor(rows, dtype=torch.int32, device=device),
            starts=torch.from_numpy(starts).to(device),
            table=table,
        )
        q = torch.randn((sum(q_lens), spec.n_heads, spec.head_dim), device=device).to(torch.bfloat16)
        out = torch.full_like(q, torch.nan)
        prefill.plan_gathered(
            PrefillShape(np.array(q_lens, dtype=np.int32), np.array(kv_lens, dtype=np.int32)), tables
        )
        prefill.run(0, q, (k, v), out, own=(q, q), scale=1.0)
        at = 0
        for row, n_q, n_kv in zip(rows, q_lens, kv_lens, strict=True):
            pages = table[row, : -(-n_kv // BLOCK_SIZE)].long()
            keys, values = (part.double()[pages].flatten(0, 1)[:n_kv] for part in (k, v))
            # The last query head of each of two groups, of a few queries.
            for place in {0, n_q // 2, n_q - 1}:
                for head in (3, spec.n_heads - 1):
                    kv_head = head * spec.n_kv_heads // spec.n_heads
                    n_seen = n_kv - n_q + place + 1
                    scores = keys[:n_seen, kv_head] @ q[at + place, head].double()
                    weights = (scores * spec.head_dim**-0.5).softmax(0)
                    want = weights @ values[:n_seen, kv_head]
                    error = (out[at + place, head].double() - want).norm() / want.norm()
                    assert error < 0.01, (row, place, head)
            at += n_q
        assert torch.isfinite(out).all()
        prefill.finish(_recorded())


def test_attention_to_own_keys() -> None:
    from bench.step import LLAMA_8B
    from worker.attention.flashinfer_backend import FlashInferPrefill, PrefillShape, Source
    from worker.models.config import spec_from_config

    spec = spec_from_config(LLAMA_8B)
    device, dtype = torch.device("cuda"), torch.bfloat16
    prefill = FlashInferPrefill(
        spec,
        block_size=BLOCK_SIZE,
        dtype=dtype,
        kv_dtype=dtype,
        device=device,
        n_turns=2,
        fa3=True,
        max_context=4096,
    )
    lens = np.array([1, 600, 33], dtype=np.int32)
    shape = PrefillShape(lens, lens)
    assert prefill.source(shape) is Source.OWN
    n, n_heads, n_kv = int(lens.sum()), spec.n_heads, spec.n_kv_heads
    # As it leaves the product: heads of q, k and v side by side.
    qkv = torch.randn((n, n_heads + 2 * n_kv, spec.head_dim), device=device).to(dtype)
    q = qkv[:, :n_heads].contiguous()
    k, v = qkv[:, n_heads : n_heads + n_kv], qkv[:, n_heads + n_kv :]
    cache = torch.zeros((1, BLOCK_SIZE, n_kv, spec.head_dim), dtype=dtype, device=device)
    out = torch.full_like(q, torch.nan)
    prefill.plan_own(shape)
    prefill.run(0, q, (cache, cache), out, own=(k, v), scale=1.0)
    start = 0
    for length in lens.tolist():
        rows = slice(start, start + length)
        q_, k_, v_ = (part[rows].double().transpose(0, 1) for part in (q, k, v))
        want = torch.nn.functional.scaled_dot_product_attention(
            q_,
            k_.repeat_interleave(n_heads // n_kv, 0),
            v_.repeat_interleave(n_heads // n_kv, 0),
            is_causal=True,
        )
        got = out[rows].double().transpose(0, 1)
        assert (got - want).norm() / want.norm() < 0.01, length
        start += length


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    return event
