"""A model folder without a model: what a fake worker and the API need of one."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB = 1024


def byte_model_folder(folder: Path, *, max_context: int) -> Path:
    """One token per byte, ids 1 to 256; 0 is EOS."""
    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(
        models.BPE(vocab={"<end>": 0} | {c: 1 + i for i, c in enumerate(alphabet)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "max_position_embeddings": max_context,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    return folder
