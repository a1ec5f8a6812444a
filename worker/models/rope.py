"""Rotary embedding frequencies of the scaling variants in use.

Sources: RoFormer (arXiv 2104.09864) for the base, Llama 3.1's reference code for `llama3`,
YaRN (arXiv 2309.00071, sections 3.2 and 3.4) for `yarn`, LongRoPE (arXiv 2402.13753) for `longrope`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from worker.errors import StartError
from worker.models.spec import RopeSpec

F64 = npt.NDArray[np.float64]

_VARIANTS = ("default", "linear", "llama3", "yarn", "longrope")


def rope_spec(config: Mapping[str, Any], *, head_dim: int, max_positions: int) -> RopeSpec:
    """Raises `StartError` for a variant that isn't served."""
    params = _parameters(config)
    theta = float(params.get("rope_theta") or config.get("rope_theta") or 10000.0)
    partial = params.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    rotary_dim = int(head_dim * float(partial))
    variant = str(params.get("rope_type") or params.get("type") or "default")
    base = theta ** -(np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    factor = float(params.get("factor") or 1.0)
    attention_factor = 1.0
    if variant == "default":
        frequencies = base
    elif variant == "linear":
        frequencies = base / factor
    elif variant == "llama3":
        frequencies = _llama3(base, params, factor=factor, max_positions=max_positions)
    elif variant == "yarn":
        original = float(params.get("original_max_position_embeddings") or max_positions)
        frequencies = _yarn(base, params, factor=factor, theta=theta, original=original)
        attention_factor = _yarn_attention_factor(params, factor=factor)
    elif variant == "longrope":
        frequencies, attention_factor = _longrope(base, params, max_positions=max_positions)
    else:
        raise StartError(
            f"rope scaling {variant!r} of the model is not served; served are {', '.join(_VARIANTS)}"
        )
    return RopeSpec(
        inv_freq=tuple(float(f) for f in frequencies),
        rotary_dim=rotary_dim,
        attention_factor=attention_factor,
        theta=theta,
        variant=variant,
    )


def _parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    params = config.get("rope_parameters") or config.get("rope_scaling") or {}
    nested = [value for value in params.values() if isinstance(value, Mapping)]
    if not nested:
        return params
    # One set per layer type: served when all agree.
    if any(value != nested[0] for value in nested):
        raise StartError("rope_parameters of the model differ between layer types, which is not served")
    return nested[0]


def _llama3(base: F64, params: Mapping[str, Any], *, factor: float, max_positions: int) -> F64:
    low, high = float(params.get("low_freq_factor", 1.0)), float(params.get("high_freq_factor", 4.0))
    original = float(params.get("original_max_position_embeddings") or max_positions)
    wavelength = 2 * math.pi / base
    # 0 where the wave is longer than original/low (scaled), 1 where shorter than original/high (kept).
    keep = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    frequencies: F64 = (1 - keep) * base / factor + keep * base
    return frequencies


def _yarn(base: F64, params: Mapping[str, Any], *, factor: float, theta: float, original: float) -> F64:
    n = 2 * len(base)

    def dimension(rotations: float) -> float:
        """The dimension whose wave turns that often over the original context."""
        return n * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(float(params.get("beta_fast") or 32))
    high = dimension(float(params.get("beta_slow") or 1))
    if params.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, n - 1)
    if low == high:
        high += 0.001
    scaled = np.clip((np.arange(len(base)) - low) / (high - low), 0.0, 1.0)
    frequencies: F64 = scaled * base / factor + (1 - scaled) * base
    return frequencies


def _yarn_attention_factor(params: Mapping[str, Any], *, factor: float) -> float:
    if params.get("attention_factor") is not None:
        return float(params["attention_factor"])

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, all_dim = params.get("mscale"), params.get("mscale_all_dim")
    if mscale and all_dim:
        return scale(float(mscale)) / scale(float(all_dim))
    return scale(1.0)


def _longrope(base: F64, params: Mapping[str, Any], *, max_positions: int) -> tuple[F64, float]:
    short, long = params.get("short_factor"), params.get("long_factor")
    if not short or short != long:
        # Two factor sets make KV depend on the request's final length: it can't be cached by prefix.
        raise StartError("rope scaling 'longrope' with different short and long factors is not served")
    if len(short) != len(base):
        raise StartError(f"the model's rope scaling has {len(short)} factors, but needs {len(base)}")
    if params.get("attention_factor") is not None:
        attention_factor = float(params["attention_factor"])
    else:
        original = float(params.get("original_max_position_embeddings") or max_positions)
        factor = float(params.get("factor") or max_positions / original)
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return base / np.asarray(short, dtype=np.float64), attention_factor
