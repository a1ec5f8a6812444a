from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from checkpoint.checkpoint import Checkpoint
from proto.codec import pack_f32, pack_i32, unpack_f32, unpack_i32
from proto.worker_pb2 import Admit, RowError, Sampling, Step
from settings.errors import ConfigError
from tests.worker.steps import Conversation, admit, capacity, step
from worker.config import WorkerConfig
from worker.fake import (
    FakeRunner,
    FakeTiming,
    FakeVocab,
    RowFault,
    StaleBlockError,
    expected_tokens,
    make_fake_runner,
)
from worker.fake_text import N_TOP, chain, chain_step, root
from worker.results import to_proto
from worker.rows import RowTable
from worker.runner import DeviceError, RunnerCapacity, Sampled

VOCAB = FakeVocab(size=100, eos_token_ids=(2,))


class Bench:
    """A runner behind a row table."""

    def __init__(self, *, strict: bool = False, eos_rate: float = 0.0, **changes: object) -> None:
        self.capacity: RunnerCapacity = capacity(**changes)
        self.vocab = FakeVocab(
            size=self.capacity.vocab_size, eos_token_ids=self.capacity.eos_token_ids, eos_rate=eos_rate
        )
        self.runner = FakeRunner(self.capacity, vocab=self.vocab, strict=strict)
        self.rows = RowTable.for_capacity(self.capacity)

    def run(self, one: Step) -> Sampled:
        return self.runner.collect(self.runner.launch(self.rows.apply(one)))

    def decode(self, n_steps: int, *, blocks: int = 30) -> list[int]:
        """Row 0 alone; each step grows it when it must."""
        answer = []
        for _ in range(n_steps):
            need = self.rows.lengths[0] + 1 > self.rows.table_lengths[0] * self.rows.block_size
            grow = [(0, blocks + int(self.rows.table_lengths[0]))] if need else []
            answer += self.run(step(self.rows.seq + 1, grow=grow, n_decode=1)).tokens.tolist()
        return answer


def test_the_chain_is_the_same_in_one_run_and_step_by_step() -> None:
    tokens = np.random.default_rng(1).integers(0, 1000, 500).astype(np.int32)
    whole = chain(root(""), tokens)
    at = np.array([root("")], dtype=np.uint64)
    for i in range(len(tokens)):
        at = chain_step(at, tokens[i : i + 1])
        assert at[0] == whole[i]
    assert (chain(int(whole[199]), tokens[200:]) == whole[200:]).all()


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
@pytest.mark.parametrize("chunk", [1, 3, 4, 11])
def test_chunks_and_blocks_do_not_change_the_text(block_size: int, chunk: int) -> None:
    bench = Bench(block_size=block_size, strict=True)
    prompt = list(range(11))
    blocks = list(range(1, -(-11 // block_size) + 1))
    parts = [min(chunk, 11 - start) for start in range(0, 11, chunk)]
    first = bench.run(step(1, admits=[admit(0, prompt, blocks)], chunks=[(0, parts[0])]))
    for n in parts[1:]:
        assert len(first.tokens) == 0
        first = bench.run(step(bench.rows.seq + 1, chunks=[(0, n)]))
    answer = first.tokens.tolist() + bench.decode(19)
    assert answer == expected_tokens(prompt, n=20, vocab=VOCAB)
    assert not bench.runner.violations


def test_a_cached_prefix_gives_the_same_text() -> None:
    bench = Bench(strict=True)
    prompt = list(range(11))
    bench.run(step(1, admits=[admit(1, prompt, [1, 2, 3])], chunks=[(1, 11)]))
    shared = bench.run(
        step(2, evicts=[1], admits=[admit(0, [*prompt[:8], 50, 51], [1, 2, 9], n_cached=8)], chunks=[(0, 2)])
    )
    assert shared.tokens.tolist() == expected_tokens([*prompt[:8], 50, 51], n=1, vocab=VOCAB)


def test_rows_of_one_step_may_share_what_one_of_them_writes() -> None:
    bench = Bench(strict=True)
    admits = [admit(0, [*range(8), 50], [1, 2, 8], n_cached=8), admit(1, range(9), [1, 2, 3])]
    sampled = bench.run(step(1, admits=admits, chunks=[(0, 1), (1, 9)]))
    assert sampled.tokens.tolist() == [
        *expected_tokens([*range(8), 50], n=1, vocab=VOCAB),
        *expected_tokens(range(9), n=1, vocab=VOCAB),
    ]


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (
            [7, 2, 9],
            "reads block 7 for positions 0 to 3, but 0 of the 4 positions it needs there were computed",
        ),
        ([2, 1, 9], "reads block 2 for positions 0 to 3, but it holds other tokens"),
        ([1, 3, 9], "reads block 3 for positions 4 to 7, but it holds other tokens"),
    ],
)
def test_a_wrong_block_gives_a_wrong_token_and_is_named(blocks: list[int], message: str) -> None:
    first = step(1, admits=[admit(1, range(11), [1, 2, 3])], chunks=[(1, 11)])
    second = step(2, admits=[admit(0, range(10), blocks, n_cached=8)], chunks=[(0, 2)], n_decode=1, grow=[])
    bench = Bench()
    bench.run(first)
    sampled = bench.run(second)
    right = expected_tokens(range(10), n=1, vocab=VOCAB)
    assert sampled.tokens[list(sampled.rows).index(0)] != right[0]
    assert message in bench.runner.violations[0].message
    strict = Bench(strict=True)
    strict.run(first)
    with pytest.raises(StaleBlockError, match=message.replace("(", r"\(")):
        strict.run(second)


def test_a_block_overwritten_under_a_running_row_is_seen() -> None:
    bench = Bench()
    bench.run(step(1, admits=[admit(0, range(9), [1, 2, 3])], chunks=[(0, 9)]))
    assert not bench.runner.violations
    bench.run(step(2, admits=[admit(1, [7, 7, 7], [1])], chunks=[(1, 3)], n_decode=1))
    assert [v.row for v in bench.runner.violations] == [0]
    assert bench.runner.violations[0].first_position == 0


def test_what_a_misled_row_writes_misleads_others() -> None:
    bench = Bench()
    bench.run(step(1, admits=[admit(0, range(9), [1, 2, 3], n_cached=4)], chunks=[(0, 5)]))
    assert len(bench.runner.violations) == 1
    bench.run(step(2, admits=[admit(1, [*range(8), 60], [4, 2, 9], n_cached=0)], evicts=[0]))
    bench.run(step(3, evicts=[1], admits=[admit(2, range(4), [1])], chunks=[(2, 4)]))
    sampled = bench.run(
        step(4, evicts=[2], admits=[admit(3, [*range(8), 60], [1, 2, 9], n_cached=8)], chunks=[(3, 1)])
    )
    assert bench.runner.violations[-1].block == 2
    assert sampled.tokens.tolist() != expected_tokens([*range(8), 60], n=1, vocab=VOCAB)


def test_zeroed_blocks_are_uncomputed() -> None:
    bench = Bench()
    bench.run(step(1, admits=[admit(0, range(9), [1, 2, 3])], chunks=[(0, 9)]))
    bench.run(step(2, zero=[2], n_decode=1))
    assert "0 of the 4" in bench.runner.violations[0].message


SAMPLINGS = [
    Sampling(temperature=1.0, seed=5),
    Sampling(temperature=0.7, seed=5, top_k=4, top_p=0.9, min_p=0.1, typical_p=0.5),
    Sampling(repetition_penalty=1.2),
    Sampling(presence_penalty=0.5),
    Sampling(frequency_penalty=-0.5, temperature=1.0, seed=9),
    Sampling(bias_ids=pack_i32([4]), bias_values=pack_f32([1.0])),
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_replay_after_any_token_goes_on_with_the_same_text(sampling: Sampling) -> None:
    whole = expected_tokens(range(5), n=20, vocab=VOCAB, sampling=sampling)
    for cut in (1, 7, 15):
        bench = Bench(strict=True)
        known = [*range(5), *whole[:cut]]
        again = admit(0, known, range(1, 9), n_prompt=5, sampling=sampling)
        first = bench.run(step(1, admits=[again], chunks=[(0, len(known))])).tokens.tolist()
        assert first + bench.decode(19 - cut) == whole[cut:]


def test_every_parameter_and_the_prompt_length_matter() -> None:
    texts = [expected_tokens(range(5), n=12, vocab=VOCAB, sampling=s) for s in SAMPLINGS]
    texts.append(expected_tokens(range(5), n=12, vocab=VOCAB))
    texts.append(expected_tokens(range(5), n=12, vocab=VOCAB, sampling=Sampling(temperature=1.0, seed=6)))
    texts.append(expected_tokens(range(5), n=12, vocab=VOCAB, adapter_id="lora"))
    texts.append(
        expected_tokens(range(5), n=12, vocab=VOCAB, sampling=Sampling(presence_penalty=0.5), n_prompt=3)
    )
    assert len({tuple(text) for text in texts}) == len(texts)


def test_neutral_values_sent_explicitly_change_nothing() -> None:
    neutral = Sampling(temperature=0, top_p=1, typical_p=1, repetition_penalty=1, seed=7, top_k=5)
    assert expected_tokens(range(5), n=9, vocab=VOCAB, sampling=neutral) == expected_tokens(
        range(5), n=9, vocab=VOCAB
    )


def test_eos_comes_at_its_rate_and_not_before_min_new_tokens() -> None:
    vocab = FakeVocab(size=100, eos_token_ids=(2, 3), eos_rate=0.2)
    texts = [expected_tokens([i, i + 1], n=200, vocab=vocab) for i in range(90)]
    assert all(text[-1] == 2 and 2 not in text[:-1] and 3 not in text for text in texts)
    assert 3 < np.mean([len(text) for text in texts]) < 8
    held = expected_tokens([1, 2], n=200, vocab=vocab, sampling=Sampling(min_new_tokens=30))
    assert len(held) > 30
    bench = Bench(eos_rate=0.2, max_context=300, n_blocks=200)
    want = expected_tokens([1, 2], n=40, vocab=bench.vocab, stop_at_eos=False)
    got = bench.run(step(1, admits=[admit(0, [1, 2], [1])], chunks=[(0, 2)])).tokens.tolist()
    assert got + bench.decode(39) == want


def test_logprobs_rank_the_greedy_token_first() -> None:
    bench = Bench()
    sampling = Sampling(logprobs=True, top_logprobs=3)
    admits = [
        admit(0, range(3), [1]),
        admit(1, range(3), [2], sampling=sampling),
        admit(2, range(3), [3], sampling=Sampling(logprobs=True)),
    ]
    sampled = bench.run(step(1, admits=admits, chunks=[(0, 3), (1, 3), (2, 3)]))
    part = sampled.logprobs
    assert part is not None
    assert (part.index.tolist(), part.n_top.tolist()) == ([1, 2], [3, 0])
    assert part.top_ids[0] == sampled.tokens[1]
    assert part.top_values[0] == part.chosen[0]
    assert part.top_values.tolist() == sorted(part.top_values.tolist(), reverse=True)
    message = to_proto(sampled, generation=4, queued_steps=1)
    assert unpack_f32(message.logprobs.chosen).tolist() == part.chosen.tolist()
    assert (message.generation, message.queued_steps) == (4, 1)


def test_prompt_logprobs_speak_of_the_computed_positions_after_the_first() -> None:
    bench = Bench()
    asks = Sampling(prompt_logprobs=2)
    one = bench.run(step(1, admits=[admit(0, range(10), [1, 2, 3], sampling=asks)], chunks=[(0, 6)]))
    two = bench.run(step(2, chunks=[(0, 4)]))
    parts = [*one.prompt_logprobs, *two.prompt_logprobs]
    assert [(p.start, len(unpack_f32(p.chosen))) for p in parts] == [(1, 6), (7, 3)]
    assert [len(unpack_i32(p.top_ids)) for p in parts] == [6, 3]
    whole = Bench().run(step(1, admits=[admit(0, range(10), [1, 2, 3], sampling=asks)], chunks=[(0, 10)]))
    assert whole.prompt_logprobs[0].chosen == parts[0].chosen + parts[1].chosen


def test_an_injected_row_error_fails_that_row_and_poisons_what_it_wrote() -> None:
    bench = Bench()
    bench.runner.faults.rows.append(RowFault(token=42, after=1))
    admits = [admit(0, [42, *range(7)], [1, 2]), admit(1, range(8), [3, 4])]
    bench.run(step(1, admits=admits, chunks=[(0, 8), (1, 8)]))
    failing = bench.run(step(2, grow=[(0, 5), (1, 6)], n_decode=2))
    assert failing.rows.tolist() == [1]
    assert [(e.row, e.epoch, e.kind) for e in failing.errors] == [(0, 1, RowError.NAN_LOGITS)]
    assert bench.runner.cache.poisoned[5]
    after = bench.run(step(3, n_decode=2))
    assert after.rows.tolist() == [0, 1]
    assert not bench.runner.violations
    assert after.tokens[1] == expected_tokens(range(8), n=3, vocab=VOCAB)[2]


def test_readers_of_poison_get_garbage_but_are_no_violation() -> None:
    bench = Bench(strict=True)
    bench.runner.faults.rows.append(RowFault(row=0))
    bench.run(step(1, admits=[admit(0, range(9), [1, 2, 3])], chunks=[(0, 9)]))
    prompt = [*range(8), 70]
    read = bench.run(step(2, evicts=[0], admits=[admit(1, prompt, [1, 2, 9], n_cached=8)], chunks=[(1, 1)]))
    assert read.tokens.tolist() != expected_tokens(prompt, n=1, vocab=VOCAB)
    clean = bench.run(step(3, evicts=[1], zero=[1, 2], admits=[admit(2, prompt, [1, 2, 9])], chunks=[(2, 9)]))
    assert clean.tokens.tolist() == expected_tokens(prompt, n=1, vocab=VOCAB)


def test_a_scripted_reply_is_said_and_ends_with_eos() -> None:
    bench = Bench()
    bench.runner.faults.reply = lambda prompt: [10, 11, 12] if prompt[0] == 9 else None
    first = bench.run(step(1, admits=[admit(0, [9, 9], [1])], chunks=[(0, 2)]))
    assert first.tokens.tolist() + bench.decode(4) == [10, 11, 12, 2, 2]


def test_the_pretended_device_queues_steps_and_measures_itself() -> None:
    now = [100.0]
    waited: list[float] = []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        now[0] += seconds

    timing = FakeTiming(step_s=0.01, row_s=0.001, prefill_token_s=0.002, clock=lambda: now[0], wait=wait)
    runner = FakeRunner(capacity(), vocab=VOCAB, timing=timing)
    rows = RowTable.for_capacity(capacity())
    one = runner.launch(rows.apply(step(1, admits=[admit(0, range(3), [1])], chunks=[(0, 3)])))
    two = runner.launch(rows.apply(step(2, n_decode=1)))
    assert (one.done(), two.done()) == (False, False)
    first = runner.collect(one)
    assert (first.step_us, first.idle_us) == (17_000, 0)
    assert (one.done(), two.done()) == (True, False)
    assert (runner.collect(two).step_us, waited) == (11_000, pytest.approx([0.017, 0.011]))
    now[0] += 0.5
    assert runner.collect(runner.launch(rows.apply(step(3, grow=[(0, 2)], n_decode=1)))).idle_us == 500_000


def test_the_device_is_lost_at_the_step_that_was_asked_for() -> None:
    bench = Bench()
    bench.runner.faults.device_error_at = 2
    bench.run(step(1, admits=[admit(0, range(3), [1])], chunks=[(0, 3)]))
    with pytest.raises(DeviceError, match="step 2"):
        bench.run(step(2, n_decode=1))


def test_settings_make_the_runner() -> None:
    config = WorkerConfig(
        model="",
        attention="fake",
        block_size=8,
        fake_n_blocks=100,
        max_batch_total_tokens=80,
        max_total_tokens=64,
    )
    made = make_fake_runner(config).capacity
    assert (made.n_blocks, made.max_batch_total_tokens, made.max_context) == (11, 80, 64)
    with pytest.raises(ConfigError, match="--max-batch-total-tokens is 7, but one block holds 8 tokens"):
        make_fake_runner(WorkerConfig(model="", attention="fake", block_size=8, max_batch_total_tokens=7))
    with pytest.raises(ValueError, match="needs 20 tokens"):
        FakeVocab(size=N_TOP, eos_token_ids=(0,))


def test_a_checkpoint_lends_its_vocabulary_and_limits() -> None:
    checkpoint = Checkpoint(
        name="tiny",
        path=Path("/models/tiny"),
        kind="safetensors",
        config={},
        eos_token_ids=(7, 9),
        bos_token_id=None,
        max_context=64,
        vocab_size=512,
        fingerprint="abc",
    )
    runner = make_fake_runner(WorkerConfig(model="tiny", attention="fake", max_total_tokens=100), checkpoint)
    made = runner.capacity
    assert (made.model_id, made.model_hash, made.model_path) == ("tiny", "abc", "/models/tiny")
    assert (made.vocab_size, made.eos_token_ids, made.max_context) == (512, (7, 9), 64)
    assert runner.vocab == FakeVocab(size=512, eos_token_ids=(7, 9))


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_many_rows_side_by_side_say_what_each_says_alone(block_size: int) -> None:
    size = capacity(block_size=block_size, n_blocks=4000, max_rows=40, max_context=200, max_step_tokens=4000)
    runner = FakeRunner(size, vocab=VOCAB, strict=True)
    rows = RowTable.for_capacity(size)
    talk = Conversation(size)
    random = np.random.default_rng(block_size)
    prompts = {r: random.integers(0, 100, random.integers(1, 90)).tolist() for r in range(40)}

    def run(one: Step) -> None:
        talk.hear(to_proto(runner.collect(runner.launch(rows.apply(one))), generation=1, queued_steps=0))

    run(talk.start({r: prompts[r] for r in range(30)}))
    for _ in range(10):
        run(talk.decode())
    run(talk.start({r: prompts[r] for r in range(30, 40)}))
    for _ in range(30):
        run(talk.decode())
    talk.check(size)
    assert {len(a) for a in talk.answers.values()} == {42, 31}


def test_admits_are_kept_no_longer_than_their_rows() -> None:
    bench = Bench()
    for seq in range(1, 20):
        one: Admit = admit(0, range(3), [1], epoch=seq)
        bench.run(step(seq, evicts=[0] if seq > 1 else [], admits=[one], chunks=[(0, 3)]))
    assert len(bench.runner._admits) == 1
