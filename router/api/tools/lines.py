"""Model lines: how each writes its calls, and which one a model belongs to."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from router.api.tools import bare, hermes, mistral
from router.api.tools.formats import Format, Marks
from router.api.tools.parsed import Parse
from router.api.tools.schemas import Function

_MISTRAL_ID_CHARS = string.ascii_letters + string.digits


class BindCalls(Protocol):
    """The arguments of strict functions fit their schema, those of others are some object."""

    def __call__(self, functions: Sequence[Function], *, marks: Marks, limit: int | None) -> Format:
        """`limit`: 1 or None."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolLine:
    name: str
    parse: Parse
    markers: tuple[str, ...] = ()
    """Tokens that the parser must see although they may be special."""
    new_id: Callable[[], str]
    calls: BindCalls
    """An answer of calls and nothing else."""
    free: BindCalls
    """Any answer; what it calls, it calls rightly."""


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _mistral_id() -> str:
    """Its templates take ids of nine letters and digits alone."""
    return "".join(secrets.choice(_MISTRAL_ID_CHARS) for _ in range(9))


HERMES = ToolLine(
    name="hermes",
    parse=hermes.parse,
    markers=hermes.MARKERS,
    new_id=_new_id,
    calls=hermes.calls,
    free=hermes.free,
)
LLAMA = ToolLine(
    name="llama3",
    parse=bare.parse_llama,
    markers=bare.LLAMA_MARKERS,
    new_id=_new_id,
    calls=bare.llama_calls,
    free=bare.llama_free,
)
MISTRAL = ToolLine(
    name="mistral",
    parse=mistral.parse,
    markers=mistral.MARKERS,
    new_id=_mistral_id,
    calls=mistral.calls,
    free=mistral.free,
)
MISTRAL_NAMED = replace(MISTRAL, calls=mistral.named_calls, free=mistral.free_named)
JSON = ToolLine(
    name="json", parse=bare.parse_json, new_id=_new_id, calls=bare.json_calls, free=bare.json_free
)
LINES = {line.name: line for line in (HERMES, LLAMA, MISTRAL, JSON)}


def choose_line(wanted: str, *, template: str) -> ToolLine | None:
    """`wanted` is the flag's value; `auto` goes by what the chat template tells the model to write."""
    line = None if wanted == "none" else _line_of(template) if wanted == "auto" else LINES[wanted]
    return MISTRAL_NAMED if line is MISTRAL and "[ARGS]" in template else line


def _line_of(template: str) -> ToolLine:
    if "<tool_call>" in template:
        return HERMES
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<|python_tag|>" in template or "<|start_header_id|>" in template:
        return LLAMA
    return JSON
