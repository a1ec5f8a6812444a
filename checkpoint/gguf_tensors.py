"""The weights of a GGUF file as float32 numpy arrays under transformers' tensor names.

Decoding of the quantised formats is the `gguf` package's. Never imports torch.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from checkpoint.checkpoint import CheckpointError
from checkpoint.gguf_header import TensorInfo, read_gguf_header, tensor_bytes
from checkpoint.grouped import Grouped, decode

F32 = npt.NDArray[np.float32]
_T = TypeVar("_T", bound=np.generic)

_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "rope_freqs.weight": "rope_freqs.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_IN_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_PERMUTED_ARCHITECTURES = ("llama", "mistral")
"""llama.cpp's converter interleaves the two rotary halves of q and k for these; others it leaves alone."""


class GgufTensors:
    """Names, shapes and decoded values. Safe to read from several threads: the file is only mapped."""

    def __init__(self, path: Path) -> None:
        """Raises `CheckpointError` when the file is damaged."""
        self.path = path
        header = read_gguf_header(path)
        self._data = np.memmap(path, dtype=np.uint8, mode="r")
        self._infos = {_name(info.name): info for info in header.tensors.values()}
        architecture = header.metadata.get("general.architecture")
        self._heads: dict[str, int] = {}
        if architecture in _PERMUTED_ARCHITECTURES:
            n_heads = int(header.metadata[f"{architecture}.attention.head_count"])
            n_kv_heads = int(header.metadata.get(f"{architecture}.attention.head_count_kv") or n_heads)
            self._heads = {"q_proj": n_heads, "k_proj": n_kv_heads}

    def names(self) -> list[str]:
        """In the file's order."""
        return list(self._infos)

    def shape(self, name: str) -> tuple[int, ...]:
        """In torch's order: rows first."""
        return tuple(reversed(self._infos[name].shape))

    def read(self, name: str) -> F32:
        """A new float32 array. Raises `CheckpointError` for a format that can't be decoded."""
        info = self._infos[name]
        values = self._decode(info).reshape(self.shape(name))
        for part, n_heads in self._heads.items():
            if f".{part}." in name:
                return _halves_together(values, n_heads)
        return values

    def read_grouped(self, name: str) -> Grouped | None:
        """The weights as the file holds them; None when their format is not of this form."""
        info = self._infos[name]
        kind, blocks = self._blocks(info)
        grouped = decode(kind, blocks)
        if grouped is None:
            return None
        for part, n_heads in self._heads.items():
            if f".{part}." in name:
                order = _halves_together(np.arange(blocks.shape[0])[:, None], n_heads)
                return grouped.rows(order[:, 0])
        return grouped

    def _decode(self, info: TensorInfo) -> F32:
        from gguf import quants
        from gguf.constants import GGMLQuantizationType

        kind, blocks = self._blocks(info)
        try:
            decoded = quants.dequantize(blocks.reshape(blocks.shape[0], -1), GGMLQuantizationType[kind])
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self.path}: tensor {info.name} has the format {kind}, which can't be decoded: "
                "use a file of another quantisation"
            ) from error
        # Unquantised tensors come back as views of the read-only map.
        return np.array(decoded, dtype=np.float32, copy=True)

    def _blocks(self, info: TensorInfo) -> tuple[str, npt.NDArray[np.uint8]]:
        """The format's name and the raw bytes, [rows, blocks of a row, bytes of a block]."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            kind = GGMLQuantizationType(info.ggml_type)
            block, size = GGML_QUANT_SIZES[kind]
        except (KeyError, ValueError) as error:
            raise CheckpointError(
                f"{self.path}: tensor {info.name} has the unknown format {info.ggml_type}"
            ) from error
        if info.shape[0] % block:
            raise CheckpointError(
                f"{self.path}: tensor {info.name} has rows of {info.shape[0]} values, no multiple of {block}"
            )
        raw = np.asarray(self._data[info.offset : info.offset + tensor_bytes(info)])
        return kind.name, raw.reshape(-1, info.shape[0] // block, size)


def _name(name: str) -> str:
    """transformers' name of a GGUF tensor; an unknown one keeps its own, for the message that refuses it."""
    if name in _GLOBAL:
        return _GLOBAL[name]
    match = _IN_LAYER.fullmatch(name)
    if match is None or match[2] not in _LAYER:
        return name
    return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}"


def _halves_together(values: npt.NDArray[_T], n_heads: int) -> npt.NDArray[_T]:
    """Undo the converter's row order: per head (pair, half) back to (half, pair)."""
    rows = values.reshape(n_heads, values.shape[0] // n_heads // 2, 2, -1)
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(values.shape)
