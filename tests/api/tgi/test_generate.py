"""TGI's generate routes: shapes, parameters, errors."""

from __future__ import annotations

import json
from typing import Any

import httpx
import numpy as np
import pytest

from proto.worker_pb2 import Grammar
from router.ipc.messages import ErrorInfo, FinishReason, PromptLogprob, RequestSpec
from tests.api.conftest import Api, MakeApi
from tests.api.scripted import EOS, Script, ScriptedClient, model_info, server_state
from tests.api.sse import open_events
from tests.api.tiny import END, byte_ids, ids

HELLO = Script(ids("hello world"))


async def _generate(
    api: Api, inputs: str = "hi", path: str = "/generate", **parameters: Any
) -> httpx.Response:
    return await api.http.post(path, json={"inputs": inputs, "parameters": parameters})


async def _events(api: Api, **parameters: Any) -> list[Any]:
    return open_events((await _generate(api, path="/generate_stream", **parameters)).text)


async def test_text_alone(make_api: MakeApi) -> None:
    response = await _generate(make_api(HELLO))
    assert response.status_code == 200
    assert response.json() == {"generated_text": "hello world"}


async def test_headers_tell_what_was_measured(make_api: MakeApi) -> None:
    response = await _generate(make_api(HELLO), inputs="héllo")
    headers = response.headers
    assert headers["x-compute-characters"] == "5"
    assert headers["x-prompt-tokens"] == str(len(ids("héllo")))
    assert headers["x-generated-tokens"] == str(len(HELLO.tokens) + 1)
    assert headers["x-queue-time"] == "1"
    for name in (
        "x-compute-time",
        "x-total-time",
        "x-validation-time",
        "x-inference-time",
        "x-time-per-token",
    ):
        assert float(headers[name]) >= 0


async def test_details(make_api: MakeApi) -> None:
    body = (await _generate(make_api(HELLO), details=True, top_n_tokens=2)).json()
    details = body["details"]
    tokens = details["tokens"]
    assert details["finish_reason"] == "eos_token"
    assert details["generated_tokens"] == len(tokens) == len(HELLO.tokens) + 1
    assert details["seed"] is None
    assert details["prefill"] == []
    assert tokens[-1] == {"id": EOS, "text": END, "logprob": -0.5, "special": True}
    assert "".join(token["text"] for token in tokens if not token["special"]) == body["generated_text"]
    assert [len(top) for top in details["top_tokens"]] == [2] * len(tokens)
    assert set(details["top_tokens"][0][0]) == {"id", "text", "logprob", "special"}


async def test_stream(make_api: MakeApi) -> None:
    events = await _events(make_api(HELLO), details=True)
    assert [event["index"] for event in events] == list(range(1, len(HELLO.tokens) + 2))
    assert "".join(e["token"]["text"] for e in events if not e["token"]["special"]) == "hello world"
    assert all(event["generated_text"] is None and event["details"] is None for event in events[:-1])
    last = events[-1]
    assert last["generated_text"] == "hello world"
    assert last["details"] == {
        "finish_reason": "eos_token",
        "generated_tokens": len(events),
        "seed": None,
        "input_length": len(ids("hi")),
    }


@pytest.mark.parametrize("encode", [ids, byte_ids])
@pytest.mark.parametrize("stop", ["o wor", "ld", "x", "hello"])
async def test_stop_text_is_in_no_token(make_api: MakeApi, stop: str, encode: Any) -> None:
    """TGI leaves it in the output."""
    api = make_api(Script(encode("hello world")))
    whole = (await _generate(api, stop=[stop], details=True)).json()
    expected = "hello world".partition(stop)[0]
    assert whole["generated_text"] == expected
    assert whole["details"]["finish_reason"] == ("eos_token" if stop == "x" else "stop_sequence")
    events = await _events(api, stop=[stop])
    assert events[-1]["generated_text"] == expected
    for tokens in (whole["details"]["tokens"], [event["token"] for event in events]):
        assert "".join(token["text"] for token in tokens if not token["special"]) == expected
        assert len(tokens) == whole["details"]["generated_tokens"]


async def test_characters_of_many_bytes_stay_whole(make_api: MakeApi) -> None:
    text = "né 👨‍👩‍👧"
    events = await _events(make_api(Script(byte_ids(text))))
    assert "".join(e["token"]["text"] for e in events if not e["token"]["special"]) == text
    assert all("\ufffd" not in event["token"]["text"] for event in events)


async def test_limit(make_api: MakeApi) -> None:
    body = (await _generate(make_api(Script(byte_ids("abcdef"))), max_new_tokens=3, details=True)).json()
    assert body["generated_text"] == "abc"
    assert body["details"]["finish_reason"] == "length"


async def test_no_parameters_at_all(make_api: MakeApi) -> None:
    """TGI samples then, and generates up to the context's end."""
    api = make_api(HELLO)
    assert (await api.http.post("/generate", json={"inputs": "hi"})).status_code == 200
    (spec,) = api.scheduler.submitted
    assert spec.sampling.temperature == 1.0
    assert spec.max_new_tokens is None


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, 0.0),
        ({"do_sample": False}, 0.0),
        ({"do_sample": True}, 1.0),
        ({"temperature": 0.5}, 0.5),
        ({"temperature": 1.0}, 0.0),
        ({"temperature": 0}, 0.0),
        ({"temperature": 7.5}, 7.5),
        ({"top_k": 5}, 1.0),
        ({"top_p": 0.9}, 1.0),
        ({"top_p": 1.0}, 0.0),
        ({"typical_p": 0.9}, 1.0),
    ],
)
async def test_what_makes_a_request_sample(
    make_api: MakeApi, parameters: dict[str, Any], expected: float
) -> None:
    """TGI refuses `top_p` 1.0 and `temperature` 0 (TGI #2228)."""
    api = make_api(HELLO)
    response = await _generate(api, **parameters)
    assert response.status_code == 200, response.text
    assert api.scheduler.submitted[0].sampling.temperature == expected


async def test_sampling_parameters_arrive(make_api: MakeApi) -> None:
    api = make_api(HELLO)
    given = {
        "top_k": 7,
        "top_p": 0.5,
        "typical_p": 0.25,
        "repetition_penalty": 1.5,
        "frequency_penalty": 0.5,
        "seed": 42,
    }
    body = (await _generate(api, details=True, **given)).json()
    sampling = api.scheduler.submitted[0].sampling
    assert {name: getattr(sampling, name) for name in given} == given
    assert sampling.presence_penalty == 0.0
    assert body["details"]["seed"] == 42


async def test_drawn_seed_is_told_and_gives_the_same_request(make_api: MakeApi) -> None:
    api = make_api(HELLO)
    body = (await _generate(api, do_sample=True, details=True)).json()
    seed = body["details"]["seed"]
    await _generate(api, do_sample=True, details=True, seed=seed)
    first, second = api.scheduler.submitted
    assert first.sampling == second.sampling
    assert second.sampling.seed == seed


async def test_best_of_takes_the_highest_mean_logprob(make_api: MakeApi) -> None:
    def script(spec: RequestSpec) -> Script:
        return Script(ids("hello world") if spec.id == 2 else byte_ids("abc"))

    class Scored(ScriptedClient):
        def _emit(self, running: Any, token: int, reason: FinishReason) -> None:
            score = -0.1 if running.spec.id == 2 else -2.0
            if reason is not FinishReason.NONE:
                self.running.pop(running.spec.id, None)
            running.sink.on_token(token, int(reason), (score, b"", b""))

    api = make_api(scheduler=Scored(script))
    body = (await _generate(api, best_of=3, do_sample=True, details=True)).json()
    assert body["generated_text"] == "hello world"
    others = body["details"]["best_of_sequences"]
    assert [other["generated_text"] for other in others] == ["abc", "abc"]
    seeds = [body["details"]["seed"], *(other["seed"] for other in others)]
    assert len(set(seeds)) == 3
    plain = make_api(scheduler=Scored(script))
    assert (await _generate(plain, best_of=3, do_sample=True)).json() == {"generated_text": "hello world"}


async def test_return_full_text(make_api: MakeApi) -> None:
    api = make_api(HELLO)
    assert (await _generate(api, return_full_text=True)).json()["generated_text"] == "hihello world"
    assert (await _events(api, return_full_text=True))[-1]["generated_text"] == "hihello world"
    assert (await _generate(api)).json()["generated_text"] == "hello world"


async def test_root_answers_a_list_with_the_prompt(make_api: MakeApi) -> None:
    api = make_api(HELLO)
    assert (await _generate(api, path="/")).json() == [{"generated_text": "hihello world"}]
    without = await _generate(api, path="/", return_full_text=False)
    assert without.json() == [{"generated_text": "hello world"}]
    stream = await api.http.post("/", json={"inputs": "hi", "stream": True})
    assert open_events(stream.text)[-1]["generated_text"] == "hihello world"


async def test_truncate_keeps_the_end(make_api: MakeApi) -> None:
    api = make_api(HELLO)
    await _generate(api, inputs="abcdef", truncate=2)
    assert np.frombuffer(api.scheduler.submitted[0].prompt, dtype="<i4").tolist() == byte_ids("ef")


async def test_decoder_input_details(make_api: MakeApi) -> None:
    part = PromptLogprob(
        id=0, start=1, chosen=np.asarray([-1.0], dtype="<f4").tobytes(), n_top=0, top_ids=b"", top_values=b""
    )
    state = server_state(model=model_info(features=["prompt_logprobs"]))
    api = make_api(scheduler=ScriptedClient(Script(ids("lo"), prompt_logprobs=(part,)), state=state))
    body = (await _generate(api, inputs="ab", decoder_input_details=True)).json()
    a, b = byte_ids("ab")
    assert body["details"]["prefill"] == [
        {"id": a, "text": "a", "logprob": None},
        {"id": b, "text": "b", "logprob": -1.0},
    ]
    await _generate(api, details=True)
    assert [spec.sampling.prompt_logprobs for spec in api.scheduler.submitted] == [1, 0]


@pytest.mark.parametrize(
    ("grammar", "kind", "source"),
    [
        ({"type": "json", "value": {"type": "object"}}, Grammar.JSON_SCHEMA, '{"type": "object"}'),
        ({"type": "json", "value": '{"type": "object"}'}, Grammar.JSON_SCHEMA, '{"type": "object"}'),
        (
            {"type": "json_schema", "value": {"name": "x", "schema": {"type": "object"}}},
            Grammar.JSON_SCHEMA,
            '{"type": "object"}',
        ),
        ({"type": "regex", "value": "[a-z]+"}, Grammar.REGEX, "[a-z]+"),
    ],
)
async def test_grammar(make_api: MakeApi, grammar: dict[str, Any], kind: int, source: str) -> None:
    state = server_state(model=model_info(features=["grammar"]))
    api = make_api(scheduler=ScriptedClient(HELLO, state=state))
    response = await _generate(api, grammar=grammar)
    assert response.status_code == 200, response.text
    spec = api.scheduler.submitted[0].grammar
    assert spec is not None
    assert spec.kind == kind
    assert (
        json.loads(spec.source) == json.loads(source)
        if kind == Grammar.JSON_SCHEMA
        else spec.source == source
    )


BAD: list[tuple[dict[str, Any], str]] = [
    ({"watermark": True}, "watermark"),
    ({"best_of": 0, "do_sample": True}, "best_of"),
    ({"best_of": 999, "do_sample": True}, "best_of"),
    ({"best_of": 2}, "best_of"),
    ({"top_n_tokens": 99}, "top_n_tokens"),
    ({"top_n_tokens": -1}, "top_n_tokens"),
    ({"truncate": 0}, "truncate"),
    ({"truncate": 5000}, "truncate"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"typical_p": 0}, "typical_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"frequency_penalty": 3}, "frequency_penalty"),
    ({"max_new_tokens": 0}, "max_new_tokens"),
    ({"max_new_tokens": 5000}, "max_total_tokens"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop": ["x"] * 17}, "max_stop_sequences"),
    ({"seed": "x"}, "parameters.seed"),
    ({"grammar": {"type": "xml", "value": "x"}}, "grammar.type"),
    ({"grammar": {"type": "regex", "value": 3}}, "grammar.value"),
    ({"grammar": {"type": "json", "value": "{"}}, "grammar.value"),
    ({"grammar": {"type": "json", "value": {}}}, "constrain"),
]


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/"])
@pytest.mark.parametrize(("parameters", "named"), BAD)
async def test_bad_parameters(make_api: MakeApi, path: str, parameters: dict[str, Any], named: str) -> None:
    api = make_api(HELLO)
    response = await _generate(api, path=path, **parameters)
    assert response.status_code == 422
    body = response.json()
    assert set(body) == {"error", "error_type"}
    assert body["error_type"] == "validation"
    assert named in body["error"]
    assert not api.scheduler.submitted


async def test_what_can_not_be_streamed(make_api: MakeApi) -> None:
    api = make_api(HELLO)
    for parameters in ({"best_of": 2, "do_sample": True}, {"decoder_input_details": True}):
        response = await _generate(api, path="/generate_stream", **parameters)
        assert response.status_code == 422
        assert next(iter(parameters)) in response.json()["error"]


@pytest.mark.parametrize(
    "body", [b"{", b"[]", b"{}", b'{"inputs": 3}', b'{"inputs": ""}', b'{"inputs": "x", "parameters": 3}']
)
@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/", "/invocations"])
async def test_bad_bodies(make_api: MakeApi, path: str, body: bytes) -> None:
    response = await make_api(HELLO).http.post(path, content=body)
    assert response.status_code == 422
    assert response.json()["error_type"] == "validation"


async def test_unknown_adapter_is_no_silent_fall_back(make_api: MakeApi) -> None:
    api = make_api(HELLO)
    response = await _generate(api, adapter_id="nobody/knows")
    assert response.status_code == 404
    assert "nobody/knows" in response.json()["error"]
    assert not api.scheduler.submitted


@pytest.mark.parametrize(
    ("status", "shown", "error_type"),
    [(429, 429, "overloaded"), (500, 424, "generation"), (503, 503, "unavailable"), (504, 504, "timeout")],
)
async def test_failures_have_tgis_types(make_api: MakeApi, status: int, shown: int, error_type: str) -> None:
    info = ErrorInfo(status=status, type="server_error", message="no", retry_after_s=2.0)
    for script in (Script(refuse=info), Script(end=info)):
        for path in ("/generate", "/generate_stream"):
            response = await _generate(make_api(script), path=path)
            assert response.status_code == shown
            assert response.json() == {"error": "no", "error_type": error_type}
            assert response.headers["retry-after"] == "2"


async def test_failure_in_mid_stream(make_api: MakeApi) -> None:
    info = ErrorInfo(status=500, type="server_error", message="NaN")
    events = await _events(make_api(Script(ids("hello"), end=info)))
    assert events[-1] == {"error": "NaN", "error_type": "generation"}
    assert events[0]["token"]["text"] == "hello"


async def test_no_key_and_wrong_method(make_api: MakeApi) -> None:
    api = make_api(HELLO, api_keys=("sekrit",))
    response = await _generate(api)
    assert response.status_code == 401
    assert response.json()["error_type"] == "authentication"
    wrong = await make_api(HELLO).http.get("/generate")
    assert wrong.status_code == 405
    assert "error_type" in wrong.json()


async def test_health_by_tgis_and_sagemakers_names(make_api: MakeApi) -> None:
    api = make_api(HELLO)
    for path in ("/", "/ping", "/health"):
        assert (await api.http.get(path)).status_code == 200


async def test_invocations(make_api: MakeApi) -> None:
    api = make_api(HELLO)
    generated = await api.http.post("/invocations", json={"inputs": "hi"})
    assert generated.json() == [{"generated_text": "hihello world"}]
    chat = await api.http.post("/invocations", json={"messages": [{"role": "user", "content": "hi"}]})
    assert chat.json()["choices"][0]["message"]["content"] == "hello world"
    text = await api.http.post("/invocations", json={"prompt": "hi"})
    assert text.json()["choices"][0]["text"] == "hello world"


async def test_info_has_what_tgis_clients_read(make_api: MakeApi) -> None:
    info = (await make_api(HELLO).http.get("/info")).json()
    assert info["model_id"] == "org/tiny"
    assert info["model_pipeline_tag"] == "text-generation"
    assert info["max_input_tokens"] == info["max_input_length"] == 1000
    assert {"max_best_of", "max_stop_sequences", "max_client_batch_size", "sha", "version"} <= set(info)
