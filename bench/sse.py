"""From the bytes of a streamed answer to its events. Runs after a measurement, never during it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from bench.measures import RequestRecord

Segment = tuple[float, bytes]
"""When some bytes arrived, and the bytes."""


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class Choice(msgspec.Struct):
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    completion_tokens: int | None = None
    prompt_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None


class Event(msgspec.Struct):
    """The part of an OpenAI stream event that is measured (completions and chat alike)."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(Event)


class StreamError(Exception):
    """The answer was no event stream that can be measured."""


class SseDecoder:
    """Cuts a byte stream into the `data` payloads of its events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads completed by these bytes. Comments and other fields are dropped."""
        buffer = (self._rest + data).replace(b"\r\n", b"\n")
        *blocks, self._rest = buffer.split(b"\n\n")
        payloads = []
        for block in blocks:
            lines = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
            if lines:
                payloads.append(b"\n".join(lines))
        return payloads


class ChunkedDecoder:
    """Takes HTTP/1.1 chunked framing off a byte stream."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """The body bytes of the chunks completed by this data. Raises StreamError on a bad length."""
        buffer = self._rest + data
        at = 0
        body = []
        while (line_end := buffer.find(b"\r\n", at)) >= 0:
            try:
                size = int(buffer[at:line_end].split(b";")[0], 16)
            except ValueError as error:
                raise StreamError(f"bad chunk length {buffer[at:line_end]!r}") from error
            end = line_end + 2 + size
            if len(buffer) < end + 2:
                break
            body.append(buffer[line_end + 2 : end])
            at = end + 2
        self._rest = buffer[at:]
        return b"".join(body)


def dechunk(segments: Iterable[Segment]) -> Iterator[Segment]:
    decoder = ChunkedDecoder()
    for at_s, data in segments:
        if body := decoder.feed(data):
            yield at_s, body


def measure_stream(record: RequestRecord, segments: Iterable[Segment], *, chat: bool) -> None:
    """Fills the record from the segments of its answer; a broken or failed stream sets `record.error`.

    Every completions event with a choice counts, an empty text included (a special token, or a byte of a
    longer character). A chat event counts when it carries content: the opening role is no token.
    """
    sse = SseDecoder()
    usage: Usage | None = None
    finished = False
    try:
        for at_s, data in segments:
            for payload in sse.feed(data):
                if payload == b"[DONE]":
                    finished = True
                    continue
                event = _decoder.decode(payload)
                if event.error is not None:
                    record.error = f"error in the stream: {str(event.error)[:200]}"
                    return
                if event.choices and (not chat or _has_content(event.choices[0])):
                    record.event_s.append(at_s)
                if event.usage is not None:
                    usage = event.usage
    except (msgspec.MsgspecError, StreamError) as error:
        record.error = f"unreadable stream: {error}"
        return
    if not finished:
        record.error = "the stream ended without [DONE]"
    elif not record.event_s:
        record.error = "no token arrived"
    if usage is not None and usage.completion_tokens is not None:
        record.n_output = usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            record.n_cached = usage.prompt_tokens_details.cached_tokens or 0
    else:
        record.n_output = len(record.event_s)
        record.counted_events = True


def _has_content(choice: Choice) -> bool:
    return choice.delta is not None and bool(choice.delta.content or choice.delta.reasoning_content)
