"""The CPU runner as the engine sees it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from checkpoint.checkpoint import Checkpoint
from proto.codec import pack_f32, pack_i32
from proto.worker_pb2 import Grammar, RowError, Sampling, Step
from tests.worker.model.driver import Driver, Request
from tests.worker.model.tiny import VOCAB, greedy, make_model, make_runner, open_checkpoint
from worker.errors import StartError


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, torch.nn.Module]:
    folder = tmp_path_factory.mktemp("tiny")
    model = make_model("llama", folder)
    return open_checkpoint(folder), model


SAMPLED = Sampling(
    temperature=1.0,
    seed=77,
    top_p=0.95,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    min_new_tokens=4,
    eos_ids=pack_i32([2]),
    logprobs=True,
)


def prompt(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, n).tolist()


def test_capacity(tiny: tuple[Checkpoint, torch.nn.Module]) -> None:
    capacity = make_runner(tiny[0], max_total_tokens=100).capacity
    assert (capacity.n_blocks, capacity.max_batch_total_tokens) == (257, 4096)
    assert (capacity.max_context, capacity.vocab_size) == (100, VOCAB)
    assert (capacity.device, capacity.dtype, capacity.attention) == ("cpu", "float32", "torch")


def test_shared_blocks_give_the_same_text(tiny: tuple[Checkpoint, torch.nn.Module]) -> None:
    """A second request reads the first one's prefix from the cache, as the trie will have it."""
    checkpoint, model = tiny
    shared = prompt(80)
    runner = make_runner(checkpoint)
    driver = Driver(runner)
    first = Request([*shared, 5], 81, 3)
    driver.run([first])
    others = [
        Request([*shared, *prompt(n, seed=n)], 80 + n, 6, blocks=list(first.blocks[:5]), n_cached=80)
        for n in (1, 7, 20)
    ]
    outputs = driver.run(others)
    for request, output in zip(others, outputs, strict=True):
        assert output == greedy(model, request.tokens[: request.n_prompt], 6)


def test_a_seeded_row_is_the_same_alone_in_company_and_after_a_move(
    tiny: tuple[Checkpoint, torch.nn.Module],
) -> None:
    runner = make_runner(tiny[0])
    mine = prompt(20, seed=9)
    alone = Driver(runner).run([Request(list(mine), 20, 16, SAMPLED)])[0]
    company = [Request(prompt(n, seed=n), n, 10, Sampling(temperature=1.5, seed=n)) for n in (3, 30, 50)]
    together = Driver(runner, chunk=6, seed=3).run([*company, Request(list(mine), 20, 16, SAMPLED)])[-1]
    assert together == alone
    moved = Request([*mine, *alone[:7]], 20, 16, SAMPLED)
    assert Driver(make_runner(tiny[0], block_size=1)).run([moved])[0] == alone


def test_logprobs_of_sampled_tokens(tiny: tuple[Checkpoint, torch.nn.Module]) -> None:
    checkpoint, model = tiny
    mine = prompt(12)
    driver = Driver(make_runner(checkpoint))
    request = Request(list(mine), 12, 5, Sampling(logprobs=True, top_logprobs=2))
    driver.run([request, Request(prompt(5), 5, 5)])
    with torch.inference_mode():
        expected = model(torch.tensor([request.tokens])).logits[0].log_softmax(-1)
    sampled = [r for r in driver.results if len(r.tokens)]
    for i, result in enumerate(sampled):
        assert result.logprobs is not None
        assert result.rows[result.logprobs.index].tolist() == [request.row]
        assert result.logprobs.chosen[0] == pytest.approx(float(expected[11 + i].max()), abs=1e-3)
        assert result.logprobs.n_top.tolist() == [2]
        assert result.logprobs.top_ids.tolist() == expected[11 + i].topk(2).indices.tolist()


def test_nan_in_one_rows_cache_fails_that_row_alone(tiny: tuple[Checkpoint, torch.nn.Module]) -> None:
    checkpoint, model = tiny
    runner = make_runner(checkpoint)
    driver = Driver(runner)
    good, bad = Request(prompt(20), 20, 4), Request(prompt(20, seed=1), 20, 4)
    driver.run([bad])
    poisoned = bad.blocks[0]
    runner._attention._cache.data[:, poisoned * 16 : poisoned * 16 + 16] = float("nan")
    again = Request(list(bad.tokens[:20]), 20, 2, blocks=bad.blocks[:2], n_cached=16)
    output = driver.run([good, again])[0]
    assert output == greedy(model, good.tokens[:20], 4)
    errors = [error for result in driver.results for error in result.errors]
    assert {(error.row, error.kind) for error in errors} == {(again.row, RowError.NAN_LOGITS)}
    driver.step(Step(zero_blocks=pack_i32(again.blocks)))
    assert not runner._attention._cache.data.isnan().any()


def test_unusable_parameters_fail_that_row_alone(tiny: tuple[Checkpoint, torch.nn.Module]) -> None:
    checkpoint, model = tiny
    driver = Driver(make_runner(checkpoint))
    wrong = Sampling(bias_ids=pack_i32([VOCAB]), bias_values=pack_f32([1.0]))
    good = Request(prompt(5), 5, 2)
    output = driver.run([Request(prompt(4), 4, 1, wrong), good])[1]
    assert output == greedy(model, good.tokens[:5], 2)
    assert [(e.row, e.kind) for e in driver.results[0].errors] == [(0, RowError.INVALID)]
    assert "logit_bias names token 199" in driver.results[0].errors[0].message


def test_a_step_without_rows_and_an_intermediate_chunk_sample_nothing(
    tiny: tuple[Checkpoint, torch.nn.Module],
) -> None:
    driver = Driver(make_runner(tiny[0]), chunk=4)
    driver.run([Request(prompt(10), 10, 1)])
    assert [len(r.tokens) for r in driver.results] == [0, 0, 1, 0]


def test_grammars_are_refused_for_now(tiny: tuple[Checkpoint, torch.nn.Module]) -> None:
    with pytest.raises(ValueError, match="grammar"):
        make_runner(tiny[0]).prepare(Grammar())


def test_kv_dtype_that_a_cpu_cannot_use(tiny: tuple[Checkpoint, torch.nn.Module]) -> None:
    with pytest.raises(StartError, match="--kv-cache-dtype is fp8_e4m3"):
        make_runner(tiny[0], kv_cache_dtype="fp8_e4m3")


def test_dummy_weights_run(tiny: tuple[Checkpoint, torch.nn.Module]) -> None:
    runner = make_runner(tiny[0], load_format="dummy", dtype="bfloat16")
    assert len(Driver(runner).run([Request(prompt(30), 30, 5)])[0]) == 5
