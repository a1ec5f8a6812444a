"""Configs of transformers, in both their rope forms, as a ModelSpec."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from worker.errors import StartError
from worker.models.config import spec_from_config, supported_architectures

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
}

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
VARIANTS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "llama3", **LLAMA3},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
    {
        "rope_type": "yarn",
        "factor": 8.0,
        "beta_fast": 20,
        "beta_slow": 2,
        "truncate": False,
        "original_max_position_embeddings": 1024,
    },
    {
        "rope_type": "yarn",
        "factor": 8.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 1024,
    },
    {
        "rope_type": "longrope",
        "short_factor": [1.5] * 32,
        "long_factor": [1.5] * 32,
        "factor": 4.0,
        "original_max_position_embeddings": 2048,
    },
]


@pytest.mark.parametrize("scaling", VARIANTS, ids=lambda s: s["rope_type"])
@pytest.mark.parametrize("form", ["rope_parameters", "rope_scaling"])
def test_rope_frequencies_equal_transformers(scaling: dict[str, Any], form: str) -> None:
    reference = LlamaConfig(**BASE, rope_parameters={"rope_theta": 50000.0, **scaling})
    expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](reference, "cpu")
    if form == "rope_parameters":
        config = {**BASE, form: {"rope_theta": 50000.0, **scaling}}
    else:
        config = {**BASE, "rope_theta": 50000.0, form: scaling}
    rope = spec_from_config(config).rope
    np.testing.assert_allclose(rope.inv_freq, expected.numpy(), rtol=2e-6)
    assert rope.attention_factor == pytest.approx(factor)


def test_older_rope_type_name_and_partial_rotation() -> None:
    rope = spec_from_config(
        {**BASE, "rope_scaling": {"type": "linear", "factor": 2.0}, "partial_rotary_factor": 0.5}
    ).rope
    assert (rope.variant, rope.rotary_dim, len(rope.inv_freq)) == ("linear", 32, 16)
    assert rope.inv_freq[0] == 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel; served are: LlamaForCausalLM, Mistral"),
        ({"architectures": None}, "not named; served are"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' of the model is not served"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 of the model is no multiple"),
        ({"num_hidden_layers": 0}, "num_hidden_layers of the model's config is 0"),
        (
            {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 1, 1, 0]},
            "skip rotary embedding",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}},
            "different short and long factors",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(StartError, match=message):
        spec_from_config({**BASE, **change})


def test_sliding_windows_per_layer() -> None:
    mistral = {**BASE, "architectures": ["MistralForCausalLM"], "sliding_window": 64}
    assert spec_from_config(mistral).sliding_windows == (64,) * 4
    assert spec_from_config({**mistral, "sliding_window": None}).sliding_windows == ()
    qwen = {**BASE, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 32, "max_window_layers": 2}
    assert spec_from_config(qwen).sliding_windows == ()
    assert spec_from_config({**qwen, "use_sliding_window": True}).sliding_windows == (None, None, 32, 32)


def test_all_supported_architectures_have_a_spec() -> None:
    for name in supported_architectures():
        spec = spec_from_config({**BASE, "architectures": [name], "no_rope_layers": [1] * 4})
        assert spec.qk_norm == (name == "Qwen3ForCausalLM")
        assert spec.qkv_bias == (name == "Qwen2ForCausalLM")
