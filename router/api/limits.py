"""Limits that can be told before the scheduler is asked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from router.api.errors import invalid
from router.api.params import Params
from router.ipc.messages import ModelInfo

I32 = npt.NDArray[np.int32]


def check_lengths(prompts: Sequence[I32], *, params: Params, model: ModelInfo, param: str) -> None:
    """Raises ApiError (400) naming both numbers and the flag for what could never be served."""
    n_choices = len(prompts) * params.n
    if n_choices > model.max_concurrent_requests:
        raise invalid(
            f"{len(prompts)} prompts with n = {params.n} are {n_choices} requests; the limit is"
            f" {model.max_concurrent_requests} (max_concurrent_requests).",
            param="n" if params.n > 1 else param,
        )
    for prompt in prompts:
        _check_length(len(prompt), params=params, model=model, param=param)


def _check_length(n: int, *, params: Params, model: ModelInfo, param: str) -> None:
    if n == 0:
        raise invalid("The prompt is empty: it must have at least one token.", param=param)
    if n > model.max_input_tokens:
        raise invalid(
            f"The prompt has {n} tokens; the limit is {model.max_input_tokens} (max_input_tokens).",
            param=param,
            code="context_length_exceeded",
        )
    wanted = params.max_new_tokens
    if wanted is not None and n + wanted > model.max_total_tokens:
        raise invalid(
            f"The prompt has {n} tokens and {wanted} more are asked for, {n + wanted} in all; the limit is"
            f" {model.max_total_tokens} (max_total_tokens).",
            param=params.max_tokens_field,
            code="context_length_exceeded",
        )
