"""What a vocabulary's spelling of a token stands for, in bytes.

Two families are exact: byte-level (GPT-2's byte alphabet) and byte-fallback (SentencePiece). All others are
known only through the library's `decode`.
"""

from __future__ import annotations

from typing import Any, Literal

from checkpoint.tokenizer import Tokenizer

DecoderKind = Literal["byte_level", "byte_fallback", "generic"]


def decoder_kind(decoder: dict[str, Any] | None) -> DecoderKind:
    """`decoder`: as tokenizer.json has it."""
    if decoder is None:
        return "generic"
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    names = [step["type"] for step in steps]
    if names == ["ByteLevel"]:
        return "byte_level"
    replaces_spaces = (
        names[:1] == ["Replace"]
        and steps[0].get("pattern") == {"String": "▁"}
        and (steps[0].get("content") == " ")
    )
    if replaces_spaces and names[1:] in (["ByteFallback", "Fuse"], ["ByteFallback", "Fuse", "Strip"]):
        strip = steps[3] if len(steps) > 3 else {"content": " ", "start": 1, "stop": 0}
        if strip["content"] == " " and strip["stop"] == 0:
            return "byte_fallback"
    return "generic"


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """Of every id, special tokens included. Empty for ids that the vocabulary doesn't have; for the generic
    kind the bytes of `decode([id])`."""
    kind = decoder_kind(tokenizer.decoder)
    data: list[bytes] = []
    for token_id in range(tokenizer.n_tokens):
        spelled = tokenizer.token(token_id)
        if spelled is None:
            data.append(b"")
        elif kind == "byte_level":
            data.append(byte_level_bytes(spelled))
        elif kind == "byte_fallback":
            byte = fallback_byte(spelled)
            data.append(spelled.replace("▁", " ").encode() if byte is None else byte)
        else:
            data.append(tokenizer.decode([token_id], skip_special=False).encode())
    return data


def byte_level_bytes(spelled: str) -> bytes:
    """A token with a character outside the byte alphabet (some added tokens) stands for its own text."""
    try:
        return bytes([BYTE_OF_CHAR[char] for char in spelled])
    except KeyError:
        return spelled.encode()


def fallback_byte(spelled: str) -> bytes | None:
    """`<0xE2>` is one byte."""
    if len(spelled) == 6 and spelled.startswith("<0x") and spelled.endswith(">"):
        try:
            return bytes([int(spelled[3:5], 16)])
        except ValueError:
            return None
    return None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte: printable Latin-1 stands for itself, the others follow
    from 256."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHAR = _byte_alphabet()
