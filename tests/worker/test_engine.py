from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from proto.codec import unpack_i32
from proto.status import RunEnd
from proto.worker_pb2 import Step
from tests.worker.steps import admit, step
from tests.worker.stub import WAIT_S, Listener, StubRunner
from worker.engine import Engine
from worker.errors import ProtocolError, RunRefused
from worker.run import LEGAL_MOVES, RunState
from worker.runner import DeviceError

MakeEngine = Callable[..., Engine]


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    engines: list[Engine] = []

    def make(runner: StubRunner, **options: object) -> Engine:
        engine = Engine(runner, max_window=4, **options)  # type: ignore[arg-type]  # named as Engine names them
        engine.start()
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        runner = engine.runner
        assert isinstance(runner, StubRunner)
        runner.held = False
        runner.release(*range(100))
        assert engine.stop(timeout_s=WAIT_S)


def first() -> Step:
    return step(1, admits=[admit(0, range(3), [1, 2])], chunks=[(0, 3)])


def opened(engine: Engine, **options: object) -> Listener:
    listener = Listener(**options)  # type: ignore[arg-type]  # named as Listener names them
    engine.open(listener.run)
    answer = listener.result()
    assert (answer.seq, answer.generation) == (0, listener.run.generation)
    return listener


def test_opening_resets_the_rows_before_it_answers(make_engine: MakeEngine) -> None:
    runner = StubRunner()
    opened(make_engine(runner), generation=7)
    runner.expect("reset")


def test_the_next_step_is_launched_before_the_one_before_is_collected() -> None:
    runner = StubRunner()
    engine = Engine(runner, max_window=4)
    listener = Listener()
    engine.open(listener.run)
    engine.submit(listener.run, first())
    for seq in (2, 3, 4):
        engine.submit(listener.run, step(seq, n_decode=1, grow=[(0, 9)] if seq == 3 else []))
    engine.start()
    # Two on the device, the others wait on the host.
    runner.expect("reset", "launch 1", "launch 2", "collect 1")
    runner.release(1, 2, 3, 4)
    results = [listener.result() for _ in range(5)]
    assert [result.seq for result in results] == [0, 1, 2, 3, 4]
    one = results[1]
    assert (unpack_i32(one.rows).tolist(), unpack_i32(one.tokens).tolist()) == ([0], [1])
    assert (one.step_us, one.generation) == (5, 1)
    runner.expect("launch 3", "collect 2", "launch 4", "collect 3", "collect 4")
    assert engine.stop(timeout_s=WAIT_S)


def test_a_step_that_arrives_while_another_runs_is_launched_behind_it(make_engine: MakeEngine) -> None:
    runner = StubRunner(pollable=True)
    engine = make_engine(runner, linger_s=WAIT_S)
    listener = opened(engine)
    engine.submit(listener.run, first())
    runner.expect("reset", "launch 1")
    engine.submit(listener.run, step(2, n_decode=1))
    runner.expect("launch 2", "collect 1")
    runner.release(1, 2)
    assert [listener.result().seq, listener.result().seq] == [1, 2]


def test_a_step_that_comes_late_is_launched_behind_the_running_one(make_engine: MakeEngine) -> None:
    runner = StubRunner(pollable=True)
    engine = make_engine(runner, linger_s=0.0)
    listener = opened(engine)
    engine.submit(listener.run, first())
    runner.expect("reset", "launch 1")
    engine.submit(listener.run, step(2, n_decode=1))
    runner.expect("launch 2", "collect 1")
    runner.release(1, 2)
    assert [listener.result().seq, listener.result().seq] == [1, 2]


def test_a_router_without_run_ahead_is_not_waited_for(make_engine: MakeEngine) -> None:
    runner = StubRunner(pollable=True)
    engine = make_engine(runner, linger_s=1e9)
    listener = opened(engine, window=1)
    engine.submit(listener.run, first())
    runner.expect("reset", "launch 1", "collect 1")


def test_a_lone_step_is_collected_at_once(make_engine: MakeEngine) -> None:
    runner = StubRunner()
    engine = make_engine(runner)
    listener = opened(engine)
    engine.submit(listener.run, first())
    runner.expect("reset", "launch 1", "collect 1")
    runner.release(1)
    assert listener.result().seq == 1


def test_a_runner_that_computes_within_launch_is_collected_before_the_next(make_engine: MakeEngine) -> None:
    runner = StubRunner(launch_depth=1)
    engine = make_engine(runner)
    listener = opened(engine)
    engine.submit(listener.run, first())
    engine.submit(listener.run, step(2, n_decode=1))
    runner.release(1, 2)
    assert [listener.result().seq, listener.result().seq] == [1, 2]
    runner.expect("reset", "launch 1", "collect 1", "launch 2", "collect 2")


def test_a_result_tells_how_many_steps_wait(make_engine: MakeEngine) -> None:
    runner = StubRunner(launch_depth=1)
    engine = make_engine(runner)
    listener = opened(engine)
    engine.submit(listener.run, first())
    runner.expect("reset", "launch 1", "collect 1")
    engine.submit(listener.run, step(2, n_decode=1))
    engine.submit(listener.run, step(3, n_decode=1))
    runner.release(1, 2, 3)
    assert [listener.result().queued_steps for _ in range(3)] == [2, 1, 0]


def test_more_steps_than_the_window_are_refused(make_engine: MakeEngine) -> None:
    runner = StubRunner()
    engine = make_engine(runner)
    listener = opened(engine, window=2)
    engine.submit(listener.run, first())
    engine.submit(listener.run, step(2, n_decode=1))
    with pytest.raises(ProtocolError, match="step 3 would be number 3 in flight, but the window is 2"):
        engine.submit(listener.run, step(3, n_decode=1))


def test_a_closed_run_ends_after_its_running_step_without_its_queued_ones(make_engine: MakeEngine) -> None:
    runner = StubRunner(launch_depth=1)
    engine = make_engine(runner)
    listener = opened(engine)
    engine.submit(listener.run, first())
    engine.submit(listener.run, step(2, n_decode=1))
    runner.expect("reset", "launch 1", "collect 1")
    engine.close(listener.run, RunEnd.CLIENT, "gone")
    assert listener.ends.empty()
    assert engine.current_run is listener.run
    engine.submit(listener.run, step(3, n_decode=1))
    runner.release(1)
    assert listener.end() == (RunEnd.CLIENT, "gone")
    runner.expect("reset")
    assert runner.events.empty()
    assert listener.results.empty()
    assert opened(engine, router_id="router-b").run is engine.current_run


def test_the_first_reason_to_close_counts(make_engine: MakeEngine) -> None:
    engine = make_engine(StubRunner())
    listener = opened(engine)
    engine.close(listener.run, RunEnd.REPLACED, "first")
    engine.close(listener.run, RunEnd.CLIENT, "second")
    assert listener.end() == (RunEnd.REPLACED, "first")


def test_a_protocol_error_ends_the_stream_and_not_the_engine(make_engine: MakeEngine) -> None:
    runner = StubRunner()
    runner.held = False
    engine = make_engine(runner)
    listener = opened(engine)
    engine.submit(listener.run, first())
    engine.submit(listener.run, step(2, n_decode=5))
    assert listener.result().seq == 1
    end, message = listener.end()
    assert end is RunEnd.PROTOCOL
    assert message == "step 2 says n_decode_rows 5, but 1 rows decode here"
    again = opened(engine, generation=2)
    engine.submit(again.run, first())
    assert (again.result().seq, again.run.generation) == (1, 2)


@pytest.mark.parametrize("where", ["launch_error", "collect_error"])
@pytest.mark.parametrize(
    ("error", "end", "message"),
    [
        (DeviceError("fell off the bus"), RunEnd.DEVICE, "device error: fell off the bus"),
        (KeyError("oops"), RunEnd.INTERNAL, "KeyError: 'oops'"),
    ],
)
def test_a_runner_that_fails_ends_the_stream_and_the_worker(
    make_engine: MakeEngine, where: str, error: Exception, end: RunEnd, message: str
) -> None:
    fatal: list[Exception] = []
    runner = StubRunner()
    runner.held = False
    engine = make_engine(runner, on_fatal=fatal.append)
    listener = opened(engine)
    setattr(runner, where, error)
    engine.submit(listener.run, first())
    assert listener.end() == (end, message)
    assert engine.stop(timeout_s=WAIT_S)
    assert fatal == [error]
    assert engine.health().error == message
    with pytest.raises(RunRefused, match=message.split(":")[0]):
        engine.open(Listener().run)


def test_stopping_reports_the_running_step_first(make_engine: MakeEngine) -> None:
    runner = StubRunner(launch_depth=1)
    engine = make_engine(runner)
    listener = opened(engine)
    engine.submit(listener.run, first())
    engine.submit(listener.run, step(2, n_decode=1))
    runner.expect("reset", "launch 1", "collect 1")
    assert engine.health().ready
    assert not engine.stop(timeout_s=0)
    assert not engine.health().ready
    assert listener.results.empty()
    runner.release(1)
    assert listener.result().seq == 1
    assert listener.end() == (RunEnd.SHUTDOWN, "the worker is shutting down")
    assert engine.stop(timeout_s=WAIT_S)
    with pytest.raises(RunRefused, match="shutting down"):
        engine.open(Listener().run)


def test_one_run_at_a_time(make_engine: MakeEngine) -> None:
    engine = make_engine(StubRunner())
    opened(engine)
    with pytest.raises(RunRefused, match="router 'router-a' holds this worker"):
        engine.open(Listener(router_id="router-b").run)


def test_health_tells_for_how_long_nothing_moved(make_engine: MakeEngine) -> None:
    now = [50.0]
    runner = StubRunner()
    engine = make_engine(runner, clock=lambda: now[0])
    assert engine.health().stalled_us == 0
    listener = opened(engine, router_id="router-z")
    now[0] += 5
    idle = engine.health()
    assert (idle.stalled_us, idle.running, idle.holder, idle.last_seq) == (0, True, "router-z", 0)
    engine.submit(listener.run, first())
    runner.expect("reset", "launch 1", "collect 1")
    now[0] += 3
    assert engine.health().stalled_us == 3_000_000
    runner.release(1)
    listener.result()
    now[0] += 4
    done = engine.health()
    assert (done.stalled_us, done.last_seq) == (0, 1)


def test_the_engine_measures_what_the_runner_does_not(make_engine: MakeEngine) -> None:
    now = [10.0]
    runner = StubRunner()
    runner.step_us = 0
    engine = make_engine(runner, clock=lambda: now[0])
    listener = opened(engine)
    now[0] += 0.25
    engine.submit(listener.run, first())
    runner.expect("reset", "launch 1", "collect 1")
    now[0] += 0.125
    runner.release(1)
    result = listener.result()
    assert (result.step_us, result.idle_us) == (125_000, 250_000)


@pytest.mark.parametrize(("here", "there"), list(itertools.product(RunState, repeat=2)))
def test_a_run_makes_only_legal_moves(here: RunState, there: RunState) -> None:
    run = Listener().run
    run.state = here
    if there in LEGAL_MOVES[here]:
        run.move(there)
        assert run.state is there
    else:
        with pytest.raises(ValueError, match=f"can't go from {here.value} to {there.value}"):
            run.move(there)
