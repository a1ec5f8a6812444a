"""The service over a real local channel."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from proto.codec import pack_i32, unpack_i32
from proto.status import RUN_END_KEY
from proto.version import PROTOCOL_VERSION
from proto.worker_pb2 import (
    DescribeRequest,
    Grammar,
    HealthRequest,
    PrepareRequest,
    Step,
    StepResult,
)
from proto.worker_pb2_grpc import WorkerStub
from tests.worker.steps import Conversation, admit, capacity, opening, step
from tests.worker.stub import WAIT_S, StubRunner
from worker.errors import StartError
from worker.runner import DeviceError
from worker.server import WorkerServer
from worker.testing import FakeWorker, fake_worker

Call = Any


@contextlib.asynccontextmanager
async def served(runner: StubRunner) -> AsyncIterator[tuple[WorkerServer, Any]]:
    server = WorkerServer(runner, host="127.0.0.1", port=0, max_window=4)
    port = await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield server, WorkerStub(channel)
    finally:
        runner.held = False
        runner.release(*range(100))
        await server.stop(grace_s=0)
        assert await asyncio.to_thread(server.engine.stop, timeout_s=WAIT_S)


async def heard(call: Call) -> StepResult:
    result = await asyncio.wait_for(call.read(), WAIT_S)
    assert isinstance(result, StepResult)
    return result


async def opened(stub: Any, **options: Any) -> Call:
    call = stub.Run()
    await call.write(opening(**options))
    assert (await heard(call)).seq == 0
    return call


async def ended(call: Call) -> tuple[grpc.StatusCode, str, str | None]:
    """Code, message and the word in the trailing metadata."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        while await asyncio.wait_for(call.read(), WAIT_S) is not grpc.aio.EOF:
            pass
    trailing: dict[str, str] = dict(await call.trailing_metadata() or ())
    return await call.code(), await call.details(), trailing.get(RUN_END_KEY)


async def wait_events(runner: StubRunner, *events: str) -> None:
    await asyncio.to_thread(runner.expect, *events)


def first() -> Step:
    return step(1, admits=[admit(0, range(3), [1, 2])], chunks=[(0, 3)])


async def test_describe_tells_the_capacity() -> None:
    async with served(StubRunner(graph_sizes=(1, 2), features=("grammar",))) as (server, stub):
        told = await stub.Describe(DescribeRequest())
    assert (told.protocol_version, told.worker_id, told.max_window) == (PROTOCOL_VERSION, server.worker_id, 4)
    assert (told.block_size, told.n_blocks, told.max_rows, told.max_context) == (4, 64, 8, 48)
    assert (list(told.graph_sizes), list(told.features), list(told.eos_token_ids)) == (
        [1, 2],
        ["grammar"],
        [2],
    )


async def test_a_conversation_over_the_wire_says_what_is_right() -> None:
    async with (
        fake_worker(
            block_size=4,
            fake_n_blocks=500,
            max_total_tokens=100,
            max_batch_size=8,
            fake_vocab_size=100,
            fake_strict=True,
        ) as worker,
        grpc.aio.insecure_channel(worker.address) as channel,
    ):
        call = await opened(WorkerStub(channel), window=2)
        talk = Conversation(worker.runner.capacity)
        await call.write(talk.start({0: range(10), 5: range(3, 30)}))
        for _ in range(20):
            await call.write(talk.decode())
            talk.hear(await heard(call))
        talk.hear(await heard(call))
        await call.write(talk.decode(evicts=[0]))
        assert unpack_i32((await heard(call)).rows).tolist() == [5]
    talk.check(capacity())


async def test_prepare_gives_the_reason_when_a_grammar_can_not_be_used() -> None:
    async with served(StubRunner()) as (_, stub):
        answer = await stub.Prepare(PrepareRequest(grammar=Grammar(kind=Grammar.REGEX, source="[")))
        assert (answer.ok, answer.error) == (False, "no grammars here")
        assert not (await stub.Prepare(PrepareRequest())).ok


async def test_health_and_describe_answer_while_a_step_runs() -> None:
    runner = StubRunner()
    async with served(runner) as (_, stub):
        call = await opened(stub)
        await call.write(first())
        await wait_events(runner, "reset", "launch 1", "collect 1")
        health = await stub.Health(HealthRequest(), timeout=WAIT_S)
        assert (health.ready, health.running, health.holder, health.last_seq) == (True, True, "router-a", 0)
        assert health.stalled_us > 0
        assert (await stub.Describe(DescribeRequest(), timeout=WAIT_S)).block_size == 4
        runner.release(1)
        assert (await heard(call)).seq == 1
        health = await stub.Health(HealthRequest())
        assert (health.last_seq, health.stalled_us) == (1, 0)


async def test_a_second_router_is_refused_by_the_holders_name_and_disturbs_nothing() -> None:
    runner = StubRunner()
    runner.held = False
    async with served(runner) as (_, stub):
        call = await opened(stub, router_id="router-a", generation=3)
        other = stub.Run()
        await other.write(opening(router_id="router-b"))
        code, message, word = await ended(other)
        assert (code, word) == (grpc.StatusCode.FAILED_PRECONDITION, "held")
        assert "held by router 'router-a' (generation 3); router 'router-b' is refused" in message
        await call.write(first())
        assert (await heard(call)).generation == 3


async def test_a_newer_generation_waits_for_the_running_step_and_takes_over() -> None:
    runner = StubRunner(launch_depth=1)
    async with served(runner) as (_, stub):
        old = await opened(stub, generation=1)
        await old.write(first())
        await old.write(step(2, n_decode=1))
        await wait_events(runner, "reset", "launch 1", "collect 1")
        new = stub.Run()
        await new.write(opening(generation=2))
        answer = asyncio.create_task(heard(new))
        done, _ = await asyncio.wait([answer], timeout=0.05)
        assert not done
        runner.release(1)
        assert (await answer).generation == 2
        assert await ended(old) == (
            grpc.StatusCode.ABORTED,
            "generation 2 of the same router took over",
            "replaced",
        )
        # Step 2 was discarded; the rows were reset after the end and at the opening.
        await wait_events(runner, "reset", "reset")
        await new.write(first())
        assert (await heard(new)).generation == 2


@pytest.mark.parametrize("generation", [4, 5])
async def test_a_generation_that_is_not_newer_is_refused(generation: int) -> None:
    async with served(StubRunner()) as (_, stub):
        await opened(stub, generation=5)
        stale = stub.Run()
        await stale.write(opening(generation=generation))
        code, message, word = await ended(stale)
    assert (code, word) == (grpc.StatusCode.FAILED_PRECONDITION, "stale")
    assert f"generation {generation} of router 'router-a' is not above 5" in message


@pytest.mark.parametrize("how", ["cancel", "half-close"])
async def test_a_router_that_goes_in_mid_step_leaves_a_free_worker(how: str) -> None:
    runner = StubRunner(launch_depth=1)
    async with served(runner) as (_, stub):
        call = await opened(stub)
        await call.write(first())
        await call.write(step(2, n_decode=1))
        await wait_events(runner, "reset", "launch 1", "collect 1")
        if how == "cancel":
            call.cancel()
        else:
            await call.done_writing()
        async with asyncio.timeout(WAIT_S):
            while (await stub.Health(HealthRequest())).running:
                pass
        # The step still runs; another router may already wait for its end.
        other = stub.Run()
        await other.write(opening(router_id="router-b"))
        runner.release(1)
        assert (await heard(other)).seq == 0
        # Step 2 was never launched.
        await wait_events(runner, "reset", "reset")


@pytest.mark.parametrize(
    ("message", "code", "word", "text"),
    [
        (
            opening(version=99),
            grpc.StatusCode.FAILED_PRECONDITION,
            "version",
            f"version 99, this worker speaks {PROTOCOL_VERSION}",
        ),
        (opening(router_id=""), grpc.StatusCode.INVALID_ARGUMENT, "protocol", "names no router_id"),
        (
            opening(window=0),
            grpc.StatusCode.INVALID_ARGUMENT,
            "protocol",
            "window 0 was asked for, but 1 to 4",
        ),
        (opening(window=5), grpc.StatusCode.INVALID_ARGUMENT, "protocol", "window 5 was asked for"),
        (step(1), grpc.StatusCode.INVALID_ARGUMENT, "protocol", "must carry `open`"),
    ],
)
async def test_a_run_that_opens_wrongly_is_refused(
    message: Step, code: grpc.StatusCode, word: str, text: str
) -> None:
    async with served(StubRunner()) as (server, stub):
        call = stub.Run()
        await call.write(message)
        got = await ended(call)
        assert (got[0], got[2]) == (code, word)
        assert text in got[1]
        assert server.engine.current_run is None


async def test_a_bad_step_ends_the_stream_and_the_next_run_works() -> None:
    runner = StubRunner()
    runner.held = False
    async with served(runner) as (_, stub):
        call = await opened(stub)
        await call.write(step(7))
        assert await ended(call) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "step 7 came after step 0; expected 1",
            "protocol",
        )
        again = await opened(stub, generation=2)
        await again.write(first())
        assert (await heard(again)).seq == 1


async def test_steps_beyond_the_window_end_the_stream() -> None:
    runner = StubRunner()
    async with served(runner) as (_, stub):
        call = await opened(stub, window=1)
        await call.write(first())
        await wait_events(runner, "reset", "launch 1", "collect 1")
        await call.write(step(2, n_decode=1))
        # The same connection carries both, in this order: the step has arrived once this is answered.
        await stub.Health(HealthRequest())
        runner.release(1, 2)
        code, message, word = await ended(call)
    assert (code, word) == (grpc.StatusCode.INVALID_ARGUMENT, "protocol")
    assert "number 2 in flight, but the window is 1" in message


async def test_a_lost_device_ends_the_stream_and_opens_no_other() -> None:
    runner = StubRunner()
    runner.launch_error = DeviceError("fell off the bus")
    async with served(runner) as (_, stub):
        call = await opened(stub)
        await call.write(first())
        want = (grpc.StatusCode.INTERNAL, "device error: fell off the bus")
        assert (await ended(call))[:2] == want
        again = stub.Run()
        await again.write(opening(generation=2))
        assert (await ended(again))[:2] == want
        health = await stub.Health(HealthRequest())
        assert (health.ready, health.error) == (False, "device error: fell off the bus")


async def test_stopping_ends_the_stream_as_a_shutdown_after_the_running_step() -> None:
    runner = StubRunner(launch_depth=1)
    async with served(runner) as (server, stub):
        call = await opened(stub)
        await call.write(first())
        await wait_events(runner, "reset", "launch 1", "collect 1")
        stopping = asyncio.create_task(asyncio.to_thread(server.engine.stop))
        runner.release(1)
        assert (await heard(call)).seq == 1
        assert await ended(call) == (
            grpc.StatusCode.UNAVAILABLE,
            "the worker is shutting down",
            "shutdown",
        )
        assert await stopping


async def test_a_prompt_of_a_million_tokens_fits_into_a_message() -> None:
    async with (
        fake_worker(
            block_size=256,
            fake_n_blocks=5000,
            max_total_tokens=1_100_000,
            max_batch_size=1,
            max_batch_prefill_tokens=1_000_000,
        ) as worker,
        grpc.aio.insecure_channel(worker.address) as channel,
    ):
        call = await opened(WorkerStub(channel))
        tokens = pack_i32([7]) * 1_000_000
        long = step(1, chunks=[(0, 1_000_000)])
        long.admits.add(row=0, epoch=1, tokens=tokens, n_prompt=1_000_000, blocks=pack_i32(range(1, 3908)))
        await call.write(long)
        assert len(unpack_i32((await heard(call)).tokens)) == 1
        assert not worker.runner.violations


async def test_a_taken_port_is_named() -> None:
    server = WorkerServer(StubRunner(), host="127.0.0.1", port=0, max_window=2)
    port = await server.start()
    second = WorkerServer(StubRunner(), host="127.0.0.1", port=port, max_window=2)
    with pytest.raises(StartError, match=f"cannot listen on 127.0.0.1:{port} .*already in use"):
        await second.start()
    await server.stop(grace_s=0)
    server.engine.stop()


# ---- the fake worker for other tests ----


async def broken(worker: FakeWorker, act: Callable[[], Any]) -> tuple[grpc.StatusCode, str, str | None]:
    # gRPC shares connections to one address, their back-off included, unless told otherwise.
    own = (("grpc.use_local_subchannel_pool", 1),)
    async with grpc.aio.insecure_channel(worker.address, options=own) as channel:
        call = await opened(WorkerStub(channel))
        result = act()
        if asyncio.iscoroutine(result):
            await result
        return await ended(call)


async def test_a_killed_fake_worker_breaks_without_a_word_and_comes_back_at_its_address() -> None:
    async with fake_worker() as worker:
        address, id_before = worker.address, worker.worker_id
        code, _, word = await broken(worker, worker.kill)
        assert (code, word) == (grpc.StatusCode.UNAVAILABLE, None)
        await worker.restart()
        assert (worker.address, worker.worker_id != id_before) == (address, True)
        code, _, word = await broken(worker, worker.cut)
        assert (code, word) == (grpc.StatusCode.UNAVAILABLE, None)
        code, _, word = await broken(worker, worker.terminate)
        assert (code, word) == (grpc.StatusCode.UNAVAILABLE, "shutdown")


async def test_a_partitioned_fake_worker_is_silent_until_it_is_healed() -> None:
    async with fake_worker() as worker, grpc.aio.insecure_channel(worker.address) as channel:
        call = await opened(WorkerStub(channel))
        worker.pause()
        await call.write(first())
        waiting = asyncio.create_task(heard(call))
        done, _ = await asyncio.wait([waiting], timeout=0.05)
        assert not done
        worker.resume()
        assert (await waiting).seq == 1
