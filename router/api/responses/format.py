"""Responses as OpenAI writes them: one object, or typed events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from checkpoint.tokenizer import Tokenizer
from router.api.choice import Choice, LogprobEntry
from router.api.exchange import Header
from router.api.job import Job
from router.api.responses.items import Event, OutputItems
from router.api.responses.schema import ResponsesRequest
from router.api.tools.message import MessageReader, MessageRules

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
        tokenizer: Tokenizer,
    ) -> None:
        self._job = job
        self._request = request
        self._model = model
        self._tokenizer = tokenizer
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
        return self._events(self._output.push(self._reader.push(text)))

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
        self._output.push(self._reader.push(choice.take()))
        self._finish(choice)
        return _encode(self._response(_status(choice)))

    def _finish(self, choice: Choice) -> list[Event]:
        events = self._output.push(self._reader.push("", final=True))
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
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None if status == "in_progress" else self._usage(),
            "user": request.user,
        }

    def _n_reasoning_tokens(self) -> int:
        """Of the thoughts as text: counted again, since their tokens are not told apart."""
        thoughts = [item.text for item in self._output.items if item.kind == "reasoning"]
        return sum(len(self._tokenizer.encode(text, special=False)) for text in thoughts)

    def _usage(self) -> dict[str, Any]:
        usage = self._job.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._n_reasoning_tokens()},
            "total_tokens": usage["total_tokens"],
        }


def _status(choice: Choice) -> str:
    return "completed" if choice.finish == "stop" else "incomplete"
