"""Cases from the field: the cache and correctness, with the fake worker."""

from __future__ import annotations

import os
import random

import pytest

from tests.router.sim import Sim, text

FULL = os.environ.get("QUIRE_TEST_FULL") == "1"


def shared_prefixes(n: int, *, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    stems = [text(120, seed=seed * 10 + i) for i in range(4)]
    return [rng.choice(stems)[: rng.randrange(120)] + text(rng.randrange(1, 30), seed=i) for i in range(n)]


def test_200_prompts_with_shared_prefixes_twice() -> None:
    """TGI #2871, #3043: texts equal those with the cache off."""
    prompts = shared_prefixes(200 if FULL else 60, seed=1)
    sim = Sim(
        check=False, block_size=16, max_batch_size=32, fake_n_blocks=200, fake_strict=True, fake_eos_rate=0.02
    )
    for _ in range(2):
        for prompt in prompts:
            sim.submit(prompt, n_new=20)
        sim.run()
    sim.assert_right()
    sim.assert_empty()
    assert sim.core.stats.hit_tokens > 0


@pytest.mark.parametrize("chunking", [True, False])
def test_a_request_that_is_put_back_never_leaves_uncomputed_blocks(chunking: bool) -> None:
    """TGI #2489: prefill budget 64, prompts of 32 + 32 + 40 tokens at once; the third is put back."""
    sim = Sim(
        block_size=1,
        max_batch_prefill_tokens=64,
        fake_n_blocks=512,
        fake_strict=True,
        config={"prefill_chunking": chunking},
    )
    third = text(40, seed=3)
    sim.submit(text(32, seed=1), n_new=4)
    sim.submit(text(32, seed=2), n_new=4)
    sim.submit(third, n_new=4)
    step = sim.compose()
    assert step is not None
    assert len(step.admits) == 2
    sim.compute()
    sim.apply()
    sim.submit(third, n_new=4)
    sim.run()
    sim.assert_right()
    sim.assert_empty()


def test_random_cancels_then_golden_prompts() -> None:
    """TGI #3043: 10,000 requests with random cancels; then the golden texts are unchanged and blocks
    conserved."""
    rng = random.Random(4)
    sim = Sim(check=False, block_size=16, max_batch_size=16, fake_n_blocks=120, fake_strict=True)
    prompts = shared_prefixes(300, seed=2)
    n_requests = 10_000 if FULL else 300
    while sim._next_id < n_requests:
        for _ in range(4):
            sim.submit(rng.choice(prompts), n_new=rng.randrange(1, 20))
        sim.turn()
        while sim.core.n_requests > 100:
            sim.turn()
        live = [i for i, answer in sim.answers.items() if not answer.done]
        if live and rng.random() < 0.7:
            sim.cancel(*rng.sample(live, min(len(live), 2)))
        for request_id in [i for i, a in sim.answers.items() if a.done]:
            sim.assert_right(request_id)
            del sim.answers[request_id]
    sim.run()
    golden = [sim.submit(prompt, n_new=20)[0] for prompt in prompts[:20]]
    sim.run()
    sim.assert_right(*golden)
    sim.assert_empty()


@pytest.mark.parametrize("block_size", [1, 2, 16])
def test_cold_warm_and_around_a_block_border(block_size: int) -> None:
    """vLLM #5543, SGLang #4175: prefixes that end one token before, on and after a border."""
    sim = Sim(block_size=block_size, fake_n_blocks=4096 // block_size, fake_strict=True)
    prompt = text(80, seed=1)
    for end in (80, 80, 63, 64, 65, 79, 47, 48, 49, 80):
        sim.submit(prompt[:end], n_new=10)
        sim.run()
    sim.assert_right()


@pytest.mark.parametrize("window", [1, 2, 3])
def test_32_requests_preempted_again_and_again(window: int) -> None:
    """vLLM #57562: text equals the run without preemption, no token twice or missing."""
    sim = Sim(
        check=window == 2,
        block_size=4,
        max_batch_size=32,
        fake_n_blocks=60,
        fake_strict=True,
        config={"window": window},
    )
    sim.core.lengths._prior = 1  # guesses far too low: everything is let in, and has to give way again
    for i in range(32):
        sim.submit(text(10, seed=i), n_new=60)
    sim.run()
    sim.assert_right()
    sim.assert_empty()
    assert sim.core.stats.n_preempted > 0


def test_3000_tokens_in_one_piece() -> None:
    """TGI #2803."""
    sim = Sim(check=False, block_size=16, fake_n_blocks=300)
    (a,) = sim.submit(text(20, seed=1), n_new=3000)
    sim.run()
    assert len(sim.answers[a].tokens) == 3000
    sim.assert_right()


def test_the_same_request_in_batches_of_any_size() -> None:
    """vLLM #51187."""
    for n in (1, 7, 44, 129):
        sim = Sim(check=False, block_size=16, max_batch_size=256, fake_n_blocks=1000)
        for i in range(n):
            sim.submit(text(30, seed=i), n_new=5)
        sim.run()
        sim.assert_right()


@pytest.mark.parametrize("block_size", [1, 16])
def test_logprobs_follow_their_tokens(block_size: int) -> None:
    from proto.codec import unpack_f32, unpack_i32
    from router.ipc.messages import SamplingSpec

    sim = Sim(block_size=block_size, fake_n_blocks=512)
    wants = SamplingSpec(temperature=0.0, logprobs=True, top_logprobs=3)
    sim.submit(text(10, seed=1), n_new=6)
    (a,) = sim.submit(text(10, seed=2), n_new=6, sampling=wants)
    sim.submit(text(10, seed=3), n_new=3)
    sim.run()
    sim.assert_right()
    answer = sim.answers[a]
    assert len(answer.logprobs) == 6
    for token, (chosen, ids, values) in zip(answer.tokens, answer.logprobs, strict=True):
        assert unpack_i32(ids)[0] == token  # greedy: the best candidate
        assert unpack_f32(values)[0] == pytest.approx(chosen)
        assert len(unpack_i32(ids)) == 3


def test_prompt_logprobs_speak_of_every_position_once() -> None:
    from proto.codec import unpack_f32
    from router.ipc.messages import SamplingSpec

    sim = Sim(block_size=4, n_replicas=2, max_batch_prefill_tokens=16, fake_n_blocks=100)
    prompt = text(50, seed=1)
    sim.submit(prompt, n_new=2)
    sim.run()
    (a,) = sim.submit(prompt, n_new=4, sampling=SamplingSpec(temperature=0.0, prompt_logprobs=3))
    for _ in range(2):
        sim.turn()
    where = sim.core._requests[1, a].replica
    assert where is not None
    sim.down(where.replica_id)  # in mid-prefill: positions computed again are not told twice
    sim.run()
    sim.assert_right()
    positions: list[int] = []
    for part in sim.answers[a].prompt_logprobs:
        n = len(unpack_f32(part.chosen))
        assert len(part.top_ids) == 4 * part.n_top * n
        positions += range(part.start, part.start + n)
    assert positions == list(range(1, 50))
