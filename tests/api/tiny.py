"""A byte-level tokenizer small enough to see through."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from checkpoint.token_bytes import BYTE_OF_CHAR
from checkpoint.tokenizer import Tokenizer, TokenizerSettings

END, START = "<|end|>", "<|start|>"
_MERGES = [
    ("h", "e"),
    ("l", "l"),
    ("he", "ll"),
    ("hell", "o"),
    ("Ġ", "w"),
    ("o", "r"),
    ("l", "d"),
    ("Ġw", "or"),
]

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@cache
def tiny_tokenizer() -> Tokenizer:
    """Id 0 is EOS, 1 starts a message, then 256 bytes, then a few merges."""
    vocab = {END: 0, START: 1}
    for char in sorted(BYTE_OF_CHAR, key=BYTE_OF_CHAR.__getitem__):
        vocab[char] = len(vocab)
    for left, right in _MERGES:
        vocab[left + right] = len(vocab)
    backend = Backend(models.BPE(vocab=vocab, merges=_MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END, special=True), AddedToken(START, special=True)])
    settings = TokenizerSettings(
        add_bos=False, bos_token=START, eos_token=END, chat_templates={"default": TEMPLATE}
    )
    return Tokenizer(backend, settings)


def ids(text: str) -> list[int]:
    return [int(token) for token in tiny_tokenizer().encode(text)]


def byte_ids(text: str) -> list[int]:
    """One token per UTF-8 byte: no merge hides a character's border."""
    return [2 + byte for byte in text.encode()]
