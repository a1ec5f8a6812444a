"""A transformers-style config dict as a `ModelSpec`, checked: what the decoder can't compute is refused here.

Field names are those of transformers' LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config; both the
older `rope_scaling` and the newer `rope_parameters` forms are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from worker.errors import StartError
from worker.models.rope import rope_spec
from worker.models.spec import ModelSpec

Config = Mapping[str, Any]


def spec_from_config(config: Config) -> ModelSpec:
    """Raises `StartError` naming the architecture or field that can't be served."""
    names = config.get("architectures") or []
    name = str(names[0]) if names else ""
    adjust = _ARCHITECTURES.get(name)
    if adjust is None:
        supported = ", ".join(sorted(_ARCHITECTURES))
        raise StartError(f"the model's architecture is {name or 'not named'}; served are: {supported}")
    return adjust(config, _base(config, name))


def supported_architectures() -> tuple[str, ...]:
    return tuple(sorted(_ARCHITECTURES))


def _base(config: Config, architecture: str) -> ModelSpec:
    """What all of the line share: grouped heads, SwiGLU, RMS norms, no biases, full attention."""
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise StartError(f"{architecture} with hidden_act {activation!r} is not served; served is silu")
    hidden_size = _positive(config, "hidden_size")
    n_heads = _positive(config, "num_attention_heads")
    n_kv_heads = int(config.get("num_key_value_heads") or n_heads)
    head_dim = int(config.get("head_dim") or hidden_size // n_heads)
    if n_heads % n_kv_heads:
        raise StartError(
            f"num_attention_heads {n_heads} of the model is no multiple of num_key_value_heads {n_kv_heads}"
        )
    max_positions = _positive(config, "max_position_embeddings")
    return ModelSpec(
        architecture=architecture,
        n_layers=_positive(config, "num_hidden_layers"),
        hidden_size=hidden_size,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        intermediate_size=_positive(config, "intermediate_size"),
        vocab_size=_positive(config, "vocab_size"),
        rms_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=rope_spec(config, head_dim=head_dim, max_positions=max_positions),
        max_positions=max_positions,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        eos_token_ids=_eos_ids(config.get("eos_token_id")),
    )


def _llama(config: Config, spec: ModelSpec) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    return replace(spec, qkv_bias=bias, o_bias=bias, mlp_bias=bool(config.get("mlp_bias", False)))


def _mistral(config: Config, spec: ModelSpec) -> ModelSpec:
    return replace(spec, sliding_windows=_windows(config, spec, default=config.get("sliding_window")))


def _qwen2(config: Config, spec: ModelSpec) -> ModelSpec:
    # Qwen2 always has biases on q, k and v and never on o.
    return replace(spec, qkv_bias=True, sliding_windows=_qwen_windows(config, spec))


def _qwen3(config: Config, spec: ModelSpec) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    return replace(
        spec, qk_norm=True, qkv_bias=bias, o_bias=bias, sliding_windows=_qwen_windows(config, spec)
    )


def _smollm3(config: Config, spec: ModelSpec) -> ModelSpec:
    without_rope = config.get("no_rope_layers")
    interval = int(config.get("no_rope_layer_interval", 4))
    has_nope = not all(without_rope) if without_rope else spec.n_layers >= interval
    if has_nope:
        raise StartError(
            "SmolLM3ForCausalLM with layers that skip rotary embedding (no_rope_layers) is not served"
        )
    return _llama(config, spec)


_ARCHITECTURES: dict[str, Callable[[Config, ModelSpec], ModelSpec]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "SmolLM3ForCausalLM": _smollm3,
}


def _qwen_windows(config: Config, spec: ModelSpec) -> tuple[int | None, ...]:
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    if not window:
        return ()
    if config.get("layer_types"):
        return _windows(config, spec, default=window)
    first = int(config.get("max_window_layers", 28))
    return _none_if_all_full(tuple(int(window) if i >= first else None for i in range(spec.n_layers)))


def _windows(config: Config, spec: ModelSpec, *, default: int | None) -> tuple[int | None, ...]:
    if not default:
        return ()
    types = config.get("layer_types") or ["sliding_attention"] * spec.n_layers
    if len(types) != spec.n_layers:
        raise StartError(f"layer_types of the model lists {len(types)} layers, the model has {spec.n_layers}")
    unknown = set(types) - {"sliding_attention", "full_attention"}
    if unknown:
        raise StartError(f"layer type {sorted(unknown)[0]!r} of the model is not served")
    return _none_if_all_full(tuple(int(default) if t == "sliding_attention" else None for t in types))


def _none_if_all_full(windows: tuple[int | None, ...]) -> tuple[int | None, ...]:
    return windows if any(w is not None for w in windows) else ()


def _positive(config: Config, key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int | float) or value <= 0:
        raise StartError(f"{key} of the model's config is {value!r}, but must be a positive number")
    return int(value)


def _eos_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list | tuple) else (int(value),)
