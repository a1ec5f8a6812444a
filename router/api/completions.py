"""POST /v1/completions."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from router.api.completion_format import CompletionFormat, Echo
from router.api.errors import invalid
from router.api.exchange import Exchange
from router.api.generation import AnswerFormat, GenerationEndpoint
from router.api.grammar import request_grammar
from router.api.job import Job
from router.api.limits import check_lengths
from router.api.params import build_params, completion_logprobs, prompt_logprobs_wanted
from router.api.schema import CompletionRequest
from router.ipc.messages import ModelInfo

I32 = npt.NDArray[np.int32]

_DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for this route."""


class CompletionsEndpoint(GenerationEndpoint):
    async def prepare(self, body: bytes, exchange: Exchange) -> tuple[Job, AnswerFormat]:
        context = self._context
        request = context.decoder.decode(body, CompletionRequest)
        model = context.check_model(request.model)
        if request.suffix:
            raise invalid("'suffix' is not available on this server.", param="suffix", code="unsupported")
        logprobs = completion_logprobs(request.logprobs, model=model)
        field, wanted = "prompt_logprobs", request.prompt_logprobs
        if request.echo and logprobs.chosen:
            field, wanted = "logprobs", logprobs.n_top
        params = build_params(
            request,
            limits=context.config,
            model=model,
            max_tokens=request.max_tokens,
            max_tokens_field="max_tokens",
            default_max_tokens=_DEFAULT_MAX_TOKENS,
            best_of=request.best_of,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs_wanted(
                wanted, field=field, model=model, stream=bool(request.stream)
            ),
        )
        grammar = request_grammar(request, model=model, limits=context.config)
        prompts = await self._prompts(request, model)
        check_lengths(prompts, params=params, model=model, param="prompt")
        table = context.text.table_for(skip_special=params.skip_special)
        job = Job(
            prefix="cmpl",
            prompts=prompts,
            params=params,
            model=model,
            client=context.client,
            table=table,
            request_id=exchange.request_id,
            traceparent=exchange.traceparent,
            grammar=grammar,
            clock=context.clock,
        )
        echo = Echo([table.whole_text(prompt) for prompt in prompts]) if request.echo else None
        format = CompletionFormat(
            job,
            model=model.model_id,
            names=context.text.names,
            echo=echo,
            with_logprobs=logprobs.chosen,
        )
        return job, format

    async def _prompts(self, request: CompletionRequest, model: ModelInfo) -> list[I32]:
        """A text, a list of texts, token ids, or a list of token id lists."""
        prompt = request.prompt
        if isinstance(prompt, str):
            return await self._encode([prompt], request)
        if not prompt:
            raise invalid("'prompt' must not be an empty list.", param="prompt")
        if all(isinstance(item, int) for item in prompt):
            return [_token_ids(prompt, "prompt", model)]
        if len(prompt) > self._context.config.max_prompts:
            raise invalid(
                f"'prompt' holds {len(prompt)} prompts; the limit is {self._context.config.max_prompts}"
                " (max_prompts).",
                param="prompt",
            )
        encoded = iter(await self._encode([item for item in prompt if isinstance(item, str)], request))
        prompts: list[I32] = []
        for i, item in enumerate(prompt):
            if isinstance(item, int):
                raise invalid("'prompt' mixes token ids with prompts.", param=f"prompt[{i}]")
            prompts.append(
                next(encoded) if isinstance(item, str) else _token_ids(item, f"prompt[{i}]", model)
            )
        return prompts

    async def _encode(self, texts: list[str], request: CompletionRequest) -> list[I32]:
        special = request.add_special_tokens is not False
        return await self._context.text.encoder.encode_all(texts, special=special)


def _token_ids(ids: list[int] | list[str | int | list[int]], path: str, model: ModelInfo) -> I32:
    """Raises ApiError for an id that the model doesn't have."""
    try:
        array = np.asarray(ids, dtype=np.int64)
    except OverflowError:
        raise invalid(f"'{path}' holds a token id that does not fit into 64 bits.", param=path) from None
    outside = np.flatnonzero((array < 0) | (array >= model.vocab_size))
    if outside.size:
        i = int(outside[0])
        raise invalid(
            f"Invalid value for '{path}[{i}]': token id {int(array[i])} is outside the vocabulary of"
            f" {model.vocab_size}.",
            param=f"{path}[{i}]",
        )
    return array.astype(np.int32)
