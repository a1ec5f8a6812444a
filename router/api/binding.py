"""One grammar for a chat's answer: of its response format, its calls and its thoughts."""

from __future__ import annotations

import json

from proto.worker_pb2 import Grammar
from router.api.reasoning import BEGIN, END
from router.api.tools.formats import Format, Marks, const, either, optional, regex, schema, sequence
from router.api.tools.request import ToolUse
from router.ipc.messages import GrammarSpec

_BETWEEN = r"[ \n\r\t]{0,8}"


def bound(
    answer: GrammarSpec | None, use: ToolUse, *, thinks: bool, opened: bool, marks: Marks
) -> GrammarSpec | None:
    """None for free text. With `answer` and tools at once the model chooses: calls, or such an answer.
    `thinks`: thoughts come before all of it, as they please; `opened`: the prompt has begun them."""
    plain = use.grammar or (answer if use.calls is None else None)
    if plain is not None and not thinks:
        return plain
    if plain is not None:
        format = _format_of(plain)
    elif use.calls is not None and answer is not None:
        format = either(use.calls, _format_of(answer))
    elif use.free is not None:
        format = use.free
    else:
        return None
    if thinks:
        format = sequence(_thoughts(opened=opened, marks=marks), format)
    source = json.dumps({"type": "structural_tag", "format": format})
    strict = any(spec is not None and spec.strict for spec in (plain, answer)) or use.free is not None
    param = answer.param if answer is not None else "tools"
    return GrammarSpec(kind=Grammar.STRUCTURAL_TAG, source=source, strict=strict, param=param)


def _thoughts(*, opened: bool, marks: Marks) -> Format:
    if opened:
        return sequence(marks.up_to(END), regex(_BETWEEN))
    return optional(sequence(regex(_BETWEEN), marks.up_to(END, begin=BEGIN), regex(_BETWEEN)))


def _format_of(spec: GrammarSpec) -> Format:
    if spec.kind == Grammar.JSON_OBJECT:
        return schema({"type": "object"}, strict=False)
    if spec.kind == Grammar.JSON_SCHEMA:
        return schema(json.loads(spec.source), strict=spec.strict)
    if spec.kind == Grammar.REGEX:
        return regex(spec.source)
    if spec.kind == Grammar.CHOICE:
        return either(*map(const, json.loads(spec.source)))
    return {"type": "grammar", "grammar": spec.source}
