"""Model lines: how each writes its calls, and which one a model belongs to."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.api.tools import bare, hermes, mistral
from router.api.tools.parsed import Parse

_MISTRAL_ID_CHARS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolLine:
    name: str
    parse: Parse
    markers: tuple[str, ...] = ()
    """Tokens that the parser must see although they may be special."""
    new_id: Callable[[], str]
    strict_tags: Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]] | None = None
    """The grammar that binds calls within free text; None where there is none."""


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _mistral_id() -> str:
    """Its templates take ids of nine letters and digits alone."""
    return "".join(secrets.choice(_MISTRAL_ID_CHARS) for _ in range(9))


HERMES = ToolLine(
    name="hermes", parse=hermes.parse, markers=hermes.MARKERS, new_id=_new_id, strict_tags=hermes.strict_tags
)
LLAMA = ToolLine(name="llama3", parse=bare.parse_llama, markers=bare.LLAMA_MARKERS, new_id=_new_id)
MISTRAL = ToolLine(name="mistral", parse=mistral.parse, markers=mistral.MARKERS, new_id=_mistral_id)
JSON = ToolLine(name="json", parse=bare.parse_json, new_id=_new_id)
LINES = {line.name: line for line in (HERMES, LLAMA, MISTRAL, JSON)}


def choose_line(wanted: str, *, template: str) -> ToolLine | None:
    """`wanted` is the flag's value; `auto` goes by what the chat template tells the model to write."""
    if wanted == "none":
        return None
    if wanted != "auto":
        return LINES[wanted]
    if "<tool_call>" in template:
        return HERMES
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<|python_tag|>" in template or "<|start_header_id|>" in template:
        return LLAMA
    return JSON
