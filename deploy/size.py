"""`quire size`: what fits into a device's memory, before one is bought or rented.

An estimate; a worker measures at its start and prints what it found.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoint.checkpoint import CheckpointError
from deploy.errors import DeployError
from worker.models.size import kv_bytes_per_token, n_parameters, step_bytes
from worker.models.spec import ModelSpec

GIB, MIB = 1 << 30, 1 << 20
CONTEXT_BYTES = 640 * MIB
"""What the driver and the libraries take of a GPU before anything is loaded."""
ITEM_BYTES: Mapping[str, int] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}


class SizeError(DeployError):
    """The model does not fit; the message says by how much and what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    memory_gib: float
    dtype: str = "bfloat16"
    kv_cache_dtype: str = "auto"
    max_batch_size: int = 256
    max_batch_prefill_tokens: int = 4096
    block_size: int = 16
    wiggle_room: float = 0.95
    context: int = 4096
    """Tokens of one request, prompt and answer, for the count of requests."""

    @property
    def kv_dtype(self) -> str:
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Bytes, and what they are enough for."""

    n_parameters: int
    weights: int
    step: int
    free: int
    kv: int
    kv_per_token: int
    n_tokens: int
    n_requests: float


def size_of(spec: ModelSpec, wanted: Wanted) -> Size:
    """Raises SizeError when not one request of `context` tokens fits."""
    total = int(wanted.memory_gib * GIB)
    count = n_parameters(spec)
    weights = count * ITEM_BYTES[wanted.dtype]
    step = step_bytes(
        spec,
        max_step_tokens=wanted.max_batch_prefill_tokens + wanted.max_batch_size,
        max_batch_size=wanted.max_batch_size,
        itemsize=ITEM_BYTES[wanted.dtype],
    )
    free = total - CONTEXT_BYTES - weights
    kv = int(max(0, free - step) * wanted.wiggle_room)
    per_token = kv_bytes_per_token(spec, itemsize=ITEM_BYTES[wanted.kv_dtype])
    # One block is kept for padding.
    n_blocks = max(0, kv // (per_token * wanted.block_size) - 1)
    size = Size(
        n_parameters=count,
        weights=weights,
        step=step,
        free=free,
        kv=kv,
        kv_per_token=per_token,
        n_tokens=n_blocks * wanted.block_size,
        n_requests=n_blocks * wanted.block_size / wanted.context,
    )
    if size.n_tokens < wanted.context:
        needed = CONTEXT_BYTES + weights + step
        needed += int((wanted.context + 2 * wanted.block_size) * per_token / wanted.wiggle_room)
        raise SizeError(
            f"it does not fit: weights {weights / GIB:.1f} GiB, the largest step {step / GIB:.1f} GiB, "
            f"driver {CONTEXT_BYTES / GIB:.1f} GiB and the KV of one request of {wanted.context} tokens need "
            f"{needed / GIB:.1f} GiB, but --gpu-memory is {wanted.memory_gib:g} GiB. Less take "
            "smaller --max-batch-prefill-tokens, --max-batch-size or --context, an 8-bit --kv-cache-dtype or "
            "another model"
        )
    return size


def report(name: str, spec: ModelSpec, wanted: Wanted, size: Size) -> str:
    """For people: each line's arithmetic as it is."""
    kv = f"2 x {spec.n_layers} layers x {spec.n_kv_heads} KV heads x {spec.head_dim} x {wanted.kv_dtype}"
    lines = [
        f"{name}: {size.n_parameters / 1e9:.2f} billion parameters, {spec.n_layers} layers, "
        f"hidden size {spec.hidden_size}",
        "",
        f"  memory                        {wanted.memory_gib:10.2f} GiB",
        f"- driver and libraries, about   {CONTEXT_BYTES / GIB:10.2f} GiB",
        f"- weights in {wanted.dtype:<18} {size.weights / GIB:10.2f} GiB",
        f"- largest step, at most         {size.step / GIB:10.2f} GiB  ({wanted.max_batch_prefill_tokens} "
        f"prompt tokens and {wanted.max_batch_size} rows)",
        f"{f'= x {wanted.wiggle_room:g} for the KV cache':<32}{size.kv / GIB:10.2f} GiB",
        "",
        f"A token takes {size.kv_per_token:,} bytes of KV ({kv}).",
        f"max_batch_total_tokens is about {size.n_tokens:,}: {size.n_requests:.0f} requests of "
        f"{wanted.context} tokens at once, shared beginnings counted once "
        f"(rows: --max-batch-size {wanted.max_batch_size}).",
    ]
    if size.n_requests < 1.5:
        lines.append("That is hardly more than one request: think of a smaller context or more memory.")
    return "\n".join(lines)


def config_of(model: str, *, revision: str | None) -> dict[str, Any]:
    """The model's config in transformers' form. Of a hub model only config.json is fetched. Raises
    CheckpointError."""
    from checkpoint.hub import is_hub_id
    from checkpoint.paths import user_path
    from checkpoint.resolve import resolve
    from checkpoint.smollm2 import SMOLLM2

    path = user_path(model)
    if path.is_dir():
        return _read(path / "config.json")
    if path.is_file() or model == SMOLLM2 or not is_hub_id(model):
        return resolve(model).config
    return _read(_hub_config(model, revision))


def _hub_config(model: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(model, "config.json", revision=revision))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"can't read the config of {model} from the hub: {first_line}") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"can't read {path}: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds no model config")
    return config
