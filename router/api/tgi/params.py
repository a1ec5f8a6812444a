"""TGI's parameters, checked and brought into the form that all routes share."""

from __future__ import annotations

import secrets

from router.api.config import ApiConfig
from router.api.errors import invalid
from router.api.params import LogprobsWanted, Params, build_params, prompt_logprobs_wanted
from router.api.schema import GenerationRequest
from router.api.tgi.schema import GenerateParameters
from router.ipc.messages import ModelInfo

_MAX_TEMPERATURE = 100.0


def tgi_params(
    given: GenerateParameters | None, *, stream: bool, config: ApiConfig, model: ModelInfo
) -> Params:
    """A request without any parameters samples, as in TGI; with some it samples when they say so. Raises
    ApiError naming the parameter, its value and the limit."""
    wanted = GenerateParameters(do_sample=True) if given is None else given
    _refuse_unserved(wanted, model=model)
    sampled = _is_sampled(wanted)
    best_of = _best_of(wanted, stream=stream, sampled=sampled, limit=config.max_n)
    if wanted.decoder_input_details and stream:
        raise invalid(
            "'decoder_input_details' is not available when streaming.", param="decoder_input_details"
        )
    top_n = _top_n_tokens(wanted.top_n_tokens, limit=model.max_logprobs)
    seed = wanted.seed
    if seed is None and sampled:
        seed = secrets.randbits(63)  # told in the details, so it is drawn here
    temperature = 1.0 if wanted.temperature is None else wanted.temperature
    request = GenerationRequest(
        n=best_of,
        stream=stream,
        stop=wanted.stop,
        temperature=temperature if sampled else 0.0,
        top_k=None if wanted.top_k is None else min(wanted.top_k, model.vocab_size),
        top_p=wanted.top_p,
        typical_p=wanted.typical_p,
        repetition_penalty=wanted.repetition_penalty,
        frequency_penalty=wanted.frequency_penalty,
        seed=seed,
    )
    details = stream or bool(wanted.details or wanted.decoder_input_details)
    return build_params(
        request,
        limits=config,
        model=model,
        max_tokens=wanted.max_new_tokens,
        max_tokens_field="max_new_tokens",
        max_temperature=_MAX_TEMPERATURE,
        logprobs=LogprobsWanted(chosen=details or best_of > 1, n_top=top_n if details else 0),
        every_token=details or best_of > 1,
        prompt_logprobs=prompt_logprobs_wanted(
            0 if wanted.decoder_input_details else None,
            field="decoder_input_details",
            model=model,
            stream=stream,
        ),
    )


def check_truncate(truncate: int | None, *, model: ModelInfo) -> None:
    if truncate is not None and not 1 <= truncate <= model.max_input_tokens:
        raise _out_of_range(
            "truncate", truncate, f"is not between 1 and {model.max_input_tokens} (max_input_tokens)"
        )


def _is_sampled(wanted: GenerateParameters) -> bool:
    temperature = wanted.temperature
    if temperature is not None and temperature != 1.0:
        return temperature != 0.0
    return (
        bool(wanted.do_sample)
        or (wanted.top_k is not None and wanted.top_k > 0)
        or (wanted.top_p is not None and wanted.top_p < 1.0)
        or (wanted.typical_p is not None and wanted.typical_p < 1.0)
    )


def _best_of(wanted: GenerateParameters, *, stream: bool, sampled: bool, limit: int) -> int:
    best_of = 1 if wanted.best_of is None else wanted.best_of
    if not 1 <= best_of <= limit:
        raise _out_of_range("best_of", best_of, f"is not between 1 and {limit} (max_n)")
    if best_of > 1 and stream:
        raise invalid(f"'best_of' {best_of} is not available when streaming.", param="best_of")
    if best_of > 1 and not sampled:
        raise invalid(
            f"'best_of' {best_of} needs sampling (do_sample, temperature, top_k, top_p or typical_p).",
            param="best_of",
        )
    return best_of


def _top_n_tokens(wanted: int | None, *, limit: int) -> int:
    n = 0 if wanted is None else wanted
    if not 0 <= n <= limit:
        raise _out_of_range("top_n_tokens", n, f"is not between 0 and {limit}")
    return n


def _refuse_unserved(wanted: GenerateParameters, *, model: ModelInfo) -> None:
    if wanted.watermark:
        raise invalid(
            "'watermark' is not available on this server; leave it out or send false.",
            param="watermark",
            code="unsupported",
        )
    if wanted.adapter_id:
        raise invalid(
            f"The adapter '{wanted.adapter_id[:200]}' is not loaded: this server serves"
            f" '{model.model_id}' alone.",
            param="adapter_id",
            code="model_not_found",
            status=404,
        )


def _out_of_range(field: str, value: int, rule: str) -> Exception:
    return invalid(f"Invalid value for '{field}': {value} {rule}.", param=field, code="out_of_range")
