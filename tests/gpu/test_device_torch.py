"""On an NVIDIA GPU: the torch backend in float32. Its logits are those of float64 but for rounding, so texts
are equal in every token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bench.float64_decoder import Float64Decoder
from bench.near_ties import gap_of
from bench.run_ahead import Request, RunAhead
from proto.worker_pb2 import Sampling
from tests.gpu.reference import tiny_weights
from worker.attention.interface import KvCache
from worker.attention.torch_backend import TorchAttention
from worker.cpu_runner import CpuRunner
from worker.cpu_tuning import plan_threads
from worker.models.decoder import Decoder
from worker.runner import RunnerCapacity

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

TOLERANCE = 1e-3
"""Of the difference of two logits."""


@pytest.fixture(autouse=True)
def whole_float32() -> None:
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize("block_size", [1, 16])
def test_equals_float64(block_size: int) -> None:
    device = torch.device("cuda")
    weights = tiny_weights(device=device, dtype=torch.float32)
    reference = Float64Decoder(weights)
    spec, n_blocks = weights.spec, 8192 // block_size
    cache = KvCache(spec, n_blocks=n_blocks, block_size=block_size, dtype=torch.float32, device=device)
    capacity = RunnerCapacity(
        model_id="tiny", model_hash="tiny", model_path="", block_size=block_size, n_blocks=n_blocks,
        max_rows=32, max_step_tokens=512, max_context=512, vocab_size=spec.vocab_size, eos_token_ids=(2,),
        attention="torch", device="cuda", dtype="float32", kv_cache_dtype="float32",
        max_batch_total_tokens=8192, memory_arithmetic="", launch_depth=1,
    )  # fmt: skip
    runner = CpuRunner(
        Decoder(weights), capacity, attention=TorchAttention(spec, cache), threads=plan_threads(1)
    )
    rng = np.random.default_rng(3)
    samplings = (
        Sampling(),
        Sampling(temperature=0.8, seed=7),
        Sampling(temperature=1.0, seed=11, top_k=20, logprobs=True, top_logprobs=3),
        Sampling(temperature=1.0, seed=13, top_p=0.9),
    )
    requests = [
        Request(rng.integers(3, spec.vocab_size, int(rng.integers(1, 90))).tolist(), 12, samplings[i % 4])
        for i in range(24)
    ]
    RunAhead(runner, window=1, chunk=32).run(requests)
    n_differ = 0
    for request in requests:
        first = len(request.prompt)
        logits = reference.logits(request.prompt + request.output[:-1], first=first - 1).cpu().numpy()
        for place, token in enumerate(request.output):
            gap = gap_of(logits[place], token, request.sampling, position=first + place, slack=TOLERANCE)
            assert gap < TOLERANCE
            n_differ += gap > 0
    assert n_differ <= 1
