"""On an NVIDIA GPU: sampling equals the CPU's general sampler, at a real vocabulary's size, and nothing of it
waits for the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.gpu.both_samplers import SAMPLINGS, Bits, Both

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

VOCAB = 49_152


def on_gpu(seed: int) -> Both:
    return Both(seed=seed, vocab=VOCAB, device=torch.device("cuda"))


def test_equals_the_cpu() -> None:
    both = on_gpu(1)
    both.admit(SAMPLINGS, n_output=3)
    for _ in range(12):
        ours, theirs = both.step()
        assert ours == theirs
        assert both.logprobs is not None
        assert both.expected.logprobs is not None
        torch.testing.assert_close(both.logprobs.chosen.cpu(), both.expected.logprobs.chosen)
        torch.testing.assert_close(both.logprobs.top_values.cpu(), both.expected.logprobs.top_values)


def test_masks() -> None:
    both = on_gpu(2)
    both.admit(SAMPLINGS)
    for turn in range(4):
        allowed = both.rng.random((3, VOCAB)) < 0.01
        bits = np.packbits(allowed, bitorder="little").view(np.int32).reshape(3, -1)
        ends = np.array([False, turn % 2 == 0, False])
        ours, theirs = both.step(masks=Bits(np.array([1, 3, 6]), bits, ends))
        assert ours == theirs


def test_nothing_waits_for_the_device() -> None:
    """torch raises where its own operations would synchronise; warm first, so that all is compiled."""
    both = on_gpu(3)
    both.admit(SAMPLINGS)
    both.step()
    both.admit(SAMPLINGS)
    rows, positions = np.arange(len(SAMPLINGS), dtype=np.int32), both.positions
    needs = both.ours.needs(rows, positions)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        both.ours.sample(rows, positions, needs)
        both.ours.logprobs(rows, positions, needs, slot=1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
