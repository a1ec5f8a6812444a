"""Sampling parameters from request fields: ranges, combinations and defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import msgspec

from router.api.errors import invalid
from router.api.schema import GenerationRequest
from router.ipc.messages import ModelInfo, SamplingSpec

_U64 = (1 << 64) - 1
_MAX_PRIORITY = 1 << 31
_UNSERVED = ("use_beam_search", "allowed_token_ids", "bad_words", "truncate_prompt_tokens")


class ParamLimits(Protocol):
    @property
    def max_n(self) -> int: ...
    @property
    def max_stop_sequences(self) -> int: ...
    @property
    def max_stop_chars(self) -> int: ...
    @property
    def max_logit_bias(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobsWanted:
    chosen: bool = False
    n_top: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """One request's validated parameters, the same for all its choices."""

    sampling: SamplingSpec
    n: int
    """Choices generated for each prompt."""
    n_returned: int
    """The best of them, as many as the client gets."""
    stops: tuple[str, ...]
    include_stop: bool
    skip_special: bool
    max_new_tokens: int | None
    max_tokens_field: str
    """Which field set it, for messages."""
    default_max_new_tokens: int | None
    """Where the request says nothing: at most so many, and never past the context's end."""
    priority: int
    deadline_s: float | None
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    """Answer with the ids of prompt and output beside their text."""
    every_token: bool = False
    """Each generated token is told, also those that show no text."""

    def max_new_tokens_for(self, n_prompt: int, model: ModelInfo) -> int | None:
        """None: as many as the context holds."""
        if self.max_new_tokens is not None or self.default_max_new_tokens is None:
            return self.max_new_tokens
        return max(1, min(self.default_max_new_tokens, model.max_total_tokens - n_prompt))

    def sampling_of(self, index: int) -> SamplingSpec:
        """The n choices of one prompt differ: a given seed is counted up, an absent one is drawn for each."""
        seed = self.sampling.seed
        if seed is None or index == 0:
            return self.sampling
        return msgspec.structs.replace(self.sampling, seed=(seed + index) & _U64)


def build_params(
    request: GenerationRequest,
    *,
    limits: ParamLimits,
    model: ModelInfo,
    max_tokens: int | None,
    max_tokens_field: str,
    logprobs: LogprobsWanted,
    prompt_logprobs: int = 0,
    default_max_tokens: int | None = None,
    max_temperature: float = 2.0,
    every_token: bool = False,
    best_of: int | None = None,
) -> Params:
    """Raises ApiError (400) naming the field, its value and the limit."""
    _refuse_unserved(request)
    n = _integer("n", request.n, default=1, low=1, high=limits.max_n)
    if max_tokens is not None and max_tokens < 1:
        raise _out_of_range(max_tokens_field, max_tokens, "must be at least 1")
    stream = bool(request.stream)
    n_generated = _best_of(best_of, n=n, stream=stream, limits=limits)
    options = request.stream_options
    if options is not None and not stream:
        raise invalid("'stream_options' is only allowed when 'stream' is true.", param="stream_options")
    temperature = _number("temperature", request.temperature, default=1.0, low=0.0, high=max_temperature)
    top_k = _integer("top_k", request.top_k, default=0, low=-1, high=model.vocab_size)
    top_p = _number("top_p", request.top_p, default=1.0, low=0.0, high=1.0)
    if top_p == 0.0:  # the smallest nucleus: the most likely token alone
        top_p, top_k = 1.0, 1
    min_tokens = _integer("min_tokens", request.min_tokens, default=0, low=0, high=model.max_total_tokens)
    if max_tokens is not None and min_tokens > max_tokens:
        raise _out_of_range("min_tokens", min_tokens, f"must not exceed {max_tokens_field} ({max_tokens})")
    sampling = SamplingSpec(
        temperature=temperature,
        top_k=max(top_k, 0),
        top_p=top_p,
        min_p=_number("min_p", request.min_p, default=0.0, low=0.0, high=1.0),
        typical_p=_number("typical_p", request.typical_p, default=1.0, low=0.0, high=1.0, open_low=True),
        repetition_penalty=_number(
            "repetition_penalty", request.repetition_penalty, default=1.0, low=0.0, high=100.0, open_low=True
        ),
        presence_penalty=_number(
            "presence_penalty", request.presence_penalty, default=0.0, low=-2.0, high=2.0
        ),
        frequency_penalty=_number(
            "frequency_penalty", request.frequency_penalty, default=0.0, low=-2.0, high=2.0
        ),
        logit_bias=_logit_bias(request.logit_bias, vocab_size=model.vocab_size, limit=limits.max_logit_bias),
        seed=_seed(request.seed),
        min_new_tokens=min_tokens,
        ignore_eos=bool(request.ignore_eos),
        stop_token_ids=_token_ids("stop_token_ids", request.stop_token_ids, vocab_size=model.vocab_size),
        logprobs=logprobs.chosen or n_generated > n,
        top_logprobs=logprobs.n_top,
        prompt_logprobs=prompt_logprobs,
    )
    return Params(
        sampling=sampling,
        n=n_generated,
        n_returned=n,
        stops=_stops(request.stop, limits=limits),
        include_stop=bool(request.include_stop_str_in_output),
        skip_special=request.skip_special_tokens is not False,
        max_new_tokens=max_tokens,
        max_tokens_field=max_tokens_field,
        default_max_new_tokens=default_max_tokens,
        priority=_integer("priority", request.priority, default=0, low=-_MAX_PRIORITY, high=_MAX_PRIORITY),
        deadline_s=_timeout(request.timeout),
        stream=stream,
        include_usage=bool(options and (options.include_usage or options.continuous_usage_stats)),
        continuous_usage=bool(options and options.continuous_usage_stats),
        return_token_ids=bool(request.return_token_ids),
        every_token=every_token,
    )


def _refuse_unserved(request: GenerationRequest) -> None:
    """vLLM's fields without which the answer would be another one."""
    for field in _UNSERVED:
        if getattr(request, field):
            raise invalid(f"'{field}' is not available on this server.", param=field, code="unsupported")


def _best_of(best_of: int | None, *, n: int, stream: bool, limits: ParamLimits) -> int:
    wanted = _integer("best_of", best_of, default=n, low=1, high=limits.max_n)
    if wanted < n:
        raise _out_of_range("best_of", wanted, f"must be at least n ({n})")
    if wanted > n and stream:
        raise invalid(
            f"Invalid value for 'best_of': {wanted} is not n ({n}), and the best can't be known while answers"
            " are streamed.",
            param="best_of",
        )
    return wanted


def chat_logprobs(wanted: bool | None, n_top: int | None, *, model: ModelInfo) -> LogprobsWanted:
    """Chat's pair of fields: a switch and the number of alternatives."""
    if n_top is not None and n_top != 0 and not wanted:
        raise invalid("'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs")
    n = _integer("top_logprobs", n_top, default=0, low=0, high=model.max_logprobs)
    return LogprobsWanted(chosen=bool(wanted), n_top=n)


def completion_logprobs(wanted: bool | int | None, *, model: ModelInfo) -> LogprobsWanted:
    """Completions' one number; 0 asks for the chosen tokens alone, false and null for none."""
    if wanted is None or wanted is False:
        return LogprobsWanted()
    n = _integer("logprobs", int(wanted), default=0, low=0, high=model.max_logprobs)
    return LogprobsWanted(chosen=True, n_top=n)


def prompt_logprobs_wanted(wanted: int | None, *, field: str, model: ModelInfo, stream: bool) -> int:
    """In the worker's counting: 0 none, n the chosen and (n - 1) most likely."""
    if wanted is None:
        return 0
    n = _integer(field, wanted, default=0, low=0, high=model.max_logprobs)
    if "prompt_logprobs" not in model.features:
        raise invalid(f"This model's workers can't give logprobs of the prompt ('{field}').", param=field)
    if stream and field == "prompt_logprobs":
        raise invalid("'prompt_logprobs' is not available with 'stream'.", param=field)
    return n + 1


def _out_of_range(field: str, value: object, rule: str) -> Exception:
    return invalid(f"Invalid value for '{field}': {value} {rule}.", param=field, code="out_of_range")


def _integer(field: str, value: int | None, *, default: int, low: int, high: int) -> int:
    if value is None:
        return default
    if not low <= value <= high:
        raise _out_of_range(field, value, f"is not between {low} and {high}")
    return value


def _number(
    field: str, value: float | None, *, default: float, low: float, high: float, open_low: bool = False
) -> float:
    if value is None:
        return default
    if not math.isfinite(value) or not low <= value <= high or (open_low and value == low):
        rule = (
            f"is not above {low:g} and at most {high:g}"
            if open_low
            else f"is not between {low:g} and {high:g}"
        )
        raise _out_of_range(field, value, rule)
    return float(value)


def _seed(seed: int | None) -> int | None:
    if seed is None:
        return None
    if not -(1 << 63) <= seed <= _U64:
        raise _out_of_range("seed", seed, "does not fit into 64 bits")
    return seed & _U64


def _timeout(timeout_s: float | None) -> float | None:
    if timeout_s is None:
        return None
    if not math.isfinite(timeout_s) or timeout_s <= 0:
        raise _out_of_range("timeout", timeout_s, "must be a positive number of seconds")
    return float(timeout_s)


def _stops(stop: str | list[str] | None, *, limits: ParamLimits) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > limits.max_stop_sequences:
        raise _out_of_range(
            "stop", f"{len(stops)} strings", f"are over {limits.max_stop_sequences} (max_stop_sequences)"
        )
    for i, text in enumerate(stops):
        field = "stop" if isinstance(stop, str) else f"stop[{i}]"
        if not text:
            raise invalid(f"Invalid value for '{field}': a stop string must not be empty.", param=field)
        if len(text) > limits.max_stop_chars:
            raise _out_of_range(
                field, f"{len(text)} characters", f"are over {limits.max_stop_chars} (max_stop_chars)"
            )
    return tuple(dict.fromkeys(stops))


def _logit_bias(bias: dict[str, float] | None, *, vocab_size: int, limit: int) -> dict[int, float]:
    if not bias:
        return {}
    if len(bias) > limit:
        raise _out_of_range("logit_bias", f"{len(bias)} entries", f"are over {limit} (max_logit_bias)")
    parsed: dict[int, float] = {}
    for key, value in bias.items():
        if not key.isascii() or not key.isdigit():
            raise invalid(f"Invalid key in 'logit_bias': {key[:32]!r} is not a token id.", param="logit_bias")
        if int(key) >= vocab_size:
            raise _out_of_range(
                "logit_bias", f"token id {key[:32]}", f"is outside the vocabulary of {vocab_size}"
            )
        if not -100.0 <= value <= 100.0:
            raise _out_of_range("logit_bias", f"{value:g} (token {key[:32]})", "is not between -100 and 100")
        parsed[int(key)] = float(value)
    return parsed


def _token_ids(field: str, ids: list[int] | None, *, vocab_size: int) -> list[int]:
    for i, token in enumerate(ids or ()):
        if not 0 <= token < vocab_size:
            raise _out_of_range(f"{field}[{i}]", token, f"is outside the vocabulary of {vocab_size}")
    return list(dict.fromkeys(ids or ()))
