"""Every request field: where it goes, its neutral value, its limits."""

from __future__ import annotations

from typing import Any

import pytest

from router.ipc.messages import SamplingSpec
from tests.api.conftest import MakeApi
from tests.api.scripted import Script, model_info, server_state
from tests.api.tiny import ids

ANSWER = Script(ids("ok"))

NEUTRAL_CHAT = {
    "temperature": 1,
    "top_p": 1,
    "n": 1,
    "stream": False,
    "stop": None,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": None,
    "logprobs": False,
    "top_logprobs": None,
    "seed": None,
    "user": "u",
    "metadata": {"a": "b"},
    "store": False,
    "service_tier": "auto",
    "response_format": {"type": "text"},
    "tools": None,
    "tool_choice": "none",
    "parallel_tool_calls": True,
    "max_tokens": None,
    "max_completion_tokens": None,
    "stream_options": None,
    "modalities": ["text"],
    "reasoning_effort": None,
    "top_k": -1,
    "min_p": 0,
    "typical_p": 1,
    "repetition_penalty": 1,
    "min_tokens": 0,
    "ignore_eos": False,
    "stop_token_ids": [],
    "skip_special_tokens": True,
    "include_stop_str_in_output": False,
    "priority": 0,
    "timeout": None,
}


@pytest.mark.parametrize(
    ("fields", "sampling"),
    [
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"temperature": 0.7}, {"temperature": 0.7}),
        ({"top_p": 0.9}, {"top_p": 0.9}),
        ({"top_p": 0}, {"top_k": 1}),
        ({"top_k": 40}, {"top_k": 40}),
        ({"min_p": 0.05}, {"min_p": 0.05}),
        ({"typical_p": 0.5}, {"typical_p": 0.5}),
        ({"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
        ({"presence_penalty": -2}, {"presence_penalty": -2.0}),
        ({"frequency_penalty": 2}, {"frequency_penalty": 2.0}),
        ({"logit_bias": {"5": -100, "7": 1.5}}, {"logit_bias": {5: -100.0, 7: 1.5}}),
        ({"seed": 42}, {"seed": 42}),
        ({"seed": -1}, {"seed": 2**64 - 1}),
        ({"min_tokens": 3}, {"min_new_tokens": 3}),
        ({"ignore_eos": True}, {"ignore_eos": True}),
        ({"stop_token_ids": [9, 9, 8]}, {"stop_token_ids": [9, 8]}),
    ],
)
@pytest.mark.parametrize("route", ["chat", "complete"])
async def test_sampling_fields(
    make_api: MakeApi, route: str, fields: dict[str, Any], sampling: dict[str, Any]
) -> None:
    api = make_api(ANSWER)
    response = await getattr(api, route)(**fields)
    assert response.status_code == 200, response.text
    assert api.scheduler.submitted[0].sampling == SamplingSpec(**sampling)


async def test_logprob_fields(make_api: MakeApi) -> None:
    api = make_api(ANSWER)
    await api.chat(logprobs=True)
    await api.chat(logprobs=True, top_logprobs=4)
    await api.complete(logprobs=0)
    await api.complete(logprobs=3)
    wanted = [(spec.sampling.logprobs, spec.sampling.top_logprobs) for spec in api.scheduler.submitted]
    assert wanted == [(True, 0), (True, 4), (True, 0), (True, 3)]


async def test_request_fields(make_api: MakeApi) -> None:
    api = make_api(ANSWER)
    await api.chat(priority=-5, timeout=2.5, max_tokens=9)
    spec = api.scheduler.submitted[0]
    assert (spec.priority, spec.deadline_s, spec.max_new_tokens) == (-5, 2.5, 9)


async def test_choices_of_a_seeded_request_differ(make_api: MakeApi) -> None:
    api = make_api(ANSWER)
    await api.chat(n=3, seed=2**64 - 1)
    assert [spec.sampling.seed for spec in api.scheduler.submitted] == [2**64 - 1, 0, 1]
    await api.chat(n=2)
    assert [spec.sampling.seed for spec in api.scheduler.submitted[3:]] == [None, None]


async def test_default_limits_of_tokens(make_api: MakeApi) -> None:
    """OpenAI's: completions stop after 16, chats when the context is full."""
    api = make_api(ANSWER)
    await api.chat()
    await api.complete()
    assert [spec.max_new_tokens for spec in api.scheduler.submitted] == [None, 16]


BAD = [
    ({"temperature": -0.1}, "temperature", "0 and 2"),
    ({"temperature": 2.1}, "temperature", "0 and 2"),
    ({"temperature": "hot"}, "temperature", "str"),
    ({"top_p": 1.5}, "top_p", "0 and 1"),
    ({"top_k": -2}, "top_k", "-1"),
    ({"min_p": -1}, "min_p", "0 and 1"),
    ({"typical_p": 0}, "typical_p", "above 0"),
    ({"repetition_penalty": 0}, "repetition_penalty", "above 0"),
    ({"presence_penalty": 2.5}, "presence_penalty", "-2 and 2"),
    ({"frequency_penalty": -3}, "frequency_penalty", "-2 and 2"),
    ({"n": 0}, "n", "1 and 128"),
    ({"n": 129}, "n", "1 and 128"),
    ({"n": 1.5}, "n", "float"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": -1}, "max_tokens", "at least 1"),
    ({"max_tokens": 5000}, "max_tokens", "1200"),
    ({"min_tokens": 5, "max_tokens": 3}, "min_tokens", "max_tokens (3)"),
    ({"seed": 2**64}, "seed", "64 bits"),
    ({"seed": "x"}, "seed", "str"),
    ({"stop": [""]}, "stop[0]", "empty"),
    ({"stop": ["a"] * 17}, "stop", "max_stop_sequences"),
    ({"stop": "x" * 1025}, "stop", "max_stop_chars"),
    ({"stop": 5}, "stop", "int"),
    ({"stop": [5]}, "stop[0]", "int"),
    ({"logit_bias": {"600": 1}}, "logit_bias", "vocabulary of 600"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "not a token id"),
    ({"logit_bias": {"abc": 1}}, "logit_bias", "not a token id"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "-100 and 100"),
    ({"logit_bias": {"5": "x"}}, "logit_bias", "str"),
    ({"logit_bias": [1]}, "logit_bias", "array"),
    ({"stop_token_ids": [600]}, "stop_token_ids[0]", "vocabulary of 600"),
    ({"stream": "yes"}, "stream", "str"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
    ({"stream_options": {"include_usage": 3}, "stream": True}, "stream_options.include_usage", "int"),
    ({"timeout": 0}, "timeout", "positive"),
    ({"priority": 2**40}, "priority", "not between"),
    ({"prompt_logprobs": 2}, "prompt_logprobs", "workers"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
    ({"response_format": {"type": "json_object"}}, "response_format", "grammar"),
]


@pytest.mark.parametrize(("fields", "param", "says"), BAD, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("route", ["chat", "complete"])
async def test_bad_values(
    make_api: MakeApi, route: str, fields: dict[str, Any], param: str, says: str
) -> None:
    api = make_api(ANSWER)
    response = await getattr(api, route)(**fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert says in error["message"]
    assert api.scheduler.submitted == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]},
            "messages[0].content[0].text",
        ),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"modalities": ["audio"]}, "modalities"),
    ],
)
async def test_bad_chat_values(make_api: MakeApi, fields: dict[str, Any], param: str) -> None:
    response = await make_api(ANSWER).chat(**fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt[0]"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [1, 600]}, "prompt[1]"),
        ({"prompt": [[1], [-1]]}, "prompt[1][0]"),
        ({"prompt": [2**70]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [5] * 1001}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"best_of": 0}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"echo": True, "logprobs": 1}, "logprobs"),
    ],
)
async def test_bad_completion_values(make_api: MakeApi, fields: dict[str, Any], param: str) -> None:
    response = await make_api(ANSWER).complete(**fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_missing_field(make_api: MakeApi) -> None:
    api = make_api(ANSWER)
    response = await api.http.post("/v1/chat/completions", json={"model": "tiny"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"
    assert response.json()["error"]["code"] == "missing_required_parameter"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"nonsense", b'"x"', b"\xff\xfe", b"[" * 100_000])
async def test_bodies_that_are_no_json_object(make_api: MakeApi, body: bytes) -> None:
    response = await make_api(ANSWER).http.post("/v1/chat/completions", content=body)
    assert response.status_code == 400
    assert "JSON" in response.json()["error"]["message"]


async def test_body_over_the_limit(make_api: MakeApi) -> None:
    response = await make_api(ANSWER, max_body_bytes=100).complete(prompt="x" * 200)
    assert response.status_code == 413
    assert "100 bytes (max_body_bytes)" in response.json()["error"]["message"]


async def test_prompt_over_the_limit_names_both_numbers(make_api: MakeApi) -> None:
    response = await make_api(ANSWER).complete(prompt=[5] * 1100)
    assert response.status_code == 400
    error = response.json()["error"]
    assert "1100" in error["message"]
    assert "1000 (max_input_tokens)" in error["message"]
    assert error["code"] == "context_length_exceeded"


async def test_more_choices_than_the_server_holds(make_api: MakeApi) -> None:
    response = await make_api(ANSWER).complete(prompt=["a", "b"], n=33)
    assert response.status_code == 400
    error = response.json()["error"]
    assert "66 requests; the limit is 64 (max_concurrent_requests)" in error["message"]
    assert error["param"] == "n"


async def test_default_of_completions_stays_within_the_context(make_api: MakeApi) -> None:
    from tests.api.scripted import ScriptedClient

    state = server_state(model=model_info(max_input_tokens=1199))
    api = make_api(scheduler=ScriptedClient(ANSWER, state=state))
    assert (await api.complete(prompt=[5] * 1195)).status_code == 200
    assert api.scheduler.submitted[0].max_new_tokens == 5


async def test_unknown_fields_are_let_through(make_api: MakeApi) -> None:
    response = await make_api(ANSWER).chat(frobnicate=1, chat_template_kwargs={"x": 1})
    assert response.status_code == 200


async def test_unknown_fields_are_logged_once(make_api: MakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    api = make_api(ANSWER)
    for _ in range(3):
        await api.chat(frobnicate=1)
    assert capsys.readouterr().out.count("frobnicate") == 1


async def test_grammar_where_the_workers_have_it(make_api: MakeApi) -> None:
    from proto.worker_pb2 import Grammar
    from tests.api.scripted import ScriptedClient

    state = server_state(model=model_info(features=["grammar"]))
    api = make_api(scheduler=ScriptedClient(ANSWER, state=state))
    schema = {"type": "object"}
    await api.chat(response_format={"type": "json_object"})
    await api.chat(
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": schema, "strict": True},
        }
    )
    first, second = (spec.grammar for spec in api.scheduler.submitted)
    assert first is not None
    assert first.kind == Grammar.JSON_OBJECT
    assert second is not None
    assert (second.kind, second.source, second.strict) == (Grammar.JSON_SCHEMA, '{"type": "object"}', True)
    bad = await api.chat(response_format={"type": "json_schema", "json_schema": {"name": "x"}})
    assert bad.status_code == 400
    assert bad.json()["error"]["param"] == "response_format.json_schema.schema"
