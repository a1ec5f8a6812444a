"""`functions` and `function_call`, the older names of tools."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from proto.worker_pb2 import Grammar
from tests.api.conftest import Api, MakeApi
from tests.api.scripted import Script, ScriptedClient, model_info, server_state
from tests.api.sse import events
from tests.api.tiny import byte_ids, tiny_tokenizer
from tests.api.tools.test_chat_tools import CALL, HERMES, NOW, TWO, WEATHER

FUNCTIONS = [WEATHER["function"], NOW["function"]]
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": None, "function_call": {"name": "now", "arguments": '{"a": 1}'}},
    {"role": "function", "name": "now", "content": "12:00"},
]


def _api(make_api: MakeApi, text: str) -> Api:
    state = server_state(model=model_info(features=["grammar"]))
    return make_api(scheduler=ScriptedClient(Script(byte_ids(text)), state=state), template=HERMES)


def _prompt(api: Api) -> str:
    packed = np.frombuffer(api.scheduler.submitted[-1].prompt, dtype="<i4")
    return tiny_tokenizer().decode(packed, skip_special=False)


async def test_a_call(make_api: MakeApi) -> None:
    """Of two only the first: the older answer has room for one."""
    api = _api(make_api, TWO)
    choice = (await api.chat(functions=FUNCTIONS, max_tokens=400)).json()["choices"][0]
    assert choice["finish_reason"] == "function_call"
    assert "tool_calls" not in choice["message"]
    call = choice["message"]["function_call"]
    assert (call["name"], json.loads(call["arguments"])) == ("weather", {"city": "Köln"})
    with_functions = _prompt(api)
    await api.chat(tools=[WEATHER, NOW], max_tokens=400)
    assert _prompt(api) == with_functions


async def test_streamed_call(make_api: MakeApi) -> None:
    response = await _api(make_api, CALL).chat(functions=FUNCTIONS, max_tokens=400, stream=True)
    chunks = events(response.text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    calls = [delta["function_call"] for delta in deltas if "function_call" in delta]
    assert calls[0]["name"] == "weather"
    assert all(set(call) == {"arguments"} for call in calls[1:])
    assert json.loads("".join(call["arguments"] for call in calls)) == {"city": "Köln"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "function_call"


async def test_named_and_none(make_api: MakeApi) -> None:
    api = _api(make_api, '{"city": "Köln"}')
    named = await api.chat(functions=FUNCTIONS, function_call={"name": "weather"}, max_tokens=400)
    choice = named.json()["choices"][0]
    assert choice["message"]["function_call"] == {"name": "weather", "arguments": '{"city": "Köln"}'}
    assert choice["finish_reason"] == "stop"
    grammar = api.scheduler.submitted[-1].grammar
    assert grammar is not None
    assert grammar.kind == Grammar.JSON_SCHEMA
    none = await api.chat(functions=FUNCTIONS, function_call="none", max_tokens=400)
    assert none.json()["choices"][0]["message"]["content"] == '{"city": "Köln"}'


async def test_history(make_api: MakeApi) -> None:
    api = _api(make_api, "noon")
    await api.chat(messages=HISTORY)
    assert _prompt(api) == (
        "<|start|>user\nhi<|end|>\n<|start|>assistant\n"
        '<tool_call>now {"a": 1}</tool_call><|end|>\n<|start|>tool\n12:00<|end|>\n<|start|>assistant\n'
    )


@pytest.mark.parametrize("call", [5, {}, {"name": 5}])
async def test_bad_history(make_api: MakeApi, call: Any) -> None:
    response = await _api(make_api, "").chat(messages=[{"role": "assistant", "function_call": call or [1]}])
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("messages[0].function_call")
