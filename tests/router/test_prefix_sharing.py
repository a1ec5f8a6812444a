"""Prompts that share a beginning compute it once, whatever happens to the request that computes it."""

from __future__ import annotations

import pytest

from tests.router.sim import Sim, text

BLOCK = 16


def burst(*, window: int = 2, chunk: int = 64, n_tokens: int = 300) -> Sim:
    sim = Sim(
        block_size=BLOCK,
        max_batch_size=64,
        max_batch_prefill_tokens=chunk,
        fake_n_blocks=400,
        fake_strict=True,
        config={"window": window},
    )
    sim.submit(*[text(n_tokens, seed=1)] * 32)
    return sim


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("chunk", [64, 100, 1024])
def test_32_equal_prompts_compute_the_prompt_once(window: int, chunk: int) -> None:
    sim = burst(window=window, chunk=chunk)
    sim.run()
    sim.assert_right()
    sim.assert_empty()
    assert sim.n_prefill_tokens <= 300 + 31 * BLOCK


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("steps_before", [1, 2, 4])
def test_the_first_waiter_takes_over_when_the_first_is_cancelled_in_prefill(
    window: int, steps_before: int
) -> None:
    sim = burst(window=window)
    for _ in range(steps_before):
        sim.turn()
    sim.cancel(0)
    sim.run()
    sim.assert_right()
    sim.assert_empty()
    assert sim.n_prefill_tokens <= 300 + 31 * BLOCK


def test_cancelling_each_in_turn_never_computes_anything_twice() -> None:
    sim = burst(n_tokens=1000)
    for request_id in range(10):
        sim.turn()
        sim.cancel(request_id)
    sim.run()
    sim.assert_right()
    assert sim.n_prefill_tokens <= 1000 + 31 * BLOCK


def test_requests_that_wait_for_a_prefix_hold_nobody_up() -> None:
    sim = burst(n_tokens=2000)
    sim.turn()
    (other,) = sim.submit(text(20, seed=99), n_new=2, priority=-1)
    for _ in range(6):
        sim.turn()
    assert sim.answers[other].done
    sim.run()
    sim.assert_right()


def test_samples_of_one_prompt_in_one_step_share_it() -> None:
    sim = Sim(block_size=BLOCK, max_batch_prefill_tokens=512, fake_n_blocks=100, fake_strict=True)
    sim.submit(*[text(100, seed=1)] * 4, n_new=3)
    step = sim.compose()
    assert step is not None
    assert len(step.admits) == 4
    assert [admit.n_cached for admit in step.admits] == [0, 96, 96, 96]
    sim.compute()
    sim.apply()
    sim.run()
    sim.assert_right()


def test_without_prefix_caching_nobody_waits_and_nothing_is_shared() -> None:
    """TGI #2676: off is off."""
    sim = Sim(block_size=BLOCK, fake_n_blocks=100, config={"prefix_caching": False})
    sim.submit(*[text(40, seed=1)] * 4, n_new=3)
    sim.run()
    sim.assert_right()
    assert sim.n_prefill_tokens == 160
    assert sim.core.stats.hit_tokens == 0
    assert all(a.started is not None and a.started.cached_tokens == 0 for a in sim.answers.values())


@pytest.mark.parametrize("block_size", [1, 2, 16])
@pytest.mark.parametrize("window", [1, 2, 3])
def test_the_second_turn_of_a_chat_finds_the_whole_first_one(block_size: int, window: int) -> None:
    sim = Sim(block_size=block_size, fake_n_blocks=4096 // block_size, config={"window": window})
    first = text(50, seed=1)
    (a,) = sim.submit(first, n_new=40)
    sim.run()
    conversation = first + sim.answers[a].tokens
    (b,) = sim.submit([*conversation, *text(7, seed=2)], n_new=5)
    sim.run()
    sim.assert_right()
    started = sim.answers[b].started
    assert started is not None
    # The last token of an answer that ends by length never has KV.
    assert started.cached_tokens == (len(conversation) - 1) // block_size * block_size


@pytest.mark.parametrize("window", [2, 3])
def test_an_answer_that_ends_by_eos_is_cached_whole_too(window: int) -> None:
    sim = Sim(block_size=1, fake_n_blocks=4096, fake_eos_rate=0.1, config={"window": window})
    first = text(50, seed=3)
    (a,) = sim.submit(first, n_new=500)
    sim.run()
    conversation = first + sim.answers[a].tokens
    assert conversation[-1] == 2
    (b,) = sim.submit([*conversation, 5, 6], n_new=2)
    sim.run()
    sim.assert_right()
    started = sim.answers[b].started
    assert started is not None
    assert started.cached_tokens == len(conversation)


def test_a_salt_roots_a_trie_of_its_own() -> None:
    sim = Sim(block_size=BLOCK, fake_n_blocks=100)
    prompt = text(100, seed=1)
    for salt in ("", "tenant", ""):
        sim.submit(prompt, n_new=2, salt=salt)
        sim.run()
    cached = [a.started.cached_tokens for a in sim.answers.values() if a.started is not None]
    assert cached == [0, 0, 96]
