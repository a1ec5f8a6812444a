from __future__ import annotations

import random

import numpy as np
import pytest

from proto.worker_pb2 import Sampling
from router.queue import RequestQueue
from router.request import TERMINAL, TRANSITIONS, Request, RequestState


def request(order: int, *, priority: int = 0) -> Request:
    return Request(
        conn=1,
        id=order,
        order=order,
        arrival_s=0.0,
        priority=priority,
        deadline_s=1.0,
        tokens=np.zeros(1, dtype=np.int32),
        n_prompt=1,
        end_len=2,
        sampling=Sampling(),
    )


def test_priority_class_then_arrival() -> None:
    queue = RequestQueue()
    for order, priority in ((0, 1), (1, 0), (2, 1), (3, 0), (4, -1)):
        queue.push(request(order, priority=priority))
    assert [r.order for r in queue] == [4, 1, 3, 0, 2]


def test_what_comes_back_takes_the_place_of_its_arrival() -> None:
    queue = RequestQueue()
    requests = [request(order) for order in range(5)]
    for r in requests:
        queue.push(r)
    queue.remove(requests[1])
    queue.push(request(9))
    queue.push(requests[1])
    assert [r.order for r in queue] == [0, 1, 2, 3, 4, 9]
    assert queue.head is requests[0]


def test_random_operations_keep_it_sorted() -> None:
    rng = random.Random(1)
    queue = RequestQueue()
    inside: list[Request] = []
    for order in range(500):
        if inside and rng.random() < 0.4:
            queue.remove(inside.pop(rng.randrange(len(inside))))
        else:
            inside.append(request(order, priority=rng.randrange(3)))
            queue.push(inside[-1])
        queue.check()
        assert len(queue) == len(inside)


def test_misuse_is_an_error() -> None:
    queue = RequestQueue()
    r = request(1)
    with pytest.raises(AssertionError, match="not queued"):
        queue.remove(r)
    queue.push(r)
    with pytest.raises(AssertionError, match="already queued"):
        queue.push(r)


def test_only_legal_transitions() -> None:
    assert set(TRANSITIONS) == set(RequestState)
    for state in RequestState:
        for target in RequestState:
            r = request(1)
            r.state = state
            if target in TRANSITIONS[state]:
                r.move(target)
                assert r.state is target
            else:
                with pytest.raises(AssertionError, match="can't become"):
                    r.move(target)
    assert all(not TRANSITIONS[state] for state in TERMINAL)
