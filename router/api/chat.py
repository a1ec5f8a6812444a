"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from checkpoint.chat_template import ChatTemplateError
from router.api.binding import bound
from router.api.chat_format import ChatFormat
from router.api.context import ApiContext
from router.api.conversation import normalise_messages
from router.api.errors import ApiError, invalid
from router.api.exchange import Exchange
from router.api.generation import AnswerFormat, GenerationEndpoint
from router.api.grammar import check_grammar, request_grammar
from router.api.job import Job
from router.api.limits import check_lengths
from router.api.literal import Rendered
from router.api.params import build_params, chat_logprobs, prompt_logprobs_wanted
from router.api.reasoning import opens_reasoning
from router.api.schema import ChatRequest
from router.api.tools.legacy import in_older_words, with_tools
from router.api.tools.message import MessageRules
from router.api.tools.request import ToolUse, tool_use
from router.api.tools.told import with_tools_told
from router.ipc.messages import ModelInfo


class ChatEndpoint(GenerationEndpoint):
    async def prepare(self, body: bytes, exchange: Exchange) -> tuple[Job, AnswerFormat]:
        context = self._context
        request, legacy = with_tools(context.decoder.decode(body, ChatRequest))
        _refuse_unserved(request)
        field = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        try:
            job, rules = await prepare_chat(
                context,
                request,
                exchange,
                prefix="chatcmpl",
                max_tokens=getattr(request, field),
                max_tokens_field=field,
            )
        except ApiError as error:
            if not legacy:
                raise
            raise in_older_words(error) from error
        rules = replace(rules, legacy=legacy)
        format = ChatFormat(job, model=context.model.model_id, names=context.text.names, rules=rules)
        return job, format


async def prepare_chat(
    context: ApiContext,
    request: ChatRequest,
    exchange: Exchange,
    *,
    prefix: str,
    max_tokens: int | None,
    max_tokens_field: str,
    messages_field: str = "messages",
) -> tuple[Job, MessageRules]:
    """The job, and how its answers are read. Raises ApiError naming the field, as the client knows it."""
    model = context.check_model(request.model)
    params = build_params(
        request,
        limits=context.config,
        model=model,
        max_tokens=max_tokens,
        max_tokens_field=max_tokens_field,
        logprobs=chat_logprobs(request.logprobs, request.top_logprobs, model=model),
        prompt_logprobs=prompt_logprobs_wanted(
            request.prompt_logprobs, field="prompt_logprobs", model=model, stream=bool(request.stream)
        ),
    )
    answer = request_grammar(request, model=model, limits=context.config)
    use = tools_of(context, request, model=model)
    rendered = render_request(context, request, tools=use.tools)
    rules = replace(
        use.rules,
        splits_reasoning=context.text.splits_reasoning,
        starts_in_reasoning=context.text.splits_reasoning and opens_reasoning(rendered.text),
    )
    grammar = bound(
        answer,
        use,
        thinks=rules.splits_reasoning,
        opened=rules.starts_in_reasoning,
        marks=context.text.marks,
    )
    if grammar is not None:
        check_grammar(grammar, limits=context.config)
    prompt = await context.text.encoder.encode_rendered(rendered)
    check_lengths([prompt], params=params, model=model, param=messages_field)
    job = Job(
        prefix=prefix,
        prompts=[prompt],
        params=params,
        model=model,
        client=context.client,
        table=context.text.table_for(skip_special=params.skip_special, markers=use.markers),
        request_id=exchange.request_id,
        traceparent=exchange.traceparent,
        grammar=grammar,
        rules=rules,
        clock=context.clock,
    )
    return job, rules


def tools_of(context: ApiContext, request: ChatRequest, *, model: ModelInfo) -> ToolUse:
    """Raises ApiError (400) naming the field at fault."""
    return tool_use(
        request.tools,
        request.tool_choice,
        parallel=request.parallel_tool_calls is not False,
        line=context.text.tool_line,
        model=model,
        marks=context.text.marks,
    )


def render_request(context: ApiContext, request: ChatRequest, *, tools: Sequence[dict[str, Any]]) -> Rendered:
    """The prompt. Raises ApiError (400) as `render_chat` does."""
    return render_chat(
        context,
        request.messages,
        tools=tools,
        add_generation_prompt=request.add_generation_prompt is not False,
        continue_final_message=bool(request.continue_final_message),
        documents=request.documents,
        variables=request.chat_template_kwargs,
    )


def render_chat(
    context: ApiContext,
    messages: list[dict[str, Any]],
    *,
    tools: Sequence[dict[str, Any]] = (),
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    documents: list[dict[str, Any]] | None = None,
    variables: dict[str, Any] | None = None,
) -> Rendered:
    """The prompt. Raises ApiError (400) when the model has no template or it refuses the messages."""
    normalised = normalise_messages(messages)
    template = context.text.template
    if template is None:
        raise invalid(
            "This model has no chat template: use /v1/completions with a prompt of your own, or start the"
            " server with --chat-template.",
            param="messages",
            code="no_chat_template",
        )
    if tools and not template.takes_tools:
        normalised, tools = with_tools_told(normalised, tools), ()
    marked = context.text.control_tokens.mark(normalised, tools, documents, variables)
    normalised, tools, documents, variables = marked.values
    try:
        text = template.render(
            normalised,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            documents=documents,
            variables=variables,
        )
    except ChatTemplateError as error:
        raise invalid(f"{error}.", param="messages", code="chat_template_error") from error
    return marked.divide(text)


def _refuse_unserved(request: ChatRequest) -> None:
    """What can't be honoured is said, not ignored."""
    if request.moderation is not None:
        raise invalid("'moderation' is not available on this server.", param="moderation", code="unsupported")
    if request.audio is not None or any(kind != "text" for kind in request.modalities or ()):
        field = "audio" if request.audio is not None else "modalities"
        raise invalid(f"'{field}': this model writes text only.", param=field, code="unsupported")
