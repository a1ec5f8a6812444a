"""Renders a checkpoint's chat template as transformers' `apply_chat_template` does, within bounds.

Templates are programs that come with a model, so they run in Jinja's immutable sandbox, and neither their
output nor their running time is unlimited.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from checkpoint.checkpoint import CheckpointError
from checkpoint.tokenizer import Tokenizer

_MAX_OUTPUT_CHARS = 16 * 1024 * 1024
_MAX_RENDER_S = 2.0
_MAX_RANGE_ITEMS = 1_000_000
"""All `range`s of one rendering together: a loop that prints nothing is bounded too."""


class ChatTemplateError(Exception):
    """These messages can't be rendered; the message says why, often in the template's own words."""


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; for serving it is its body alone."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """`range` is bounded by the sandbox; strings grown by multiplication are bounded here."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("the power operator is not available in chat templates")
        for text, count in ((left, right), (right, left)):
            multiplied = isinstance(text, str | list | tuple) and isinstance(count, int)
            if multiplied and len(text) * count > _MAX_OUTPUT_CHARS:
                raise SecurityError("the chat template multiplies a text beyond the limit")
        return super().call_binop(context, operator, left, right)


class ChatTemplate:
    """One compiled template. Not bound to a request; rendering keeps no state."""

    def __init__(
        self,
        source: str,
        *,
        variables: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime.datetime] = datetime.datetime.now,
    ) -> None:
        """`variables`: special tokens by role. Raises CheckpointError when the template isn't valid Jinja."""
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise CheckpointError(f"the chat template is not valid Jinja: {error}") from error
        self.source = source
        self.takes_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
        """Whether the template has a place for tools."""
        self._variables = dict(variables or {})
        self._clock = clock

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as text, special tokens included (so it is tokenised without adding any).

        Raises ChatTemplateError for messages that the template refuses, and past the bounds.
        """
        values = {
            **self._variables,
            **(variables or {}),
            "range": _bounded_range(),
            "messages": list(messages),
            "tools": None if not tools else list(tools),
            "documents": None if not documents else list(documents),
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        text = self._generate(values)
        return _cut_after_final_message(text, messages) if continue_final_message else text

    def _generate(self, values: Mapping[str, Any]) -> str:
        deadline = self._clock() + _MAX_RENDER_S
        parts: list[str] = []
        n_chars = 0
        try:
            for part in self._template.generate(values):
                parts.append(part)
                n_chars += len(part)
                if n_chars > _MAX_OUTPUT_CHARS:
                    raise ChatTemplateError(f"the rendered prompt is over {_MAX_OUTPUT_CHARS} characters")
                if self._clock() > deadline:
                    raise ChatTemplateError(f"rendering the chat template took over {_MAX_RENDER_S} s")
        except ChatTemplateError:
            raise
        except TemplateError as error:
            raise ChatTemplateError(f"the chat template refused the messages: {error}") from error
        except Exception as error:  # a template can fail in any way that Python can
            raise ChatTemplateError(
                f"the chat template failed on these messages: {type(error).__name__}: {error}"
            ) from error
        return "".join(parts)


def load_chat_template(tokenizer: Tokenizer, *, source: str | None = None) -> ChatTemplate | None:
    """The tokenizer's default template, or `source` in its place; None when the model has none."""
    text = source if source is not None else tokenizer.settings.chat_templates.get("default")
    if text is None:
        return None
    return ChatTemplate(text, variables=tokenizer.settings.template_variables)


def _cut_after_final_message(text: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """For an assistant message that the model is to go on with: everything after its words is dropped."""
    content = messages[-1].get("content") if messages else None
    final = content.strip() if isinstance(content, str) else ""
    at = text.rfind(final) if final else -1
    if at < 0:
        raise ChatTemplateError(
            "continue_final_message: the last message's text is not in the rendered prompt"
        )
    # A template that keeps the message's own trailing space keeps it here too.
    whole = content if isinstance(content, str) else final
    start = text.rfind(whole)
    return text[: start + len(whole)] if start >= 0 else text[: at + len(final)]


def _bounded_range() -> Callable[..., range]:
    n_left = _MAX_RANGE_ITEMS

    def bounded(*arguments: int) -> range:
        nonlocal n_left
        items = range(*arguments)
        n_left -= len(items)
        if n_left < 0:
            raise SecurityError(f"the chat template loops over more than {_MAX_RANGE_ITEMS} numbers")
        return items

    return bounded


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)
