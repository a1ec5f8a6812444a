"""Sampling on the device, kernels included (Triton's interpreter), against the general sampler of the CPU."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton's interpreter runs the kernels, but triton is not installed", allow_module_level=True)

import torch

from proto.codec import pack_f32, pack_i32
from proto.worker_pb2 import Sampling
from tests.gpu import simulated
from worker.gpu.buffers import SAMPLE_TILE, make_buffers
from worker.gpu.inputs import StepInputs
from worker.gpu.sampler import NO_NUMBER, NO_TOKEN, GpuSampler
from worker.models.config import spec_from_config
from worker.sampling import Sampler

VOCAB, MAX_ROWS = 300, 8
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated.install(monkeypatch)


@dataclass
class Bits:
    """What a grammar allows."""

    index: np.ndarray
    bits: np.ndarray
    ends: np.ndarray


@dataclass
class Both:
    """The same requests on both samplers; the device's row i samples in place order[i]."""

    seed: int = 0
    n: int = 0
    positions: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))

    def __post_init__(self) -> None:
        spec = spec_from_config(
            {
                "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "num_hidden_layers": 1,
                "num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 16,
                "vocab_size": VOCAB, "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "head_dim": 16,
            }
        )  # fmt: skip
        self.buffers = make_buffers(
            spec, max_tokens=8, max_rows=MAX_ROWS, n_programs=8, dtype=torch.float32, device=CPU
        )
        self.inputs = StepInputs(
            max_rows=MAX_ROWS, max_step_tokens=8, max_blocks_per_row=4, block_size=16, n_blocks=8,
            buffers=self.buffers, device=CPU, n_slots=3,
        )  # fmt: skip
        self.ours = GpuSampler(
            buffers=self.buffers, head=self.inputs.head, last=self.inputs.rows.last, vocab_size=VOCAB,
            max_rows=MAX_ROWS, n_slots=4, device=CPU, pdl=False,
        )  # fmt: skip
        self.theirs = Sampler(vocab_size=VOCAB, max_rows=MAX_ROWS, device=CPU)
        self.rng = np.random.default_rng(self.seed)

    def admit(self, samplings: list[Sampling], *, n_output: int = 0) -> None:
        for row, sampling in enumerate(samplings):
            tokens = self.rng.integers(0, VOCAB, 6 + row + n_output).astype(np.int32)
            for sampler in (self.ours, self.theirs):
                sampler.admit(row, sampling, tokens=tokens, n_prompt=6 + row)
        self.n = len(samplings)
        self.positions = np.arange(6, 6 + self.n, dtype=np.int32) + n_output

    def step(self, *, masks: Any = None, rows: np.ndarray | None = None) -> tuple[list[int], list[int]]:
        """Tokens of the device and of the CPU, by place; both have the same logits."""
        rows = np.arange(self.n, dtype=np.int32) if rows is None else rows
        n, positions = len(rows), self.positions[rows]
        logits = torch.from_numpy(self.rng.normal(0, 3, (n, VOCAB)).astype(np.float32))
        self.buffers.logits[:n] = logits
        head = self.inputs.head
        head.sample_rows[:n] = torch.from_numpy(rows)
        head.slot.fill_(1)
        keys = self.ours.keys(rows, positions)
        for name in ("key0", "key1", "temperature", "top_k", "top_p", "log_min_p"):
            values = getattr(keys, name)
            target = getattr(head, name)
            target[:n] = torch.from_numpy(
                values.view(np.int32) if values.dtype == np.uint32 else np.ascontiguousarray(values)
            )
        needs = self.ours.needs(rows, positions, masked=masks is not None)
        self.ours.sample(rows, positions, needs, masks=masks)
        self.logprobs = self.ours.logprobs(rows, positions, needs, slot=1)
        self.expected = self.theirs.sample(logits, rows, positions, masks=masks)
        self.positions[rows] += 1
        ours = self.ours.ring[1, :n].tolist()
        assert self.inputs.rows.last[torch.from_numpy(rows).long()].tolist() == [max(t, 0) for t in ours]
        return ours, self.expected.tokens.tolist()


SAMPLINGS = [
    Sampling(),
    Sampling(repetition_penalty=1.7, presence_penalty=0.5, frequency_penalty=0.25),
    Sampling(temperature=0.9, seed=4, repetition_penalty=1.2, top_k=30, logprobs=True, top_logprobs=4),
    Sampling(temperature=1.1, seed=2**40 + 3, typical_p=0.5),
    Sampling(temperature=1.4, seed=8, typical_p=0.3, top_p=0.95, top_k=90, frequency_penalty=-0.6),
    Sampling(
        temperature=1.0, seed=9, min_p=0.02, bias_ids=pack_i32([7, 8, 7]), bias_values=pack_f32([3, -5, 4])
    ),
    Sampling(
        min_new_tokens=9, eos_ids=pack_i32([11, 12]), bias_ids=pack_i32([11]), bias_values=pack_f32([50])
    ),
    Sampling(temperature=1.0, seed=9, logprobs=True),
]  # fmt: skip


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
    assert SAMPLE_TILE >= VOCAB


def test_an_id_outside_the_vocabulary_is_named() -> None:
    both = Both()
    with pytest.raises(ValueError, match="logit_bias names token 300, but the vocabulary has 300 tokens"):
        both.admit([Sampling(bias_ids=pack_i32([300]), bias_values=pack_f32([1.0]))])
