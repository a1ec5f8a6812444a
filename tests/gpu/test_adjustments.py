"""Sampling on the device, kernels included (Triton's interpreter), against the general sampler of the CPU."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton's interpreter runs the kernels, but triton is not installed", allow_module_level=True)

import torch

from proto.codec import pack_f32, pack_i32
from proto.worker_pb2 import Sampling
from tests.gpu import simulated
from tests.gpu.both_samplers import SAMPLINGS, Bits, Both
from worker.gpu.sampler import NO_NUMBER, NO_TOKEN

VOCAB = 300


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated.install(monkeypatch)


def test_equals_the_general_sampler() -> None:
    both = Both()
    both.admit(SAMPLINGS)
    for _ in range(6):
        ours, theirs = both.step()
        assert ours == theirs
        assert both.logprobs is not None
        assert both.expected.logprobs is not None
        assert both.logprobs.index.tolist() == [2, 7]
        torch.testing.assert_close(both.logprobs.chosen, both.expected.logprobs.chosen)
        torch.testing.assert_close(both.logprobs.top_values, both.expected.logprobs.top_values)
        assert both.logprobs.top_ids.tolist() == both.expected.logprobs.top_ids.tolist()


def test_rows_in_any_order_and_number() -> None:
    """Some rows of the step, in any order; then a row is taken by another request."""
    both = Both(seed=1)
    both.admit(SAMPLINGS, n_output=5)
    for rows in ([3, 1, 5], [6], [7, 2, 0, 4]):
        ours, theirs = both.step(rows=np.array(rows, dtype=np.int32))
        assert ours == theirs
    both.admit([SAMPLINGS[1], SAMPLINGS[0], SAMPLINGS[5]])
    for _ in range(2):
        ours, theirs = both.step()
        assert ours == theirs


def test_masks() -> None:
    both = Both(seed=2)
    both.admit(SAMPLINGS)
    for turn in range(4):
        allowed = both.rng.random((3, -(-VOCAB // 32) * 32)) < 0.1
        # Of row 6 only a forbidden end token is allowed: the grammar has ended, so it may come.
        ends = np.array([False, False, turn % 2 == 0])
        if ends[2]:
            allowed[2] = False
            allowed[2, 11] = True
        bits = np.packbits(allowed, bitorder="little").view(np.int32).reshape(3, -1)
        ours, theirs = both.step(masks=Bits(np.array([0, 4, 6]), bits, ends))
        assert ours == theirs
        assert all(allowed[line, ours[place]] for line, place in enumerate((0, 4, 6)))


def test_no_token_and_no_number() -> None:
    everything = pack_i32(list(range(VOCAB)))
    nothing = Sampling(bias_ids=everything, bias_values=pack_f32([-np.inf] * VOCAB))
    both = Both()
    both.admit([nothing, SAMPLINGS[1], Sampling()])
    normal = both.rng.normal

    def poisoned(*args: Any) -> np.ndarray:
        values = normal(*args)
        values[1, 250] = np.nan
        return values

    class Rng:
        normal = staticmethod(poisoned)

    both.rng = Rng()  # type: ignore[assignment]
    ours, _ = both.step()
    assert ours[:2] == [NO_TOKEN, NO_NUMBER]
    assert ours[2] >= 0
    assert both.expected.usable.tolist() == [False, False, True]
    assert both.expected.finite.tolist() == [True, False, True]


def test_many_entries_make_the_table_grow() -> None:
    both = Both()
    few = SAMPLINGS[5]
    ids = list(range(290))
    many = Sampling(
        bias_ids=pack_i32(ids), bias_values=pack_f32([-1.0 * (i % 7) for i in ids]), temperature=1.0, seed=3
    )
    both.admit([few, many, few])
    ours, theirs = both.step()
    assert ours == theirs


def test_an_id_outside_the_vocabulary_is_named() -> None:
    both = Both()
    with pytest.raises(ValueError, match="logit_bias names token 300, but the vocabulary has 300 tokens"):
        both.admit([Sampling(bias_ids=pack_i32([300]), bias_values=pack_f32([1.0]))])
