"""The header of a safetensors file: checks that a file is whole without reading its weights.

Layout (safetensors format): u64 little-endian header size, a JSON header, the data.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from checkpoint.checkpoint import CheckpointError

_MAX_HEADER = 100_000_000
"""The format's own limit."""


def check_safetensors(path: Path) -> dict[str, Any]:
    """The JSON header: tensor name to {dtype, shape, data_offsets}.

    Raises `CheckpointError` for a file that is missing, damaged, cut short or a Git LFS pointer.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            n_header = int.from_bytes(prefix, "little")
            if prefix == b"version ":
                raise CheckpointError(
                    f"{path} is a Git LFS pointer, not the model: run `git lfs pull` in its folder"
                )
            if len(prefix) < 8 or n_header > min(_MAX_HEADER, size - 8):
                raise CheckpointError(
                    f"{path} is damaged or cut short ({size} bytes, header of {n_header}): fetch it again"
                )
            header: dict[str, Any] = json.loads(file.read(n_header))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing: fetch the model again") from error
    except OSError as error:
        raise CheckpointError(f"can't read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged (its header is not JSON): fetch it again") from error
    header.pop("__metadata__", None)
    try:
        end = 8 + n_header + max((int(info["data_offsets"][1]) for info in header.values()), default=0)
    except (KeyError, TypeError, IndexError) as error:
        raise CheckpointError(f"{path} is damaged (its header has no offsets): fetch it again") from error
    if end > size:
        raise CheckpointError(
            f"{path} is cut short: {size} bytes on disk, {end} by its own header: fetch it again"
        )
    return header
