"""A cheap identity of a model: equal for equal models on different hosts, different for fine-tunes.

Shapes alone would make all fine-tunes of a model equal, so a few evenly spaced samples of the weights are
hashed too. All weights are never read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from checkpoint.gguf_header import GgufHeader

_N_SAMPLES = 16
_SAMPLE_BYTES = 4096
_LOCAL_KEYS = ("_name_or_path", "transformers_version")
"""Config entries that say where a copy came from, not what it computes."""


def fingerprint_gguf(path: Path, header: GgufHeader) -> str:
    """The whole header (config, tokenizer, tensor places) and samples of the data."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        digest.update(file.read(header.header_size))
    _add_samples(digest, path, start=header.data_offset, size=header.file_size)
    return digest.hexdigest()


def fingerprint_folder(
    folder: Path, *, config: Mapping[str, Any], weights: Sequence[Path], tokenizer: Sequence[Path]
) -> str:
    """`weights` and `tokenizer` are files inside `folder`; the folder's own name does not count."""
    digest = hashlib.sha256()
    kept = {key: value for key, value in config.items() if key not in _LOCAL_KEYS}
    digest.update(json.dumps(kept, sort_keys=True).encode())
    for path in sorted(tokenizer):
        digest.update(path.relative_to(folder).as_posix().encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    for path in sorted(weights):
        digest.update(path.relative_to(folder).as_posix().encode())
        with path.open("rb") as file:
            prefix = file.read(8)
            n_header = int.from_bytes(prefix, "little")
            digest.update(prefix + file.read(n_header))
        _add_samples(digest, path, start=8 + n_header, size=path.stat().st_size)
    return digest.hexdigest()


def _add_samples(digest: hashlib._Hash, path: Path, *, start: int, size: int) -> None:
    digest.update(size.to_bytes(8, "little"))
    span = max(size - start - _SAMPLE_BYTES, 0)
    with path.open("rb") as file:
        for i in range(_N_SAMPLES):
            file.seek(start + span * i // (_N_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
