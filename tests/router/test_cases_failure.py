"""Cases from the field: cancellation, failing rows, lost replicas, with the fake worker in one thread."""

from __future__ import annotations

import pytest

from proto.codec import pack_i32
from proto.worker_pb2 import RowError, StepResult
from router.errors import RowFailedError, StepProtocolError, UnavailableError
from router.ipc.messages import FinishReason, SamplingSpec
from tests.router.sim import Sim, text
from worker.fake import RowFault


def test_cancel_frees_blocks_and_row_within_one_step() -> None:
    """vLLM #9428, TGI #495: while it streams, while it is queued, in a long prefill."""
    sim = Sim(block_size=16, max_batch_size=2, max_batch_prefill_tokens=32, fake_n_blocks=65)
    (streaming,) = sim.submit(text(10, seed=1), n_new=100)
    (in_prefill,) = sim.submit(text(500, seed=2), n_new=100)
    (queued,) = sim.submit(text(10, seed=3), n_new=100)
    while len(sim.answers[streaming].tokens) < 3:
        sim.turn()
    rs = sim.core.replicas[0]
    assert rs.prefill
    assert len(sim.core.queue) == 1
    sim.cancel(streaming, in_prefill, queued)
    assert rs.allocator.stats().leased == 0
    assert len(rs.free_rows) == 2
    assert sim.core.n_requests == 0
    (after,) = sim.submit(text(10, seed=4), n_new=2)
    step = sim.compose()
    assert step is not None
    assert len(step.evicts) == 2 * 4  # the worker hears of both rows with the next step
    sim.run()
    sim.assert_right(after)
    sim.assert_empty()


def test_500_requests_that_leave_at_once() -> None:
    """SGLang #36475: all state returns to base."""
    sim = Sim(check=False, max_batch_size=8)
    for i in range(500):
        (a,) = sim.submit(text(20, seed=i), n_new=50)
        if i % 7 == 0:
            sim.turn()
        sim.cancel(a)
    sim.run()
    sim.assert_empty()
    assert not sim.core._requests
    assert sim.core.outbox.take() == []


@pytest.mark.parametrize("window", [1, 2, 3])
def test_cancel_while_the_eos_result_is_in_flight(window: int) -> None:
    """sglang-jax #982: the release happens once."""
    for n_before in range(12):
        sim = Sim(block_size=4, fake_n_blocks=65, fake_eos_rate=0.2, config={"window": window})
        (a,) = sim.submit(text(10, seed=5), n_new=30)
        for _ in range(n_before):
            if sim.answers[a].done:
                break
            while sim.compose() is not None:
                pass
            sim.compute()
            if sim.replicas[0].computed and n_before:
                sim.apply()
        while sim.replicas[0].sent:
            sim.compute()
        sim.cancel(a)
        while sim.replicas[0].computed:
            sim.apply()
        sim.assert_right()
        sim.assert_empty()


@pytest.mark.parametrize("kind", [RowError.INVALID, RowError.GRAMMAR, RowError.NAN_LOGITS])
def test_one_failing_row_in_a_step_of_8(kind: RowError.Kind.ValueType) -> None:
    """TGI #2316: only that request fails."""
    sim = Sim(block_size=4, fake_n_blocks=200, max_batch_prefill_tokens=256)
    prompts = [text(20, seed=i, vocab=900) for i in range(8)]
    prompts[3][7] = 999
    ids = [sim.submit(prompt, n_new=20)[0] for prompt in prompts]
    sim.replicas[0].runner.faults.rows.append(RowFault(kind=kind, token=999, after=5))
    sim.run()
    error = sim.answers[ids[3]].error
    assert error is not None
    assert error.status == (400 if kind == RowError.GRAMMAR else 500)
    assert len(sim.answers[ids[3]].tokens) == 5
    sim.assert_right()
    sim.assert_empty()


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("after", [0, 4, 9])
def test_whoever_read_a_damaged_block_is_computed_again(window: int, after: int) -> None:
    """The texts of requests that shared the failing row's blocks are right, and bad blocks are never hit."""
    sim = Sim(block_size=2, fake_n_blocks=300, max_batch_prefill_tokens=40, config={"window": window})
    prompt = text(60, seed=1, vocab=900)
    poisoned = [*prompt[:50], 999, *prompt[51:]]
    fault = RowFault(kind=RowError.NAN_LOGITS, token=999, after=after)
    sim.replicas[0].runner.faults.rows.append(fault)
    (bad,) = sim.submit(poisoned, n_new=30)
    readers = sim.submit(*[poisoned[:45] + text(5, seed=i, vocab=900) for i in range(4)], n_new=12)
    others = sim.submit(*[text(20, seed=70 + i, vocab=900) for i in range(3)], n_new=12)
    sim.run()
    assert sim.answers[bad].error is not None
    assert sim.answers[bad].error.code == RowFailedError.code
    assert all(sim.answers[i].error is None for i in (*readers, *others))
    sim.assert_right()
    (again,) = sim.submit(poisoned, n_new=30)
    sim.run()
    assert sim.answers[again].error is None
    sim.assert_right()
    sim.assert_empty()


def test_an_error_for_a_row_that_ended_is_dropped() -> None:
    sim = Sim(block_size=4)
    (a,) = sim.submit(text(10, seed=1), n_new=20)
    sim.turn()
    sim.compose()
    rs = sim.core.replicas[0]
    row = sim.core._requests[1, a].row
    epoch = int(rs.epoch[row])
    sim.cancel(a)
    seq = rs.in_flight[0].seq
    stale = RowError(row=row, epoch=epoch, kind=RowError.NAN_LOGITS)
    sim.core.apply_result(0, StepResult(seq=seq, generation=rs.generation, errors=[stale]), now=sim.now)
    sim.settle()
    assert sim.core.stats.n_failed == {}


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingSpec(temperature=0.0),
        SamplingSpec(temperature=0.9, seed=7),
        SamplingSpec(
            temperature=0.9,
            seed=7,
            repetition_penalty=1.2,
            presence_penalty=0.3,
            frequency_penalty=0.2,
            min_new_tokens=25,
        ),
        SamplingSpec(temperature=0.0, logprobs=True, top_logprobs=2),
    ],
)
def test_a_lost_replica_is_not_seen_in_the_text(window: int, sampling: SamplingSpec) -> None:
    """TGI #2593: another replica lives; each stream goes on, no token twice or missing."""
    sim = Sim(n_replicas=2, block_size=4, fake_n_blocks=300, fake_eos_rate=0.01, config={"window": window})
    ids = [
        request_id
        for i in range(8)
        for request_id in sim.submit(*[text(15, seed=i)] * 2, n_new=40, sampling=sampling)
    ]
    for _ in range(8):
        sim.turn()
    sim.compose(0)
    sim.down(0)
    sim.run()
    assert sim.core.stats.n_migrated > 0
    sim.assert_right()
    if sampling.logprobs:
        assert all(len(sim.answers[i].logprobs) == len(sim.answers[i].tokens) for i in ids)
    sim.assert_empty()


def test_with_a_single_replica_requests_wait_until_it_is_back() -> None:
    """TGI #2593: the queue holds; past the deadline a proper error, never a hang."""
    sim = Sim(block_size=4)
    (patient,) = sim.submit(text(10, seed=1), n_new=30)
    (hasty,) = sim.submit(text(10, seed=2), n_new=30, deadline_s=5.0)
    for _ in range(5):
        sim.turn()
    sim.down(0)
    (late,) = sim.submit(text(10, seed=3), n_new=30)
    sim.now += 4.0
    sim.core.tick(sim.now)
    sim.settle()
    assert sim.answers[hasty].error is None
    sim.now += 1.0
    sim.core.tick(sim.now)
    sim.settle()
    error = sim.answers[hasty].error
    assert error is not None
    assert (error.status, error.type) == (504, "timeout_error")
    sim.up(0, probing=True)
    sim.run()
    sim.assert_right(patient, late)
    sim.assert_empty()


def test_results_of_an_older_generation_are_ignored() -> None:
    sim = Sim(block_size=4)
    (a,) = sim.submit(text(10, seed=1), n_new=10)
    sim.compose()
    old = sim.replicas[0]
    sim.compute()
    sim.down(0)
    sim.up(0)
    sim.compose()
    sim.core.apply_result(0, old.computed.popleft(), now=sim.now)
    sim.settle()
    assert sim.answers[a].tokens == []
    sim.run()
    sim.assert_right()


def test_a_request_present_at_two_deaths_fails_alone() -> None:
    """Infera #82."""
    sim = Sim(n_replicas=3, block_size=4, max_batch_size=8, fake_n_blocks=200)
    (poison,) = sim.submit(text(10, seed=1), n_new=40)
    for _ in range(3):
        sim.turn()
    first = sim.core._requests[1, poison].replica
    assert first is not None
    sim.down(first.replica_id)
    others = [sim.submit(text(10, seed=2 + i), n_new=20)[0] for i in range(6)]
    for _ in range(3):
        sim.turn()
    second = sim.core._requests[1, poison].replica
    assert second is not None
    sim.down(second.replica_id)
    error = sim.answers[poison].error
    assert error is not None
    assert (error.status, error.code) == (500, "replica_lost")
    sim.run()
    assert all(sim.answers[i].reason is FinishReason.LENGTH for i in others)
    sim.assert_right()


def test_a_half_open_replica_gets_one_request_until_it_has_answered() -> None:
    sim = Sim(n_replicas=1, block_size=4)
    for i in range(6):
        sim.submit(text(10, seed=i), n_new=10)
    sim.turn()
    sim.down(0)
    sim.up(0, probing=True)
    step = sim.compose()
    assert step is not None
    assert len(step.admits) == 1
    assert sim.compose() is None
    sim.compute()
    sim.apply()
    step = sim.compose()
    assert step is not None
    assert len(step.admits) == 5
    sim.run()
    sim.assert_right()


def test_a_half_open_replica_is_not_tried_with_what_has_seen_a_loss() -> None:
    """A worker that dies on every step ends no request while another one lives."""
    sim = Sim(n_replicas=2, block_size=4, max_batch_size=3)
    ids = [sim.submit(text(10, seed=i), n_new=30)[0] for i in range(6)]
    sim.turn()
    for _ in range(5):
        sim.down(0)
        sim.up(0, probing=True)
        sim.compose(0)
    sim.run()
    assert all(sim.answers[i].error is None for i in ids)
    sim.assert_right()


def test_a_planned_end_blames_nobody() -> None:
    sim = Sim(n_replicas=1, block_size=4)
    (a,) = sim.submit(text(10, seed=1), n_new=30)
    for _ in range(4):
        sim.turn()
        sim.replicas.pop(0)
        sim.core.replica_retired(0)
        sim.up(0)
    sim.run()
    assert sim.answers[a].error is None
    sim.assert_right()


@pytest.mark.parametrize(
    "wrong",
    [
        {"seq": 99},
        {"rows": [0, 1]},
        {"rows": [500], "epochs": [0], "tokens": [5]},
        {"rows": [0], "epochs": [0], "tokens": [5_000]},
        {"rows": [-1], "epochs": [0], "tokens": [5]},
    ],
)
def test_a_result_that_contradicts_what_was_sent_ends_the_stream(wrong: dict[str, object]) -> None:
    sim = Sim(block_size=4)
    sim.submit(text(10, seed=1), n_new=10)
    step = sim.compose()
    assert step is not None
    fields = {"seq": step.seq, "rows": [0], "epochs": [0], "tokens": [5]} | wrong
    result = StepResult(
        seq=fields["seq"],
        generation=sim.core.replicas[0].generation,
        rows=pack_i32(fields["rows"]),
        epochs=pack_i32(fields["epochs"]),
        tokens=pack_i32(fields["tokens"]),
    )
    with pytest.raises(StepProtocolError):
        sim.core.apply_result(0, result, now=sim.now)
    sim.down(0)
    sim.up(0)
    sim.run()
    sim.assert_right()


def test_draining_refuses_new_work_and_finishes_the_old() -> None:
    sim = Sim(block_size=4)
    (a,) = sim.submit(text(10, seed=1), n_new=10)
    sim.turn()
    sim.core.draining = True
    with pytest.raises(UnavailableError) as refused:
        sim.submit(text(10, seed=2), n_new=10)
    assert refused.value.info.status == 503
    sim.run()
    sim.assert_right(a)


def test_an_api_connection_that_is_lost_takes_its_requests_along() -> None:
    sim = Sim(block_size=4)
    ids = [sim.submit(text(10, seed=i), n_new=50)[0] for i in range(12)]
    for _ in range(3):
        sim.turn()
    sim.core.disconnect(1)
    for request_id in ids:
        sim.answers[request_id].cancelled = True
    sim.settle()
    sim.assert_empty()
    sim.run()


def test_losing_replicas_blames_only_what_was_there() -> None:
    sim = Sim(n_replicas=2, block_size=4, max_batch_size=2, fake_n_blocks=65)
    ids = [sim.submit(text(10, seed=i), n_new=30)[0] for i in range(8)]
    sim.turn()
    queued = [r.id for r in sim.core.queue]
    sim.down(0)
    sim.down(1)
    assert all(r.n_deaths == (r.id not in queued) for r in sim.core.queue)
    sim.up(0)
    sim.run()
    assert all(sim.answers[i].error is None for i in ids)
    sim.assert_right()
