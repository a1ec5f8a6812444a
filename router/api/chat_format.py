"""Chat completions as OpenAI writes them: one object, or chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from router.api.choice import Choice, LogprobEntry
from router.api.exchange import Header
from router.api.job import Job
from router.api.logprobs import TokenNames, chat_logprobs_value
from router.api.sse import DONE
from router.api.version import FINGERPRINT

_encode = msgspec.json.encode


class ChatFormat:
    """Of one job. The unchanging parts of a chunk are encoded once."""

    done = DONE

    def __init__(self, job: Job, *, model: str, names: TokenNames) -> None:
        self._job = job
        self._model = model
        self._names = names
        self._with_logprobs = job.params.sampling.logprobs
        self._continuous = job.params.continuous_usage
        self._with_ids = job.params.return_token_ids
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
        if self._with_logprobs or self._continuous or self._with_ids:
            logprobs = chat_logprobs_value(entries, self._names) if self._with_logprobs else None
            return self._event(choice, {"content": text}, logprobs)
        return self._text_heads[choice.index] + _encode(text) + self._text_tail

    def closing(self, choice: Choice) -> bytes:
        return self._event(choice, {}, None, finish=choice.finish)

    def usage(self) -> bytes:
        return self._head + b'],"usage":' + _encode(self._job.usage()) + b"}\n\n"

    def headers(self) -> Sequence[Header]:
        return ()

    def whole(self) -> bytes:
        """The answer to a request without `stream`."""
        job = self._job
        return _encode(
            {
                "id": job.id,
                "object": "chat.completion",
                "created": job.created,
                "model": self._model,
                "system_fingerprint": FINGERPRINT,
                "choices": [self._whole_choice(choice) for choice in job.choices],
                "usage": job.usage(),
            }
        )

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        text = choice.take()
        entries = choice.take_entries()
        value: dict[str, Any] = {
            "index": choice.index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": chat_logprobs_value(entries, self._names) if self._with_logprobs else None,
            "finish_reason": choice.finish,
        }
        if self._with_ids:
            value["token_ids"] = choice.take_token_ids()
            value["prompt_token_ids"] = self._job.prompt_of(choice).tolist()
        return value

    def _event(
        self,
        choice: Choice,
        delta: dict[str, str],
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
