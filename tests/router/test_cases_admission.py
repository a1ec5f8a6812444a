"""Cases from the field: admission, memory, scheduling, with the fake worker."""

from __future__ import annotations

import os
import tracemalloc

import pytest

from router.errors import ContextLengthError, InvalidRequestError, OverloadedError
from router.limits import resolve_limits
from router.request import RequestState
from settings.errors import ConfigError
from tests.router.sim import Sim, text

FULL = os.environ.get("QUIRE_TEST_FULL") == "1"


def state_of(sim: Sim, request_id: int) -> RequestState:
    return sim.core._requests[1, request_id].state


def test_more_than_the_whole_pool_is_refused_with_both_numbers() -> None:
    """vLLM #15996; others keep flowing."""
    sim = Sim(block_size=16, fake_n_blocks=11)
    sim.submit(text(20, seed=1), n_new=20)
    sim.turn()
    with pytest.raises(ContextLengthError) as refused:
        sim.submit(text(100, seed=2), n_new=61)
    assert "161" in refused.value.message
    assert "160" in refused.value.message
    assert refused.value.info.status == 400
    sim.run()
    sim.assert_right()


def test_whatever_fits_the_pool_to_the_last_token_is_served() -> None:
    """TGI #2744, #1374: budgets filled to the last token; the longest allowed request right after start."""
    sim = Sim(block_size=16, fake_n_blocks=11, max_batch_prefill_tokens=32)
    assert sim.limits.max_total_tokens == 160
    (a,) = sim.submit(text(159, seed=1), n_new=1)
    (b,) = sim.submit(text(1, seed=2), n_new=159)
    (c,) = sim.submit(text(100, seed=3), n_new=60)
    (d,) = sim.submit(text(5, seed=4), n_new=None)
    sim.run()
    sim.assert_right()
    assert [len(sim.answers[i].tokens) for i in (a, b, c, d)] == [1, 159, 60, 155]
    sim.assert_empty()


def test_two_prompts_of_60_percent_of_the_pool() -> None:
    """TGI #2842, vLLM #21793: the second waits, both finish, nothing is preempted."""
    sim = Sim(block_size=16, fake_n_blocks=11, max_batch_prefill_tokens=160)
    (a,) = sim.submit(text(96, seed=1), n_new=20)
    (b,) = sim.submit(text(96, seed=2), n_new=20)
    sim.turn()
    assert state_of(sim, a) is not RequestState.QUEUED
    assert state_of(sim, b) is RequestState.QUEUED
    sim.run()
    sim.assert_right()
    assert sim.core.stats.n_preempted == 0
    assert sim.core.stats.n_prompt_tokens == 192


def test_decode_rows_are_in_every_step_while_long_prompts_arrive() -> None:
    """SGLang #32549: no stream ever misses a step, and no step computes more than the prefill budget."""
    sim = Sim(check=False, block_size=16, max_batch_size=64, max_batch_prefill_tokens=512, fake_n_blocks=4000)
    streams = [sim.submit(text(20, seed=i), n_new=100)[0] for i in range(8)]
    for _ in range(4):
        sim.turn()
    sizes = sim.replicas[0].runner.step_sizes
    sizes.clear()
    for i in range(20):
        sim.submit(text(8000, seed=100 + i)[:8000], n_new=1)
        sim.turn()
    assert all(n_decode >= 8 for n_decode, _ in sizes)
    assert all(n_prefill <= 512 for _, n_prefill in sizes)
    assert all(len(sim.answers[i].tokens) >= 20 for i in streams)


def test_a_high_priority_request_starts_next_when_all_rows_are_taken() -> None:
    """vLLM #40004."""
    sim = Sim(block_size=16, max_batch_size=4, fake_n_blocks=65)
    low = [sim.submit(text(20, seed=i), n_new=50, priority=5)[0] for i in range(6)]
    for _ in range(3):
        sim.turn()
    (high,) = sim.submit(text(20, seed=50), n_new=5, priority=0)
    step = sim.compose()
    if step is None:
        sim.compute()
        sim.apply()
        step = sim.compose()
    assert step is not None
    assert state_of(sim, high) is not RequestState.QUEUED
    assert state_of(sim, low[3]) is RequestState.QUEUED  # the latest of the lowest class gave way
    sim.run()
    sim.assert_right()
    sim.assert_empty()


def test_priority_also_makes_room_in_the_pool() -> None:
    sim = Sim(block_size=16, max_batch_size=8, fake_n_blocks=11, max_batch_prefill_tokens=160)
    (low,) = sim.submit(text(100, seed=1), n_new=30, priority=1)
    for _ in range(3):
        sim.turn()
    (high,) = sim.submit(text(100, seed=2), n_new=30, priority=0)
    for _ in range(2):
        sim.turn()
    assert state_of(sim, high) is not RequestState.QUEUED
    assert state_of(sim, low) is RequestState.QUEUED
    sim.run()
    sim.assert_right()


def test_a_preempted_request_keeps_its_arrival_and_finishes() -> None:
    """vLLM #41951."""
    sim = Sim(block_size=4, max_batch_size=8, fake_n_blocks=40)
    sim.core.lengths._prior = 1
    first = [sim.submit(text(10, seed=i), n_new=60)[0] for i in range(6)]
    while sim.core.stats.n_preempted == 0:
        sim.turn()
    (back,) = [r for r in sim.core.queue if r.n_preempted]
    later = sim.submit(text(4, seed=77), n_new=2)[0]
    assert sim.core.queue.head is back
    sim.run()
    sim.assert_right(*first, later)
    sim.assert_empty()


def test_slow_results_and_short_blocks_make_no_cascade() -> None:
    """vLLM #49674: results come back late; each shortage preempts no more than it needs."""
    sim = Sim(block_size=4, max_batch_size=8, fake_n_blocks=40, config={"window": 3})
    sim.core.lengths._prior = 1
    for i in range(8):
        sim.submit(text(12, seed=i), n_new=40)
    most = 0
    while sim.core.n_requests:
        before = sim.core.stats.n_preempted
        while sim.compose() is not None:
            most = max(most, sim.core.stats.n_preempted - before)
            before = sim.core.stats.n_preempted
        replica = sim.replicas[0]
        while replica.sent:  # all results at once, as late as can be
            sim.compute()
        while replica.computed:
            sim.apply()
    sim.assert_right()
    # Eight rows that need a block in one step can cost eight rows at worst; one row gives three or more.
    assert most <= 3


def test_the_surplus_gets_429_and_the_accepted_finish() -> None:
    """vLLM #2901, TGI #439: n counts as n; a refused list leaves nothing behind."""
    sim = Sim(fake_n_blocks=400, max_batch_size=4, config={"max_concurrent_requests": 10})
    for i in range(10):
        sim.submit(text(10, seed=i), n_new=3)
    for i in range(90):
        with pytest.raises(OverloadedError) as full:
            sim.submit(text(10, seed=i), n_new=3)
        assert full.value.info.status == 429
        assert full.value.info.retry_after_s is not None
    sim.cancel(0, 1)
    with pytest.raises(OverloadedError):
        sim.submit(*[text(10, seed=1)] * 3, n_new=3)
    assert sim.core.n_requests == 8
    sim.submit(*[text(10, seed=1)] * 2, n_new=3)
    with pytest.raises(InvalidRequestError) as never:
        sim.submit(*[text(10, seed=1)] * 11, n_new=3)
    assert never.value.info.status == 400
    sim.run()
    sim.assert_right()


def test_a_list_with_one_bad_prompt_is_refused_whole() -> None:
    sim = Sim()
    with pytest.raises(InvalidRequestError):
        sim.submit(text(10, seed=1), [1, 2, 100_000], n_new=3)
    assert sim.core.n_requests == 0
    assert sim.compose() is None


def test_a_prefill_budget_far_too_large_names_what_fits() -> None:
    """TGI #1692."""
    with pytest.raises(ConfigError, match=r"--max-batch-prefill-tokens is 100000.* at most 64 fits"):
        Sim(config={"max_batch_prefill_tokens": 100_000})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"max_total_tokens": 5000}, r"--max-total-tokens is 5000.* at most 1024 fits"),
        ({"max_total_tokens": 20_000}, r"--max-total-tokens is 20000.*16384"),
        ({"max_input_tokens": 1024}, r"--max-input-tokens is 1024.* at most 1023 fits"),
        ({"max_batch_total_tokens": 7}, r"--max-batch-total-tokens is 7, less than one block of 16"),
        ({"prefill_chunking": False, "max_input_tokens": 65}, r"--max-input-tokens is 65.* at most 64 fits"),
    ],
)
def test_settings_that_do_not_fit_the_worker(config: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sim(config=config)


def test_the_kv_budget_can_be_lowered_at_will() -> None:
    sim = Sim(block_size=16, fake_n_blocks=65, config={"max_batch_total_tokens": 100})
    assert sim.limits.pool_tokens == 96
    assert resolve_limits(sim.config, sim.capacity).max_total_tokens == 96
    sim.submit(text(90, seed=1), n_new=6)
    sim.submit(text(50, seed=2), n_new=6)
    sim.run()
    sim.assert_right()
    assert sim.core.replicas[0].allocator.stats().n_blocks == 7


@pytest.mark.parametrize("passes", [0, 2, 5])
def test_a_large_request_is_passed_a_bounded_number_of_times(passes: int) -> None:
    sim = Sim(block_size=16, max_batch_size=8, fake_n_blocks=11, config={"max_queue_passes": passes})
    sim.submit(text(60, seed=1), n_new=60)
    sim.turn()
    (large,) = sim.submit(text(120, seed=2), n_new=10)
    small = [sim.submit(text(4, seed=10 + i), n_new=2)[0] for i in range(12)]
    while state_of(sim, large) is RequestState.QUEUED:
        sim.turn()
    assert sim.core._requests[1, large].n_passed == passes
    order = [started.id for events in sim.events for started in events.started]
    assert order.index(large) == 1 + passes
    assert len(small) > passes
    sim.run()
    sim.assert_right()


def test_requests_leave_nothing_behind() -> None:
    """TGI #801, SGLang #6914: memory is flat over many short requests."""
    sim = Sim(check=False, block_size=16, max_batch_size=8, fake_n_blocks=65)
    n_rounds = 50_000 // 20 if FULL else 15

    def round_of_requests(seed: int) -> None:
        for i in range(20):
            sim.submit(text(8, seed=(seed * 20 + i) % 500), n_new=2)
        sim.run()
        sim.answers.clear()
        sim.events.clear()
        sim.replicas[0].runner.step_sizes.clear()

    for i in range(60 if FULL else 8):
        round_of_requests(i)
    tracemalloc.start()
    for i in range(10):
        round_of_requests(i)
    before = tracemalloc.get_traced_memory()[0]
    for i in range(n_rounds):
        round_of_requests(i)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 200_000
    assert len(sim.core._deadlines) < 3000


def test_waiting_served_ratio_holds_back_until_enough_wait() -> None:
    """TGI's meaning: at least that share of the running batch, or max_waiting_tokens steps."""
    config = {"waiting_served_ratio": 0.5, "max_waiting_tokens": 10, "window": 1}
    sim = Sim(max_batch_size=16, fake_n_blocks=200, config=config)
    for i in range(8):
        sim.submit(text(5, seed=i), n_new=200)
    sim.turn()
    sim.turn()
    waiting = [sim.submit(text(5, seed=20 + i), n_new=2)[0] for i in range(3)]
    sim.turn()
    assert all(state_of(sim, i) is RequestState.QUEUED for i in waiting)
    waiting += sim.submit(text(5, seed=30), n_new=2)
    sim.turn()
    assert all(state_of(sim, i) is not RequestState.QUEUED for i in waiting)
    for _ in range(3):
        sim.turn()
    (late,) = sim.submit(text(5, seed=40), n_new=2)
    n_turns = 0
    while state_of(sim, late) is RequestState.QUEUED:
        sim.turn()
        n_turns += 1
    assert 5 <= n_turns <= 10
