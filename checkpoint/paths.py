"""Paths as users write them."""

from __future__ import annotations

from pathlib import Path

from checkpoint.checkpoint import CheckpointError


def user_path(text: str) -> Path:
    """With `~` replaced. Raises `CheckpointError` where the user has no home folder, as in containers that
    run under a bare number."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise CheckpointError(
            f"{text} needs a home folder, and this user has none: set HOME, QUIRE_CACHE (for models) or a "
            "path without ~"
        ) from error
