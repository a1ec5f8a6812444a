"""The model's vocabulary as the grammar compiler sees it."""

from __future__ import annotations

from checkpoint.token_bytes import token_bytes
from checkpoint.tokenizer import Tokenizer


def grammar_vocabulary(tokenizer: Tokenizer, *, vocab_size: int) -> list[bytes]:
    """[vocab_size] bytes of each token. `vocab_size`: the model's, which may be padded beyond the tokenizer's
    or cut short of it. Special tokens stand here with bytes that no text has: a grammar allows one only where
    it names that token, and the stop tokens at its end."""
    data = token_bytes(tokenizer)
    for token in tokenizer.special_ids:
        data[token] = b"\xff\xff%d" % token
    return data[:vocab_size] + [b""] * (vocab_size - len(data))
