"""A model's tokenizer: text to token ids and what each token id stands for.

Loaded from a checkpoint folder (`tokenizer.json` and its companions) or out of a GGUF file's metadata
(`checkpoint/gguf_tokenizer.py`). Owns no state beyond the vocabulary; safe to use from several threads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from checkpoint.checkpoint import Checkpoint, CheckpointError

I32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class TokenizerSettings:
    """What stands beside the vocabulary: in tokenizer_config.json or in GGUF metadata."""

    add_bos: bool | None = None
    """Whether `encode` starts with BOS; None: as the backend's own post-processor has it."""
    add_eos: bool | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    """By name; a checkpoint's only template is called "default"."""
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    """Special tokens by their role (`bos_token`, `pad_token`, …), as templates name them."""


class Tokenizer:
    """Wraps a `tokenizers.Tokenizer` with the checkpoint's own rules for BOS and EOS."""

    def __init__(self, backend: tokenizers.Tokenizer, settings: TokenizerSettings) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.settings = settings
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.n_tokens = max(backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        self.bos_token_id = self._id_of(settings.bos_token)
        self.eos_token_id = self._id_of(settings.eos_token)

    @property
    def decoder(self) -> dict[str, Any] | None:
        """The backend's decoder in the form of tokenizer.json; None when it has none."""
        backend_decoder = self.backend.decoder
        if backend_decoder is None:
            return None
        state: dict[str, Any] = json.loads(backend_decoder.__getstate__())
        return state

    def encode(self, text: str, *, special: bool = True) -> I32:
        """Token ids of `text`, [n] int32. `special` adds BOS/EOS where the model's tokenizer does so."""
        return self.encode_batch([text], special=special)[0]

    def encode_batch(self, texts: Sequence[str], *, special: bool = True) -> list[I32]:
        """As `encode` does each; the interpreter's lock is free meanwhile."""
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=special)
        return [self._finish(encoding.ids, special) for encoding in encodings]

    def encode_spans(self, text: str, *, special: bool = True) -> list[tuple[int, int, int]]:
        """The ids of `encode`, each with its first and last + 1 character in `text`: (0, 0) for BOS, EOS."""
        encoding = self.backend.encode(text, add_special_tokens=special)
        raw: list[int] = encoding.ids
        spans: list[tuple[int, int]] = encoding.offsets
        ids: list[int] = self._finish(raw, special).tolist()
        if ids[: len(raw)] != raw:
            # BOS was put before what the backend gave, or taken away from it.
            spans = [(0, 0), *spans] if ids[1 : len(raw) + 1] == raw else spans[1:]
        spans = spans + [(0, 0)] * (len(ids) - len(spans))
        return [(token, start, stop) for token, (start, stop) in zip(ids, spans, strict=True)]

    def decode(self, ids: Sequence[int] | I32, *, skip_special: bool = True) -> str:
        listed = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        text: str = self.backend.decode(listed, skip_special_tokens=skip_special)
        return text

    def token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling (e.g. "Ġthe"); None for an id that it doesn't have."""
        spelled: str | None = self.backend.id_to_token(token_id)
        return spelled

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self.backend.token_to_id(token)

    def _finish(self, ids: list[int], special: bool) -> I32:
        if special:
            settings = self.settings
            bos, eos = self.bos_token_id, self.eos_token_id
            if bos is not None:
                if settings.add_bos is True and ids[:1] != [bos]:
                    ids = [bos, *ids]
                elif settings.add_bos is False and ids[:1] == [bos] and self._backend_adds_bos():
                    ids = ids[1:]
            if eos is not None and settings.add_eos is True and ids[-1:] != [eos]:
                ids = [*ids, eos]
        return np.asarray(ids, dtype=np.int32)

    def _backend_adds_bos(self) -> bool:
        return bool(self.backend.encode("", add_special_tokens=True).ids[:1] == [self.bos_token_id])


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of a resolved checkpoint. Raises CheckpointError naming the file at fault."""
    if checkpoint.kind == "gguf":
        from checkpoint.gguf_tokenizer import tokenizer_from_gguf

        return tokenizer_from_gguf(checkpoint.path)
    return tokenizer_from_folder(checkpoint.path)


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """Reads tokenizer.json, tokenizer_config.json and the chat template's own files from `folder`."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no tokenizer.json: a fast tokenizer is needed; convert the model's tokenizer with"
            " transformers (AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path} can't be read as a tokenizer: {error}") from error
    return Tokenizer(backend, _folder_settings(folder))


def _folder_settings(folder: Path) -> TokenizerSettings:
    config = _read_json(folder / "tokenizer_config.json")
    special = {**_read_json(folder / "special_tokens_map.json"), **config}
    variables = {
        name: text
        for name, value in special.items()
        if name.endswith("_token") and (text := _token_text(value)) is not None
    }
    # Only these classes rebuild the post-processor from the two flags; others keep tokenizer.json's.
    rebuilt = str(config.get("tokenizer_class", "")).startswith(("Llama", "CodeLlama", "Gemma", "Cohere"))
    return TokenizerSettings(
        add_bos=_flag(config, "add_bos_token") if rebuilt else None,
        add_eos=_flag(config, "add_eos_token") if rebuilt else None,
        bos_token=variables.get("bos_token"),
        eos_token=variables.get("eos_token"),
        chat_templates=_folder_templates(folder, config),
        template_variables=variables,
    )


def _folder_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Later sources win: tokenizer_config.json, chat_template.json, *.jinja files."""
    templates: dict[str, str] = {}
    for source in (config, _read_json(folder / "chat_template.json")):
        value = source.get("chat_template")
        if isinstance(value, str):
            templates["default"] = value
        elif isinstance(value, list):
            templates.update({entry["name"]: entry["template"] for entry in value if isinstance(entry, dict)})
        elif isinstance(value, dict):
            templates.update({str(name): str(text) for name, text in value.items()})
    single = folder / "chat_template.jinja"
    if single.is_file():
        templates["default"] = single.read_text(encoding="utf-8")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8")
    return templates


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} should hold a JSON object, not {type(value).__name__}")
    return value


def _token_text(value: object) -> str | None:
    """A special token stands as a string or as an object with its content."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _flag(config: Mapping[str, Any], name: str) -> bool | None:
    value = config.get(name)
    return value if isinstance(value, bool) else None
