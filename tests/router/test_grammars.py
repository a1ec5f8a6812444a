"""Requests with a grammar over real gRPC: compiled first, placed where it is compiled, nobody else waits."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from proto.worker_pb2 import Grammar
from router.ipc.client import RefusedError
from router.ipc.local_client import LocalClient
from router.ipc.messages import GrammarSpec
from tests.router.service import Collector, ask, ask_all, scheduler, until
from tests.router.sim import text
from worker.fake_faults import FakeFaults
from worker.fake_grammar import constrained_reply
from worker.testing import FakeWorker, fake_worker

WORDS = ["a rather long first answer, " * 4, "a rather long second answer, " * 4]
CHOICE = GrammarSpec(kind=Grammar.CHOICE, source=json.dumps(WORDS))
OTHER = GrammarSpec(kind=Grammar.CHOICE, source='["other"]')


def right(answer: Collector, worker: FakeWorker, spec: GrammarSpec = CHOICE) -> bool:
    """Whether the tokens are one of the choice, and then the end."""
    grammar = Grammar(kind=Grammar.Kind.ValueType(spec.kind), source=spec.source)
    vocab = worker.runner.vocab
    prompt = np.array(answer.prompt, dtype=np.int32)
    return answer.tokens == [*constrained_reply(grammar, prompt=prompt, vocab=vocab), vocab.eos_token_ids[0]]


async def test_it_is_compiled_once_on_each_worker() -> None:
    async with fake_worker() as one, fake_worker() as two, scheduler(one.address, two.address) as s:
        client = LocalClient(s)
        await until(lambda: client.state.n_replicas_live == 2, "both live")
        for _ in range(3):
            answers = await ask_all(client, [text(10, seed=i) for i in range(8)], n_new=400, grammar=CHOICE)
            for answer in answers:
                await answer.end()
                assert right(answer, one)
        await until(lambda: len(one.runner.prepared) == len(two.runner.prepared) == 1, "both have it")
        assert one.runner.n_unprepared == two.runner.n_unprepared == 0
        assert await client.admin("check") == {"ok": True}


async def test_a_slow_compiler_holds_up_nobody_else() -> None:
    async with fake_worker() as worker, scheduler(worker.address) as s:
        client = LocalClient(s)
        worker.faults.hang_compiler()
        waiting = asyncio.create_task(ask(client, text(10, seed=1), n_new=400, grammar=CHOICE))
        await until(lambda: bool(s.intake.preparing), "it is being compiled")
        for i in range(5):
            plain = await ask(client, text(10, seed=i), n_new=100)
            await plain.end()
            plain.assert_right(worker)
        assert not waiting.done()
        worker.faults.unhang_compiler()
        answer = await waiting
        await answer.end()
        assert right(answer, worker)
        assert not s.intake.preparing


async def test_one_worker_that_has_it_is_enough() -> None:
    async with fake_worker() as one, fake_worker() as two, scheduler(one.address, two.address) as s:
        client = LocalClient(s)
        await until(lambda: client.state.n_replicas_live == 2, "both live")
        one.faults.hang_compiler()
        try:
            answers = await ask_all(client, [text(10, seed=i) for i in range(8)], n_new=400, grammar=CHOICE)
            for answer in answers:
                await answer.end()
                assert right(answer, two)
            assert one.runner.n_steps == 0
        finally:
            one.faults.unhang_compiler()


async def test_a_refusal_names_the_field_and_the_reason() -> None:
    async with fake_worker() as worker, scheduler(worker.address) as s:
        client = LocalClient(s)
        worker.faults.refuse_grammars = "at $.a: no such thing"
        spec = GrammarSpec(kind=Grammar.JSON_SCHEMA, source="{}", param="guided_json")
        with pytest.raises(RefusedError) as refused:
            await ask(client, text(5, seed=1), grammar=spec)
        info = refused.value.error
        assert (info.status, info.param) == (400, "guided_json")
        assert "at $.a: no such thing" in info.message
        worker.faults.refuse_grammars = ""
        answer = await ask(client, text(5, seed=1), n_new=20, grammar=spec)
        await answer.end()
        assert right(answer, worker, spec), "a refusal is not remembered"


async def test_a_client_that_leaves_meanwhile_leaves_nothing_behind() -> None:
    async with fake_worker() as worker, scheduler(worker.address) as s:
        client = LocalClient(s)
        worker.faults.hang_compiler()
        waiting = asyncio.create_task(ask(client, text(10, seed=1), n_new=400, grammar=CHOICE))
        await until(lambda: bool(s.intake.preparing), "it is being compiled")
        waiting.cancel()
        await until(lambda: not s.intake.preparing, "it was given up")
        worker.faults.unhang_compiler()
        await until(lambda: len(worker.runner.prepared) == 1, "compiled all the same")
        answer = await ask(client, text(5, seed=1), n_new=5)
        await answer.end()
        assert worker.runner.n_unprepared == 0
        assert s.stats.n_submitted == 1


async def test_what_is_being_compiled_counts_as_a_request() -> None:
    async with fake_worker() as worker, scheduler(worker.address, max_concurrent_requests=2) as s:
        client = LocalClient(s)
        worker.faults.hang_compiler()
        waiting = asyncio.create_task(
            ask_all(client, [text(10, seed=1), text(10, seed=2)], n_new=400, grammar=CHOICE)
        )
        await until(lambda: len(s.intake.preparing) == 2, "both are being compiled")
        with pytest.raises(RefusedError) as refused:
            await ask(client, text(5, seed=3), grammar=OTHER)
        assert refused.value.error.status == 429
        worker.faults.unhang_compiler()
        for answer in await waiting:
            await answer.end()


async def test_a_killed_worker_s_answers_go_on_where_it_is_compiled() -> None:
    """Dynamo #7634: the constraint holds after the move."""
    async with (
        fake_worker(fake_strict=True, fake_step_ms=1.0) as one,
        fake_worker(fake_strict=True, fake_step_ms=1.0) as two,
        scheduler(one.address, two.address) as s,
    ):
        client = LocalClient(s)
        await until(lambda: client.state.n_replicas_live == 2, "both live")
        await (await ask(client, text(10, seed=9), n_new=5, grammar=CHOICE)).end()
        # Requests go only where their grammar is compiled: on both, so that both get some.
        await until(lambda: bool(one.runner.prepared and two.runner.prepared), "compiled on both")
        answers = await ask_all(client, [text(10, seed=i) for i in range(8)], n_new=400, grammar=CHOICE)
        for answer in answers:
            await answer.has(5)
        await one.kill()
        for answer in answers:
            await answer.end()
            assert right(answer, two)
        assert s.stats.n_migrated > 0
        assert two.runner.n_unprepared == 0


async def test_a_worker_that_comes_back_compiles_before_it_goes_on() -> None:
    async with fake_worker(fake_step_ms=1.0) as worker, scheduler(worker.address) as s:
        client = LocalClient(s)
        answer = await ask(client, text(10, seed=1), n_new=400, grammar=CHOICE)
        await answer.has(5)
        await worker.kill()
        await until(lambda: not client.state.ready, "not ready without a worker")
        late = await ask(client, text(10, seed=2), n_new=400, grammar=OTHER)
        plain = await ask(client, text(10, seed=3), n_new=20)
        await worker.restart()
        for waiting, spec in ((answer, CHOICE), (late, OTHER)):
            await waiting.end()
            assert right(waiting, worker, spec)
        await plain.end()
        plain.assert_right(worker)
        assert worker.runner.n_unprepared == 0
        assert len(worker.runner.prepared) == 2


async def test_a_worker_that_comes_back_and_refuses_fails_those_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(faults: FakeFaults, grammar: Grammar) -> None:
        raise ValueError("not today")

    async with fake_worker(fake_step_ms=1.0) as worker, scheduler(worker.address) as s:
        client = LocalClient(s)
        answer = await ask(client, text(10, seed=1), n_new=400, grammar=CHOICE)
        await answer.has(5)
        await worker.kill()
        await until(lambda: not client.state.ready, "not ready without a worker")
        monkeypatch.setattr(FakeFaults, "prepare", refuse)
        await worker.restart()
        await answer.end()
        assert answer.error is not None
        assert answer.error.status == 400
        assert "not today" in answer.error.message
        plain = await ask(client, text(10, seed=3), n_new=20)
        await plain.end()
        plain.assert_right(worker)


@pytest.mark.parametrize("able_first", [False, True])
async def test_only_workers_that_know_grammars_are_given_them(able_first: bool) -> None:
    """Whichever comes first: plain requests go to both."""
    async with (
        fake_worker(fake_grammar=able_first) as one,
        fake_worker(fake_grammar=not able_first) as two,
        scheduler(one.address, two.address) as s,
    ):
        client = LocalClient(s)
        await until(lambda: client.state.n_replicas_live == 2, "both live")
        assert client.state.model is not None
        assert "grammar" in client.state.model.features
        able, other = (one, two) if able_first else (two, one)
        answers = await ask_all(client, [text(10, seed=i) for i in range(8)], n_new=400, grammar=CHOICE)
        for answer in answers:
            await answer.end()
            assert right(answer, able)
        assert other.runner.n_steps == 0
        assert not other.runner.prepared
        await able.kill()
        await until(lambda: client.state.n_replicas_live == 1, "the other alone")
        with pytest.raises(RefusedError, match="no worker that can constrain") as refused:
            await ask(client, text(10, seed=1), n_new=400, grammar=CHOICE)
        assert refused.value.error.status == 503
        plain = await ask(client, text(10, seed=1), n_new=10)
        await plain.end()


async def test_where_no_worker_knows_grammars() -> None:
    async with fake_worker(fake_grammar=False) as worker, scheduler(worker.address) as s:
        client = LocalClient(s)
        await until(lambda: client.state.n_replicas_live == 1, "live")
        with pytest.raises(RefusedError, match="not supported by this server's workers") as refused:
            await ask(client, text(10, seed=1), n_new=400, grammar=CHOICE)
        assert refused.value.error.status == 400
