"""From what a user names (`smollm2`, a hub id, a folder, a GGUF file) to a model on local disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from checkpoint.checkpoint import Checkpoint, CheckpointError
from checkpoint.folder import folder_checkpoint
from checkpoint.gguf_config import gguf_checkpoint
from checkpoint.hub import fetch_hub, is_hub_id
from checkpoint.paths import user_path
from checkpoint.smollm2 import SMOLLM2, fetch_smollm2


def default_cache_dir() -> Path:
    """`$QUIRE_CACHE`, else `$XDG_CACHE_HOME/quire`, else `~/.cache/quire`; models lie in its `models`."""
    if cache := os.environ.get("QUIRE_CACHE"):
        return user_path(cache) / "models"
    return user_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "quire" / "models"


def resolve(
    name: str,
    *,
    cache_dir: Path | None = None,
    offline: bool = False,
    revision: str | None = None,
    say: Callable[[str], None] | None = None,
    weights: bool = True,
) -> Checkpoint:
    """Fetches what is missing and describes the model; never reads all weights.

    Without `weights` it is for its tokenizer and chat template alone: a hub model's weights are then neither
    fetched nor looked for in a folder (a GGUF file holds everything in one).

    `cache_dir` holds what is fetched; None: `default_cache_dir()` for the default model, the hub's own cache
    for hub models.
    `offline` forbids the network. `say` hears a line of progress before a long step.
    Raises `CheckpointError` whose message names the model, what is wrong and what to do.
    """
    if not name:
        raise CheckpointError("no model is named: --model takes smollm2, a hub id, a folder or a .gguf file")
    if name == SMOLLM2:
        path = fetch_smollm2(cache_dir or default_cache_dir(), offline=offline, say=say)
        return gguf_checkpoint(path, name=name)
    local = user_path(name)
    if local.is_dir():
        return _local_folder(local, name, weights=weights)
    if local.is_file():
        if local.suffix == ".safetensors":
            raise CheckpointError(f"{name} is one weight file: name its folder, {local.parent}, instead")
        return gguf_checkpoint(local, name=name)
    if _looks_like_a_path(name) or not is_hub_id(name):
        raise CheckpointError(
            f"no such model folder or file: {name} (also known are {SMOLLM2} and hub ids like org/name)"
        )
    if say:
        say(f"looking for {name} in the hub's cache and on the hub")
    folder = fetch_hub(name, cache_dir=cache_dir, offline=offline, revision=revision, weights=weights)
    return folder_checkpoint(folder, name=name, weights=weights)


def is_model_name(name: str) -> bool:
    """Whether it names a model wherever it lies (`smollm2`, a hub id), not a place on this host."""
    return not _looks_like_a_path(name) and is_hub_id(name) and not user_path(name).exists()


def _looks_like_a_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith((".gguf", ".safetensors"))


def _local_folder(folder: Path, name: str, *, weights: bool) -> Checkpoint:
    """A transformers folder, or one that holds a single GGUF file."""
    if not (folder / "config.json").is_file():
        files = sorted(folder.glob("*.gguf"))
        if len(files) == 1:
            return gguf_checkpoint(files[0], name=name)
        if files:
            raise CheckpointError(f"{name} holds {len(files)} GGUF files: name one, for example {files[0]}")
    return folder_checkpoint(folder, name=name, weights=weights)
