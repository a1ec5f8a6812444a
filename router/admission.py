"""From what the API asks to a request that can be scheduled: everything that can't is refused here, once."""

from __future__ import annotations

import random
import sys

import numpy as np
import numpy.typing as npt

from proto.codec import pack_f32, pack_i32, unpack_i32
from proto.worker_pb2 import Grammar, Sampling
from router.errors import ContextLengthError, InvalidRequestError, UnknownAdapterError
from router.ipc.messages import GrammarSpec, RequestSpec, SamplingSpec
from router.limits import Limits
from router.request import Request, grammar_key

I32 = npt.NDArray[np.int32]

_SEED_MASK = 2**64 - 1
_MAX_PRIORITY = 1_000_000


def make_request(
    spec: RequestSpec,
    *,
    conn: int,
    order: int,
    limits: Limits,
    default_deadline_s: float,
    rng: random.Random,
    now: float,
) -> Request:
    """Raises InvalidRequestError (400) naming the value and the limit. Whatever passes can be scheduled on an
    empty server."""
    tokens = _prompt(spec, limits)
    end_len = _end_len(spec, len(tokens), limits)
    _check_features(spec, limits)
    salt = spec.salt
    if spec.adapter_id:
        salt = f"{salt}\0adapter={spec.adapter_id}"
    if spec.sampling.prompt_logprobs:
        # Logprobs of cached positions are never computed: such a request shares nothing.
        salt = f"{salt}\0alone={conn}/{spec.id}/{order}"
    if not 0 <= spec.id < 2**63:
        raise InvalidRequestError(f"the request id is {spec.id}, but must be from 0 to 2^63 - 1")
    if not -_MAX_PRIORITY <= spec.priority <= _MAX_PRIORITY:
        raise InvalidRequestError(
            f"priority is {spec.priority}, but must be from {-_MAX_PRIORITY} to {_MAX_PRIORITY}",
            param="priority",
        )
    deadline_s = spec.deadline_s if spec.deadline_s is not None else default_deadline_s
    if not deadline_s > 0:
        raise InvalidRequestError(f"the deadline is {deadline_s} s, but must be above 0", param="deadline_s")
    try:
        sampling = _sampling(spec.sampling, limits=limits, rng=rng)
    except (ValueError, OverflowError, TypeError) as error:
        raise InvalidRequestError(f"a sampling parameter is out of range: {error}") from None
    grammar = grammar_of(spec.grammar) if spec.grammar is not None else None
    return Request(
        conn=conn,
        id=spec.id,
        order=order,
        arrival_s=now,
        priority=spec.priority,
        deadline_s=now + deadline_s,
        tokens=tokens,
        n_prompt=len(tokens),
        end_len=end_len,
        sampling=sampling,
        grammar=grammar,
        grammar_key=grammar_key(grammar) if grammar is not None else b"",
        adapter_id=spec.adapter_id,
        salt=salt,
        ignore_eos=spec.sampling.ignore_eos,
        stop_token_ids=frozenset(spec.sampling.stop_token_ids),
        request_id=spec.request_id,
        tie_break=rng.random(),
    )


def grammar_of(spec: GrammarSpec) -> Grammar:
    """As the workers take it. Its kind must be known."""
    return Grammar(kind=Grammar.Kind.ValueType(spec.kind), source=spec.source, strict=spec.strict)


def _prompt(spec: RequestSpec, limits: Limits) -> I32:
    if not spec.prompt or len(spec.prompt) % 4:
        raise InvalidRequestError(
            "the prompt is empty, but must have at least one token"
            if not spec.prompt
            else f"the prompt has {len(spec.prompt)} bytes, not a multiple of 4",
            param="prompt",
        )
    n_prompt = len(spec.prompt) // 4
    if n_prompt > limits.max_input_tokens:
        raise ContextLengthError(
            f"the prompt has {n_prompt} tokens, but at most {limits.max_input_tokens} are allowed "
            "(max_input_tokens)",
            param="prompt",
        )
    tokens = unpack_i32(spec.prompt)
    if sys.byteorder == "big":
        tokens = tokens.astype(np.int32)
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= limits.vocab_size:
        raise InvalidRequestError(
            f"the prompt has token id {low if low < 0 else high}, but ids are 0 to {limits.vocab_size - 1}",
            param="prompt",
        )
    return tokens


def _end_len(spec: RequestSpec, n_prompt: int, limits: Limits) -> int:
    longest = min(limits.max_total_tokens, limits.pool_tokens)
    if spec.max_new_tokens is None:
        return longest
    if spec.max_new_tokens < 1:
        raise InvalidRequestError(
            f"max_tokens is {spec.max_new_tokens}, but must be at least 1", param="max_tokens"
        )
    total = n_prompt + spec.max_new_tokens
    if total > longest:
        by = "max_total_tokens" if limits.max_total_tokens <= limits.pool_tokens else "max_batch_total_tokens"
        raise ContextLengthError(
            f"the prompt has {n_prompt} tokens and max_tokens is {spec.max_new_tokens}: together {total}, "
            f"but at most {longest} are allowed ({by}; the KV cache holds {limits.pool_tokens})",
            param="max_tokens",
        )
    return total


def _check_features(spec: RequestSpec, limits: Limits) -> None:
    sampling = spec.sampling
    if spec.adapter_id:
        raise UnknownAdapterError(
            f"adapter {spec.adapter_id!r} is not loaded: this server serves {limits.model_id} alone",
            param="model",
        )
    if spec.grammar is not None:
        if "grammar" not in limits.features:
            raise InvalidRequestError(
                "constrained output (response_format, tools with a forced choice) is not supported by this "
                "server's workers",
                param=spec.grammar.param,
            )
        if spec.grammar.kind not in Grammar.Kind.values():
            raise InvalidRequestError(
                f"unknown kind of grammar: {spec.grammar.kind}", param=spec.grammar.param
            )
    if not 0 <= sampling.top_logprobs <= limits.max_logprobs:
        raise InvalidRequestError(
            f"top_logprobs is {sampling.top_logprobs}, but must be from 0 to {limits.max_logprobs}",
            param="top_logprobs",
        )
    if sampling.prompt_logprobs:
        if "prompt_logprobs" not in limits.features:
            raise InvalidRequestError(
                "logprobs of the prompt are not supported by this server's workers", param="prompt_logprobs"
            )
        if not 0 < sampling.prompt_logprobs <= limits.max_logprobs + 1:
            raise InvalidRequestError(
                f"prompt_logprobs is {sampling.prompt_logprobs}, but must be from 0 to "
                f"{limits.max_logprobs + 1}",
                param="prompt_logprobs",
            )
    for param, ids in (("logit_bias", sampling.logit_bias), ("stop_token_ids", sampling.stop_token_ids)):
        for token in ids:
            if not 0 <= token < limits.vocab_size:
                raise InvalidRequestError(
                    f"{param} names token id {token}, but ids are 0 to {limits.vocab_size - 1}", param=param
                )


def _sampling(spec: SamplingSpec, *, limits: Limits, rng: random.Random) -> Sampling:
    seed = rng.getrandbits(64) if spec.seed is None else spec.seed & _SEED_MASK
    sampling = Sampling(
        temperature=spec.temperature,
        top_k=spec.top_k,
        top_p=spec.top_p,
        min_p=spec.min_p,
        typical_p=spec.typical_p,
        repetition_penalty=spec.repetition_penalty,
        presence_penalty=spec.presence_penalty,
        frequency_penalty=spec.frequency_penalty,
        seed=seed,
        min_new_tokens=spec.min_new_tokens,
        logprobs=spec.logprobs,
        top_logprobs=spec.top_logprobs,
        prompt_logprobs=spec.prompt_logprobs,
    )
    if spec.logit_bias:
        sampling.bias_ids = pack_i32(list(spec.logit_bias.keys()))
        sampling.bias_values = pack_f32(list(spec.logit_bias.values()))
    if spec.min_new_tokens:
        ends = set(spec.stop_token_ids)
        if not spec.ignore_eos:
            ends.update(limits.eos_token_ids)
        sampling.eos_ids = pack_i32(sorted(ends))
    return sampling
