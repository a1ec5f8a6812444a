from __future__ import annotations

import random

import pytest

from router.placement import Prospect, by_cost
from tests.router.sim import Sim, text


def where(sim: Sim, request_id: int) -> int:
    rs = sim.core._requests[1, request_id].replica
    assert rs is not None
    return rs.replica_id


def test_a_prompt_goes_where_its_prefix_is() -> None:
    sim = Sim(n_replicas=4, block_size=16, fake_n_blocks=400, max_batch_prefill_tokens=512)
    stems = [text(200, seed=i) for i in range(8)]
    home = {}
    for i, stem in enumerate(stems):
        (a,) = sim.submit(stem, n_new=2)
        sim.turn()
        home[i] = where(sim, a) if (1, a) in sim.core._requests else None
        sim.run()
    for i, stem in enumerate(stems):
        (a,) = sim.submit([*stem, *text(20, seed=50 + i)], n_new=5)
        sim.turn()
        if home[i] is not None:
            assert where(sim, a) == home[i]
        started = sim.answers[a].started
        assert started is not None
        assert started.cached_tokens >= 192
        sim.run()
    sim.assert_right()


def test_equal_replicas_share_the_load() -> None:
    sim = Sim(n_replicas=3, block_size=16, fake_n_blocks=400, max_batch_size=64)
    for i in range(30):
        sim.submit(text(30, seed=i), n_new=20)
    sim.turn()
    counts = [rs.n_running for rs in sim.core.replicas.values()]
    assert sum(counts) > 5
    for _ in range(10):
        sim.turn()
    counts = [rs.n_running for rs in sim.core.replicas.values()]
    assert max(counts) - min(counts) <= 2
    sim.run()
    sim.assert_right()


def test_load_outweighs_a_short_prefix() -> None:
    sim = Sim(
        n_replicas=2, block_size=16, fake_n_blocks=400, max_batch_size=64, max_batch_prefill_tokens=1024
    )
    stem = text(32, seed=1)
    sim.submit(stem, n_new=1)
    sim.turn()
    for i in range(40):
        sim.submit([*stem, *text(3, seed=i)], n_new=30)
    for _ in range(4):
        sim.turn()
    counts = [rs.n_running for rs in sim.core.replicas.values()]
    assert min(counts) >= 10
    sim.run()
    sim.assert_right()


def test_equal_prompts_on_two_replicas_are_computed_once() -> None:
    sim = Sim(n_replicas=2, block_size=16, fake_n_blocks=400, max_batch_size=64, fake_strict=True)
    sim.submit(*[text(640, seed=1)] * 8, n_new=4)
    sim.run()
    sim.assert_right()
    assert sim.n_prefill_tokens <= 640 + 7 * 16


def test_a_suspect_replica_gets_nothing_new() -> None:
    sim = Sim(n_replicas=2, block_size=16)
    sim.core.replicas[0].suspect = True
    for i in range(6):
        sim.submit(text(10, seed=i), n_new=3)
    sim.turn()
    assert sim.core.replicas[0].n_running == 0
    assert sim.core.replicas[1].n_running > 0
    sim.run()
    sim.assert_right()


def test_waiting_for_a_prefix_ends_when_its_replica_falls_silent() -> None:
    sim = Sim(n_replicas=2, block_size=16, max_batch_prefill_tokens=32, fake_n_blocks=100)
    (a,) = sim.submit(text(400, seed=1), n_new=3)
    (b,) = sim.submit(text(400, seed=1), n_new=3)
    sim.turn()
    if sim.core._requests[1, a].replica is None:
        a, b = b, a
    busy = where(sim, a)
    waiting = sim.core._requests[1, b].wait
    assert waiting is not None
    assert waiting.replica.replica_id == busy
    sim.core.replicas[busy].suspect = True
    sim.turn()
    assert where(sim, b) == 1 - busy
    sim.core.replicas[busy].suspect = False
    sim.run()
    sim.assert_right()


def test_the_choice_among_equals_is_the_same_for_every_replica() -> None:
    sim = Sim(n_replicas=3)
    offers = [Prospect(replica=rs, n_cached=0, wait=None, cost=1.0) for rs in sim.core.replicas.values()]
    chosen = {by_cost(offers, tie_break=x / 30)[0].replica.replica_id for x in range(30)}
    assert chosen == {0, 1, 2}
    for x in range(30):  # also when it is asked in another order
        first = by_cost(offers, tie_break=x / 30)[0]
        assert by_cost(offers[::-1], tie_break=x / 30)[0] is first
    offers[1].cost = 0.5
    assert by_cost(offers, tie_break=0.99)[0] is offers[1]


def test_a_replica_that_comes_back_under_load_takes_its_share_again() -> None:
    """SGLang PR #14532: no death spiral; the share recovers."""
    sim = Sim(check=False, n_replicas=2, block_size=16, fake_n_blocks=400, max_batch_size=16)
    seed = 0

    def load(n_turns: int) -> None:
        nonlocal seed
        for _ in range(n_turns):
            for _ in range(2):
                seed += 1
                sim.submit(text(20, seed=seed), n_new=10)
            sim.turn()

    load(20)
    sim.down(0)
    load(10)
    sim.up(0, probing=True)
    load(40)
    running = [sim.core.replicas[i].n_running for i in (0, 1)]
    assert min(running) * 2 >= max(running)
    sim.run()
    sim.assert_right()
    assert all(answer.error is None for answer in sim.answers.values())


def shared_load(n_replicas: int, *, placement: str = "exact", seed: int = 0) -> tuple[Sim, list[int]]:
    """Closed loop: 16 clients per replica, prompts over 8 prefixes. The sim, and how often each prefix was
    computed."""
    sim = Sim(
        check=False, n_replicas=n_replicas, seed=seed, block_size=16, fake_n_blocks=2000, max_batch_size=64,
        max_batch_prefill_tokens=512, config={"placement": placement},
    )  # fmt: skip
    rng = random.Random(seed)
    stems = [text(256, seed=100 + i) for i in range(8)]
    prefix_of: dict[int, int] = {}
    running: set[int] = set()
    for i in range(120 * n_replicas):
        while len(running) >= 16 * n_replicas:
            sim.turn()
            running = {a for a in running if not sim.answers[a].done}
        prefix = rng.randrange(8)
        (a,) = sim.submit([*stems[prefix], *text(16, seed=1000 + i)], n_new=16)
        prefix_of[a] = prefix
        running.add(a)
    sim.run()
    computed = [0] * 8
    for a, prefix in prefix_of.items():
        started = sim.answers[a].started
        assert started is not None
        computed[prefix] += started.cached_tokens < 128
    return sim, computed


@pytest.mark.parametrize("n_replicas", [2, 3])
def test_prefixes_stay_on_few_replicas_and_the_load_is_even(n_replicas: int) -> None:
    sim, computed = shared_load(n_replicas)
    dealt, dealt_computed = shared_load(n_replicas, placement="round-robin")
    assert sum(computed) < sum(dealt_computed) == 8 * n_replicas
    assert sim.core.stats.hit_tokens >= dealt.core.stats.hit_tokens
    tokens = [rs.n_output_tokens + rs.n_prefill_tokens for rs in sim.core.replicas.values()]
    assert max(tokens) - min(tokens) < 0.2 * sum(tokens) / n_replicas
    sim.assert_right()
    assert all(answer.error is None for answer in sim.answers.values())
