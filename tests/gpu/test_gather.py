"""Keys and values gathered out of their blocks, in Triton's interpreter; and when that is worth it."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from worker.attention.flashinfer_backend import PrefillShape, worth_gathering


def shape(q_lens: list[int], kv_lens: list[int]) -> PrefillShape:
    return PrefillShape(np.array(q_lens, dtype=np.int32), np.array(kv_lens, dtype=np.int32))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize(("n_kv", "dim"), [(2, 8), (3, 8)])
def test_every_position_of_every_chunk_lands_in_its_place(block_size: int, n_kv: int, dim: int) -> None:
    import torch

    from worker.gpu.kernels.gather import gather_kv_kernel

    generator = torch.Generator().manual_seed(3)
    lens, rows = [1, 19, 8], [4, 0, 2]
    n_blocks = 64
    k, v = (torch.randn((n_blocks, block_size, n_kv, dim), generator=generator) for _ in range(2))
    table = torch.randint(1, n_blocks, (5, 20), generator=generator, dtype=torch.int32)
    starts = torch.tensor([0, 1, 20, 28], dtype=torch.int32)
    out = [torch.full((32, n_kv, dim), -7.0) for _ in range(2)]
    gather_kv_kernel[(-(-max(lens) // 8), 3)](
        k, v, *out, torch.tensor(rows, dtype=torch.int32), starts, table, table.stride(0), 1.0,
        WIDTH=n_kv * dim, WIDTH_PAD=1 << (n_kv * dim - 1).bit_length(), BLOCK_SIZE=block_size, N_TOKENS=8,
    )  # fmt: skip
    at = 0
    for length, row in zip(lens, rows, strict=True):
        for t in range(length):
            block = int(table[row, t // block_size])
            assert torch.equal(out[0][at + t], k[block, t % block_size])
            assert torch.equal(out[1][at + t], v[block, t % block_size])
        at += length
    for tensor in out:
        assert (tensor[at:] == -7).all()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_a_narrow_cache_is_widened_and_scaled() -> None:
    import torch

    from worker.gpu.kernels.gather import gather_kv_kernel

    k = torch.arange(32, dtype=torch.float32).view(4, 1, 1, 8).to(torch.float16)
    out = [torch.zeros((2, 1, 8)) for _ in range(2)]
    one = torch.tensor([0], dtype=torch.int32)
    table = torch.tensor([[3, 1]], dtype=torch.int32)
    starts = torch.tensor([0, 2], dtype=torch.int32)
    gather_kv_kernel[(1, 1)](
        k, k, *out, one, starts, table, 2, 0.5, WIDTH=8, WIDTH_PAD=8, BLOCK_SIZE=1, N_TOKENS=8
    )
    assert torch.equal(out[0][:, 0], torch.stack([k[3, 0, 0].float(), k[1, 0, 0].float()]) / 2)


def test_long_chunks_are_gathered_and_short_ones_are_not() -> None:
    assert worth_gathering(shape([8192], [8192]), group=4)
    assert worth_gathering(shape([4096], [30000]), group=4)
    assert worth_gathering(shape([1024], [30000]), group=4)
    assert not worth_gathering(shape([256], [30000]), group=4)
    assert not worth_gathering(shape([512] * 16, [512] * 16), group=4)
    assert not worth_gathering(shape([128] * 4, [2176] * 4), group=4)
    # Without grouped heads keys weigh four times as much.
    assert not worth_gathering(shape([1024], [30000]), group=1)
