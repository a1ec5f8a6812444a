"""TGI's request bodies. Types only, as in `router/api/schema.py`."""

from __future__ import annotations

from typing import Any

import msgspec


class GenerateParameters(msgspec.Struct, kw_only=True):
    best_of: int | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    do_sample: bool | None = None
    max_new_tokens: int | None = None
    return_full_text: bool | None = None
    stop: list[str] | None = None
    truncate: int | None = None
    watermark: bool | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    seed: int | None = None
    top_n_tokens: int | None = None
    grammar: dict[str, Any] | None = None
    adapter_id: str | None = None


class GenerateRequest(msgspec.Struct, kw_only=True):
    inputs: str
    parameters: GenerateParameters | None = None
    stream: bool | None = None
    """Read on `/` and `/invocations` alone."""


class InputsTokenizeRequest(msgspec.Struct, kw_only=True):
    inputs: str
    parameters: GenerateParameters | None = None
