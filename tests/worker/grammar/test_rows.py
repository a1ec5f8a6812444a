"""Matchers of rows: masks follow the tokens, rows don't meet each other, a replay ends in the same place."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest

from proto.worker_pb2 import Grammar
from tests.worker.grammar.tiny import (
    END,
    N_PADDED,
    START,
    allowed,
    json_schema,
    make_compiler,
    next_allowed,
    text,
    tokenizer,
    write,
)
from worker.grammar.compiler import GrammarCompiler
from worker.grammar.rows import GrammarRows

YES_NO = Grammar(kind=Grammar.CHOICE, source='["yes", "no"]')
OBJECT = Grammar(kind=Grammar.JSON_OBJECT)


def ids(string: str) -> list[int]:
    return [2 + byte for byte in string.encode()]


def i32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_a_choice_allows_its_letters_then_the_end_then_everything(rows: GrammarRows) -> None:
    rows.admit(3, YES_NO, output=[])
    assert next_allowed(rows, 3) == sorted(ids("yn"))
    for token, then in zip(ids("no"), ([2 + ord("o")], [END]), strict=True):
        rows.accept(i32(3), i32(token))
        assert next_allowed(rows, 3) == then
    rows.accept(i32(3), i32(END))
    assert next_allowed(rows, 3) == list(range(N_PADDED)), "a matcher that has ended binds nothing"
    rows.accept(i32(3), i32(77))
    assert next_allowed(rows, 3) == list(range(N_PADDED))


def test_the_mask_says_when_only_the_end_is_left(rows: GrammarRows) -> None:
    rows.admit(0, YES_NO, output=ids("yes"))
    rows.admit(1, YES_NO, output=ids("y"))
    job = rows.begin_step(i32(0, 1))
    assert job is not None
    assert job.wait().ends.tolist() == [True, False]


def test_free_rows_cost_nothing_and_have_no_mask(rows: GrammarRows) -> None:
    rows.admit(0, None, output=[])
    rows.admit(1, Grammar(kind=Grammar.NONE), output=[])
    assert rows.begin_step(i32(0, 1)) is None
    rows.admit(5, YES_NO, output=[])
    job = rows.begin_step(i32(0, 5, 1))
    assert job is not None
    assert job.wait().index.tolist() == [1]


def test_special_and_padding_tokens_are_never_allowed(rows: GrammarRows) -> None:
    rows.admit(0, Grammar(kind=Grammar.REGEX, source="[^a]*"), output=[])
    choices = next_allowed(rows, 0)
    assert START not in choices
    assert END in choices
    assert max(choices) < tokenizer().n_tokens


@pytest.mark.parametrize("cut", [0, 1, 3, 9])
def test_a_replay_ends_in_the_same_place(rows: GrammarRows, cut: int) -> None:
    """As after a preemption or on another replica."""
    rows.admit(0, OBJECT, output=[])
    whole = write(rows, 0, seed=4)
    rows.evict(0)
    rows.admit(7, OBJECT, output=whole[:cut])
    rows.admit(0, OBJECT, output=[])
    for token in whole[:cut]:
        next_allowed(rows, 0)
        rows.accept(i32(0), i32(token))
    assert next_allowed(rows, 7) == next_allowed(rows, 0)


def test_a_replay_over_the_end_leaves_the_row_free(rows: GrammarRows) -> None:
    rows.admit(0, YES_NO, output=[*ids("no"), END, 55, 56])
    assert next_allowed(rows, 0) == list(range(N_PADDED))


def test_a_dead_end_fails_its_row_alone(rows: GrammarRows) -> None:
    nowhere = Grammar(kind=Grammar.EBNF, source='root ::= "a" b\nb ::= b "c"')
    rows.admit(0, nowhere, output=ids("a"))
    rows.admit(1, YES_NO, output=[])
    for _ in range(2):
        job = rows.begin_step(i32(0, 1))
        assert job is not None
        masks = job.wait()
        assert list(masks.errors) == [0]
        assert masks.index.tolist() == [1]
        assert allowed(masks.bits[0]) == sorted(ids("yn"))


def test_a_token_that_does_not_fit_fails_its_row(rows: GrammarRows) -> None:
    rows.admit(0, YES_NO, output=ids("x"))
    job = rows.begin_step(i32(0))
    assert job is not None
    assert "does not allow" in job.wait().errors[0]


def test_a_grammar_that_was_never_prepared_is_compiled_on_the_way(rows: GrammarRows) -> None:
    rows.admit(0, Grammar(kind=Grammar.CHOICE, source='["never seen before"]'), output=[])
    assert text(write(rows, 0, seed=0)) == "never seen before"


def test_a_row_that_is_used_again_forgets(rows: GrammarRows) -> None:
    rows.admit(0, YES_NO, output=ids("n"))
    rows.admit(0, YES_NO, output=[])
    assert next_allowed(rows, 0) == sorted(ids("yn"))
    rows.reset()
    assert rows.begin_step(i32(0)) is None


@pytest.mark.parametrize("seed", range(5))
def test_json_objects(rows: GrammarRows, seed: int) -> None:
    rows.admit(0, OBJECT, output=[])
    assert isinstance(json.loads(text(write(rows, 0, seed=seed))), dict)


def test_white_space_has_an_end(rows: GrammarRows) -> None:
    """A small model would fill its whole answer with line ends."""
    rows.admit(0, OBJECT, output=ids("{" + "\n" * 24))
    assert 2 + ord("\n") not in next_allowed(rows, 0)


def test_choices_of_any_characters(rows: GrammarRows) -> None:
    words = ['a "b" \\ c', "größer\n", "\U0001f600", "]]{}|/*"]
    rows.admit(0, Grammar(kind=Grammar.CHOICE, source=json.dumps(words)), output=[])
    found = set()
    for seed in range(12):
        rows.admit(0, Grammar(kind=Grammar.CHOICE, source=json.dumps(words)), output=[])
        found.add(text(write(rows, 0, seed=seed)))
    assert found <= set(words)
    assert len(found) > 1


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar(kind=Grammar.REGEX, source="[a"), "position 3"),
        (Grammar(kind=Grammar.REGEX, source="(?=a)b"), "Lookahead"),
        (Grammar(kind=Grammar.EBNF, source="root ::= foo"), '"foo" is not defined'),
        (Grammar(kind=Grammar.CHOICE, source="[]"), "at least one"),
        (Grammar(kind=Grammar.CHOICE, source='["a", ""]'), "at least one character"),
        (json_schema('{"type": "foo"}'), 'type "foo"'),
        (json_schema('{"$ref": "#/$defs/x"}'), "$defs"),
        (json_schema("[]"), "object"),
        (json_schema("{"), "Expecting"),
    ],
)
def test_what_can_not_be_compiled_says_why(rows: GrammarRows, grammar: Grammar, message: str) -> None:
    with pytest.raises(ValueError, match=r"^(?!.*[.]cc)") as raised:
        rows.prepare(grammar)
    assert message in str(raised.value)


@pytest.mark.slow
def test_what_compiles_too_long_is_refused_and_the_next_one_is_served() -> None:
    compiler = make_compiler(timeout_s=0.2)
    rows = GrammarRows(compiler)
    rows.prepare(YES_NO)
    many = {f"name{i}": {"type": "string", "pattern": "^([a-z]|[0-9]){1,40}$"} for i in range(20_000)}
    with pytest.raises(ValueError, match="--grammar-timeout-s"):
        rows.prepare(json_schema(json.dumps({"type": "object", "properties": many})))
    rows.prepare(Grammar(kind=Grammar.CHOICE, source='["still", "here"]'))
    rows.close()


@pytest.mark.slow
def test_the_cache_keeps_what_was_used_last(compiler: GrammarCompiler) -> None:
    small = make_compiler(cache_bytes=1)
    one, two = YES_NO, Grammar(kind=Grammar.CHOICE, source='["b"]')
    first = small.submit(one).result()
    assert small.submit(one).result() is first
    small.submit(two).result()
    assert small.submit(one).result() is not first
    assert compiler.submit(one).result() is compiler.submit(one).result()
    small.close()


def test_a_stuck_matcher_fails_its_row_and_the_others_go_on(compiler: GrammarCompiler) -> None:
    rows = GrammarRows(compiler, n_threads=1, timeout_s=0.2)
    never = threading.Event()

    class Stuck:
        def is_terminated(self) -> bool:
            never.wait()
            return False

    for row in (0, 1):
        rows.admit(row, YES_NO, output=[])
    next_allowed(rows, 1)
    rows._rows[0].matcher = Stuck()
    try:
        for expected in ({0, 1}, {0, 1}):
            job = rows.begin_step(i32(0, 1))
            assert job is not None
            masks = job.wait()
            assert masks.errors.keys() <= expected
            assert "not ready within 0.2 s" in masks.errors[0]
        rows.admit(2, YES_NO, output=[])
        assert next_allowed(rows, 2) == sorted(ids("yn"))
    finally:
        never.set()
