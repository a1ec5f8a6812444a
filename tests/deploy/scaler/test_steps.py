from __future__ import annotations

import pytest

from deploy.scaler.auto import FAILURE_PAUSE_S, follow, observe
from deploy.scaler.model import RouterState, ScaleError
from deploy.scaler.policy import ScalePolicy
from deploy.scaler.steps import Patience, Scaler
from deploy.scaler.table import table
from tests.deploy.scaler.fakes import World


def scaler(world: World, **patience: float) -> Scaler:
    said: list[str] = []
    return Scaler(engine=world, router=world, time=world, say=said.append, patience=Patience(**patience))


def numbers(world: World) -> list[int]:
    return [worker.number for worker in world.workers()]


def test_up_starts_one_after_the_other_and_waits_until_each_serves() -> None:
    world = World().with_workers(1)
    scaler(world).scale(3)
    assert world.events == ["start 2", "start 3"]
    assert world.clock_s >= 10
    assert all(load.live for load in world.state().loads)


def test_down_drains_the_least_loaded_and_stops_it_empty() -> None:
    world = World().with_workers(1, 2, 3)
    for worker, n in zip(world.workers(), (5, 2, 9), strict=True):
        world.running[worker.address] = n
    scaler(world).scale(2)
    assert world.events == ["drain 2", "remove 2 with 0 running"]
    assert numbers(world) == [1, 3]


def test_of_equals_the_youngest_goes() -> None:
    world = World().with_workers(1, 2, 3)
    scaler(world).scale(1)
    assert numbers(world) == [1]


def test_a_worker_that_does_not_serve_goes_first_and_undrained() -> None:
    world = World().with_workers(1, 2)
    broken = world.start()
    world.events.clear()
    scaler(world).scale(2)
    assert world.events == [f"remove {broken.number} with 0 running"]


def test_an_answer_that_never_ends_is_not_waited_for_for_ever() -> None:
    world = World(finish_per_s=0).with_workers(1, 2)
    world.running[world.workers()[1].address] = 3
    world.running[world.workers()[0].address] = 7
    scaler(world, drain_s=30).scale(1)
    assert world.events == ["drain 2", "remove 2 with 3 running"]
    assert 30 <= world.clock_s < 33


def test_an_interrupted_drain_puts_the_worker_back_to_work() -> None:
    world = World(finish_per_s=0).with_workers(1, 2)
    world.running[world.workers()[1].address] = 1
    world.running[world.workers()[0].address] = 2

    def interrupt() -> None:
        raise KeyboardInterrupt

    world.on_wait = interrupt
    with pytest.raises(KeyboardInterrupt):
        scaler(world).scale(1)
    assert world.events == ["drain 2", "undrain 2"]
    assert numbers(world) == [1, 2]


def test_a_worker_that_ends_at_its_start_leaves_nothing_behind_but_its_words() -> None:
    world = World(fails=lambda worker: "no GPU is left for this worker").with_workers(1)
    with pytest.raises(ScaleError, match="quire-worker-2 has ended: no GPU is left for this worker"):
        scaler(world).scale(2)
    assert numbers(world) == [1]


def test_a_worker_that_never_serves_leaves_nothing_behind() -> None:
    world = World(start_s=1e9).with_workers(1)
    with pytest.raises(ScaleError, match=r"did not serve within 20 s \(--start-timeout-s\)"):
        scaler(world, start_s=20).scale(2)
    assert numbers(world) == [1]


def test_a_worker_of_another_version_is_named_and_removed() -> None:
    world = World(refused="it speaks protocol 3, this router speaks 4").with_workers(1)
    with pytest.raises(ScaleError, match=r"can't serve beside the others: it speaks protocol 3"):
        scaler(world).scale(2)
    assert numbers(world) == [1]


def test_more_workers_than_gpus() -> None:
    world = World(gpus=2).with_workers(1)
    with pytest.raises(ScaleError, match="3 workers need 3 GPUs, one each, but this host has 2"):
        scaler(world).scale(3)
    assert world.events == []


def test_zero_workers_can_not_serve() -> None:
    with pytest.raises(ScaleError, match="at least 1"):
        scaler(World().with_workers(1)).scale(0)


def test_rolling_lets_the_new_one_serve_before_the_old_one_goes() -> None:
    world = World().with_workers(1, 2)
    scaler(world).roll()
    assert world.events == [
        "start 3",
        "drain 1",
        "remove 1 with 0 running",
        "start 1",
        "drain 2",
        "remove 2 with 0 running",
    ]
    assert len(numbers(world)) == 2


def test_rolling_without_room_takes_the_old_one_first() -> None:
    world = World().with_workers(1, 2)
    world.fails = lambda worker: "no GPU is left" if len(world.workers()) >= 2 else ""
    scaler(world).roll()
    assert world.events == [
        "start 3",
        "remove 3 with 0 running",
        "drain 1",
        "remove 1 with 0 running",
        "start 1",
        "drain 2",
        "remove 2 with 0 running",
        "start 2",
    ]


def test_the_only_worker_is_never_taken_before_another_serves() -> None:
    world = World(fails=lambda worker: "no GPU is left").with_workers(1)
    with pytest.raises(ScaleError, match="no GPU is left"):
        scaler(world).roll()
    with pytest.raises(ScaleError, match="the only one that serves"):
        scaler(world).roll(surge=False)
    assert numbers(world) == [1]
    assert "drain 1" not in world.events


def test_following_the_load_up_and_down() -> None:
    world = World().with_workers(1)
    world.n_waiting, world.oldest_wait_s = 5, 9.0
    policy = ScalePolicy(n_min=1, n_max=2, up_after_s=4, down_after_s=20)
    follow(scaler(world), policy, n_rounds=5)
    assert numbers(world) == [1, 2]
    world.n_waiting, world.oldest_wait_s = 0, 0.0
    follow(scaler(world), policy, n_rounds=20)
    assert numbers(world) == [1]


def test_a_start_that_fails_is_said_and_tried_again_later() -> None:
    world = World(fails=lambda worker: "no GPU is left").with_workers(1)
    world.n_waiting, world.oldest_wait_s = 5, 9.0
    follow(scaler(world), ScalePolicy(n_min=1, n_max=2, up_after_s=0), n_rounds=2)
    assert world.events == ["start 2", "remove 2 with 0 running"] * 2
    assert world.clock_s >= 2 * FAILURE_PAUSE_S


def test_what_is_observed_leaves_out_what_drains() -> None:
    world = World().with_workers(1, 2)
    first, second = world.workers()
    world.running[first.address] = 50
    world.running[second.address] = 100
    world.drain(second.address, on=True)
    assert observe(world.state(), n_workers=2).rows_used == 0.5


def test_the_table() -> None:
    world = World().with_workers(1, 2)
    world.running[world.workers()[0].address] = 7
    world.drain(world.workers()[1].address, on=True)
    world.n_waiting, world.oldest_wait_s = 3, 1.25
    text = table(world.workers(), world.state())
    head, one, two, *_, last = text.splitlines()
    assert head.split() == ["WORKER", "STATE", "DEVICE", "RUNNING", "KV", "VERSION", "ADDRESS", "REASON"]
    assert one.split() == ["quire-worker-1", "live", "cpu", "7/100", "7%", "10.0.0.1:50051"]
    assert two.split()[:2] == ["quire-worker-2", "draining"]
    assert last == "router: ready; 3 waiting, the first for 1.2 s"


def test_the_routers_state_is_read_as_it_is_sent() -> None:
    value = {
        "ready": True,
        "reason": "",
        "n_waiting": 2,
        "oldest_wait_s": 0.5,
        "replicas": [
            {"id": 0, "address": "a:1", "state": "waiting", "reason": "not reached"},
            {
                "address": "b:1",
                "state": "live",
                "reason": "",
                "device": "cpu",
                "quire_version": "0.1.0",
                "max_rows": 8,
                "n_running": 3,
                "draining": False,
                "blocks": {"n_blocks": 101, "leased": 50, "free": 50, "cached": 0},
            },
        ],
    }
    state = RouterState.read(value)
    assert [load.live for load in state.loads] == [False, True]
    assert state.loads[1].n_blocks_used / state.loads[1].n_blocks == 0.5
