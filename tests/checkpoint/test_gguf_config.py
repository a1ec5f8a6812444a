from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from checkpoint.checkpoint import CheckpointError
from checkpoint.gguf_config import gguf_checkpoint
from checkpoint.gguf_header import read_gguf_header

MakeGguf = Callable[..., Path]


@pytest.mark.parametrize(
    ("architecture", "named"),
    [
        ("llama", "LlamaForCausalLM"),
        ("mistral", "MistralForCausalLM"),
        ("qwen2", "Qwen2ForCausalLM"),
        ("qwen3", "Qwen3ForCausalLM"),
    ],
)
def test_the_architectures_of_the_llama_line(make_gguf: MakeGguf, architecture: str, named: str) -> None:
    found = gguf_checkpoint(make_gguf(architecture), name="m")
    assert found.config["architectures"] == [named]
    assert found.config["num_key_value_heads"] == 2
    assert found.config["head_dim"] == 4
    assert found.config["rms_norm_eps"] == np.float32(1e-5)
    assert found.config["tie_word_embeddings"] is True
    assert (found.max_context, found.vocab_size) == (64, 32)
    assert (found.bos_token_id, found.eos_token_ids) == (1, (2,))


def test_an_own_output_matrix_unties_and_biases_are_seen(make_gguf: MakeGguf) -> None:
    zeros = np.zeros((32, 8), dtype=np.float32)
    path = make_gguf(
        "qwen2", tensors={"output.weight": zeros, "blk.0.attn_q.bias": np.zeros(8, dtype=np.float32)}
    )
    config = gguf_checkpoint(path, name="m").config
    assert config["tie_word_embeddings"] is False
    assert config["attention_bias"] is True


def test_several_tokens_may_end_an_answer_once_each(make_gguf: MakeGguf) -> None:
    path = make_gguf(
        metadata={"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 2}, name="eos.gguf"
    )
    assert gguf_checkpoint(path, name="m").eos_token_ids == (2, 5)


def test_rope_factors_become_the_longrope_form(make_gguf: MakeGguf) -> None:
    factors = np.array([1.0, 8.0], dtype=np.float32)
    scaling = gguf_checkpoint(make_gguf(tensors={"rope_freqs.weight": factors}), name="m").config[
        "rope_scaling"
    ]
    assert scaling["rope_type"] == "longrope"
    assert scaling["short_factor"] == scaling["long_factor"] == [1.0, 8.0]
    assert scaling["attention_factor"] == 1.0


def test_yarn(make_gguf: MakeGguf) -> None:
    path = make_gguf(
        metadata={
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.original_context_length": 16,
        }
    )
    assert gguf_checkpoint(path, name="m").config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    }


@pytest.mark.parametrize(
    ("architecture", "metadata", "words"),
    [
        ("gemma", {}, "architecture 'gemma'; served are llama"),
        ("llama", {"llama.expert_count": 8}, "mixture of experts"),
        (
            "llama",
            {"llama.rope.scaling.type": "other", "llama.rope.scaling.factor": 2.0},
            "scales rope by 'other'",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    make_gguf: MakeGguf, architecture: str, metadata: dict[str, int | float | str], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        gguf_checkpoint(make_gguf(architecture, metadata=metadata), name="m")


def test_a_file_cut_short_names_both_sizes(make_gguf: MakeGguf) -> None:
    path = make_gguf()
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match=f"cut short: {len(whole) - 100} bytes on disk, {len(whole)}"):
        gguf_checkpoint(path, name="m")


def test_every_truncation_of_the_header_is_an_error_of_ours(make_gguf: MakeGguf) -> None:
    path = make_gguf()
    whole = path.read_bytes()
    header_size = read_gguf_header(path).header_size
    for size in range(0, header_size, 7):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            gguf_checkpoint(path, name="m")


def test_a_flipped_byte_in_the_header_never_escapes_as_another_error(make_gguf: MakeGguf) -> None:
    path = make_gguf()
    whole = path.read_bytes()
    header_size = read_gguf_header(path).header_size
    for at in range(0, header_size, 5):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            gguf_checkpoint(path, name="m")
        except CheckpointError:
            continue


def test_other_files_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "a.gguf"
    text.write_text("hello, this is not a model")
    with pytest.raises(CheckpointError, match=r"not GGUF \(it starts with b'hell'\)"):
        gguf_checkpoint(text, name="m")
    text.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(CheckpointError, match="git lfs pull"):
        gguf_checkpoint(text, name="m")
    text.write_bytes(b"")
    with pytest.raises(CheckpointError, match="not GGUF"):
        gguf_checkpoint(text, name="m")


def test_equal_files_have_equal_fingerprints_and_other_weights_another(make_gguf: MakeGguf) -> None:
    a = gguf_checkpoint(make_gguf(name="a.gguf"), name="a")
    b = gguf_checkpoint(make_gguf(name="b.gguf"), name="b")
    tuned = {"token_embd.weight": np.full((32, 8), 0.5, dtype=np.float32)}
    c = gguf_checkpoint(make_gguf(name="c.gguf", tensors=tuned), name="c")
    assert a.fingerprint == b.fingerprint != c.fingerprint
