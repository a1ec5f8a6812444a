"""On an NVIDIA GPU: texts equal a float64 reference, whatever the batch, graphs, block size or order of
steps.

    python -m pytest tests/gpu -m gpu

A token may differ only where the reference's two (noised) values are closer than a bound that follows from
the measured error of the logits; the comparison goes on from our text, and the share of such places stays
below 5 % (the random model has many near ties).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bench.run_ahead import Request, RunAhead
from proto.worker_pb2 import Sampling
from tests.gpu.reference import reference_logits, tiny_weights
from worker.models.spec import DecoderWeights
from worker.sampling_noise import gumbel_noise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

N_NEW = 20


@pytest.fixture(scope="module")
def weights() -> DecoderWeights:
    return tiny_weights(device=torch.device("cuda"), dtype=torch.bfloat16)


def make_runner(weights: DecoderWeights, *, block_size: int = 16, graphs: bool = True, max_rows: int = 256):  # type: ignore[no-untyped-def]
    from worker.gpu.buffers import make_buffers
    from worker.gpu.cache import PagedCache
    from worker.gpu.choices import most_decode_programs
    from worker.gpu.core import CoreShape, GpuCore
    from worker.gpu.device import find_gpu
    from worker.gpu.graph_sizes import graph_sizes
    from worker.gpu.runner import GpuRunner
    from worker.gpu.token_sizes import measure
    from worker.runner import RunnerCapacity

    gpu = find_gpu()
    spec = weights.spec
    shape = CoreShape(
        max_rows=max_rows,
        max_step_tokens=2048 + max_rows,
        max_context=1024,
        block_size=block_size,
        graph_sizes=graph_sizes(max_rows) if graphs else (),
    )
    buffers = make_buffers(
        spec,
        max_tokens=shape.max_step_tokens + 64,
        max_rows=max_rows,
        n_programs=most_decode_programs(max_rows=max_rows, n_kv_heads=spec.n_kv_heads, n_sms=gpu.n_sms),
        dtype=torch.bfloat16,
        device=gpu.device,
    )
    n_blocks = 1 + 48_000 // block_size
    cache = PagedCache(
        spec, n_blocks=n_blocks, block_size=block_size, dtype=torch.bfloat16, device=gpu.device
    )
    core = GpuCore(weights, gpu=gpu, shape=shape, buffers=buffers, cache=cache, dtype=torch.bfloat16)
    if graphs:
        core.capture_graphs(measure(core.decoder, shape.max_step_tokens, stream=core.stream))
    capacity = RunnerCapacity(
        model_id="tiny", model_hash="tiny", model_path="", block_size=block_size, n_blocks=n_blocks,
        max_rows=max_rows, max_step_tokens=shape.max_step_tokens, max_context=shape.max_context,
        vocab_size=spec.vocab_size, eos_token_ids=(2,), attention="flashinfer", device="cuda",
        dtype="bfloat16",
        kv_cache_dtype="bfloat16", max_batch_total_tokens=n_blocks * block_size, memory_arithmetic="",
    )  # fmt: skip
    return GpuRunner(core, capacity, use_graphs=graphs)


def make_requests(n: int, *, vocab: int, seed: int = 0) -> list[Request]:
    """Greedy, seeded and filtered ones in turn; prompts of 1 to 90 tokens."""
    rng = np.random.default_rng(seed)
    samplings = (
        Sampling(),
        Sampling(temperature=0.8, seed=7),
        Sampling(temperature=1.0, seed=11, top_k=20),
        Sampling(temperature=1.0, seed=13, top_p=0.9),
    )
    return [
        Request(rng.integers(3, vocab, int(rng.integers(1, 90))).tolist(), N_NEW, samplings[index % 4])
        for index in range(n)
    ]


def logit_error(weights: DecoderWeights, runner) -> tuple[float, float]:  # type: ignore[no-untyped-def]
    """(largest, root mean square) error of the logits of a decode step over 24 rows, against float64."""
    requests = make_requests(24, vocab=weights.spec.vocab_size, seed=5)
    for request in requests:
        request.sampling, request.max_new = Sampling(), 4
    driver = RunAhead(runner, window=1)
    driver.run(requests)
    last = next(result for result in reversed(driver.results) if len(result.rows))
    assert last.rows.tolist() == [request.row for request in requests]
    ours = runner.core.buffers.logits[:24].double()
    worst, square = 0.0, 0.0
    for index, request in enumerate(requests):
        text = torch.tensor(request.prompt + request.output, device="cuda")
        want = reference_logits(weights, text)[-2]
        error = (ours[index] - want).abs()
        worst, square = max(worst, float(error.max())), square + float(error.square().mean())
    return worst, (square / 24) ** 0.5


def filter_edge(values: np.ndarray, sampling: Sampling) -> float:
    """The lowest value that top-k or top-p allows."""
    edge = -np.inf
    if sampling.top_k:
        edge = np.sort(values)[-sampling.top_k]
    if 0 < sampling.top_p < 1:
        order = np.argsort(-values)
        p = np.exp(values[order] - values.max())
        p /= p.sum()
        edge = max(edge, values[order[np.cumsum(p) - p < sampling.top_p]].min())
    return float(edge)


def differences(weights: DecoderWeights, requests: list[Request], *, bound: float) -> tuple[int, int]:
    """(places where the reference would have gone on otherwise, all places). Fails beyond the bound."""
    n_differ = n_all = 0
    vocab = np.arange(weights.spec.vocab_size)
    for request in requests:
        text = torch.tensor(request.prompt + request.output, device="cuda")
        logits = reference_logits(weights, text)[len(request.prompt) - 1 : -1].cpu().numpy()
        sampling = request.sampling
        for place, token in enumerate(request.output):
            values = logits[place]
            slack = bound
            if sampling.temperature > 0:
                values = values / sampling.temperature
                slack = bound / sampling.temperature
                edge = filter_edge(values, sampling)
                # What lies near the edge may be in or out.
                assert values[token] > edge - slack
                values = np.where((values >= edge + slack) | (vocab == token), values, -np.inf)
                values = values + gumbel_noise(sampling.seed, len(request.prompt) + place, vocab)
            n_all += 1
            best = int(values.argmax())
            if best != token:
                n_differ += 1
                assert values[best] - values[token] < slack, (place, best, token, values[best], values[token])
    return n_differ, n_all


@pytest.mark.parametrize(("block_size", "graphs"), [(16, True), (1, True), (16, False)])
def test_equals_reference(weights: DecoderWeights, block_size: int, graphs: bool) -> None:
    runner = make_runner(weights, block_size=block_size, graphs=graphs)
    worst, rms = logit_error(weights, runner)
    print(f"logits: largest error {worst:.3f}, rms {rms:.4f}")
    assert rms < 0.05
    n_differ = n_all = 0
    for n in (1, 2, 3, 5, 8, 9, 17, 33, 40, 65, 200):
        requests = make_requests(n, vocab=weights.spec.vocab_size, seed=n)
        RunAhead(runner, chunk=64).run(requests)
        differ, total = differences(weights, requests[:24], bound=4 * worst)
        n_differ, n_all = n_differ + differ, n_all + total
    print(f"block size {block_size}, graphs {graphs}: {n_differ} of {n_all} places differ")
    assert n_differ < 0.05 * n_all


def test_alone_and_in_company(weights: DecoderWeights) -> None:
    """The same request among 200 and alone: both within the bound; few texts differ at all."""
    runner = make_runner(weights)
    worst, _ = logit_error(weights, runner)
    together = make_requests(200, vocab=weights.spec.vocab_size, seed=3)
    RunAhead(runner, chunk=48).run(together)
    singles = make_requests(200, vocab=weights.spec.vocab_size, seed=3)[:24]
    for request in singles:
        RunAhead(runner).run([request])
    differences(weights, together[:24], bound=4 * worst)
    differences(weights, singles, bound=4 * worst)
    n_differ = sum(one.output != other.output for one, other in zip(singles, together, strict=False))
    print(f"{n_differ} of 24 texts differ alone and in company (near ties of a random model)")
    again = make_requests(200, vocab=weights.spec.vocab_size, seed=3)
    RunAhead(runner, chunk=48).run(again)
    assert [request.output for request in again] == [request.output for request in together]


def test_shared_prefix(weights: DecoderWeights) -> None:
    """Rows that share 320 tokens attend to them together; another run shares nothing; both stay within the
    bound."""
    runner = make_runner(weights)
    worst, _ = logit_error(weights, runner)
    rng = np.random.default_rng(9)
    vocab = weights.spec.vocab_size
    prefix = rng.integers(3, vocab, 321).tolist()
    driver = RunAhead(runner)
    first = Request(list(prefix), 1)
    driver.run([first])
    rows = make_requests(40, vocab=vocab, seed=10)
    for index, request in enumerate(rows):
        if index % 5:
            request.prompt = prefix[:320] + request.prompt
            request.blocks, request.n_cached = first.blocks[:20], 320
    shared = RunAhead(runner, chunk=64)
    shared._free = [block for block in shared._free if block not in first.blocks]
    n_groups = []
    find = runner.core._sharing.find

    def watched(**kwargs):  # type: ignore[no-untyped-def]
        found = find(**kwargs)
        n_groups.append(len(found.members))
        return found

    runner.core._sharing.find = watched
    shared.run(rows)
    assert max(n_groups) >= 7
    n_differ, n_all = differences(weights, rows, bound=4 * worst)
    print(f"shared prefix: {n_differ} of {n_all} places differ")
    assert n_differ < 0.05 * n_all


def test_delayed_stream_changes_nothing(weights: DecoderWeights) -> None:
    """Every step waits behind 5 ms of sleep on the device, so that the host is as far ahead as it may be."""
    runner = make_runner(weights)
    plain = make_requests(24, vocab=weights.spec.vocab_size, seed=8)
    RunAhead(runner, chunk=16).run(plain)
    core = runner.core
    launch = core.launch

    def delayed(*args, **kwargs):  # type: ignore[no-untyped-def]
        torch.cuda._sleep(10_000_000)
        return launch(*args, **kwargs)

    core.launch = delayed
    slow = make_requests(24, vocab=weights.spec.vocab_size, seed=8)
    RunAhead(runner, chunk=16).run(slow)
    assert [request.output for request in slow] == [request.output for request in plain]


def test_a_row_with_nan_fails_alone(weights: DecoderWeights) -> None:
    runner = make_runner(weights, graphs=False)
    core = runner.core
    logits = core.decoder.logits

    def poisoned(*, n_rows, index):  # type: ignore[no-untyped-def]
        logits(n_rows=n_rows, index=index)
        core.buffers.logits[1, 17] = torch.nan

    core.decoder.logits = poisoned
    driver = RunAhead(runner)
    driver.run(make_requests(3, vocab=weights.spec.vocab_size))
    rows = {error.row for result in driver.results for error in result.errors}
    assert rows == {1}
