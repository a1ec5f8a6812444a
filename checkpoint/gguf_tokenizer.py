"""A `tokenizers.Tokenizer` out of GGUF metadata.

Key names and token types: the GGUF specification. Two vocabularies are known: `gpt2` (byte-level BPE with its
own merges) and `llama` (SentencePiece BPE with scores and byte fallback). How text is split before the merges
is named by `tokenizer.ggml.pre`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from checkpoint.checkpoint import CheckpointError
from checkpoint.gguf_header import read_gguf_header
from checkpoint.tokenizer import Tokenizer, TokenizerSettings

_PREFIX = "tokenizer.ggml."


class TokenType(enum.IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class _Split:
    """How text is cut before byte-level BPE."""

    pattern: str | None = None
    """None: GPT-2's own pattern, built into the byte-level pre-tokenizer."""
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    """Whole words of the vocabulary are taken without merging."""
    add_bos: bool = False
    """When the file doesn't say."""


def _words(digits: str) -> str:
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = _Split()
_DIGITS = _Split(single_digits=True)
_LLAMA3 = _Split(pattern=_words(r"\p{N}{1,3}"), ignore_merges=True, add_bos=True)
_QWEN2 = _Split(pattern=_words(r"\p{N}"), nfc=True)
_SPLITS: Mapping[str, _Split] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _Split(pattern=_TEKKEN, ignore_merges=True, add_bos=True),
}


def tokenizer_from_gguf(path: Path) -> Tokenizer:
    """Raises CheckpointError for a vocabulary or a pre-tokeniser that isn't known."""
    return tokenizer_from_metadata(read_gguf_header(path).metadata, path=path)


def tokenizer_from_metadata(meta: Mapping[str, Any], *, path: Path) -> Tokenizer:
    """`path` serves for messages."""
    kind = meta.get(_PREFIX + "model")
    tokens = meta.get(_PREFIX + "tokens")
    if not isinstance(tokens, list) or not tokens:
        raise CheckpointError(f"{path} holds no vocabulary ({_PREFIX}tokens): convert it again")
    types = meta.get(_PREFIX + "token_type") or [TokenType.NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(f"{path}: {len(tokens)} tokens but {len(types)} token types: it is damaged")
    if kind == "gpt2":
        backend, add_bos = _byte_level(meta, tokens, path=path)
    elif kind == "llama":
        backend, add_bos = _sentencepiece(meta, tokens, types, path=path), True
    else:
        raise CheckpointError(f"{path} has a tokenizer of kind {kind!r}; known are 'gpt2' and 'llama'")
    _add_tokens(backend, tokens, types)
    return Tokenizer(backend, _settings(meta, tokens, add_bos=add_bos))


def _byte_level(meta: Mapping[str, Any], tokens: list[str], *, path: Path) -> tuple[Backend, bool]:
    name = meta.get(_PREFIX + "pre", "default")
    split = _SPLITS.get(name)
    if split is None:
        raise CheckpointError(
            f"{path}: unknown pre-tokeniser {name!r} ({_PREFIX}pre); known are {', '.join(sorted(_SPLITS))}"
        )
    merges = meta.get(_PREFIX + "merges")
    if not isinstance(merges, list):
        raise CheckpointError(f"{path} holds no merges ({_PREFIX}merges): convert it again")
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    try:
        model = models.BPE(vocab=vocab, merges=pairs, fuse_unk=False, ignore_merges=split.ignore_merges)
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path}: vocabulary and merges don't fit together: {error}") from error
    backend = Backend(model)
    steps: list[pre_tokenizers.PreTokenizer] = []
    if split.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if split.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"))
    prefix = bool(meta.get(_PREFIX + "add_space_prefix", False))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=split.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if split.nfc:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend, split.add_bos


def _sentencepiece(meta: Mapping[str, Any], tokens: list[str], types: list[int], *, path: Path) -> Backend:
    scores = meta.get(_PREFIX + "scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise CheckpointError(f"{path} has no score for each of its {len(tokens)} tokens: convert it again")
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = next((tokens[i] for i, kind in enumerate(types) if kind == TokenType.UNKNOWN), None)
    merges = _merges_by_score(tokens, types, scores)
    backend = Backend(
        models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = bool(meta.get(_PREFIX + "add_space_prefix", True))
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    decode: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        spaces.insert(0, normalizers.Prepend("▁"))
        decode.append(decoders.Strip(content=" ", left=1))
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence(decode)
    return backend


def _merges_by_score(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose union has the highest score; as merges: every way to cut a
    token into two of the vocabulary, in the order of the token's score."""
    mergeable = {
        token: i
        for i, token in enumerate(tokens)
        if types[i] in (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
    }
    merges: list[tuple[str, str]] = []
    for token in sorted(mergeable, key=lambda token: (-scores[mergeable[token]], mergeable[token])):
        cuts = [(token[:k], token[k:]) for k in range(1, len(token))]
        known = [(left, right) for left, right in cuts if left in mergeable and right in mergeable]
        merges.extend(sorted(known, key=lambda cut: (mergeable[cut[0]], mergeable[cut[1]])))
    return merges


def _add_tokens(backend: Backend, tokens: list[str], types: list[int]) -> None:
    """Control tokens are special; user-defined ones are matched as a whole but shown."""
    special = [
        AddedToken(token, normalized=False, special=True)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN)
    ]
    plain = [
        AddedToken(token, normalized=False, special=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind == TokenType.USER_DEFINED
    ]
    if special:
        backend.add_special_tokens(special)
    if plain:
        backend.add_tokens(plain)


def _settings(meta: Mapping[str, Any], tokens: list[str], *, add_bos: bool) -> TokenizerSettings:
    def token(role: str) -> str | None:
        index = meta.get(f"{_PREFIX}{role}_token_id")
        return tokens[index] if isinstance(index, int) and 0 <= index < len(tokens) else None

    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    variables = {name: text for name, role in roles.items() if (text := token(role)) is not None}
    templates = {"default": meta["tokenizer.chat_template"]} if meta.get("tokenizer.chat_template") else {}
    for name in meta.get("tokenizer.chat_templates", ()):
        if text := meta.get(f"tokenizer.chat_template.{name}"):
            templates[name] = text
    return TokenizerSettings(
        add_bos=bool(meta.get(_PREFIX + "add_bos_token", add_bos)),
        add_eos=bool(meta.get(_PREFIX + "add_eos_token", False)),
        bos_token=variables.get("bos_token"),
        eos_token=variables.get("eos_token"),
        chat_templates=templates,
        template_variables=variables,
    )
