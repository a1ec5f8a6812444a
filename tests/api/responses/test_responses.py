"""POST /v1/responses, with OpenAI's own client and over plain HTTP."""

from __future__ import annotations

import json
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from pydantic import BaseModel

from proto.worker_pb2 import Grammar
from tests.api.conftest import Api, MakeApi
from tests.api.live import serving
from tests.api.scripted import Script, ScriptedClient, model_info, server_state
from tests.api.tiny import TEMPLATE, byte_ids, ids, tiny_tokenizer
from tests.api.tools.test_chat_tools import HERMES, TWO

GRAMMAR = server_state(model=model_info(features=["grammar"]))
HELLO = Script(ids("hello world"), cached_tokens=3)
THINKING = TEMPLATE + "{# </think> #}"
WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}


async def _respond(api: Api, **fields: Any) -> httpx.Response:
    return await api.http.post("/v1/responses", json={"model": "tiny", "input": "hi", **fields})


def _events(text: str) -> list[dict[str, Any]]:
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    events = []
    for block in blocks:
        kind, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def _prompt(api: Api) -> str:
    packed = np.frombuffer(api.scheduler.submitted[-1].prompt, dtype="<i4")
    return tiny_tokenizer().decode(packed, skip_special=False)


async def test_text(make_api: MakeApi) -> None:
    api = make_api(HELLO)
    body = (await _respond(api, instructions="be brief", temperature=0.5, metadata={"a": "b"})).json()
    assert body["id"].startswith("resp_") or body["id"].startswith("resp-")
    assert (body["object"], body["status"], body["error"]) == ("response", "completed", None)
    (item,) = body["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [
        {"type": "output_text", "text": "hello world", "annotations": [], "logprobs": []}
    ]
    assert (body["temperature"], body["metadata"], body["instructions"]) == (0.5, {"a": "b"}, "be brief")
    usage = body["usage"]
    assert usage["input_tokens_details"] == {"cached_tokens": 3}
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert _prompt(api) == (
        "<|start|>system\nbe brief<|end|>\n<|start|>user\nhi<|end|>\n<|start|>assistant\n"
    )


async def test_events_of_a_text(make_api: MakeApi) -> None:
    events = _events((await _respond(make_api(HELLO), stream=True)).text)
    kinds = [event["type"].removeprefix("response.") for event in events]
    n_deltas = kinds.count("output_text.delta")
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * n_deltas,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert "".join(event.get("delta", "") for event in events) == "hello world"
    final = events[-1]["response"]
    assert final["output"][0] == events[-2]["item"]
    assert final["usage"]["output_tokens"] == len(HELLO.tokens) + 1
    assert events[0]["response"]["usage"] is None


async def test_limit(make_api: MakeApi) -> None:
    api = make_api(HELLO)
    body = (await _respond(api, max_output_tokens=1)).json()
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    events = _events((await _respond(api, max_output_tokens=1, stream=True)).text)
    assert events[-1]["type"] == "response.incomplete"
    assert api.scheduler.submitted[0].max_new_tokens == 1


async def test_items(make_api: MakeApi) -> None:
    api = make_api(HELLO, template=HERMES)
    items = [
        {"role": "developer", "content": "brief"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "summary": []},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Looking."}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Köln"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "12"},
    ]
    assert (await _respond(api, input=items)).status_code == 200
    assert _prompt(api) == (
        "<|start|>system\nbrief<|end|>\n<|start|>user\nWeather?<|end|>\n"
        '<|start|>assistant\nLooking.<tool_call>weather {"city": "Köln"}</tool_call><|end|>\n'
        "<|start|>tool\n12<|end|>\n<|start|>assistant\n"
    )


async def test_calls(make_api: MakeApi) -> None:
    api = make_api(Script(byte_ids(TWO)), template=HERMES)
    fields = {"tools": [WEATHER, {"type": "function", "name": "now"}], "max_output_tokens": 300}
    output = (await _respond(api, **fields)).json()["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "function_call"]
    assert (output[1]["name"], output[1]["arguments"]) == ("weather", '{"city": "Köln"}')
    assert output[1]["call_id"].startswith("call_")
    events = _events((await _respond(api, stream=True, **fields)).text)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in done] == ["message", "function_call", "function_call"]
    deltas = [e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta"]
    assert "".join(deltas) == '{"city": "Köln"}{}'


async def test_thoughts(make_api: MakeApi) -> None:
    api = make_api(Script(byte_ids("<think>hm</think>Yes")), template=THINKING)
    body = (await _respond(api)).json()
    assert [item["type"] for item in body["output"]] == ["reasoning", "message"]
    assert body["output"][0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert body["usage"]["output_tokens_details"] == {"reasoning_tokens": len(byte_ids("<think>hm</think>"))}
    events = _events((await _respond(api, stream=True)).text)
    thoughts = [e["delta"] for e in events if e["type"] == "response.reasoning_text.delta"]
    assert "".join(thoughts) == "hm"


@pytest.mark.parametrize(
    ("fields", "n_top"),
    [({"top_logprobs": 2}, 2), ({"include": ["message.output_text.logprobs"]}, 0)],
)
async def test_logprobs(make_api: MakeApi, fields: dict[str, Any], n_top: int) -> None:
    """Of the words alone, whatever came before them."""
    api = make_api(Script(byte_ids("<think>hm</think>Köln")), template=THINKING)
    body = (await _respond(api, **fields)).json()
    told = body["output"][1]["content"][0]["logprobs"]
    assert bytes(byte for item in told for byte in item["bytes"]).decode() == "Köln"
    assert [len(item["top_logprobs"]) for item in told] == [n_top] * 5
    events = _events((await _respond(api, stream=True, **fields)).text)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [item for event in deltas for item in event["logprobs"]] == told
    assert next(e for e in events if e["type"] == "response.output_text.done")["logprobs"] == told


async def test_logprobs_beside_calls(make_api: MakeApi) -> None:
    api = make_api(Script(byte_ids(TWO)), template=HERMES)
    body = (await _respond(api, tools=[WEATHER], top_logprobs=1, max_output_tokens=400)).json()
    told = body["output"][0]["content"][0]["logprobs"]
    assert "".join(item["token"] for item in told) == "Looking."


async def test_json_schema(make_api: MakeApi) -> None:
    api = make_api(scheduler=ScriptedClient(Script(byte_ids("{}")), state=GRAMMAR))
    schema = {"type": "object"}
    format = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    body = (await _respond(api, text={"format": format})).json()
    assert body["text"] == {"format": format}
    grammar = api.scheduler.submitted[0].grammar
    assert grammar is not None
    assert (grammar.kind, json.loads(grammar.source), grammar.strict) == (Grammar.JSON_SCHEMA, schema, True)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": 3}, "input"),
    ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
    ({"tools": [{"type": "function", "name": "x y"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "x", "parameters": {"$defs": 5}}]}, "tools[0].parameters.$defs"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"role": "user", "content": "a"}, {"role": "king"}], "instructions": "x"}, "input[1].role"),
    ({"input": [{"type": "function_call"}]}, "input[0].name"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "c"}, "conversation"),
    ({"background": True}, "background"),
    ({"moderation": {"model": "x"}}, "moderation"),
    ({"context_management": [{"type": "compaction"}]}, "context_management"),
    ({"truncation": "auto"}, "truncation"),
    ({"top_logprobs": 99}, "top_logprobs"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": 9}, "temperature"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"input": "x" * 2000}, "input"),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
async def test_bad_requests(make_api: MakeApi, fields: dict[str, Any], param: str) -> None:
    api = make_api(HELLO)
    response = await _respond(api, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert not api.scheduler.submitted


async def test_what_a_stateless_server_ignores(make_api: MakeApi) -> None:
    fields: dict[str, Any] = {
        "store": True,
        "include": ["reasoning.encrypted_content"],
        "user": "u",
        "service_tier": "auto",
    }
    fields |= {"prompt_cache_options": {}, "prompt_cache_retention": "24h", "image": {"detail": "low"}}
    fields |= {"background_options": {}, "access_programs": [], "safety_identifier": "x"}
    response = await _respond(make_api(HELLO), truncation="disabled", **fields)
    assert response.status_code == 200
    assert response.json()["store"] is False


async def test_official_client() -> None:
    class Weather(BaseModel):
        city: str

    async with (
        serving(ScriptedClient(Script(byte_ids(TWO))), template=HERMES) as live,
        openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="x") as client,
    ):
        tools: Any = [WEATHER]
        whole = await client.responses.create(model="tiny", input="hi", tools=tools, max_output_tokens=300)
        assert whole.output_text == "Looking."
        assert [item.type for item in whole.output] == ["message", "function_call", "function_call"]
        async with client.responses.stream(
            model="tiny", input="hi", tools=tools, max_output_tokens=300
        ) as stream:
            texts = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            final = await stream.get_final_response()
        assert "".join(texts) == final.output_text == "Looking."
    script = Script(byte_ids('{"city": "Köln"}'))
    async with (
        serving(ScriptedClient(script, state=GRAMMAR)) as live,
        openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="x") as client,
    ):
        parsed = await client.responses.parse(model="tiny", input="hi", text_format=Weather)
        assert parsed.output_parsed == Weather(city="Köln")


async def test_embeddings_are_refused(make_api: MakeApi) -> None:
    response = await make_api(HELLO).http.post("/v1/embeddings", json={"model": "tiny", "input": "hi"})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("model", "unsupported")
