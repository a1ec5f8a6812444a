"""Cases that users of TGI, vLLM and SGLang reported about the plain API, each as a test.

The trackers' own numbers stand in the docstrings.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.ipc.messages import ErrorInfo
from tests.api.conftest import Api, MakeApi
from tests.api.scripted import Script, ScriptedClient
from tests.api.sse import events
from tests.api.test_params import NEUTRAL_CHAT
from tests.api.tiny import byte_ids, ids

HELLO = Script(ids("hello world"))


def _text(chunks: list[Any]) -> str:
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])


async def _both(api: Api, **fields: Any) -> tuple[str, str]:
    """The text as a whole and streamed."""
    whole = (await api.chat(**fields)).json()["choices"][0]["message"]["content"]
    return whole, _text(events((await api.chat(stream=True, **fields)).text))


@pytest.mark.parametrize("name", [*NEUTRAL_CHAT, "all"])
async def test_explicit_defaults_are_as_good_as_absent(make_api: MakeApi, name: str) -> None:
    """TGI #2228, #1796."""
    api = make_api(HELLO)
    await api.chat()
    fields = NEUTRAL_CHAT if name == "all" else {name: NEUTRAL_CHAT[name]}
    response = await api.chat(**fields)
    assert response.status_code == 200, response.text
    absent, explicit = api.scheduler.submitted
    assert explicit.sampling == absent.sampling
    assert explicit.max_new_tokens == absent.max_new_tokens
    assert (explicit.priority, explicit.deadline_s) == (absent.priority, absent.deadline_s)


async def test_temperature_zero_with_and_without_penalties_of_zero(make_api: MakeApi) -> None:
    """TGI #1796."""
    api = make_api(HELLO)
    await api.chat(temperature=0)
    await api.chat(temperature=0, presence_penalty=0, frequency_penalty=0.0)
    first, second = api.scheduler.submitted
    assert first.sampling == second.sampling


async def test_explicit_defaults_of_completions(make_api: MakeApi) -> None:
    """TGI #2228."""
    api = make_api(HELLO)
    await api.complete()
    response = await api.complete(
        best_of=1, echo=False, logprobs=None, suffix=None, max_tokens=16, n=1, stop=None, logit_bias={}
    )
    assert response.status_code == 200
    await api.complete(logprobs=False)
    first, second, third = api.scheduler.submitted
    assert first.sampling == second.sampling == third.sampling
    assert first.max_new_tokens == second.max_new_tokens


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ("lo", "hel"),
        (["lo"], "hel"),
        ("o wor", "hell"),
        (["xyz", "world"], "hello "),
        ("hello world!", "hello world"),
        ("h", ""),
    ],
)
@pytest.mark.parametrize("encode", [ids, byte_ids])
async def test_stop_strings(make_api: MakeApi, stop: Any, expected: str, encode: Any) -> None:
    """TGI #1724: a string, a list, and one that spans tokens; no part of it is ever streamed."""
    api = make_api(Script(encode("hello world")))
    assert await _both(api, stop=stop) == (expected, expected)


async def test_three_choices_have_their_indices(make_api: MakeApi) -> None:
    """TGI #2914."""
    body = (await make_api(HELLO).chat(n=3)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]


@pytest.mark.parametrize("text", ["안녕하세요, 반갑습니다!", "👨‍👩‍👧‍👦🏳️‍🌈", "a\u0301 — ñ"])
async def test_characters_of_many_bytes(make_api: MakeApi, text: str) -> None:
    """TGI #131."""
    for encode in (ids, byte_ids):
        api = make_api(Script(encode(text)))
        assert await _both(api) == (text, text)
        stream = await api.chat(stream=True)
        assert all("\ufffd" not in json.dumps(c, ensure_ascii=False) for c in events(stream.text))


async def test_prompt_that_ends_inside_an_emoji(make_api: MakeApi) -> None:
    """vLLM #48853."""
    whole = byte_ids("ok 👨‍👩‍👧")
    for cut in range(4, len(whole)):
        api = make_api(Script([*whole[cut:], *byte_ids(" yes")]))
        body = (await api.complete(prompt=whole[:cut], echo=True, max_tokens=99)).json()
        assert body["choices"][0]["text"] == "ok 👨‍👩‍👧 yes"
        chunks = events((await api.complete(prompt=whole[:cut], stream=True, max_tokens=99)).text)
        assert "\ufffd" not in "".join(c["choices"][0]["text"] for c in chunks)


async def test_prompt_with_ids_beyond_the_tokenizer(make_api: MakeApi) -> None:
    """Models pad their vocabulary; such ids show nothing."""
    body = (await make_api(HELLO).complete(prompt=[*byte_ids("é")[:1], 599], echo=True)).json()
    assert body["choices"][0]["text"].endswith("hello world")


async def test_answer_cut_off_inside_a_character(make_api: MakeApi) -> None:
    """The text of fewer tokens is always the beginning of the text of more."""
    api = make_api(Script(byte_ids("né👍")))
    texts = [(await _both(api, max_tokens=n))[0] for n in range(1, 8)]
    assert texts == ["n", "n", "né", "né", "né", "né", "né👍"]


async def test_exactly_one_usage_chunk(make_api: MakeApi) -> None:
    """TGI #2531, vLLM #7299: empty choices, before [DONE], and null usage on all others."""
    chunks = events((await make_api(HELLO).chat(stream=True, stream_options={"include_usage": True})).text)
    usages = [chunk for chunk in chunks if chunk["usage"] is not None]
    assert usages == [chunks[-1]]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == len(ids("hello world")) + 1
    without = events((await make_api(HELLO).chat(stream=True)).text)
    assert all("usage" not in chunk for chunk in without)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"logit_bias": {"5": "a lot"}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"echo": True, "max_tokens": 0}, "max_tokens"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
    ],
)
async def test_bad_requests_name_the_field_and_do_no_harm(
    make_api: MakeApi, fields: dict[str, Any], param: str
) -> None:
    """vLLM #17248."""
    api = make_api(HELLO)
    response = await api.complete(**fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert (await api.complete()).status_code == 200


async def test_stop_string_in_the_output_on_request(make_api: MakeApi) -> None:
    """vLLM #14399."""
    api = make_api(Script(byte_ids("one STOP two")))
    assert await _both(api, stop="STOP", include_stop_str_in_output=True) == ("one STOP", "one STOP")


async def test_completions_logprobs_shape(make_api: MakeApi) -> None:
    """TGI #2211."""
    logprobs = (await make_api(HELLO).complete(logprobs=2)).json()["choices"][0]["logprobs"]
    assert set(logprobs) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert len({len(values) for values in logprobs.values()}) == 1
    assert "".join(logprobs["tokens"]) == "hello world"
    assert all(len(top) == 2 for top in logprobs["top_logprobs"])


async def test_no_key_and_a_wrong_key(make_api: MakeApi) -> None:
    """TGI #1372."""
    api = make_api(HELLO, api_keys=("right",))
    for headers in ({}, {"authorization": "Bearer wrong"}):
        response = await api.http.post("/v1/chat/completions", json={}, headers=headers)
        assert response.status_code == 401
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert (await api.http.get("/health")).status_code == 200


async def test_surplus_gets_429_with_retry_after(make_api: MakeApi) -> None:
    """vLLM #2901, TGI #439: n counts as n, all or nothing."""
    full = ErrorInfo(status=429, type="rate_limit_error", message="full", retry_after_s=3.0)
    scheduler = ScriptedClient(lambda spec: Script(refuse=full) if spec.id > 2 else HELLO)
    api = make_api(scheduler=scheduler)
    assert (await api.chat(n=2)).status_code == 200
    refused = await api.chat(n=3, stream=True)
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "3"
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert len(scheduler.submitted) == 2


async def test_failing_request_fails_alone(make_api: MakeApi) -> None:
    """TGI #2316."""
    broken = ErrorInfo(status=500, type="server_error", message="NaN")
    scheduler = ScriptedClient(lambda spec: Script(ids("a"), end=broken) if spec.id == 2 else HELLO)
    api = make_api(scheduler=scheduler)
    statuses = [(await api.chat()).status_code for _ in range(3)]
    assert statuses == [200, 500, 200]
