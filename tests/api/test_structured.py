"""What binds an answer's text: fields, limits and their errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proto.worker_pb2 import Grammar
from router.ipc.messages import GrammarSpec
from tests.api.conftest import MakeApi
from tests.api.scripted import Script, ScriptedClient, model_info, server_state
from tests.api.tiny import ids

ANSWER = Script(ids("ok"))
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA)


@pytest.fixture
def api(make_api: MakeApi) -> Any:
    state = server_state(model=model_info(features=["grammar"]))
    return make_api(scheduler=ScriptedClient(ANSWER, state=state))


def spec(kind: Grammar.Kind.ValueType, source: str, param: str, *, strict: bool = False) -> GrammarSpec:
    return GrammarSpec(kind=kind, source=source, param=param, strict=strict)


def json_format(**outer: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", **outer}}


PATH = "response_format.json_schema.schema"
GOOD: list[tuple[dict[str, Any], GrammarSpec | None]] = [
    ({}, None),
    ({"response_format": None}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"structured_outputs": {}}, None),
    ({"structured_outputs": {"json_object": False}}, None),
    ({"response_format": {"type": "json_object"}}, spec(Grammar.JSON_OBJECT, "", "response_format")),
    ({"response_format": json_format(schema=SCHEMA)}, spec(Grammar.JSON_SCHEMA, TEXT, PATH)),
    (
        {"response_format": json_format(schema=SCHEMA, strict=True)},
        spec(Grammar.JSON_SCHEMA, TEXT, PATH, strict=True),
    ),
    ({"guided_json": SCHEMA}, spec(Grammar.JSON_SCHEMA, TEXT, "guided_json", strict=True)),
    ({"guided_json": TEXT}, spec(Grammar.JSON_SCHEMA, TEXT, "guided_json", strict=True)),
    ({"guided_regex": "[ab]+"}, spec(Grammar.REGEX, "[ab]+", "guided_regex")),
    ({"guided_choice": ["a", "b"]}, spec(Grammar.CHOICE, '["a", "b"]', "guided_choice")),
    ({"guided_grammar": 'root ::= "a"'}, spec(Grammar.EBNF, 'root ::= "a"', "guided_grammar")),
    (
        {"structured_outputs": {"json": SCHEMA}},
        spec(Grammar.JSON_SCHEMA, TEXT, "structured_outputs.json", strict=True),
    ),
    (
        {"structured_outputs": {"json_object": True}},
        spec(Grammar.JSON_OBJECT, "", "structured_outputs.json_object"),
    ),
    ({"structured_outputs": {"regex": "a"}}, spec(Grammar.REGEX, "a", "structured_outputs.regex")),
    (
        {"structured_outputs": {"choice": ["a"]}, "response_format": {"type": "text"}},
        spec(Grammar.CHOICE, '["a"]', "structured_outputs.choice"),
    ),
    ({"structured_outputs": {"grammar": "g"}}, spec(Grammar.EBNF, "g", "structured_outputs.grammar")),
]


@pytest.mark.parametrize(("fields", "expected"), GOOD, ids=lambda value: str(value)[:50])
@pytest.mark.parametrize("route", ["chat", "complete"])
async def test_fields(api: Any, route: str, fields: dict[str, Any], expected: GrammarSpec | None) -> None:
    reply = await getattr(api, route)(**fields)
    assert reply.status_code == 200, reply.text
    (sent,) = api.scheduler.submitted
    assert sent.grammar == expected


DEEP: dict[str, Any] = {"type": "string"}
for _ in range(70):
    DEEP = {"type": "array", "items": DEEP}

BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
    ({"response_format": {}}, "response_format.type", "None"),
    ({"response_format": json_format()}, PATH, "must be a JSON schema"),
    ({"response_format": json_format(schema=[])}, PATH, "must be a JSON schema"),
    ({"response_format": json_format(schema=DEEP)}, PATH, "71 levels deep; the limit is 64"),
    ({"guided_json": 3}, "guided_json", "int"),
    ({"guided_json": "{"}, "guided_json", "not a JSON schema"),
    ({"guided_json": "[1]"}, "guided_json", "expected a JSON schema"),
    ({"guided_regex": ""}, "guided_regex", "regular expression"),
    ({"guided_regex": "(" * 65 + ")" * 65}, "guided_regex", "65 levels deep"),
    ({"guided_regex": "a" * 200_000}, "guided_regex", "200000 bytes; the limit is 131072"),
    ({"guided_choice": []}, "guided_choice", "at least one"),
    ({"guided_choice": ["a", ""]}, "guided_choice[1]", "at least one character"),
    ({"guided_choice": ["a", 1]}, "guided_choice[1]", "int"),
    ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice", "list"),
    ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]", "text"),
    ({"structured_outputs": {"json_object": "x"}}, "structured_outputs.json_object", "true or false"),
    ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex", "regular expression"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "'guided_regex' both"),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "structured_outputs.regex",
        "'response_format' both",
    ),
]


@pytest.mark.parametrize(("fields", "param", "says"), BAD, ids=lambda value: str(value)[:50])
@pytest.mark.parametrize("route", ["chat", "complete"])
async def test_errors_name_the_field(
    api: Any, route: str, fields: dict[str, Any], param: str, says: str
) -> None:
    reply = await getattr(api, route)(**fields)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert says in error["message"]
    assert not api.scheduler.submitted


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": {}},
        {"structured_outputs": {"regex": "a"}},
        {"response_format": {"type": "json_object"}},
    ],
)
async def test_workers_without_grammars(make_api: MakeApi, fields: dict[str, Any]) -> None:
    reply = await make_api().chat(**fields)
    assert reply.status_code == 400
    assert "can't constrain" in reply.json()["error"]["message"]
