"""Weights of a checkpoint, loaded straight to a device and merged in place for the decoder.

Each merged tensor (q, k and v; gate and up) is allocated once on the device and its parts are copied into
their rows, so there is never a second full copy of the model. Files are read by several threads at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from checkpoint.checkpoint import Checkpoint, CheckpointError
from checkpoint.folder import weight_files
from checkpoint.gguf_tensors import GgufTensors
from checkpoint.grouped import Grouped, join
from checkpoint.safetensors_header import check_safetensors
from worker.models.spec import DecoderWeights, LayerWeights, ModelSpec
from worker.models.tensors import MODEL, Part, Weight, is_harmless, parts, weights

_DUMMY_STD = 0.02
_MAX_READERS = 8


class TensorFile(Protocol):
    """One open file of a checkpoint."""

    path: Path

    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def read(self, name: str, *, device: torch.device) -> torch.Tensor:
        """In the file's own dtype. Called from several threads."""
        ...


class _Safetensors:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._header = check_safetensors(path)
        self._local = threading.local()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(info["shape"]) for name, info in self._header.items()}

    def read(self, name: str, *, device: torch.device) -> torch.Tensor:
        try:
            if not hasattr(self._local, "file"):
                # Opened once per thread: a handle is not to be shared while it reads.
                self._local.file = safe_open(self.path, framework="pt", device=str(device))
            tensor: torch.Tensor = self._local.file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.path}: tensor {name} can't be read ({error})") from error
        return tensor


class _Gguf:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._tensors = GgufTensors(path)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self._tensors.shape(name) for name in self._tensors.names()}

    def read(self, name: str, *, device: torch.device) -> torch.Tensor:
        return torch.from_numpy(self._tensors.read(name))

    def read_grouped(self, name: str) -> Grouped | None:
        return self._tensors.read_grouped(name)


def load_weights(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    *,
    device: torch.device,
    dtype: torch.dtype,
    keep: Callable[[Grouped], bool] | None = None,
) -> DecoderWeights:
    """Every weight on `device` in `dtype`, but for the linear ones that the file holds in groups and `keep`
    wants as they are. Raises `CheckpointError` naming the file and the tensor that is missing, unknown, of
    another shape than the config says, or unreadable."""
    if checkpoint.kind == "gguf":
        files: list[TensorFile] = [_Gguf(checkpoint.path)]
    else:
        files = [_Safetensors(path) for path in weight_files(checkpoint.path)]
    places = _locate(files, spec, where=checkpoint.path)
    grouped = _read_grouped(places, keep) if keep is not None else {}
    merged = {
        (w.layer, w.field): torch.empty(
            w.shape,
            dtype=dtype,
            device="meta" if (w.layer, w.field) in grouped and w.field != "embed" else device,
        )
        for w in weights(spec)
    }
    places = [(part, file) for part, file in places if not merged[part.layer, part.field].is_meta]

    def fill(item: tuple[Part, TensorFile]) -> None:
        part, file = item
        target = merged[part.layer, part.field][part.start : part.start + part.shape[0]]
        target.copy_(file.read(part.name, device=device))

    n_readers = min(_MAX_READERS, max(2, len(files)))
    with ThreadPoolExecutor(max_workers=n_readers, thread_name_prefix="weights") as pool:
        for _ in pool.map(fill, places):
            pass
    if "lm_head" not in {field for _, field in merged} and (MODEL, "embed") in grouped:
        grouped[MODEL, "lm_head"] = grouped[MODEL, "embed"]
    return _assemble(spec, merged, grouped)


def dummy_weights(
    spec: ModelSpec, *, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> DecoderWeights:
    """Random weights of the model's shape, for measuring speed without a download. Norms are one."""
    generator = torch.Generator(device=device).manual_seed(seed)
    merged = {(w.layer, w.field): _dummy(w, device, dtype, generator) for w in weights(spec)}
    return _assemble(spec, merged)


def _read_grouped(
    places: Iterable[tuple[Part, TensorFile]], keep: Callable[[Grouped], bool]
) -> dict[tuple[int, str], Grouped]:
    """The linear weights whose parts all come in groups of equal bits. The embedding is among them because
    it may be the output layer too."""
    found: dict[tuple[int, str], list[tuple[Part, Grouped | None]]] = {}
    for part, file in places:
        if len(part.shape) == 2 and isinstance(file, _Gguf):
            found.setdefault((part.layer, part.field), []).append((part, file.read_grouped(part.name)))
    out = {}
    for key, pieces in found.items():
        pieces.sort(key=lambda piece: piece[0].start)
        groups = [group for _, group in pieces if group is not None]
        joined = join(groups) if len(groups) == len(pieces) else None
        if joined is not None and keep(joined):
            out[key] = joined
    return out


def _dummy(
    weight: Weight, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    tensor = torch.empty(weight.shape, dtype=dtype, device=device)
    if weight.field.endswith("norm"):
        return tensor.fill_(1.0)
    if weight.field.endswith("bias"):
        return tensor.zero_()
    return tensor.normal_(0.0, _DUMMY_STD, generator=generator)


def _locate(files: Iterable[TensorFile], spec: ModelSpec, *, where: Path) -> list[tuple[Part, TensorFile]]:
    """Each part with its file, in file order. All checks happen here, before anything large is read."""
    wanted = {part.name: part for part in parts(spec)}
    found: list[tuple[Part, TensorFile]] = []
    unknown: list[str] = []
    for file in files:
        for name, shape in file.shapes().items():
            part = wanted.pop(name, None)
            if part is None:
                if not is_harmless(name, spec):
                    unknown.append(f"{name} in {file.path.name}")
            elif shape != part.shape:
                raise CheckpointError(
                    f"{file.path}: tensor {name} has shape {list(shape)}, but the config asks for "
                    f"{list(part.shape)}"
                )
            else:
                found.append((part, file))
    if wanted:
        raise CheckpointError(f"{where} lacks {_some(sorted(wanted))}")
    if unknown:
        raise CheckpointError(
            f"{where} has tensors that {spec.architecture} does not have: {_some(sorted(unknown))}"
        )
    return found


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown


def _assemble(
    spec: ModelSpec,
    merged: dict[tuple[int, str], torch.Tensor],
    grouped: dict[tuple[int, str], Grouped] | None = None,
) -> DecoderWeights:
    embed = merged[MODEL, "embed"]
    layers: list[dict[str, torch.Tensor]] = [{} for _ in range(spec.n_layers)]
    for (layer, field), tensor in merged.items():
        if layer != MODEL:
            layers[layer][field] = tensor
    return DecoderWeights(
        spec=spec,
        embed=embed,
        final_norm=merged[MODEL, "final_norm"],
        lm_head=merged.get((MODEL, "lm_head"), embed),
        layers=[LayerWeights(**tensors) for tensors in layers],
        grouped=grouped or {},
    )
