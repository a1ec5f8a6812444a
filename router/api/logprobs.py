"""Logprobs in OpenAI's two shapes: chat's list of objects and completions' parallel lists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from router.api.choice import LogprobEntry
from router.api.detokenize import TokenTable

_LOWEST = -9999.0
"""Stands for a probability of zero, which JSON can't write."""


class TokenNames:
    """How single tokens are written in an answer."""

    def __init__(self, table: TokenTable) -> None:
        """`table` must not skip special tokens: they are named here."""
        self._table = table

    def data(self, token: int) -> bytes:
        return self._table.data[token] if token < len(self._table.data) else b""

    def text(self, token: int) -> str:
        """With U+FFFD for bytes that are no whole character."""
        return self.data(token).decode("utf-8", "replace")

    def spelled(self, token: int) -> str:
        """Unambiguous: a token that is no whole text is spelled `bytes:\\xe2\\x98`."""
        data = self.data(token)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs_value(entries: Sequence[LogprobEntry], names: TokenNames) -> dict[str, Any]:
    """`choices[].logprobs` of chat completions."""
    content = []
    for entry in entries:
        item = _chat_item(entry.token, entry.chosen, names)
        item["top_logprobs"] = [_chat_item(token, value, names) for token, value in _top(entry)]
        content.append(item)
    return {"content": content, "refusal": None}


def pieces(
    text: str, entries: Sequence[LogprobEntry], *, end: int
) -> Iterator[tuple[str, LogprobEntry | None]]:
    """`text` cut where its tokens end, each piece with its token. `end`: where it ends in its choice. What no
    token of `entries` covers comes last."""
    start = end - len(text)
    at = 0
    for entry in entries:
        until = min(max(at, entry.end - start), len(text))
        yield text[at:until], entry
        at = until
    if at < len(text):
        yield text[at:], None


def completion_logprobs_value(
    entries: Sequence[LogprobEntry], names: TokenNames, *, offset: int = 0
) -> dict[str, Any]:
    """`choices[].logprobs` of completions; `offset` is the length of an echoed prompt."""
    return {
        "tokens": [names.spelled(entry.token) for entry in entries],
        "token_logprobs": [_finite(entry.chosen) for entry in entries],
        "top_logprobs": [_completion_top(entry, names) for entry in entries],
        "text_offset": [entry.offset + offset for entry in entries],
    }


def _top(entry: LogprobEntry) -> list[tuple[int, float]]:
    ids = np.frombuffer(entry.top_ids, dtype="<i4").tolist()
    values = np.frombuffer(entry.top_values, dtype="<f4").tolist()
    return list(zip(ids, values, strict=True))


def _completion_top(entry: LogprobEntry, names: TokenNames) -> dict[str, float]:
    """The chosen token is always among them."""
    top = {names.spelled(token): _finite(value) for token, value in _top(entry)}
    top.setdefault(names.spelled(entry.token), _finite(entry.chosen))
    return top


def _chat_item(token: int, value: float, names: TokenNames) -> dict[str, Any]:
    return {"token": names.text(token), "logprob": _finite(value), "bytes": list(names.data(token))}


def _finite(value: float) -> float:
    return max(value, _LOWEST)


def mean_logprob(entries: Sequence[LogprobEntry]) -> float:
    """By which `best_of` ranks: the mean over the generated tokens."""
    return sum(_finite(entry.chosen) for entry in entries) / max(1, len(entries))
