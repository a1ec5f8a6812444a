"""Our decoder and paged attention against transformers, float32, on tiny random models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.worker.model.driver import Driver, Request
from tests.worker.model.tiny import FAMILIES, VOCAB, greedy, make_model, make_runner, open_checkpoint
from worker.attention.interface import AttentionBatch, KvCache
from worker.attention.torch_backend import TorchAttention
from worker.models.config import spec_from_config
from worker.models.decoder import Decoder
from worker.weights import load_weights

CPU = torch.device("cpu")
LENGTHS = (1, 2, 15, 16, 17, 40)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, make_model(request.param, folder)


def prompts(seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB, n).tolist() for n in LENGTHS]


def test_logits_of_prefill_chunks_and_decode(model: tuple[Path, PreTrainedModel]) -> None:
    folder, reference = model
    checkpoint = open_checkpoint(folder)
    spec = spec_from_config(checkpoint.config)
    decoder = Decoder(load_weights(checkpoint, spec, device=CPU, dtype=torch.float32))
    tokens = torch.from_numpy(np.random.default_rng(1).integers(0, VOCAB, 60))
    with torch.inference_mode():
        expected = reference(tokens[None]).logits[0]
        for block_size in (1, 16):
            cache = KvCache(spec, n_blocks=200, block_size=block_size, dtype=torch.float32, device=CPU)
            attention = TorchAttention(spec, cache)
            table = np.random.default_rng(2).permutation(np.arange(1, 200))[None, :70].astype(np.int32)
            rows = []
            for start, stop in ((0, 33), (33, 50), (50, 51), (51, 52), (52, 60)):
                batch = AttentionBatch(
                    n_decode=int(stop - start == 1),
                    q_lens=np.array([stop - start], dtype=np.int32),
                    kv_lens=np.array([stop], dtype=np.int32),
                    block_tables=table,
                )
                attention.plan(batch)
                rows.append(decoder.logits(decoder.hidden(tokens[start:stop], attention, None)))
            torch.testing.assert_close(torch.cat(rows), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(("block_size", "chunk"), [(1, 7), (16, 1 << 30), (16, 5)])
def test_greedy_text_of_a_mixed_batch(
    model: tuple[Path, PreTrainedModel], block_size: int, chunk: int
) -> None:
    folder, reference = model
    runner = make_runner(open_checkpoint(folder), block_size=block_size)
    requests = [Request(list(p), len(p), 8 + i) for i, p in enumerate(prompts())]
    outputs = Driver(runner, chunk=chunk).run(requests)
    for prompt, request, output in zip(prompts(), requests, outputs, strict=True):
        assert output == greedy(reference, prompt, request.max_new)


def test_prompt_logprobs(model: tuple[Path, PreTrainedModel]) -> None:
    from proto.codec import unpack_f32, unpack_i32
    from proto.worker_pb2 import Sampling

    folder, reference = model
    prompt = prompts()[-1]
    driver = Driver(make_runner(open_checkpoint(folder)), chunk=11)
    driver.run([Request(list(prompt), len(prompt), 2, Sampling(prompt_logprobs=3))])
    parts = [part for result in driver.results for part in result.prompt_logprobs]
    assert [part.start for part in parts] == [1, 12, 23, 34]
    chosen = np.concatenate([unpack_f32(part.chosen) for part in parts])
    top_ids = np.concatenate([unpack_i32(part.top_ids) for part in parts]).reshape(-1, 2)
    with torch.inference_mode():
        logprobs = reference(torch.tensor([prompt])).logits[0].log_softmax(-1)[:-1]
    expected = logprobs.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    np.testing.assert_allclose(chosen, expected.numpy(), atol=1e-3)
    np.testing.assert_array_equal(top_ids, logprobs.topk(2).indices.numpy())
