"""A model on local disk: what the router (tokenizer, template, limits) and the worker (weights) read.

Nothing in this package imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


class CheckpointError(Exception):
    """The model can't be found or read. The message names it, and says what to do."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`resolve()` (checkpoint/resolve.py) makes one from a hub id, a folder, a GGUF file or `smollm2`."""

    name: str
    """As the user named it."""
    path: Path
    """The folder (safetensors, config.json, tokenizer.json …) or the GGUF file."""
    kind: Literal["safetensors", "gguf"]
    config: dict[str, Any]
    """In the form of a transformers config.json, whatever the kind."""
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    max_context: int
    vocab_size: int
    fingerprint: str
    """Hex digest of config, tokenizer, the weights' names, shapes and sizes and samples of their data: equal
    for equal models on different hosts, cheap to compute (never reads all weights)."""
