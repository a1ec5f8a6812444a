"""Random prompts of an exact number of tokens, as text or as token ids, with a common prefix if wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer


@dataclass(slots=True, frozen=True)
class PromptShape:
    """Tokens of one prompt: `n_prefix` that all prompts of a run share, then `n_own` random ones."""

    n_own: int
    n_prefix: int = 0

    @property
    def n_tokens(self) -> int:
        return self.n_prefix + self.n_own


class WordVocabulary:
    """The tokens that are one whole word with a space before it. Any sequence of them is a text that
    encodes to exactly these tokens again, so a text prompt has a known length."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises ValueError when the tokenizer has no such words."""
        self._tokenizer = tokenizer
        candidates = sorted(
            (token_id, " " + token[1:])
            for token, token_id in tokenizer.get_vocab(with_added_tokens=False).items()
            if token[0] in "Ġ▁" and len(token) > 3 and token[1:].isascii() and token[1:].isalpha()
        )
        encoded = tokenizer.encode_batch_fast([text for _, text in candidates], add_special_tokens=False)
        kept = [c for c, e in zip(candidates, encoded, strict=True) if e.ids == [c[0]]]
        if len(kept) < 256:
            raise ValueError(
                f"this tokenizer has only {len(kept)} plain words: use --prompts tokens instead of text"
            )
        self._texts = [text for _, text in kept]
        self._ids = np.array([token_id for token_id, _ in kept])

    def __len__(self) -> int:
        return len(self._texts)

    def text(self, picks: Sequence[int] | np.ndarray[tuple[int], np.dtype[np.int64]]) -> str:
        """The text of words given by index. Raises ValueError when it doesn't encode to one token each."""
        text = "".join(self._texts[i] for i in picks)
        if self._tokenizer.encode(text, add_special_tokens=False).ids != [int(self._ids[i]) for i in picks]:
            raise ValueError("this tokenizer joins words: use --prompts tokens instead of text")
        return text


def load_tokenizer(path: Path) -> Tokenizer:
    """From a tokenizer.json or a folder that holds one. Raises ValueError naming what is missing."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"--tokenizer {path}: no tokenizer.json there")
    return Tokenizer.from_file(str(file))


def random_texts(words: WordVocabulary, shape: PromptShape, *, n: int, seed: int) -> list[str]:
    """[n] prompts of `shape.n_tokens` tokens each, the beginning-of-text token not counted."""
    rng = np.random.default_rng(seed)
    prefix = rng.integers(len(words), size=shape.n_prefix)
    return [
        words.text(np.concatenate([prefix, rng.integers(len(words), size=shape.n_own)])) for _ in range(n)
    ]


def random_token_lists(vocab_size: int, shape: PromptShape, *, n: int, seed: int) -> list[list[int]]:
    """[n] prompts as token ids below `vocab_size`, drawn uniformly."""
    rng = np.random.default_rng(seed)
    prefix = rng.integers(vocab_size, size=shape.n_prefix)
    return [np.concatenate([prefix, rng.integers(vocab_size, size=shape.n_own)]).tolist() for _ in range(n)]
