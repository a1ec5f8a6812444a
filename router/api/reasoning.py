"""Thinking models write `<think>…</think>` before their answer: kept apart from it, and out of reach of stop
strings."""

from __future__ import annotations

from router.api.stop import StopMatcher

BEGIN, END = "<think>", "</think>"


def opens_reasoning(prompt: str) -> bool:
    """Some templates write the opening tag themselves."""
    return prompt.rstrip().endswith(BEGIN)


class ReasoningSplitter:
    """Text in, (reasoning, content) out, the same for any cut into pieces. White space at the part's borders
    belongs to neither."""

    __slots__ = ("_held", "_inside", "_started", "_strip_next")

    def __init__(self, *, inside: bool) -> None:
        self._inside: bool | None = True if inside else None
        """None: nothing but white space was seen so far."""
        self._held = ""
        self._started = False
        self._strip_next = False

    def push(self, piece: str, *, final: bool = False) -> tuple[str, str]:
        text = self._held + piece
        self._held = ""
        if self._inside is None:
            start = text.lstrip()
            if not final and BEGIN.startswith(start):  # the empty text too
                self._held = text
                return "", ""
            self._inside = start.startswith(BEGIN)
            if self._inside:
                text = start[len(BEGIN) :]
        if not self._inside:
            return "", self._content(text, final=final)
        end = text.find(END)
        if end < 0:
            return self._reasoning(text, final=final), ""
        reasoning = self._reasoning(text[:end], final=True)
        self._inside, self._strip_next = False, True
        return reasoning, self._content(text[end + len(END) :], final=final)

    def _reasoning(self, text: str, *, final: bool) -> str:
        if not self._started:
            text = text.lstrip()
            self._started = bool(text)
        if final:
            return text.rstrip()
        certain = len(text) - _n_held(text)
        shown = text[:certain].rstrip()
        self._held = text[len(shown) :]
        return shown

    def _content(self, text: str, *, final: bool) -> str:
        if self._strip_next:
            text = text.lstrip()
            self._strip_next = not text
        return text


class ReasoningCounter:
    """How many tokens of an answer are thoughts, the tags' own included."""

    __slots__ = ("_n_unknown", "_seen", "_state", "n_tokens")

    def __init__(self, *, inside: bool) -> None:
        self.n_tokens = 0
        self._state = "inside" if inside else "unknown"
        self._n_unknown = 0
        """Tokens that are thoughts if a tag follows."""
        self._seen = ""

    def push(self, text: str) -> None:
        """Of one token; may be empty."""
        if self._state == "answer":
            return
        self._seen += text
        if self._state == "unknown":
            self._n_unknown += 1
            start = self._seen.lstrip()
            if not start.startswith(BEGIN):
                if not BEGIN.startswith(start):
                    self._state = "answer"
                return
            self._state, self.n_tokens = "inside", self._n_unknown
            self._seen = start[len(BEGIN) :]
        else:
            self.n_tokens += 1
        if END in self._seen:
            self._state = "answer"
        self._seen = self._seen[-len(END) :]


class ReasoningStop:
    """A StopMatcher that looks at the answer alone, not at the thoughts before it."""

    __slots__ = ("_inner", "_seen", "_state")

    def __init__(self, inner: StopMatcher, *, inside: bool) -> None:
        self._inner = inner
        self._state = "inside" if inside else "unknown"
        self._seen = ""
        """What may be the beginning of a tag. Inside the thoughts it was let through already."""

    @property
    def matched(self) -> str | None:
        return self._inner.matched

    @property
    def n_held(self) -> int:
        held = len(self._seen) if self._state == "unknown" else 0
        return held + self._inner.n_held

    def push(self, piece: str) -> str:
        if self._state == "answer":
            return self._inner.push(piece)
        if self._state == "unknown":
            self._seen += piece
            start = self._seen.lstrip()
            if BEGIN.startswith(start):
                return ""
            text, self._seen = self._seen, ""
            if not start.startswith(BEGIN):
                self._state = "answer"
                return self._inner.push(text)
            self._state = "inside"
            return self._thought(text)
        return self._thought(piece)

    def flush(self) -> str:
        held = self._seen if self._state == "unknown" else ""
        self._seen = ""
        return held + self._inner.flush()

    def _thought(self, piece: str) -> str:
        text = self._seen + piece
        end = text.find(END)
        if end < 0:
            self._seen = text[len(text) - _n_held(text) :]
            return piece
        self._state = "answer"
        after = end + len(END) - len(self._seen)
        self._seen = ""
        return piece[:after] + self._inner.push(piece[after:])


def _n_held(text: str) -> int:
    for n in range(min(len(END) - 1, len(text)), 0, -1):
        if END.startswith(text[-n:]):
            return n
    return 0
