"""The model's vocabulary as the grammar compiler sees it."""

from __future__ import annotations

from checkpoint.token_bytes import token_bytes
from checkpoint.tokenizer import Tokenizer


def grammar_vocabulary(tokenizer: Tokenizer, *, vocab_size: int) -> list[bytes]:
    """[vocab_size] bytes of each token. `vocab_size`: the model's, which may be padded beyond the tokenizer's
    or cut short of it. Special tokens have no text here: a grammar never allows them, except for the stop
    tokens at its end."""
    data = token_bytes(tokenizer)
    for token in tokenizer.special_ids:
        data[token] = b""
    return data[:vocab_size] + [b""] * (vocab_size - len(data))
