"""The same requests on the device's sampler and on the general one of the CPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from proto.codec import pack_f32, pack_i32
from proto.worker_pb2 import Sampling
from worker.gpu.buffers import make_buffers
from worker.gpu.inputs import StepInputs
from worker.gpu.sampler import GpuSampler
from worker.models.config import spec_from_config
from worker.sampling import Sampler

MAX_ROWS = 8


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
    vocab: int = 300
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    n: int = 0
    positions: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))

    def __post_init__(self) -> None:
        spec = spec_from_config(
            {
                "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "num_hidden_layers": 1,
                "num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 16,
                "vocab_size": self.vocab, "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "head_dim": 16,
            }
        )  # fmt: skip
        self.buffers = make_buffers(
            spec, max_tokens=8, max_rows=MAX_ROWS, n_programs=8, dtype=torch.float32, device=self.device
        )
        self.inputs = StepInputs(
            max_rows=MAX_ROWS, max_step_tokens=8, max_blocks_per_row=4, block_size=16, n_blocks=8,
            buffers=self.buffers, device=self.device, n_slots=3,
        )  # fmt: skip
        self.ours = GpuSampler(
            buffers=self.buffers, head=self.inputs.head, last=self.inputs.rows.last, vocab_size=self.vocab,
            max_rows=MAX_ROWS, n_slots=4, device=self.device, pdl=False,
        )  # fmt: skip
        self.theirs = Sampler(vocab_size=self.vocab, max_rows=MAX_ROWS, device=torch.device("cpu"))
        self.rng = np.random.default_rng(self.seed)

    def admit(self, samplings: list[Sampling], *, n_output: int = 0) -> None:
        for row, sampling in enumerate(samplings):
            tokens = self.rng.integers(0, self.vocab, 6 + row + n_output).astype(np.int32)
            for sampler in (self.ours, self.theirs):
                sampler.admit(row, sampling, tokens=tokens, n_prompt=6 + row)
        self.n = len(samplings)
        self.positions = np.arange(6, 6 + self.n, dtype=np.int32) + n_output

    def step(self, *, masks: Any = None, rows: np.ndarray | None = None) -> tuple[list[int], list[int]]:
        """Tokens of the device and of the CPU, by place; both have the same logits."""
        rows = np.arange(self.n, dtype=np.int32) if rows is None else rows
        n, positions = len(rows), self.positions[rows]
        logits = torch.from_numpy(self.rng.normal(0, 3, (n, self.vocab)).astype(np.float32))
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
        assert self.inputs.rows.last[torch.from_numpy(rows).long().to(self.device)].tolist() == [
            max(t, 0) for t in ours
        ]
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
