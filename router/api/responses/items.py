"""The output items of one response, grown from the deltas of its message."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from router.api.tools.message import MessageDelta

Kind = Literal["reasoning", "message", "function_call"]
_PREFIX = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
Event = dict[str, Any]


@dataclass(slots=True)
class Item:
    kind: Kind
    index: int
    """Its place in the output."""
    name: str = ""
    call_id: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    """Of a message's words, if they were asked for."""
    text: str = ""
    """Words, thoughts, or a call's arguments."""
    status: str = "in_progress"
    id: str = field(init=False)

    def __post_init__(self) -> None:
        self.id = f"{_PREFIX[self.kind]}_{uuid.uuid4().hex}"

    def part(self) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}

    def value(self) -> dict[str, Any]:
        value: dict[str, Any] = {"type": self.kind, "id": self.id, "status": self.status}
        if self.kind == "function_call":
            return value | {"call_id": self.call_id, "name": self.name, "arguments": self.text}
        content = [self.part()] if self.text else []
        if self.kind == "reasoning":
            return value | {"summary": [], "content": content}
        return value | {"role": "assistant", "content": content}


class OutputItems:
    """Only the last item grows; when another kind of part comes, it is done."""

    def __init__(self) -> None:
        self.items: list[Item] = []

    def push(self, delta: MessageDelta, *, logprobs: Sequence[dict[str, Any]] = ()) -> list[Event]:
        """What streams tell of it, without `sequence_number`."""
        events: list[Event] = []
        if delta.reasoning:
            self._grow("reasoning", delta.reasoning, events)
        if delta.content:
            self._grow("message", delta.content, events, logprobs=logprobs)
        for call in delta.calls:
            if call.id is not None:
                self._begin(
                    Item("function_call", len(self.items), name=call.name or "", call_id=call.id), events
                )
            if call.arguments:
                self._grow("function_call", call.arguments, events)
        return events

    def finish(self, *, complete: bool) -> list[Event]:
        """An answer without any part is an empty message."""
        events: list[Event] = []
        if not self.items:
            self._begin(Item("message", 0), events)
        self._end(events, status="completed" if complete else "incomplete")
        return events

    def values(self) -> list[dict[str, Any]]:
        return [item.value() for item in self.items]

    def _grow(
        self, kind: Kind, text: str, events: list[Event], *, logprobs: Sequence[dict[str, Any]] = ()
    ) -> None:
        if not self.items or self.items[-1].kind != kind:
            self._begin(Item(kind, len(self.items)), events)
        item = self.items[-1]
        item.text += text
        place = _place(item)
        if kind == "function_call":
            events.append({"type": "response.function_call_arguments.delta", **place, "delta": text})
        elif kind == "reasoning":
            events.append(
                {"type": "response.reasoning_text.delta", **place, "content_index": 0, "delta": text}
            )
        else:
            event = {"type": "response.output_text.delta", **place, "content_index": 0, "delta": text}
            item.logprobs += logprobs
            events.append(event | {"logprobs": list(logprobs)})

    def _begin(self, item: Item, events: list[Event]) -> None:
        if self.items:
            self._end(events, status="completed")
        self.items.append(item)
        events.append(
            {"type": "response.output_item.added", "output_index": item.index, "item": item.value()}
        )
        if item.kind != "function_call":
            events.append(
                {
                    "type": "response.content_part.added",
                    **_place(item),
                    "content_index": 0,
                    "part": item.part(),
                }
            )

    def _end(self, events: list[Event], *, status: str) -> None:
        item = self.items[-1]
        item.status = status
        place = _place(item)
        if item.kind == "function_call":
            events.append(
                {
                    "type": "response.function_call_arguments.done",
                    **place,
                    "name": item.name,
                    "arguments": item.text,
                }
            )
        else:
            place["content_index"] = 0
            if item.kind == "reasoning":
                events.append({"type": "response.reasoning_text.done", **place, "text": item.text})
            else:
                done = {
                    "type": "response.output_text.done",
                    **place,
                    "text": item.text,
                    "logprobs": item.logprobs,
                }
                events.append(done)
            events.append({"type": "response.content_part.done", **place, "part": item.part()})
        events.append({"type": "response.output_item.done", "output_index": item.index, "item": item.value()})


def _place(item: Item) -> dict[str, Any]:
    return {"item_id": item.id, "output_index": item.index}
