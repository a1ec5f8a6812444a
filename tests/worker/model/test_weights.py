"""Loading: merged in place, from one file or several, safetensors or GGUF; damage is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint.checkpoint import Checkpoint, CheckpointError
from checkpoint.gguf_config import gguf_checkpoint
from checkpoint.gguf_tensors import GgufTensors
from tests.worker.model.tiny import make_model, open_checkpoint
from worker.models.config import spec_from_config
from worker.models.spec import DecoderWeights
from worker.weights import dummy_weights, load_weights

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


def load(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> DecoderWeights:
    return load_weights(checkpoint, spec_from_config(checkpoint.config), device=CPU, dtype=dtype)


def test_parts_are_merged_in_their_rows(tmp_path: Path) -> None:
    state = make_model("llama3-rope-biases", tmp_path).state_dict()
    weights = load(open_checkpoint(tmp_path), torch.bfloat16)
    layer = weights.layers[1]
    prefix = "model.layers.1."
    qkv = torch.cat([state[f"{prefix}self_attn.{x}_proj.weight"] for x in "qkv"])
    torch.testing.assert_close(layer.qkv, qkv.bfloat16())
    bias = torch.cat([state[f"{prefix}mlp.{x}_proj.bias"] for x in ("gate", "up")])
    assert layer.gate_up_bias is not None
    torch.testing.assert_close(layer.gate_up_bias, bias.bfloat16())
    torch.testing.assert_close(weights.lm_head, state["lm_head.weight"].bfloat16())


def test_sharded_checkpoint_equals_the_single_file(tmp_path: Path) -> None:
    model = make_model("llama", tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="60KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = load(open_checkpoint(tmp_path / "one")), load(open_checkpoint(tmp_path / "many"))
    assert many.lm_head is many.embed
    for a, b in zip(one.layers, many.layers, strict=True):
        torch.testing.assert_close(a.gate_up, b.gate_up)


def _drop(tensors: Tensors) -> None:
    del tensors["model.layers.2.mlp.up_proj.weight"]


def _add(tensors: Tensors) -> None:
    tensors["model.layers.0.self_attn.sinks"] = torch.zeros(2)


def _reshape(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = torch.zeros(47)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_drop, r"lacks model.layers.2.mlp.up_proj.weight"),
        (_add, r"LlamaForCausalLM does not have: model.layers.0.self_attn.sinks in model.safetensors"),
        (_reshape, r"model.safetensors: tensor model.norm.weight has shape \[47\].* asks for \[48\]"),
    ],
)
def test_wrong_tensors_are_named(tmp_path: Path, damage: Callable[[Tensors], None], message: str) -> None:
    make_model("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    damage(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        load(open_checkpoint(tmp_path))


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"model.safetensors is cut short"):
        load(open_checkpoint(tmp_path))


def test_harmless_extra_tensors_are_passed_over(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    save_file(tensors, file, metadata={"format": "pt"})
    load(open_checkpoint(tmp_path))


def test_dummy_weights_have_the_models_shapes(tmp_path: Path) -> None:
    make_model("qwen3", tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    spec = spec_from_config(checkpoint.config)
    dummy = dummy_weights(spec, device=CPU, dtype=torch.float32)
    real = load(checkpoint)
    assert dummy.layers[0].qkv.shape == real.layers[0].qkv.shape
    assert dummy.layers[0].qkv.std() == pytest.approx(0.02, rel=0.1)
    assert dummy.final_norm.tolist() == [1.0] * 48


# ---- GGUF ----

KINDS = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


def interleave(weight: np.ndarray, n_heads: int) -> np.ndarray:
    """The row order that llama.cpp's converter gives q and k."""
    rows = weight.reshape(n_heads, 2, weight.shape[0] // n_heads // 2, -1)
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(weight.shape)


def write_gguf(path: Path, state: Tensors, kind: str) -> None:
    """A tiny Llama of hidden 64, 4 heads, 2 KV heads, 2 layers, as llama.cpp would write it."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for name, tensor in state.items():
        stem = name.removesuffix(".weight")
        prefix = ""
        if stem.startswith("model.layers."):
            _, _, layer, stem = stem.split(".", 3)
            prefix = f"blk.{layer}."
        values = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            values = interleave(values, 4 if "q_proj" in name else 2)
        if values.ndim == 1:
            writer.add_tensor(f"{prefix}{names[stem]}.weight", values)
            continue
        quantised = gguf.GGMLQuantizationType[kind]
        raw = gguf.quants.quantize(values, quantised)
        writer.add_tensor(f"{prefix}{names[stem]}.weight", raw, raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("kind", KINDS)
def test_gguf_gives_back_the_weights(tmp_path: Path, kind: str) -> None:
    state = {k: v.detach() for k, v in make_model("llama", tmp_path / "hf", **SIZES).state_dict().items()}
    path = tmp_path / "tiny.gguf"
    write_gguf(path, state, kind)
    checkpoint = gguf_checkpoint(path, name="tiny")
    weights = load(checkpoint)
    qkv = torch.cat([state[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv"])
    # Half a quantisation step, for weights within about 1.2.
    step = {"F32": 0.0, "F16": 1e-3, "BF16": 8e-3, "Q8_0": 0.01, "Q5_0": 0.08, "Q5_1": 0.08}.get(kind, 0.16)
    torch.testing.assert_close(weights.layers[1].qkv, qkv, atol=step, rtol=0)
    torch.testing.assert_close(weights.lm_head, state["lm_head.weight"], atol=step, rtol=0)


def test_gguf_tensors_have_transformers_names(tmp_path: Path) -> None:
    model = make_model("llama", tmp_path / "hf", **SIZES)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, {k: v.detach() for k, v in model.state_dict().items()}, "F32")
    tensors = GgufTensors(path)
    assert set(tensors.names()) == set(model.state_dict())
    assert tensors.shape("model.layers.0.mlp.down_proj.weight") == (64, 96)


def test_gguf_of_another_shape_than_its_metadata_is_refused(tmp_path: Path) -> None:
    model = make_model("llama", tmp_path / "hf", **SIZES)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, {k: v.detach() for k, v in model.state_dict().items()}, "F32")
    checkpoint = gguf_checkpoint(path, name="tiny")
    config = {**checkpoint.config, "intermediate_size": 128}
    with pytest.raises(CheckpointError, match=r"_proj.weight has shape \[.*96.*\].*128"):
        load(replace(checkpoint, config=config))
