"""Tiny models made on the spot, so that no test here needs the network."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def safetensors_bytes(*, n_values: int = 2048, fill: float = 0.0) -> bytes:
    data = np.full(n_values, fill, dtype="<f4").tobytes()
    header = json.dumps({"w": {"dtype": "F32", "shape": [n_values], "data_offsets": [0, len(data)]}}).encode()
    return struct.pack("<Q", len(header)) + header + data


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(safetensors_bytes())
    return folder


@pytest.fixture
def make_gguf(tmp_path: Path) -> Callable[..., Path]:
    """make_gguf(architecture=…, name=…, **metadata) writes a GGUF with one embedding of 32 tokens.

    Extra metadata keys are given with `__` for `.`; tensors as arrays in `tensors`.
    """
    from gguf import GGUFWriter

    def make(
        architecture: str = "llama",
        *,
        name: str = "m.gguf",
        tensors: dict[str, Any] | None = None,
        metadata: dict[str, int | float | str] | None = None,
    ) -> Path:
        path = tmp_path / name
        writer = GGUFWriter(path, architecture)
        writer.add_block_count(1)
        writer.add_context_length(64)
        writer.add_embedding_length(8)
        writer.add_feed_forward_length(16)
        writer.add_head_count(2)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_token_list([f"t{i}" for i in range(32)])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        for key, value in (metadata or {}).items():
            if isinstance(value, str):
                writer.add_string(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            else:
                writer.add_uint32(key, value)
        arrays = {"token_embd.weight": np.zeros((32, 8), dtype=np.float32), **(tensors or {})}
        for key, array in arrays.items():
            writer.add_tensor(key, array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return make
