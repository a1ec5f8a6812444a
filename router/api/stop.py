"""Stop strings in a stream of text: none of one is ever let through, and nothing else is held back longer
than needed."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Looks for the stop string that is complete first; of two complete at once the longer wins. The outcome
    does not depend on how the text was cut into pieces."""

    __slots__ = ("_first_chars", "_held", "_include", "_longest", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """`include`: the stop string itself is part of the text."""
        self._stops = tuple(stops)
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._longest = max(len(stop) for stop in stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    @property
    def n_held(self) -> int:
        """Characters that wait for what follows them."""
        return len(self._held)

    def push(self, piece: str) -> str:
        """Returns the text that is safe to show. Once `matched` is set the text has ended."""
        text = self._held + piece if self._held else piece
        best_end, best_start = len(text) + 1, 0
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (start + len(stop), start) < (best_end, best_start):
                best_end, best_start, self.matched = start + len(stop), start, stop
        if self.matched is not None:
            self._held = ""
            return text[: best_end if self._include else best_start]
        cut = self._start_of_possible_stop(text)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """The text ended by itself: what was held back is text after all."""
        held, self._held = self._held, ""
        return held

    def _start_of_possible_stop(self, text: str) -> int:
        for i in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[i] in self._first_chars:
                tail = text[i:]
                if any(stop.startswith(tail) for stop in self._stops):
                    return i
        return len(text)
