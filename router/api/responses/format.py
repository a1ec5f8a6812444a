"""Responses as OpenAI writes them: one object, or typed events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from router.api.choice import Choice, LogprobEntry
from router.api.exchange import Header
from router.api.job import Job
from router.api.logprobs import TokenNames, chat_logprobs_value, pieces
from router.api.responses.items import Event, OutputItems
from router.api.responses.schema import ResponsesRequest
from router.api.tools.message import MessageDelta, MessageReader, MessageRules

_encode = msgspec.json.encode


class ResponseFormat:
    """Of one job with one choice."""

    done = b""

    def __init__(
        self,
        job: Job,
        *,
        request: ResponsesRequest,
        model: str,
        rules: MessageRules,
        names: TokenNames,
    ) -> None:
        self._job = job
        self._request = request
        self._model = model
        self._names = names
        self._with_logprobs = job.params.sampling.logprobs
        self._untold: list[LogprobEntry] = []
        """Logprobs of tokens whose text no part has told yet."""
        self._n_entries = 0
        self._reader = MessageReader(rules)
        self._output = OutputItems()
        self._n_events = 0

    def opening(self, choice: Choice) -> bytes:
        response = self._response("in_progress")
        return self._events(
            [
                {"type": "response.created", "response": response},
                {"type": "response.in_progress", "response": response},
            ]
        )

    def delta(self, choice: Choice, text: str, entries: list[LogprobEntry]) -> bytes:
        return self._events(self._push(choice, text, entries))

    def closing(self, choice: Choice) -> bytes:
        events = self._finish(choice)
        status = _status(choice)
        events.append({"type": f"response.{status}", "response": self._response(status)})
        return self._events(events)

    def usage(self) -> bytes:
        return b""

    def headers(self) -> Sequence[Header]:
        return ()

    def whole(self) -> bytes:
        (choice,) = self._job.choices
        text = choice.take()
        self._push(choice, text, choice.take_entries())
        self._finish(choice)
        return _encode(self._response(_status(choice)))

    def _push(self, choice: Choice, text: str, entries: Sequence[LogprobEntry]) -> list[Event]:
        if not self._with_logprobs:
            return self._output.push(self._reader.push(text))
        events: list[Event] = []
        for piece, entry in pieces(text, entries, end=choice.n_emitted):
            if entry is not None:
                self._n_entries += 1
                if self._n_entries > choice.n_reasoning_tokens:
                    self._untold.append(entry)
            events += self._tell(self._reader.push(piece))
        return events

    def _tell(self, delta: MessageDelta, *, final: bool = False) -> list[Event]:
        """Logprobs go with the words that come next; those of thoughts and calls go with nothing."""
        if not (delta.content or delta.reasoning or delta.calls or final):
            return []
        told = chat_logprobs_value(self._untold, self._names)["content"] if delta.content else []
        self._untold = []
        return self._output.push(delta, logprobs=told)

    def _finish(self, choice: Choice) -> list[Event]:
        events = self._tell(self._reader.push("", final=True), final=True)
        return events + self._output.finish(complete=choice.finish == "stop")

    def _events(self, events: Sequence[Event]) -> bytes:
        parts: list[bytes] = []
        for event in events:
            numbered = {**event, "sequence_number": self._n_events}
            self._n_events += 1
            parts.append(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), _encode(numbered)))
        return b"".join(parts)

    def _response(self, status: str) -> dict[str, Any]:
        request, job = self._request, self._job
        sampling = job.params.sampling
        text = request.text
        return {
            "id": job.id,
            "object": "response",
            "created_at": job.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self._model,
            "output": self._output.values(),
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": request.reasoning or {"effort": None, "summary": None},
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"} if text is None or text.format is None else text.format},
            "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
            "tools": request.tools or [],
            "top_logprobs": sampling.top_logprobs,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None if status == "in_progress" else self._usage(),
            "user": request.user,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._job.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }


def _status(choice: Choice) -> str:
    return "completed" if choice.finish == "stop" else "incomplete"
