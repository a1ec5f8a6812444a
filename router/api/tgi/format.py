"""Answers as TGI writes them: one object with details, or an event for each token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from router.api.choice import Choice, LogprobEntry
from router.api.exchange import Header
from router.api.job import Job
from router.api.logprobs import TokenNames, mean_logprob
from router.api.prompt_logprobs import prompt_scores

_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the answer holds."""

    details: bool = False
    prefill: bool = False
    top_n: int = 0
    prefix: str = ""
    """Put before the generated text (`return_full_text`)."""
    as_list: bool = False
    """`/` answers with a list of one."""
    n_input_chars: int = 0
    sampled: bool = False


class GenerateFormat:
    """Of one job. The tokens' texts join to the generated text; what a stop string cuts off is empty."""

    done = b""

    def __init__(
        self,
        job: Job,
        *,
        wanted: Wanted,
        names: TokenNames,
        special_ids: frozenset[int],
        arrived_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._job = job
        self._wanted = wanted
        self._names = names
        self._special_ids = special_ids
        self._arrived_s = arrived_s
        self._clock = clock
        self._text = ""
        self._n_told = 0
        self._last: LogprobEntry | None = None

    # ---- streamed: one choice ----

    def opening(self, choice: Choice) -> bytes:
        return b""

    def delta(self, choice: Choice, text: str, entries: list[LogprobEntry]) -> bytes:
        """The last token waits for `closing`: its event tells the whole text."""
        self._text += text
        if choice.finish is not None and entries:
            self._last = entries.pop()
        return b"".join(self._event(entry) for entry in entries)

    def closing(self, choice: Choice) -> bytes:
        if self._last is None:
            return b""
        details = None
        if self._wanted.details:
            details = {
                "finish_reason": _finish_reason(choice),
                "generated_tokens": choice.n_tokens,
                "seed": self._seed(choice),
                "input_length": self._job.n_prompt_tokens,
            }
        return self._event(self._last, whole=self._wanted.prefix + self._text, details=details)

    def usage(self) -> bytes:
        return b""

    def _event(
        self, entry: LogprobEntry, *, whole: str | None = None, details: dict[str, Any] | None = None
    ) -> bytes:
        self._n_told += 1
        value: dict[str, Any] = {"index": self._n_told, "token": self._token(entry, self._text)}
        if self._wanted.top_n:
            value["top_tokens"] = self._top_tokens(entry)
        value["generated_text"] = whole
        value["details"] = details
        return b"data: " + _encode(value) + b"\n\n"

    # ---- as a whole ----

    def whole(self) -> bytes:
        answers = [(choice, choice.take(), choice.take_entries()) for choice in self._job.choices]
        if len(answers) > 1:
            answers.sort(key=lambda answer: mean_logprob(answer[2]), reverse=True)
        best = answers[0]
        value: dict[str, Any] = {"generated_text": self._wanted.prefix + best[1]}
        if self._wanted.details:
            value["details"] = self._details(*best)
            if len(answers) > 1:
                value["details"]["best_of_sequences"] = [
                    {"generated_text": self._wanted.prefix + answer[1]} | self._details(*answer)
                    for answer in answers[1:]
                ]
        return _encode([value] if self._wanted.as_list else value)

    def headers(self) -> Sequence[Header]:
        """TGI's, in its units: seconds for the compute time, milliseconds for the others."""
        job, now = self._job, self._clock()
        n_tokens = job.n_output_tokens
        total_s = now - self._arrived_s
        queue_s = max(choice.queue_s for choice in job.choices)
        inference_s = max(0.0, now - job.submitted_s - queue_s)
        values = {
            "x-compute-time": f"{total_s:.6f}",
            "x-compute-characters": str(self._wanted.n_input_chars),
            "x-total-time": _ms(total_s),
            "x-validation-time": _ms(job.submitted_s - self._arrived_s),
            "x-queue-time": _ms(queue_s),
            "x-inference-time": _ms(inference_s),
            "x-time-per-token": _ms(inference_s / max(1, n_tokens)),
            "x-prompt-tokens": str(job.n_prompt_tokens),
            "x-generated-tokens": str(n_tokens),
        }
        return [(name.encode(), value.encode()) for name, value in values.items()]

    def _details(self, choice: Choice, text: str, entries: list[LogprobEntry]) -> dict[str, Any]:
        value: dict[str, Any] = {
            "finish_reason": _finish_reason(choice),
            "generated_tokens": choice.n_tokens,
            "seed": self._seed(choice),
            "prefill": self._prefill(choice) if self._wanted.prefill else [],
            "tokens": [self._token(entry, text) for entry in entries],
        }
        if self._wanted.top_n:
            value["top_tokens"] = [self._top_tokens(entry) for entry in entries]
        return value

    def _prefill(self, choice: Choice) -> list[dict[str, Any]]:
        scores = prompt_scores(self._job.prompt_of(choice), choice.prompt_logprobs)
        return [
            {"id": token, "text": self._names.text(token), "logprob": value}
            for token, value in zip(scores.prompt.tolist(), scores.chosen, strict=True)
        ]

    # ---- both ----

    def _seed(self, choice: Choice) -> int | None:
        if not self._wanted.sampled:
            return None
        return self._job.params.sampling_of(choice.index).seed

    def _token(self, entry: LogprobEntry, text: str) -> dict[str, Any]:
        special = entry.token in self._special_ids
        shown = self._names.text(entry.token) if special else text[entry.offset : entry.end]
        return {"id": entry.token, "text": shown, "logprob": entry.chosen, "special": special}

    def _top_tokens(self, entry: LogprobEntry) -> list[dict[str, Any]]:
        ids = np.frombuffer(entry.top_ids, dtype="<i4").tolist()
        values = np.frombuffer(entry.top_values, dtype="<f4").tolist()
        return [
            {
                "id": token,
                "text": self._names.text(token),
                "logprob": value,
                "special": token in self._special_ids,
            }
            for token, value in zip(ids, values, strict=True)
        ]


def _finish_reason(choice: Choice) -> str:
    if choice.finish == "length":
        return "length"
    return "eos_token" if choice.matched_stop is None else "stop_sequence"


def _ms(seconds: float) -> str:
    return str(round(seconds * 1000))
