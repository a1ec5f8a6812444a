"""Chat completions as OpenAI writes them: one object, or chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from router.api.choice import Choice, LogprobEntry
from router.api.exchange import Header
from router.api.job import Job
from router.api.logprobs import TokenNames, chat_logprobs_value
from router.api.prompt_logprobs import prompt_scores
from router.api.sse import DONE
from router.api.tools.message import MessageDelta, MessageReader, MessageRules, read_message
from router.api.version import FINGERPRINT

_encode = msgspec.json.encode


class ChatFormat:
    """Of one job. The unchanging parts of a chunk are encoded once."""

    done = DONE

    def __init__(self, job: Job, *, model: str, names: TokenNames, rules: MessageRules) -> None:
        self._job = job
        self._model = model
        self._names = names
        self._with_logprobs = job.params.sampling.logprobs
        self._continuous = job.params.continuous_usage
        self._with_ids = job.params.return_token_ids
        self._rules = rules
        reads = rules.splits_reasoning or rules.parse is not None
        self._readers = [MessageReader(rules) for _ in job.choices] if reads else None
        self._untold: dict[int, list[LogprobEntry]] = {}
        """Logprobs of tokens whose text no event has told yet, by choice."""
        head = _encode(
            {
                "id": job.id,
                "object": "chat.completion.chunk",
                "created": job.created,
                "model": model,
                "system_fingerprint": FINGERPRINT,
            }
        )
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if job.params.include_usage else b"]}\n\n"
        self._text_heads = [
            b'%b{"index":%d,"delta":{"content":' % (self._head, choice.index) for choice in job.choices
        ]
        self._text_tail = b'},"logprobs":null,"finish_reason":null}' + self._tail

    def opening(self, choice: Choice) -> bytes:
        delta = {"role": "assistant", "content": ""}
        return self._event(choice, delta, None)

    def delta(self, choice: Choice, text: str, entries: list[LogprobEntry]) -> bytes:
        if self._readers is not None:
            return self._parts(choice, self._readers[choice.index].push(text), entries)
        if self._with_logprobs or self._continuous or self._with_ids:
            logprobs = chat_logprobs_value(entries, self._names) if self._with_logprobs else None
            return self._event(choice, {"content": text}, logprobs)
        return self._text_heads[choice.index] + _encode(text) + self._text_tail

    def closing(self, choice: Choice) -> bytes:
        if self._readers is None:
            return self._event(choice, {}, None, finish=choice.finish)
        reader = self._readers[choice.index]
        last = self._parts(choice, reader.push("", final=True), [], final=True)
        return last + self._event(choice, {}, None, finish=self._finish_reason(choice, reader.n_calls))

    def usage(self) -> bytes:
        return self._head + b'],"usage":' + _encode(self._job.usage()) + b"}\n\n"

    def headers(self) -> Sequence[Header]:
        return ()

    def whole(self) -> bytes:
        """The answer to a request without `stream`."""
        job = self._job
        value: dict[str, Any] = {
            "id": job.id,
            "object": "chat.completion",
            "created": job.created,
            "model": self._model,
            "system_fingerprint": FINGERPRINT,
            "choices": [self._whole_choice(choice) for choice in job.choices],
            "usage": job.usage(),
        }
        if job.params.sampling.prompt_logprobs:
            scores = prompt_scores(job.prompts[0], job.choices[0].prompt_logprobs)
            value["prompt_logprobs"] = scores.as_objects(self._names)
        return _encode(value)

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        message, n_calls = read_message(self._rules, choice.take())
        entries = choice.take_entries()
        value: dict[str, Any] = {
            "index": choice.index,
            "message": message,
            "logprobs": chat_logprobs_value(entries, self._names) if self._with_logprobs else None,
            "finish_reason": self._finish_reason(choice, n_calls),
        }
        if self._with_ids:
            value["token_ids"] = choice.take_token_ids()
            value["prompt_token_ids"] = self._job.prompt_of(choice).tolist()
        return value

    def _finish_reason(self, choice: Choice, n_calls: int) -> str | None:
        if n_calls and choice.finish == "stop" and self._rules.tells_calls:
            return "function_call" if self._rules.legacy else "tool_calls"
        return choice.finish

    def _parts(
        self, choice: Choice, delta: MessageDelta, entries: list[LogprobEntry], *, final: bool = False
    ) -> bytes:
        """An event for each part. Logprobs go with the first text that comes after them."""
        untold = [*self._untold.pop(choice.index, ()), *entries]
        values = delta.as_values(legacy=self._rules.legacy)
        if not values and untold and final:
            values = [{"content": ""}]
        if not values:
            self._untold[choice.index] = untold
            return b""
        logprobs = chat_logprobs_value(untold, self._names) if self._with_logprobs else None
        first = self._event(choice, values[0], logprobs)
        return first + b"".join(self._event(choice, value, None) for value in values[1:])

    def _event(
        self,
        choice: Choice,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None,
        *,
        finish: str | None = None,
    ) -> bytes:
        value: dict[str, Any] = {
            "index": choice.index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish,
        }
        if self._with_ids:
            value["token_ids"] = choice.take_token_ids()
        if self._continuous:
            return self._head + _encode(value) + b'],"usage":' + _encode(self._job.usage()) + b"}\n\n"
        return self._head + _encode(value) + self._tail
