"""Float32 forms of a quantised GGUF model, so that other engines can be compared on equal weights.

    python -m bench.peer_models --gguf model.Q4_1.gguf --out DIR

writes `DIR/model-f32.gguf` (for llama.cpp) and `DIR/safetensors/` (config, tokenizer and weights, for
engines that read Hugging Face folders). Needs the `worker` extra and `accelerate`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize

FILE_TYPE_ALL_F32 = 0
"""`general.file_type` of a file whose tensors are all float32."""


def write_f32_gguf(source: Path, target: Path) -> int:
    """Copies every field and widens every tensor to float32. Returns the number of tensors."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = FILE_TYPE_ALL_F32 if name == "general.file_type" else field.contents()
        kind = field.types[0]
        sub_kind = field.types[-1] if kind is GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, kind, sub_type=sub_kind)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, as_float32(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return len(reader.tensors)


def as_float32(data: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """[rows, columns] of one GGUF tensor as float32."""
    return np.ascontiguousarray(dequantize(data, kind), dtype=np.float32)


def write_safetensors(source: Path, target: Path) -> None:
    """Config, tokenizer and float32 weights as `transformers` saves them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, name = str(source.parent), source.name
    loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    config = loaded.config
    # The tensors are float32 by now, but a model marked as quantised refuses to be saved.
    del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]  # untyped there
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(target)
    AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(target)


def main(
    gguf: Annotated[Path, typer.Option(help="The quantised model")],
    out: Annotated[Path, typer.Option(help="Folder to write into")],
) -> None:
    """Write the float32 forms of a GGUF model."""
    if not gguf.is_file():
        typer.echo(f"bench.peer_models: --gguf {gguf}: no such file", err=True)
        raise typer.Exit(2)
    out.mkdir(parents=True, exist_ok=True)
    n = write_f32_gguf(gguf, out / "model-f32.gguf")
    typer.echo(f"{out / 'model-f32.gguf'}: {n} tensors")
    write_safetensors(gguf, out / "safetensors")
    typer.echo(f"{out / 'safetensors'}")


if __name__ == "__main__":
    typer.run(main)
