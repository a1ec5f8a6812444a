"""Requests of any shape: never a 5xx, never a request left running, and the next good one is served.

CI runs a seeded sample; `make test-full` 10,000 requests.
"""

from __future__ import annotations

import json
import os
import random
from typing import Any

import pytest

from tests.api.conftest import Api, MakeApi
from tests.api.scripted import Script, ScriptedClient, model_info, server_state
from tests.api.tiny import TEMPLATE, byte_ids
from tests.api.tools.test_chat_tools import WEATHER

N = 10_000 if os.environ.get("QUIRE_TEST_FULL") else 600
N_PER_API = 200
TEMPLATE_WITH_TOOLS = TEMPLATE + "{# <tool_call> <think></think> #}{{ tools | tojson if tools else '' }}"
ANSWER = '<think>a</think>b <tool_call>{"name": "weather", "arguments": {"city": "x"}}</tool_call>'
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
SAMPLING: dict[str, Any] = {
    "n": 2,
    "stop": ["x", "</"],
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 3,
    "seed": 7,
    "logit_bias": {"5": 1},
    "stream": True,
    "stream_options": {"include_usage": True},
    "min_tokens": 1,
    "stop_token_ids": [5],
    "return_token_ids": True,
    "priority": -1,
    "timeout": 5.0,
    "guided_choice": ["a", "b"],
    "structured_outputs": {"regex": "a+"},
    "response_format": SCHEMA,
    "prompt_logprobs": 1,
}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "c", "content": "r"},
]
CHAT: dict[str, Any] = SAMPLING | {
    "messages": MESSAGES,
    "tools": [WEATHER],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "logprobs": True,
    "top_logprobs": 2,
    "chat_template_kwargs": {"x": 1},
    "continue_final_message": True,
    "documents": [{"text": "d"}],
}
TGI = {
    "inputs": "hi",
    "stream": True,
    "parameters": {
        "best_of": 2,
        "do_sample": True,
        "details": True,
        "decoder_input_details": True,
        "top_n_tokens": 2,
        "truncate": 3,
        "stop": ["x"],
        "grammar": {"type": "regex", "value": "a+"},
        "max_new_tokens": 3,
        "seed": 3,
    },
}
BODIES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "/v1/chat/completions": (CHAT, ("messages",)),
    "/v1/completions": (SAMPLING | {"prompt": ["a", [5]], "echo": True, "logprobs": 1}, ("prompt",)),
    "/v1/responses": (
        {
            "input": [{"role": "user", "content": "hi"}, {"type": "function_call", "name": "f"}],
            "instructions": "i",
            "tools": [{"type": "function", "name": "f"}],
            "text": {"format": {"type": "json_schema", "name": "x", "schema": {}}},
            "stream": True,
            "max_output_tokens": 5,
        },
        ("input",),
    ),
    "/generate": (TGI, ("inputs",)),
    "/generate_stream": (TGI, ("inputs",)),
    "/": (TGI, ("inputs",)),
    "/invocations": (CHAT, ("messages",)),
    "/tokenize": ({"prompt": "hi", "messages": MESSAGES, "return_token_strs": True}, ()),
    "/chat_tokenize": (CHAT, ("messages",)),
    "/detokenize": ({"tokens": [5, 6]}, ("tokens",)),
}
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, 2**70, -(2**70), 0.0, -0.0, 0.5, 1e308, -1e-308, "",
    " ", "a", "x" * 3000, "\x00", "\ud800", "👍🏽", "auto", "none", "required", "<|end|>", [], {}, [[]], [{}],
    {"": None}, [None], ["a", 1], {"type": "function"}, {"type": None}, [0, -1, 2**40],
    {"a": {"b": {"c": []}}},
]  # fmt: skip


def _mutated(value: Any, rng: random.Random) -> Any:
    """One place of it changed, somewhere."""
    if isinstance(value, dict) and value and rng.random() < 0.75:
        key = rng.choice(list(value))
        return {**value, key: _mutated(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.75:
        i = rng.randrange(len(value))
        return [*value[:i], _mutated(value[i], rng), *value[i + 1 :]]
    return rng.choice(VALUES)


def _request(rng: random.Random) -> tuple[str, bytes]:
    path = rng.choice(list(BODIES))
    whole, needed = BODIES[path]
    body = {name: value for name, value in whole.items() if name in needed or rng.random() < 0.25}
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        body = _mutated(body, rng) if body else body
        if not isinstance(body, dict):
            break
    data = json.dumps(body).encode()
    if rng.random() < 0.03:
        data = data[: rng.randrange(len(data))] + rng.choice((b"", b"\xff", b"[" * 5000))
    return path, data


def _api(make_api: MakeApi) -> Api:
    state = server_state(model=model_info(features=["grammar", "prompt_logprobs"]))
    scheduler = ScriptedClient(Script(byte_ids(ANSWER)), state=state)
    return make_api(scheduler=scheduler, template=TEMPLATE_WITH_TOOLS)


@pytest.mark.parametrize("part", range(N // N_PER_API))
async def test_any_request(make_api: MakeApi, part: int) -> None:
    api, rng = _api(make_api), random.Random(part)
    for _ in range(N_PER_API):
        path, body = _request(rng)
        response = await api.http.post(path, content=body)
        assert response.status_code < 500, (path, body, response.text)
        assert response.status_code != 424, (path, body, response.text)
        if response.status_code >= 400:
            assert response.json()["error"], (path, body)
        assert not api.scheduler.running, (path, body)
    assert (await api.chat()).status_code == 200
