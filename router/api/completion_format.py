"""Text completions as OpenAI writes them: one object, or chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from router.api.choice import Choice, LogprobEntry
from router.api.exchange import Header
from router.api.job import Job
from router.api.logprobs import TokenNames, completion_logprobs_value, mean_logprob
from router.api.prompt_logprobs import PromptScores, prompt_scores
from router.api.sse import DONE
from router.api.version import FINGERPRINT

_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompts as text, put before each of their choices."""

    texts: Sequence[str]


class CompletionFormat:
    """Of one job. The unchanging parts of a chunk are encoded once."""

    done = DONE

    def __init__(
        self, job: Job, *, model: str, names: TokenNames, echo: Echo | None, with_logprobs: bool
    ) -> None:
        self._job = job
        self._model = model
        self._names = names
        self._echo = echo
        self._with_logprobs = with_logprobs
        self._continuous = job.params.continuous_usage
        self._with_ids = job.params.return_token_ids
        head = _encode(
            {
                "id": job.id,
                "object": "text_completion",
                "created": job.created,
                "model": model,
                "system_fingerprint": FINGERPRINT,
            }
        )
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if job.params.include_usage else b"]}\n\n"
        self._text_heads = [b'%b{"index":%d,"text":' % (self._head, choice.index) for choice in job.choices]
        self._text_tail = b',"logprobs":null,"finish_reason":null}' + self._tail

    def opening(self, choice: Choice) -> bytes:
        if self._echo is None:
            return b""
        logprobs = self._echoed_logprobs(choice) if self._with_logprobs else None
        return self._event(choice, self._echoed(choice), logprobs)

    def delta(self, choice: Choice, text: str, entries: list[LogprobEntry]) -> bytes:
        if self._with_logprobs or self._continuous or self._with_ids:
            return self._event(choice, text, self._logprobs(choice, entries))
        return self._text_heads[choice.index] + _encode(text) + self._text_tail

    def closing(self, choice: Choice) -> bytes:
        return self._event(choice, "", None, finish=choice.finish)

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
                "object": "text_completion",
                "created": job.created,
                "model": self._model,
                "system_fingerprint": FINGERPRINT,
                "choices": self._whole_choices(),
                "usage": job.usage(),
            }
        )

    def _whole_choices(self) -> list[dict[str, Any]]:
        """Of each prompt the best ones, counted through."""
        params = self._job.params
        answers = [(choice, choice.take(), choice.take_entries()) for choice in self._job.choices]
        values: list[dict[str, Any]] = []
        for first in range(0, len(answers), params.n):
            group = answers[first : first + params.n]
            if params.n_returned < params.n:
                group.sort(key=lambda answer: mean_logprob(answer[2]), reverse=True)
            for answer in group[: params.n_returned]:
                values.append(self._whole_choice(*answer) | {"index": len(values)})
        return values

    def _whole_choice(self, choice: Choice, text: str, entries: list[LogprobEntry]) -> dict[str, Any]:
        logprobs = self._logprobs(choice, entries)
        if self._echo is not None:
            text = self._echoed(choice) + text
            if logprobs is not None:
                echoed = self._echoed_logprobs(choice)
                logprobs = {name: echoed[name] + values for name, values in logprobs.items()}
        value = {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": choice.finish}
        if self._job.params.sampling.prompt_logprobs and self._echo is None:
            value["prompt_logprobs"] = self._scores(choice).as_objects(self._names)
        if self._with_ids:
            value["token_ids"] = choice.take_token_ids()
            value["prompt_token_ids"] = self._job.prompt_of(choice).tolist()
        return value

    def _logprobs(self, choice: Choice, entries: list[LogprobEntry]) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        return completion_logprobs_value(entries, self._names, offset=len(self._echoed(choice)))

    def _echoed(self, choice: Choice) -> str:
        return "" if self._echo is None else self._echo.texts[choice.index // self._job.params.n]

    def _scores(self, choice: Choice) -> PromptScores:
        return prompt_scores(self._job.prompt_of(choice), choice.prompt_logprobs)

    def _echoed_logprobs(self, choice: Choice) -> dict[str, list[Any]]:
        return self._scores(choice).as_lists(self._names)

    def _event(
        self, choice: Choice, text: str, logprobs: dict[str, Any] | None, *, finish: str | None = None
    ) -> bytes:
        value = {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        if self._with_ids:
            value["token_ids"] = choice.take_token_ids()
        if self._continuous:
            return self._head + _encode(value) + b'],"usage":' + _encode(self._job.usage()) + b"}\n\n"
        return self._head + _encode(value) + self._tail
