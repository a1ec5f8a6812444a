from __future__ import annotations

import pytest

from router.config import PLACEMENT_CHOICES
from router.dealing import Placement
from tests.router.sim import Sim, text

STEM = text(64, seed=1)


def dealt_sim(placement: str, *, n_replicas: int = 2) -> Sim:
    return Sim(
        n_replicas=n_replicas, block_size=16, fake_n_blocks=400, max_batch_size=64,
        max_batch_prefill_tokens=1024, config={"placement": placement},
    )  # fmt: skip


def homes(sim: Sim, ids: list[int]) -> list[int]:
    """Where requests run. They all must."""
    found = []
    for request_id in ids:
        rs = sim.core._requests[1, request_id].replica
        assert rs is not None
        found.append(rs.replica_id)
    return found


def test_the_flag_offers_every_placement() -> None:
    assert set(PLACEMENT_CHOICES) == {placement.value for placement in Placement}


def test_round_robin_deals_in_turn_whatever_is_cached() -> None:
    sim = dealt_sim("round-robin", n_replicas=3)
    ids = sim.submit(*[[*STEM, *text(5, seed=i)] for i in range(9)], n_new=8)
    for _ in range(4):
        sim.turn()
    assert homes(sim, ids) == [0, 1, 2] * 3
    sim.run()
    sim.assert_right()
    computed = [r.runner.n_prefill_tokens for r in sim.replicas.values()]
    assert all(n >= len(STEM) for n in computed)  # each has computed the common beginning, and only once
    assert max(computed) < 2 * len(STEM)


def test_random_placement_reaches_all_and_keeps_its_choice() -> None:
    sim = dealt_sim("random", n_replicas=3)
    ids = sim.submit(*[text(20, seed=i) for i in range(30)], n_new=8)
    sim.turn()
    at_first = {i: sim.core._requests[1, i].replica for i in ids}
    for _ in range(3):
        sim.turn()
    assert set(homes(sim, ids)) == {0, 1, 2}
    assert all(sim.core._requests[1, i].replica is rs for i, rs in at_first.items() if rs is not None)
    sim.run()
    sim.assert_right()


@pytest.mark.parametrize("placement", ["random", "round-robin"])
def test_dealt_requests_go_on_when_their_replica_is_lost(placement: str) -> None:
    sim = dealt_sim(placement)
    sim.submit(*[text(20, seed=i) for i in range(12)], n_new=20)
    for _ in range(4):
        sim.turn()
    sim.down(0)
    sim.run()
    sim.assert_right()
    assert all(answer.error is None for answer in sim.answers.values())
