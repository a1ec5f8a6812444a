"""A model folder as transformers lays it out: config.json, tokenizer files, safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from checkpoint.checkpoint import Checkpoint, CheckpointError
from checkpoint.fingerprint import fingerprint_folder
from checkpoint.safetensors_header import check_safetensors

_INDEX = "model.safetensors.index.json"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
)
_OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack")
_DEFAULT_CONTEXT = 2048


def folder_checkpoint(folder: Path, *, name: str, weights: bool = True) -> Checkpoint:
    """Raises `CheckpointError` when a needed file is missing, damaged or in another format. Without `weights`
    they are not looked at, and the fingerprint does not tell models apart."""
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json: it is not a model folder")
    config = read_json(folder / "config.json")
    files = weight_files(folder) if weights else []
    for path in files:
        check_safetensors(path)
    tokenizer = [folder / file for file in _TOKENIZER_FILES if (folder / file).is_file()]
    vocab_size = config.get("vocab_size")
    if not isinstance(vocab_size, int) or vocab_size <= 0:
        raise CheckpointError(f"{folder / 'config.json'} has no usable vocab_size ({vocab_size!r})")
    return Checkpoint(
        name=name,
        path=folder,
        kind="safetensors",
        config=config,
        eos_token_ids=_eos_ids(folder, config),
        bos_token_id=_first_id(config.get("bos_token_id")),
        max_context=int(config.get("max_position_embeddings") or _DEFAULT_CONTEXT),
        vocab_size=vocab_size,
        fingerprint=fingerprint_folder(folder, config=config, weights=files, tokenizer=tokenizer),
    )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold the model, sorted; those of the index when there is one."""
    index = folder / _INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index} is damaged (no weight_map): fetch the model again")
        files = sorted({folder / str(file) for file in weight_map.values()})
        if missing := [path.name for path in files if not path.is_file()]:
            raise CheckpointError(
                f"{folder} lacks {', '.join(missing[:3])} ({len(missing)} of {len(files)} weight files): "
                "fetch the model again"
            )
        return files
    # Mistral's repositories carry a second, consolidated copy of the same weights.
    files = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated"))
    if files:
        return files
    others = sorted(path.name for pattern in _OTHER_FORMATS for path in folder.glob(pattern))
    hint = f"; it has {others[0]}: convert it to safetensors" if others else ": fetch the model again"
    raise CheckpointError(f"{folder} has no safetensors file{hint}")


def read_json(path: Path) -> dict[str, Any]:
    """Raises `CheckpointError` naming the file when it is unreadable or not a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"can't read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged (not JSON: {error}): fetch it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is damaged (not a JSON object): fetch it again")
    return value


def _eos_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """generation_config.json says what ends an answer where it exists: chat models list more ids there."""
    generation = folder / "generation_config.json"
    value = read_json(generation).get("eos_token_id") if generation.is_file() else None
    if value is None:
        value = config.get("eos_token_id")
    if value is None:
        return ()
    return tuple(int(token) for token in (value if isinstance(value, list) else [value]))


def _first_id(value: Any) -> int | None:
    if isinstance(value, list):
        value = value[0] if value else None
    return None if value is None else int(value)
