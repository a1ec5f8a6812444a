from __future__ import annotations

import numpy as np

from router.histogram import Histogram
from router.ipc.messages import StepEvents
from router.outbox import Outbox
from tests.router.sim import Sim, text


def test_a_histogram_counts_as_prometheus_does() -> None:
    one, many = Histogram((0.1, 1.0)), Histogram((0.1, 1.0))
    values = [0.05, 0.1, 0.5, 1.0, 7.0]
    for value in values:
        one.add(value)
    many.add_many(np.array(values))
    assert one.cumulative() == many.cumulative() == [("0.1", 2.0), ("1.0", 4.0), ("+Inf", 5.0)]
    assert one.count == 5
    assert one.sum == many.sum == sum(values)


def test_the_outbox_keeps_order_and_connections_apart() -> None:
    outbox = Outbox()
    for tokens in ([10, 20, 30, 40], [11, 21, 31, 41]):
        outbox.tokens(
            conns=np.array([1, 2, 1, 2], dtype=np.int32),
            ids=np.array([5, 6, 7, 8], dtype=np.int64),
            tokens=np.array(tokens, dtype=np.int32),
            reasons=np.zeros(4, dtype=np.uint8),
            logprobs={3: (-1.0, b"", b"")},
        )
    taken: dict[int, StepEvents] = dict(outbox.take())
    assert np.frombuffer(taken[1].ids, dtype="<i8").tolist() == [5, 7, 5, 7]
    assert np.frombuffer(taken[1].tokens, dtype="<i4").tolist() == [10, 30, 11, 31]
    assert np.frombuffer(taken[2].tokens, dtype="<i4").tolist() == [20, 40, 21, 41]
    assert [part.entry for part in taken[2].logprobs] == [1, 3]
    assert taken[1].logprobs == []
    assert outbox.take() == []


def test_idle_time_is_counted_between_decode_steps_alone() -> None:
    sim = Sim()
    rs = sim.core.replicas[0]
    sim.submit(text(4, seed=1), n_new=5)
    seen = []
    while (step := sim.compose()) is not None or rs.in_flight:
        if step is None or len(rs.in_flight) == rs.window:
            before = rs.steady_us, rs.steady_idle_us
            sim.compute()
            result = sim.apply()
            gained = rs.steady_us - before[0], rs.steady_idle_us - before[1]
            seen.append((gained, (result.step_us, result.idle_us)))
    # The prompt's step and the decode step behind it don't count.
    assert [gained for gained, _ in seen[:2]] == [(0, 0), (0, 0)]
    assert all(gained == took for gained, took in seen[2:])
    assert len(seen) == 5
