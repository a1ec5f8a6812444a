"""POST /generate, /generate_stream, / and /invocations."""

from __future__ import annotations

import enum

import msgspec

from router.api.chat import ChatEndpoint
from router.api.completions import CompletionsEndpoint
from router.api.context import ApiContext
from router.api.errors import invalid
from router.api.exchange import Exchange
from router.api.generation import AnswerFormat, GenerationEndpoint
from router.api.job import Job
from router.api.limits import check_lengths
from router.api.tgi.format import GenerateFormat, Wanted
from router.api.tgi.grammar import tgi_grammar
from router.api.tgi.params import check_truncate, tgi_params
from router.api.tgi.schema import GenerateParameters, GenerateRequest


class Mode(enum.Enum):
    WHOLE = "/generate"
    STREAM = "/generate_stream"
    EITHER = "/"
    """The body's `stream` decides; the whole answer is a list; the prompt comes back unless refused."""


class GenerateEndpoint(GenerationEndpoint):
    def __init__(self, context: ApiContext, *, mode: Mode) -> None:
        super().__init__(context)
        self._mode = mode

    async def prepare(self, body: bytes, exchange: Exchange) -> tuple[Job, AnswerFormat]:
        context, mode = self._context, self._mode
        request = context.decoder.decode(body, GenerateRequest)
        model = context.model
        stream = mode is Mode.STREAM or (mode is Mode.EITHER and bool(request.stream))
        given = request.parameters
        params = tgi_params(given, stream=stream, config=context.config, model=model)
        wanted = GenerateParameters() if given is None else given
        grammar = tgi_grammar(wanted.grammar, model=model, limits=context.config)
        check_truncate(wanted.truncate, model=model)
        if not request.inputs:
            raise invalid("'inputs' must not be empty.", param="inputs")
        prompt = await context.text.encoder.encode(request.inputs, special=True)
        if wanted.truncate is not None:
            prompt = prompt[-wanted.truncate :]
        check_lengths([prompt], params=params, model=model, param="inputs")
        job = Job(
            prefix="gen",
            prompts=[prompt],
            params=params,
            model=model,
            client=context.client,
            table=context.text.table_for(skip_special=True),
            request_id=exchange.request_id,
            traceparent=exchange.traceparent,
            grammar=grammar,
            clock=context.clock,
        )
        full_text = wanted.return_full_text
        if full_text is None:
            full_text = mode is Mode.EITHER
        format = GenerateFormat(
            job,
            wanted=Wanted(
                details=bool(wanted.details or wanted.decoder_input_details),
                prefill=bool(wanted.decoder_input_details),
                top_n=params.sampling.top_logprobs,
                prefix=request.inputs if full_text else "",
                as_list=mode is Mode.EITHER,
                n_input_chars=len(request.inputs),
                sampled=params.sampling.temperature > 0.0,
            ),
            names=context.text.names,
            special_ids=context.text.tokenizer.special_ids,
            arrived_s=exchange.started_s,
            clock=context.clock,
        )
        return job, format


class InvocationsEndpoint(GenerationEndpoint):
    """SageMaker's single route: the body's fields say what it is."""

    def __init__(self, context: ApiContext) -> None:
        super().__init__(context)
        self._by_field: dict[str, GenerationEndpoint] = {
            "inputs": GenerateEndpoint(context, mode=Mode.EITHER),
            "messages": ChatEndpoint(context),
            "prompt": CompletionsEndpoint(context),
        }
        self._fields = msgspec.json.Decoder(dict[str, msgspec.Raw])

    async def prepare(self, body: bytes, exchange: Exchange) -> tuple[Job, AnswerFormat]:
        try:
            fields = self._fields.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise invalid(f"The request body is not a JSON object: {error}") from error
        for name, endpoint in self._by_field.items():
            if name in fields:
                return await endpoint.prepare(body, exchange)
        raise invalid("Send 'inputs', 'messages' or 'prompt'.", param="inputs")
