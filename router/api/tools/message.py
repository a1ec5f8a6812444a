"""The parts of an assistant's message: thoughts, words and calls, out of the text of one choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from router.api.reasoning import ReasoningSplitter
from router.api.tools.parsed import Call, Parse

_STEPS = 256
"""An unfinished call is read again when it has grown by this part: the whole stays linear."""


@dataclass(slots=True)
class CallDelta:
    index: int
    arguments: str
    id: str | None = None
    """Set, like the name, in the call's first delta."""
    name: str | None = None

    def as_value(self) -> dict[str, Any]:
        if self.id is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        return {"index": self.index, **self.as_call()}

    def as_call(self) -> dict[str, Any]:
        """Of a whole answer."""
        return {"id": self.id, "type": "function", "function": self.as_function()}

    def as_function(self) -> dict[str, Any]:
        if self.id is None:
            return {"arguments": self.arguments}
        return {"name": self.name, "arguments": self.arguments}


@dataclass(slots=True)
class MessageDelta:
    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def as_values(self, *, legacy: bool) -> list[dict[str, Any]]:
        """OpenAI's `delta` objects, one kind of part in each."""
        values: list[dict[str, Any]] = []
        if self.reasoning:
            values.append({"reasoning_content": self.reasoning})
        if self.content:
            values.append({"content": self.content})
        if legacy:
            values += [{"function_call": call.as_function()} for call in self.calls]
        else:
            values += [{"tool_calls": [call.as_value()]} for call in self.calls]
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageRules:
    """How the messages of a request are read; the same for all its choices."""

    splits_reasoning: bool = False
    starts_in_reasoning: bool = False
    parse: Parse | None = None
    """None: no calls are looked for."""
    names: frozenset[str] = frozenset()
    new_id: Callable[[], str] = str
    max_calls: int | None = None
    """Further calls are dropped (`parallel_tool_calls` false)."""
    tells_calls: bool = True
    """A message with calls ends with `tool_calls`; not when the one function was named by the request."""
    legacy: bool = False
    """Answer with `function_call`, as a request with `functions` expects."""


class MessageReader:
    """Of one choice. The joined deltas do not depend on how the text was cut into pieces."""

    __slots__ = ("_fresh", "_n_settled", "_read_at", "_rules", "_sent", "_splitter", "_text")

    def __init__(self, rules: MessageRules) -> None:
        self._rules = rules
        self._splitter = (
            ReasoningSplitter(inside=rules.starts_in_reasoning) if rules.splits_reasoning else None
        )
        self._text = ""
        """Not settled yet."""
        self._read_at = 0
        """The length of text from which reading it again is worth while."""
        self._fresh = True
        self._n_settled = 0
        self._sent: list[int] = []
        """Characters of arguments told for each call that is not settled."""

    @property
    def n_calls(self) -> int:
        """Told so far."""
        n = self._n_settled + len(self._sent)
        limit = self._rules.max_calls
        return n if limit is None else min(n, limit)

    def push(self, piece: str, *, final: bool = False) -> MessageDelta:
        delta = MessageDelta()
        if self._splitter is not None:
            delta.reasoning, piece = self._splitter.push(piece, final=final)
        if self._rules.parse is None:
            delta.content = piece
            return delta
        self._text += piece
        if final or len(self._text) >= self._read_at:
            self._parse(self._rules.parse, delta, final=final)
        return delta

    def _parse(self, parse: Parse, delta: MessageDelta, *, final: bool) -> None:
        parsed = parse(self._text, names=self._rules.names, fresh=self._fresh, final=final)
        delta.content = parsed.content
        if parsed.content:
            self._fresh = False
        self._tell((*parsed.calls, *parsed.open), delta)
        settled = len(parsed.calls)
        self._n_settled += settled
        del self._sent[:settled]
        self._text = self._text[parsed.rest :]
        self._read_at = len(self._text) + max(1, len(self._text) // _STEPS)
        if final and self.n_calls:
            delta.content = delta.content.rstrip()

    def _tell(self, calls: Sequence[Call], delta: MessageDelta) -> None:
        limit = self._rules.max_calls
        for i, call in enumerate(calls):
            index = self._n_settled + i
            if limit is not None and index >= limit:
                self._sent += [0] * (len(calls) - len(self._sent))
                return
            if i == len(self._sent):
                self._sent.append(len(call.arguments))
                delta.calls.append(CallDelta(index, call.arguments, id=self._rules.new_id(), name=call.name))
            elif len(call.arguments) > self._sent[i]:
                delta.calls.append(CallDelta(index, call.arguments[self._sent[i] :]))
                self._sent[i] = len(call.arguments)


def read_message(rules: MessageRules, text: str) -> tuple[dict[str, Any], int]:
    """OpenAI's `message` of a whole answer, and the number of its calls."""
    reader = MessageReader(rules)
    delta = reader.push(text, final=True)
    value: dict[str, Any] = {"role": "assistant", "content": delta.content, "refusal": None}
    if rules.splits_reasoning and delta.reasoning:
        value["reasoning_content"] = delta.reasoning
    if delta.calls:
        value["content"] = delta.content or None
        if rules.legacy:
            value["function_call"] = delta.calls[0].as_function()
        else:
            value["tool_calls"] = [call.as_call() for call in delta.calls]
    return value, len(delta.calls)
