"""The header of a GGUF file: metadata and tensor places, read through mmap without touching a weight.

Layout (GGUF specification, versions 2 and 3, little-endian): magic, version, tensor count, metadata
count, the metadata, the tensor infos, padding to `general.alignment`, tensor data. Written by hand because
the `gguf` package's reader makes a numpy view of every vocabulary entry: seconds instead of milliseconds.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from checkpoint.checkpoint import CheckpointError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS: dict[int, str] = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "|b1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_MAX_COUNT = 1 << 31
"""No real file has more entries: a larger count is a damaged one."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    name: str
    shape: tuple[int, ...]
    """Fastest-varying dimension first, as the file has it (the reverse of torch's order)."""
    ggml_type: int
    offset: int
    """Bytes from the start of the file."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    metadata: dict[str, Any]
    """Scalars as int, float, bool or str; arrays as lists of them."""
    tensors: dict[str, TensorInfo]
    header_size: int
    """Bytes up to the end of the tensor infos."""
    data_offset: int
    file_size: int


class _Cursor:
    """A position in the mapped header; every read is bounds-checked by struct and slice lengths."""

    __slots__ = ("at", "data")

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def u32(self) -> int:
        value: int = struct.unpack_from("<I", self.data, self.at)[0]
        self.at += 4
        return value

    def u64(self) -> int:
        value: int = struct.unpack_from("<Q", self.data, self.at)[0]
        self.at += 8
        return value

    def count(self) -> int:
        value = self.u64()
        if value > _MAX_COUNT:
            raise ValueError(f"an entry count of {value}")
        return value

    def string(self) -> str:
        size = self.count()
        raw = self.data[self.at : self.at + size]
        if len(raw) != size:
            raise ValueError("a string that runs past the end of the file")
        self.at += size
        return raw.decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, n = self.u32(), self.count()
            if item in _SCALARS:
                return self._scalars(item, n)
            # A bound method in a comprehension: vocabularies have hundreds of thousands of strings.
            read: Callable[[], Any] = self.string if item == _STRING else lambda: self.value(item)
            return [read() for _ in range(n)]
        return self._scalars(kind, 1)[0]

    def _scalars(self, kind: int, n: int) -> list[Any]:
        code = _SCALARS.get(kind)
        if code is None:
            raise ValueError(f"an unknown value type {kind}")
        array = np.frombuffer(self.data, dtype=np.dtype(code), count=n, offset=self.at)
        self.at += array.nbytes
        values: list[Any] = array.tolist()
        return values


def read_gguf_header(path: Path) -> GgufHeader:
    """Milliseconds for a small model, a few hundred for a vocabulary of 250,000 tokens.

    Raises `CheckpointError` when the file is not GGUF, damaged or shorter than its tensor infos say.
    """
    try:
        file_size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(64)
            if head[:4] != _MAGIC:
                raise CheckpointError(_not_gguf(path, head))
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(path, _Cursor(data), file_size)
    except OSError as error:
        raise CheckpointError(f"can't read {path}: {error.strerror or error}") from error


def _not_gguf(path: Path, head: bytes) -> str:
    if head.startswith(b"version https://git-lfs"):
        return f"{path} is a Git LFS pointer, not the model: run `git lfs pull` in its folder"
    return f"{path} is not GGUF (it starts with {head[:4]!r}): name a .gguf file or a model folder"


def _parse(path: Path, cursor: _Cursor, file_size: int) -> GgufHeader:
    try:
        cursor.at = len(_MAGIC)
        version = cursor.u32()
        if version not in _VERSIONS:
            raise CheckpointError(
                f"{path} has GGUF version {version}, not one of {_VERSIONS}: convert it again"
            )
        n_tensors, n_metadata = cursor.count(), cursor.count()
        metadata: dict[str, Any] = {}
        for _ in range(n_metadata):
            key = cursor.string()
            metadata[key] = cursor.value(cursor.u32())
        infos = []
        for _ in range(n_tensors):
            name = cursor.string()
            shape = tuple(cursor.u64() for _ in range(cursor.u32()))
            infos.append((name, shape, cursor.u32(), cursor.u64()))
    except (struct.error, ValueError) as error:
        raise CheckpointError(f"{path} is damaged (at byte {cursor.at}: {error}): fetch it again") from error

    alignment = int(metadata.get("general.alignment", 32))
    data_offset = -(-cursor.at // alignment) * alignment
    tensors = {
        name: TensorInfo(name, shape, kind, data_offset + offset) for name, shape, kind, offset in infos
    }
    end = max((info.offset + tensor_bytes(info) for info in tensors.values()), default=data_offset)
    if end > file_size:
        raise CheckpointError(
            f"{path} is cut short: {file_size} bytes on disk, {end} by its own header: fetch it again"
        )
    return GgufHeader(metadata, tensors, cursor.at, data_offset, file_size)


def tensor_bytes(info: TensorInfo) -> int:
    """Size of a tensor's data, by ggml's block sizes. An unknown type counts as 0: only the weight loader,
    which must decode it, can refuse it."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(info.ggml_type)]
    except (KeyError, ValueError):
        return 0
    n = 1
    for length in info.shape:
        n *= length
    return n // block * size
