"""Bodies nested deep: refused before anything walks through them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.api.conftest import Api, MakeApi
from tests.api.scripted import Script, ScriptedClient, model_info, server_state
from tests.api.tiny import END, ids
from tests.api.tools.test_chat_tools import HERMES


def _api(make_api: MakeApi) -> Api:
    model = model_info(features=["grammar"], max_input_tokens=10**6, max_total_tokens=10**6)
    scheduler = ScriptedClient(Script(ids("ok")), state=server_state(model=model))
    return make_api(scheduler=scheduler, template=HERMES)


def _deep(n: int) -> Any:
    deep: Any = {}
    for _ in range(n):
        deep = {"items": deep}
    return deep


def _tool(**function: Any) -> dict[str, Any]:
    return {"tools": [{"function": {"name": "f", **function}}]}


def _places(deep: Any) -> dict[str, dict[str, Any]]:
    call = {"name": "f", "arguments": deep}
    return {
        "forced call": {**_tool(parameters=deep), "tool_choice": "required"},
        "strict tool": _tool(parameters=deep, strict=True),
        "tool": _tool(parameters=deep),
        "beside a control token": _tool(parameters=deep, description=END),
        "format": {"response_format": {"type": "json_schema", "json_schema": {"schema": deep}}},
        "document": {"documents": [deep, END]},
        "variable": {"chat_template_kwargs": {"x": deep, "y": END}},
        "history": {"messages": [{"role": "assistant", "function_call": call}]},
        "history as text": {
            "messages": [{"role": "assistant", "function_call": {**call, "arguments": json.dumps(deep)}}]
        },
        "unknown field": {"x": deep},
    }


@pytest.mark.parametrize("place", _places({}))
async def test_no_depth_is_our_fault(make_api: MakeApi, place: str) -> None:
    api = _api(make_api)
    for n in (60, 150, 190, 300, 480, 900):
        response = await api.chat(**_places(_deep(n))[place])
        assert response.status_code in (200, 400), (n, response.text)
    assert (await api.chat()).status_code == 200


async def test_limit(make_api: MakeApi) -> None:
    api = _api(make_api)
    assert (await api.chat(x=_deep(198))).status_code == 200
    refused = await api.chat(x=_deep(200))
    assert refused.json()["error"]["code"] == "too_deep"
    tgi = await api.http.post("/generate", json={"inputs": "x", "x": _deep(200)})
    assert (tgi.status_code, tgi.json()["error_type"]) == (422, "validation")


@pytest.mark.parametrize("text", ["[{" * 300, '\\"[' * 300, "]" * 300 + "[" * 300, "\\" * 301])
async def test_brackets_in_texts_do_not_nest(make_api: MakeApi, text: str) -> None:
    assert (await _api(make_api).chat(user=text, metadata={text: text})).status_code == 200
