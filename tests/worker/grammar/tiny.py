"""A small byte-level vocabulary, and a model that picks among what a mask allows."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from checkpoint.token_bytes import BYTE_OF_CHAR
from checkpoint.tokenizer import Tokenizer, TokenizerSettings
from proto.worker_pb2 import Grammar
from worker.grammar.compiler import GrammarCompiler
from worker.grammar.rows import GrammarRows
from worker.grammar.vocabulary import grammar_vocabulary

END, START, N_PADDED = 0, 1, 300


def tokenizer() -> Tokenizer:
    """Id 0 ends, 1 starts a message, 2 + b is the byte b, then a few merges."""
    vocab = {"<end>": END, "<start>": START}
    for char in sorted(BYTE_OF_CHAR, key=BYTE_OF_CHAR.__getitem__):
        vocab[char] = len(vocab)
    merges = [("u", "e"), ("t", "r"), ("tr", "ue"), ("{", '"'), ('"', ":"), ('"', "}"), ("1", "2")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True), AddedToken("<start>", special=True)])
    return Tokenizer(backend, TokenizerSettings(add_bos=False, eos_token="<end>"))


def make_compiler(*, timeout_s: float = 20.0, cache_bytes: int = 1 << 26) -> GrammarCompiler:
    """The model's vocabulary is padded to 300."""
    return GrammarCompiler(
        vocabulary=grammar_vocabulary(tokenizer(), vocab_size=N_PADDED),
        stop_token_ids=(END,),
        timeout_s=timeout_s,
        cache_bytes=cache_bytes,
    )


def allowed(bits: npt.NDArray[np.int32]) -> list[int]:
    """Token ids of one mask."""
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()


def text(tokens: Sequence[int]) -> str:
    data = grammar_vocabulary(tokenizer(), vocab_size=N_PADDED)
    return b"".join(data[token] for token in tokens if token not in (START, END)).decode()


def next_allowed(rows: GrammarRows, row: int) -> list[int]:
    job = rows.begin_step(np.array([row], dtype=np.int32))
    assert job is not None
    masks = job.wait()
    assert not masks.errors, masks.errors
    return allowed(masks.bits[0]) if len(masks.index) else list(range(N_PADDED))


def write(rows: GrammarRows, row: int, *, seed: int, most: int = 400, known: Sequence[int] = ()) -> list[int]:
    """A random answer up to its end token, or `most` tokens. Prefers printable characters, and ends soon."""
    rng = random.Random(seed)
    output = list(known)
    while len(output) < most:
        choices = next_allowed(rows, row)
        plain = [t for t in choices if t != START and (t < 2 or t > 257 or 32 <= t - 2 < 127)]
        closing = [t for t in choices if t == END or (t - 2 < 256 and chr(max(0, t - 2)) in '"}]')]
        pool = closing if closing and rng.random() < 0.4 else (plain or choices)
        token = rng.choice(pool)
        output.append(token)
        if token == END:
            break
        rows.accept(np.array([row], dtype=np.int32), np.array([token], dtype=np.int32))
    return output


def json_schema(source: str, *, strict: bool = True) -> Grammar:
    return Grammar(kind=Grammar.JSON_SCHEMA, source=source, strict=strict)
