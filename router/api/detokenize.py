"""Tokens to text, one token at a time, such that the pieces join to the text of all tokens.

The text of an answer is what `decode(prompt + answer)` has beyond `decode(prompt)`, minus an unfinished
character at the very end. A prompt that ends inside a character therefore hands its first bytes on, and a
character cut off by a limit is left out rather than shown broken.

Two decoders are done with tables: byte-level (GPT-2's byte alphabet) and byte-fallback (SentencePiece). All
others go through the library's `decode` over a short window.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from checkpoint.token_bytes import DecoderKind, byte_level_bytes, decoder_kind, fallback_byte
from checkpoint.tokenizer import Tokenizer

I32 = npt.NDArray[np.int32]

_MAX_CHARACTER_BYTES = 4
_PER_BYTE_ERRORS = "quire-replace-each-byte"
codecs.register_error(_PER_BYTE_ERRORS, lambda error: _replace_each_byte(error))


class Detokenizer(Protocol):
    """Holds at most the bytes of one unfinished character (or one window of tokens)."""

    def push(self, token: int) -> str:
        """The text that became certain with this token; often all of its text, sometimes none."""
        ...


@dataclass(frozen=True, slots=True)
class TokenTable:
    """What each token id stands for; built once per tokenizer and `skip_special`, shared by all requests."""

    kind: DecoderKind
    data: list[bytes]
    """The token's bytes: exact for the two table kinds, the bytes of `decode([id])` for the other. Empty for
    special tokens when they are skipped, and for ids that the vocabulary doesn't have."""
    texts: list[str | None]
    """The token's text where it is whole characters; None where bytes must be joined with a neighbour's."""
    tokenizer: Tokenizer
    skip_special: bool

    def without_special(self) -> TokenTable:
        """The same with all special tokens hidden."""
        data, texts = list(self.data), list(self.texts)
        for token in self.tokenizer.special_ids:
            data[token], texts[token] = b"", ""
        return replace(self, data=data, texts=texts, skip_special=True)

    def detokenizer(self, prompt: I32) -> Detokenizer:
        """For an answer to `prompt`, whose last tokens may end inside a character."""
        if self.kind == "byte_level":
            return _ByteLevelDetokenizer(self, self.unfinished_tail(prompt))
        if self.kind == "byte_fallback":
            return _ByteFallbackDetokenizer(self, self.unfinished_tail(prompt))
        return _WindowDetokenizer(self, prompt)

    def whole_text(self, prompt: I32) -> str:
        """The prompt as text, without a character that its end leaves unfinished: such a one belongs to the
        answer that completes it."""
        text = self.tokenizer.decode(prompt, skip_special=self.skip_special)
        tail = self.unfinished_tail(prompt)
        if not tail:
            return text
        return text[: -1 if self.kind == "byte_level" else -len(tail)]

    def unfinished_tail(self, prompt: I32) -> bytes:
        """The bytes of the character that the prompt's end leaves unfinished."""
        if self.kind == "generic":
            return b""
        tail = b""
        for token in prompt[-64:][::-1].tolist():
            if token >= len(self.data):
                continue
            if self.kind == "byte_fallback" and self.texts[token]:
                break
            tail = self.data[token] + tail
            if len(tail) >= _MAX_CHARACTER_BYTES:
                break
        _, used = codecs.utf_8_decode(tail, "replace", False)
        return tail[used:]


def build_token_table(tokenizer: Tokenizer, *, skip_special: bool = True) -> TokenTable:
    """Takes about 0.1 s for 100,000 tokens."""
    whole = _whole_table(tokenizer)
    return whole.without_special() if skip_special else whole


def _whole_table(tokenizer: Tokenizer) -> TokenTable:
    kind = decoder_kind(tokenizer.decoder)
    data: list[bytes] = []
    texts: list[str | None] = []
    for token_id in range(tokenizer.n_tokens):
        spelled = tokenizer.token(token_id)
        if spelled is None:
            data.append(b"")
            texts.append("")
        elif kind == "byte_level":
            raw = byte_level_bytes(spelled)
            data.append(raw)
            texts.append(_whole_text(raw))
        elif kind == "byte_fallback":
            byte = fallback_byte(spelled)
            data.append(spelled.replace("▁", " ").encode() if byte is None else byte)
            texts.append(spelled.replace("▁", " ") if byte is None else None)
        else:
            text = tokenizer.decode([token_id], skip_special=False)
            data.append(text.encode())
            texts.append(None)
    return TokenTable(kind=kind, data=data, texts=texts, tokenizer=tokenizer, skip_special=False)


class _ByteLevelDetokenizer:
    """The joined bytes of all tokens, read as UTF-8 with U+FFFD for each maximal ill-formed part."""

    __slots__ = ("_data", "_pending", "_texts")

    def __init__(self, table: TokenTable, pending: bytes) -> None:
        self._texts = table.texts
        self._data = table.data
        self._pending = pending

    def push(self, token: int) -> str:
        if not self._pending:
            try:
                text = self._texts[token]
            except IndexError:  # the model's vocabulary may be padded beyond the tokenizer's
                return ""
            if text is not None:
                return text
        data = self._pending + (self._data[token] if token < len(self._data) else b"")
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text


class _ByteFallbackDetokenizer:
    """Text tokens as they are; runs of byte tokens as UTF-8, with one U+FFFD for each byte that fits
    nowhere."""

    __slots__ = ("_data", "_pending", "_texts")

    def __init__(self, table: TokenTable, pending: bytes) -> None:
        self._texts = table.texts
        self._data = table.data
        self._pending = pending

    def push(self, token: int) -> str:
        text = self._texts[token] if token < len(self._texts) else ""
        if text is not None:
            if not text or not self._pending:
                return text
            broken, self._pending = "\ufffd" * len(self._pending), b""
            return broken + text
        data = self._pending + self._data[token]
        decoded, used = codecs.utf_8_decode(data, _PER_BYTE_ERRORS, False)
        self._pending = data[used:]
        return decoded


class _WindowDetokenizer:
    """Decodes a window of tokens with and without the new ones and returns the difference. The window starts
    a few tokens before the last point where the text was certain, so that the decoder sees its context."""

    __slots__ = ("_n_certain", "_skip_special", "_tokenizer", "_window")

    _CONTEXT = 6

    def __init__(self, table: TokenTable, prompt: I32) -> None:
        self._tokenizer = table.tokenizer
        self._skip_special = table.skip_special
        self._window: list[int] = prompt[-self._CONTEXT :].tolist()
        self._n_certain = len(self._window)
        while self._n_certain and self._decode(self._window[: self._n_certain]).endswith("\ufffd"):
            self._n_certain -= 1

    def push(self, token: int) -> str:
        self._window.append(token)
        before = self._decode(self._window[: self._n_certain])
        now = self._decode(self._window)
        if len(now) <= len(before) or now.endswith("\ufffd"):
            return ""
        self._n_certain = len(self._window)
        if self._n_certain > 4 * self._CONTEXT:
            self._window = self._window[-self._CONTEXT :]
            self._n_certain = self._CONTEXT
        return now[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=self._skip_special)


def _whole_text(data: bytes) -> str | None:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end
