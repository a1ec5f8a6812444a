"""Stop strings: found whatever the cuts, never leaked, and nothing held back without need."""

from __future__ import annotations

import random

import pytest

from router.api.stop import StopMatcher


def _run(stops: list[str], pieces: list[str], *, include: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include=include)
    shown = ""
    for piece in pieces:
        shown += matcher.push(piece)
        if matcher.matched is not None:
            return shown, matcher.matched
    return shown + matcher.flush(), None


def _expected(stops: list[str], text: str, *, include: bool) -> tuple[str, str | None]:
    """Letter by letter: the stop that is complete first, the longest of those complete at once."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@pytest.mark.parametrize("include", [False, True])
def test_random_texts_and_cuts(include: bool) -> None:
    draw = random.Random(11)
    for _ in range(5000):
        stops = ["".join(draw.choices("ab", k=draw.randint(1, 4))) for _ in range(draw.randint(1, 3))]
        text = "".join(draw.choices("abc", k=draw.randint(0, 14)))
        pieces, at = [], 0
        while at < len(text):
            size = draw.randint(1, 5)
            pieces.append(text[at : at + size])
            at += size
        assert _run(stops, pieces, include=include) == _expected(stops, text, include=include)


def test_never_shows_the_beginning_of_a_stop() -> None:
    matcher = StopMatcher(["STOP"])
    assert [matcher.push(piece) for piece in ("a S", "T", "O", "x")] == ["a ", "", "", "STOx"]


def test_holds_back_no_more_than_the_possible_stop() -> None:
    matcher = StopMatcher(["\n\n", "User:"])
    assert matcher.push("hello ") == "hello "
    assert matcher.push("worldU") == "world"
    assert matcher.push("p\n") == "Up"
    assert matcher.flush() == "\n"
