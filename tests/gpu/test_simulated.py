"""The whole GPU runner, kernels included, against the CPU runner on tiny models (Triton's interpreter)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton's interpreter runs the kernels, but triton is not installed", allow_module_level=True)

import torch

from proto.worker_pb2 import Sampling
from tests.gpu import simulated
from tests.gpu.simulated import rng_prompts, simulated_cuda  # noqa: F401 (a fixture)
from tests.worker.model.driver import Driver, Request
from tests.worker.model.tiny import VOCAB, make_model, open_checkpoint
from tests.worker.model.tiny import make_runner as make_cpu_runner
from worker.gpu import sharing
from worker.models.config import spec_from_config
from worker.weights import load_weights

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
PROMPTS = rng_prompts((1, 5, 17, 33), vocab=VOCAB)
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.8, seed=7),
    Sampling(temperature=1.0, seed=11, top_k=5),
    Sampling(temperature=1.2, seed=2**63 + 5, top_p=0.7, min_p=0.05),
)


def requests(n_new: int, samplings: tuple[Sampling, ...]) -> list[Request]:
    return [
        Request(list(prompt), len(prompt), n_new, samplings[index % len(samplings)])
        for index, prompt in enumerate(PROMPTS)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "llama3-rope-biases", "qwen3", "qwen2-mixed-windows"])
@pytest.mark.parametrize(("block_size", "graphs"), [(1, False), (16, True)])
def test_equals_cpu_runner(
    family: str, block_size: int, graphs: bool, tmp_path: Path, simulated_cuda: None
) -> None:
    sizes = {**SIZES, "num_attention_heads": 4}
    make_model(family, tmp_path, **sizes)
    checkpoint = open_checkpoint(tmp_path)
    spec = spec_from_config(checkpoint.config)
    weights = load_weights(checkpoint, spec, device=torch.device("cpu"), dtype=torch.float32)
    want = Driver(make_cpu_runner(checkpoint), chunk=12).run(requests(5, SAMPLINGS))
    runner = simulated.make_runner(weights, block_size=block_size, graphs=graphs)
    got = Driver(runner, chunk=12).run(requests(5, SAMPLINGS))
    assert got == want


@pytest.mark.slow
def test_general_sampling_and_logprobs(tmp_path: Path, simulated_cuda: None) -> None:
    make_model("llama", tmp_path, **{**SIZES, "num_attention_heads": 4})
    checkpoint = open_checkpoint(tmp_path)
    spec = spec_from_config(checkpoint.config)
    weights = load_weights(checkpoint, spec, device=torch.device("cpu"), dtype=torch.float32)
    samplings = (
        Sampling(repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.1),
        Sampling(temperature=0.7, seed=3, logprobs=True, top_logprobs=3),
        Sampling(prompt_logprobs=3),
        Sampling(temperature=1.0, seed=5, typical_p=0.8),
    )
    cpu, gpu = (
        Driver(make_cpu_runner(checkpoint), chunk=12),
        Driver(simulated.make_runner(weights, block_size=4), chunk=12),
    )
    assert gpu.run(requests(5, samplings)) == cpu.run(requests(5, samplings))
    for ours, theirs in zip(gpu.results, cpu.results, strict=True):
        assert (ours.logprobs is None) == (theirs.logprobs is None)
        if ours.logprobs is not None and theirs.logprobs is not None:
            np.testing.assert_allclose(ours.logprobs.chosen, theirs.logprobs.chosen, atol=1e-4)
            np.testing.assert_array_equal(ours.logprobs.top_ids, theirs.logprobs.top_ids)
        assert [part.start for part in ours.prompt_logprobs] == [
            part.start for part in theirs.prompt_logprobs
        ]
        for mine, other in zip(ours.prompt_logprobs, theirs.prompt_logprobs, strict=True):
            np.testing.assert_allclose(
                np.frombuffer(mine.chosen, np.float32), np.frombuffer(other.chosen, np.float32), atol=1e-4
            )
            assert mine.top_ids == other.top_ids


@pytest.mark.slow
@pytest.mark.parametrize("graphs", [False, True])
def test_shared_prefix(
    graphs: bool,
    tmp_path: Path,
    simulated_cuda: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows that share their first blocks attend to them together; texts equal those of rows that share
    nothing."""
    monkeypatch.setattr(sharing, "MIN_TOKENS", 8)
    make_model("llama", tmp_path, **{**SIZES, "num_attention_heads": 8})
    checkpoint = open_checkpoint(tmp_path)
    spec = spec_from_config(checkpoint.config)
    weights = load_weights(checkpoint, spec, device=torch.device("cpu"), dtype=torch.float32)
    rng = np.random.default_rng(4)
    prefix = rng.integers(3, VOCAB, 33).tolist()
    # Four heads a KV head: four rows fill a tile, so seven make two groups.
    tails = [rng.integers(3, VOCAB, n).tolist() for n in (1, 4, 9, 2, 7, 3, 5)]
    others = rng.integers(3, VOCAB, 21).tolist()
    plain = [Request([*prefix, *tail], 33 + len(tail), 6) for tail in tails] + [Request(list(others), 21, 6)]
    want = Driver(make_cpu_runner(checkpoint), chunk=16).run(plain)
    runner = simulated.make_runner(weights, block_size=4, graphs=graphs)
    driver = Driver(runner, chunk=16)
    driver.run([Request(list(prefix), 33, 1, blocks=list(range(1, 10)))])
    found: list[int] = []
    find = runner.core._sharing.find

    def watched(**kwargs: Any) -> Any:
        answer = find(**kwargs)
        found.append(len(answer.members))
        return answer

    monkeypatch.setattr(runner.core._sharing, "find", watched)
    driver._free = [block for block in driver._free if block > 9]
    rows = [
        Request([*prefix, *tail], 33 + len(tail), 6, blocks=list(range(1, 9)), n_cached=32) for tail in tails
    ]
    rows.append(Request(list(others), 21, 6))
    assert driver.run(rows) == want
    assert max(found) == 2
    assert not runner.core.buffers.attention_count.any()
