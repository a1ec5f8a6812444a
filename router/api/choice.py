"""One choice of an answer: tokens come in, exact text and logprobs come out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from router.api.detokenize import Detokenizer
from router.api.reasoning import ReasoningCounter, ReasoningStop
from router.api.stop import StopMatcher
from router.ipc.messages import ErrorInfo, Failed, FinishReason, PromptLogprob, Started

_FINISH_NAMES: dict[int, str] = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class LogprobEntry(NamedTuple):
    """One output token's raw logprobs."""

    token: int
    offset: int
    """Characters of this choice's text before the token's own."""
    end: int
    """The same with the token's own, which may reach beyond a stop string that ends the text."""
    chosen: float
    top_ids: bytes
    """i32[], most likely first."""
    top_values: bytes
    """f32[]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceOptions:
    """How tokens become text; the same for all choices of a request."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    logprobs: bool = False
    every_token: bool = False
    """An entry for each token, also for those that show no text, handed out once its text is certain. Needs
    `logprobs`."""
    token_ids: bool = False
    """Keep the ids of the output for the client."""
    splits_reasoning: bool = False
    """Stop strings are looked for only after the thoughts, if there are any."""
    starts_in_reasoning: bool = False
    min_tokens: int = 0
    """Stop strings are looked for only in the text after so many tokens."""


def _stop_matcher(options: ChoiceOptions) -> StopMatcher | ReasoningStop | None:
    if not options.stops:
        return None
    matcher = StopMatcher(options.stops, include=options.include_stop)
    if options.splits_reasoning:
        return ReasoningStop(matcher, inside=options.starts_in_reasoning)
    return matcher


class Choice:
    """A TokenSink. Owns the text that is not yet written; never writes itself: `notify` is called after each
    event, and the owner takes what is there when it suits."""

    __slots__ = (
        "_cut",
        "_detokenizer",
        "_notify",
        "_options",
        "_reasoning",
        "_stop",
        "cached_tokens",
        "ended",
        "entries",
        "error",
        "finish",
        "id",
        "index",
        "n_emitted",
        "n_tokens",
        "pending",
        "prompt_logprobs",
        "queue_s",
        "started",
        "stopped_early",
        "token_ids",
    )

    def __init__(
        self,
        *,
        id: int,
        index: int,
        detokenizer: Detokenizer,
        options: ChoiceOptions,
        notify: Callable[[Choice], None],
    ) -> None:
        self.id = id
        self.index = index
        self._detokenizer = detokenizer
        self._options = options
        self._notify = notify
        self._stop = _stop_matcher(options)
        self._reasoning = (
            ReasoningCounter(inside=options.starts_in_reasoning) if options.splits_reasoning else None
        )
        self._cut = False
        self.pending = ""
        """Text that nobody has taken yet; grows while the client is slow, at most to the answer's length."""
        self.n_emitted = 0
        """Characters taken so far."""
        self.n_tokens = 0
        """Tokens generated, those that show no text included."""
        self.entries: list[LogprobEntry] = []
        self.token_ids: list[int] = []
        self.prompt_logprobs: list[PromptLogprob] = []
        self.finish: str | None = None
        self.error: ErrorInfo | None = None
        self.ended = False
        self.stopped_early = False
        """Ended here, by a stop string, while the scheduler still runs it: it must be cancelled."""
        self.started = False
        self.cached_tokens = 0
        self.queue_s = 0.0

    # ---- TokenSink ----

    def on_started(self, started: Started) -> None:
        if not self.started:
            self.started = True
            self.cached_tokens = started.cached_tokens
            self.queue_s = started.queue_s

    def on_token(self, token: int, reason: int, logprob: tuple[float, bytes, bytes] | None) -> None:
        if self.ended:
            return
        self.n_tokens += 1
        if self._options.token_ids:
            self.token_ids.append(token)
        # The token that stops an answer is no part of its text, unless the request wants it.
        hidden = reason == FinishReason.STOP and not self._options.include_stop
        if not hidden:
            self._take_token(token, logprob)
        elif self._options.every_token and logprob is not None:
            at = self._n_chars
            self.entries.append(LogprobEntry(token, at, at, *logprob))
        if reason and not self.ended:
            self._finish(_FINISH_NAMES.get(reason, "stop"))
        self._notify(self)

    def on_prompt_logprobs(self, part: PromptLogprob) -> None:
        self.prompt_logprobs.append(part)

    def on_failed(self, failed: Failed) -> None:
        if not self.ended:
            self.ended = True
            self.error = failed.error
            self._notify(self)

    # ---- owner ----

    def take(self) -> str:
        """The text since the last call."""
        text, self.pending = self.pending, ""
        self.n_emitted += len(text)
        return text

    @property
    def n_reasoning_tokens(self) -> int:
        return 0 if self._reasoning is None else self._reasoning.n_tokens

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the text."""
        return None if self._stop is None else self._stop.matched

    def take_entries(self) -> list[LogprobEntry]:
        """Logprobs of the tokens whose text was taken, in order. At the end all that belong to the text."""
        entries, shown = self.entries, self.n_emitted
        every_token = self._options.every_token
        if self.ended:
            self.entries = []
            if every_token or not self._cut:
                return entries
            return [entry for entry in entries if entry.offset < shown]
        n = 0
        while n < len(entries) and (entries[n].end <= shown if every_token else entries[n].offset < shown):
            n += 1
        self.entries = entries[n:]
        return entries[:n]

    def take_token_ids(self) -> list[int]:
        """The ids since the last call, that of a token that ended the answer included."""
        ids, self.token_ids = self.token_ids, []
        return ids

    # ---- inside ----

    @property
    def _n_chars(self) -> int:
        """Characters of the text so far, those that nobody may see yet included."""
        held = 0 if self._stop is None else self._stop.n_held
        return self.n_emitted + len(self.pending) + held

    def _take_token(self, token: int, logprob: tuple[float, bytes, bytes] | None) -> None:
        text = self._detokenizer.push(token)
        if self._reasoning is not None:
            self._reasoning.push(text)
        if logprob is not None and self._options.logprobs:
            at = self._n_chars
            self.entries.append(LogprobEntry(token, at, at + len(text), *logprob))
        if not text:
            return
        stop = self._stop
        if stop is None or self.n_tokens <= self._options.min_tokens:
            self.pending += text
            return
        self.pending += stop.push(text)
        if stop.matched is not None:
            self._cut = not self._options.include_stop
            self.ended = self.stopped_early = True
            self.finish = "stop"

    def _finish(self, name: str) -> None:
        if self._stop is not None:
            self.pending += self._stop.flush()
        self.ended = True
        self.finish = name
