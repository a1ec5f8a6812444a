"""Tools over HTTP: what the model sees, what the client gets."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import openai
import pytest
from pydantic import BaseModel

from proto.worker_pb2 import Grammar
from tests.api.conftest import Api, MakeApi
from tests.api.live import serving
from tests.api.scripted import Script, ScriptedClient, model_info, server_state
from tests.api.sse import events
from tests.api.tiny import START, TEMPLATE, byte_ids, ids, tiny_tokenizer

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
HERMES = (
    "{% if tools %}<|start|>tools\n{{ tools | tojson }}<|end|>\n{% endif %}"
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}"
    "</tool_call>{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
TWO = f'Looking.\n{CALL}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'
GRAMMAR = server_state(model=model_info(features=["grammar"]))


def _api(make_api: MakeApi, text: str, *, grammar: bool = False, **config: Any) -> Api:
    state = GRAMMAR if grammar else server_state()
    return make_api(
        scheduler=ScriptedClient(Script(byte_ids(text)), state=state), **{"template": HERMES, **config}
    )


def _prompt(api: Api, index: int = -1) -> str:
    packed = np.frombuffer(api.scheduler.submitted[index].prompt, dtype="<i4")
    return tiny_tokenizer().decode(packed, skip_special=False)


def _joined(text: str) -> dict[str, Any]:
    """A stream put together as the official client does it."""
    content, finish = "", None
    calls: list[dict[str, Any]] = []
    for chunk in events(text):
        choice = chunk["choices"][0]
        finish = choice["finish_reason"] or finish
        content += choice["delta"].get("content") or ""
        for part in choice["delta"].get("tool_calls", ()):
            if part["index"] == len(calls):
                assert part["type"] == "function"
                calls.append({"id": part["id"], "name": part["function"]["name"], "arguments": ""})
            calls[part["index"]]["arguments"] += part["function"]["arguments"]
    return {"content": content, "calls": calls, "finish": finish}


async def test_a_call(make_api: MakeApi) -> None:
    """TGI #2461: the arguments are a JSON string."""
    choice = (await _api(make_api, CALL).chat(tools=[WEATHER], max_tokens=200)).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["id"].startswith("call_")
    assert (call["type"], call["function"]["name"]) == ("function", "weather")
    assert json.loads(call["function"]["arguments"]) == {"city": "Köln"}


async def test_parallel_calls_streamed(make_api: MakeApi) -> None:
    api = _api(make_api, TWO)
    joined = _joined((await api.chat(tools=[WEATHER, NOW], stream=True, max_tokens=300)).text)
    assert joined["content"] == "Looking."
    assert joined["finish"] == "tool_calls"
    assert [(call["name"], call["arguments"]) for call in joined["calls"]] == [
        ("weather", '{"city": "Köln"}'),
        ("now", "{}"),
    ]
    assert len({call["id"] for call in joined["calls"]}) == 2


async def test_one_call_when_parallel_calls_are_off(make_api: MakeApi) -> None:
    api = _api(make_api, TWO)
    fields = {"tools": [WEATHER, NOW], "parallel_tool_calls": False, "max_tokens": 300}
    whole = (await api.chat(**fields)).json()["choices"][0]["message"]
    streamed = _joined((await api.chat(stream=True, **fields)).text)
    assert [call["function"]["name"] for call in whole["tool_calls"]] == ["weather"]
    assert [call["name"] for call in streamed["calls"]] == ["weather"]


async def test_words_instead_of_a_call(make_api: MakeApi) -> None:
    api = _api(make_api, "It rains. 1 < 2 <tool")
    choice = (await api.chat(tools=[WEATHER], max_tokens=99)).json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "It rains. 1 < 2 <tool", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert _joined((await api.chat(tools=[WEATHER], stream=True, max_tokens=99)).text) == {
        "content": "It rains. 1 < 2 <tool",
        "calls": [],
        "finish": "stop",
    }


async def test_cut_off_by_the_limit(make_api: MakeApi) -> None:
    api = _api(make_api, CALL)
    n = len(CALL.encode()) - 20
    choice = (await api.chat(tools=[WEATHER], max_tokens=n)).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"city": "K')


async def test_choices_have_their_own_calls(make_api: MakeApi) -> None:
    body = (await _api(make_api, CALL).chat(tools=[WEATHER], n=2, max_tokens=200)).json()
    call_ids = {choice["message"]["tool_calls"][0]["id"] for choice in body["choices"]}
    assert len(call_ids) == 2


async def test_template_renders_tools_calls_and_results(make_api: MakeApi) -> None:
    """TGI #2986: after the result comes an answer in words."""
    api = _api(make_api, "12 degrees.")
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "12"}]},
    ]
    body = (await api.chat(messages=messages, tools=[NOW], max_tokens=99)).json()
    assert body["choices"][0]["message"]["content"] == "12 degrees."
    assert "tool_calls" not in body["choices"][0]["message"]
    assert _prompt(api) == (
        f"<|start|>tools\n{json.dumps([NOW])}<|end|>\n<|start|>user\nWeather?<|end|>\n"
        '<|start|>assistant\n<tool_call>weather {"city": "Köln"}</tool_call><|end|>\n'
        "<|start|>tool\n12<|end|>\n<|start|>assistant\n"
    )


async def test_template_without_a_place_for_tools(make_api: MakeApi) -> None:
    text = '{"name": "weather", "arguments": {"city": "Bonn"}}'
    api = _api(make_api, text, template=TEMPLATE)
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "now", "arguments": ""}}]},
        {"role": "tool", "content": "noon"},
        {"role": "tool", "content": "12"},
    ]
    choice = (await api.chat(messages=messages, tools=[WEATHER], max_tokens=200)).json()["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Bonn"}'
    prompt = _prompt(api)
    assert prompt.startswith("<|start|>system\nYou can call functions.")
    assert json.dumps(WEATHER["function"]) in prompt
    assert '<|start|>assistant\n{"name": "now", "arguments": {}}<|end|>' in prompt
    assert "<|start|>user\nResult of the call: noon\nResult of the call: 12<|end|>" in prompt


async def test_none_neither_shows_nor_reads_tools(make_api: MakeApi) -> None:
    api = _api(make_api, CALL)
    message = (await api.chat(tools=[WEATHER], tool_choice="none", max_tokens=200)).json()["choices"][0][
        "message"
    ]
    assert message["content"] == CALL
    assert "weather" not in _prompt(api)


async def test_required(make_api: MakeApi) -> None:
    text = '[{"name": "weather", "arguments": {"city": "Köln"}}, {"name": "now", "arguments": {}}]'
    api = _api(make_api, text, grammar=True)
    fields = {"tools": [WEATHER, NOW], "tool_choice": "required", "max_tokens": 300}
    choice = (await api.chat(**fields)).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather", "now"]
    joined = _joined((await api.chat(stream=True, **fields)).text)
    assert [call["arguments"] for call in joined["calls"]] == ['{"city": "Köln"}', "{}"]
    grammar = api.scheduler.submitted[0].grammar
    assert grammar is not None
    assert grammar.kind == Grammar.JSON_SCHEMA
    schema = json.loads(grammar.source)
    names = [item["properties"]["name"]["const"] for item in schema["items"]["anyOf"]]
    assert names == ["weather", "now"]
    assert schema["minItems"] == 1


@pytest.mark.parametrize(
    "choice",
    [{"type": "function", "function": {"name": "weather"}}, {"type": "function", "name": "weather"}],
)
async def test_named(make_api: MakeApi, choice: dict[str, Any]) -> None:
    api = _api(make_api, '{"city": "Köln"}', grammar=True)
    fields = {"tools": [NOW, WEATHER], "tool_choice": choice, "max_tokens": 99}
    whole = (await api.chat(**fields)).json()["choices"][0]
    assert whole["finish_reason"] == "stop"
    assert whole["message"]["tool_calls"][0]["function"] == {
        "name": "weather",
        "arguments": '{"city": "Köln"}',
    }
    joined = _joined((await api.chat(stream=True, **fields)).text)
    assert [(call["name"], call["arguments"]) for call in joined["calls"]] == [
        ("weather", '{"city": "Köln"}')
    ]
    grammar = api.scheduler.submitted[0].grammar
    assert grammar is not None
    assert json.loads(grammar.source) == WEATHER["function"]["parameters"]


async def test_definitions_of_several_functions_do_not_meet(make_api: MakeApi) -> None:
    def tool(name: str, kind: str) -> dict[str, Any]:
        schema = {
            "type": "object",
            "properties": {"x": {"$ref": "#/$defs/X"}},
            "$defs": {"X": {"type": kind}},
        }
        return {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}

    api = _api(make_api, "[]", grammar=True)
    await api.chat(tools=[tool("a", "string"), tool("b", "integer")], tool_choice="required")
    grammar = api.scheduler.submitted[0].grammar
    assert grammar is not None
    assert grammar.strict
    schema = json.loads(grammar.source)
    for i, kind in enumerate(("string", "integer")):
        parameters = schema["items"]["anyOf"][i]["properties"]["arguments"]
        reference = parameters["properties"]["x"]["$ref"].removeprefix("#/$defs/")
        assert schema["$defs"][reference] == {"type": kind}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
    ({"tools": [NOW, {"type": "function"}]}, "tools[1].function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    (
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": 3}}]},
        "tools[0].function.parameters",
    ),
    ({"tools": [NOW], "tool_choice": "maybe"}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": {"type": "function"}}, "tool_choice"),
    (
        {"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice.function.name",
    ),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": "required"}, "tool_choice"),
    ({"functions": [{"name": "x"}], "tools": [NOW]}, "functions"),
    ({"functions": [{"name": "x"}], "tool_choice": "auto"}, "tool_choice"),
    ({"functions": [{"name": "x y"}]}, "functions[0].name"),
    (
        {"tools": [{"function": {"name": "x", "parameters": {"$defs": 5}}}], "tool_choice": "required"},
        "tools[0].function.parameters.$defs",
    ),
    ({"functions": [{"name": "x", "parameters": 5}]}, "functions[0].parameters"),
    ({"functions": [{"name": "x"}], "function_call": "required"}, "function_call"),
    ({"functions": [{"name": "x"}], "function_call": {"name": "y"}}, "function_call.name"),
    ({"functions": [{"name": "x"}], "function_call": {}}, "function_call.name"),
    ({"function_call": {"name": "x"}}, "function_call"),
    ({"messages": [{"role": "assistant", "tool_calls": 3}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [3]}]}, "messages[0].tool_calls[0].function"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
        "messages[0].tool_calls[0].function.name",
    ),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
async def test_bad_requests(make_api: MakeApi, fields: dict[str, Any], param: str) -> None:
    response = await _api(make_api, "x").chat(**fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_json_answer_and_tools_at_once(make_api: MakeApi) -> None:
    """The model may call, or answer as the format has it (`test_strict.py` shows the grammar)."""
    fields = {"tools": [NOW], "response_format": {"type": "json_object"}}
    api = _api(make_api, "{}", grammar=True)
    assert (await api.chat(**fields)).json()["choices"][0]["message"]["content"] == "{}"
    assert (await api.chat(tool_choice="none", **fields)).status_code == 200
    both, alone = (request.grammar for request in api.scheduler.submitted)
    assert both is not None
    assert alone is not None
    assert (both.kind, alone.kind) == (Grammar.STRUCTURAL_TAG, Grammar.JSON_OBJECT)
    called = await _api(make_api, TWO.partition("\n")[2], grammar=True).chat(**fields, max_tokens=400)
    assert called.json()["choices"][0]["finish_reason"] == "tool_calls"


async def test_without_a_parser(make_api: MakeApi) -> None:
    api = _api(make_api, '[{"name": "now", "arguments": {}}]', grammar=True, tool_parser="none")
    refused = await api.chat(tools=[NOW])
    assert refused.status_code == 400
    assert "--tool-parser" in refused.json()["error"]["message"]
    assert (await api.chat(tools=[NOW], tool_choice="required")).status_code == 200


async def test_special_tokens_that_the_parser_needs(make_api: MakeApi) -> None:
    """Markers are seen though special tokens are not shown."""
    api = _api(make_api, "", tool_parser="mistral")
    text = api.app.state.context.text
    text.tool_line = dataclasses.replace(text.tool_line, markers=(START,))
    api.scheduler.script = Script([*byte_ids("a"), *ids(START), *byte_ids("b")])
    shown = (await api.chat(tools=[NOW])).json()["choices"][0]["message"]["content"]
    hidden = (await api.chat()).json()["choices"][0]["message"]["content"]
    assert (shown, hidden) == (f"a{START}b", "ab")


async def test_official_client_with_pydantic() -> None:
    class Weather(BaseModel):
        city: str

    tool = openai.pydantic_function_tool(Weather, name="weather")
    scheduler = ScriptedClient(Script(byte_ids(TWO)))
    async with (
        serving(scheduler, template=HERMES) as live,
        openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="x") as client,
    ):
        messages: Any = [{"role": "user", "content": "hi"}]
        parsed = await client.chat.completions.parse(
            model="tiny", messages=messages, tools=[tool], max_tokens=300
        )
        calls = parsed.choices[0].message.tool_calls
        assert calls is not None
        assert calls[0].function.parsed_arguments == Weather(city="Köln")
        async with client.chat.completions.stream(
            model="tiny", messages=messages, tools=[tool], max_tokens=300
        ) as stream:
            final = await stream.get_final_completion()
        streamed = final.choices[0].message.tool_calls
        assert streamed is not None
        assert [call.function.arguments for call in streamed] == ['{"city": "Köln"}', "{}"]
        assert final.choices[0].finish_reason == "tool_calls"
