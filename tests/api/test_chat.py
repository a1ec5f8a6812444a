"""/v1/chat/completions, streamed and not."""

from __future__ import annotations

import pytest

from router.ipc.messages import FinishReason, PromptLogprob
from tests.api.conftest import MakeApi
from tests.api.scripted import Script, ScriptedClient, model_info, server_state
from tests.api.sse import events
from tests.api.tiny import ids, tiny_tokenizer


async def test_answer_as_a_whole(make_api: MakeApi) -> None:
    api = make_api(Script(ids("hello world"), cached_tokens=3))
    response = await api.chat()
    assert response.status_code == 200
    body = response.json()
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["model"]) == ("chat.completion", "org/tiny")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello world", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    n_prompt = len(ids("<|start|>user\nhi<|end|>\n<|start|>assistant\n"))
    n_output = len(ids("hello world")) + 1
    assert body["usage"] == {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_output,
        "total_tokens": n_prompt + n_output,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


async def test_streamed_answer(make_api: MakeApi) -> None:
    api = make_api(Script(ids("hello world"), end=FinishReason.STOP))
    response = await api.chat(stream=True)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response.text)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "hello world"
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert all("usage" not in chunk for chunk in chunks)


async def test_prompt_logprobs(make_api: MakeApi) -> None:
    import numpy as np

    values = np.asarray([-1.0, -2.0], dtype="<f4").tobytes()
    part = PromptLogprob(id=0, start=1, chosen=values, n_top=0, top_ids=b"", top_values=b"")
    state = server_state(model=model_info(features=["prompt_logprobs"]))
    scheduler = ScriptedClient(Script(ids("ok"), prompt_logprobs=(part,)), state=state)
    body = (await make_api(scheduler=scheduler).chat(prompt_logprobs=0)).json()
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]
    assert body["prompt_logprobs"][0] is None
    assert [entry["logprob"] for entry in body["prompt_logprobs"][1].values()] == [-1.0]


async def test_prompt_is_the_rendered_template(make_api: MakeApi) -> None:
    import numpy as np

    api = make_api(Script(ids("ok")))
    await api.chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ]
    )
    prompt = np.frombuffer(api.scheduler.submitted[0].prompt, dtype="<i4")
    text = tiny_tokenizer().decode(prompt, skip_special=False)
    assert text == "<|start|>system\nbe brief<|end|>\n<|start|>user\nab<|end|>\n<|start|>assistant\n"


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_limit_of_tokens(make_api: MakeApi, field: str) -> None:
    api = make_api(Script(ids("hello world")))
    body = (await api.chat(**{field: 1})).json()
    assert body["choices"][0]["message"]["content"] == "hello"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 1


async def test_several_choices(make_api: MakeApi) -> None:
    api = make_api(Script(ids("hello world")))
    body = (await api.chat(n=3)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in body["choices"]} == {"hello world"}
    chunks = events((await api.chat(n=3, stream=True)).text)
    for index in range(3):
        parts = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert parts[0]["delta"]["role"] == "assistant"
        assert "".join(part["delta"].get("content", "") for part in parts) == "hello world"
        assert [p["finish_reason"] for p in parts if p["finish_reason"]] == ["stop"]


async def test_logprobs(make_api: MakeApi) -> None:
    api = make_api(Script(ids("hello")))
    body = (await api.chat(logprobs=True, top_logprobs=2)).json()
    (entry,) = body["choices"][0]["logprobs"]["content"]
    assert entry["token"] == "hello"
    assert entry["bytes"] == list(b"hello")
    assert entry["logprob"] == -0.5
    assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.5, -1.0]
    assert entry["top_logprobs"][0]["token"] == "hello"


async def test_streamed_usage_in_every_chunk(make_api: MakeApi) -> None:
    options = {"continuous_usage_stats": True}
    chunks = events(
        (await make_api(Script(ids("hello world"))).chat(stream=True, stream_options=options)).text
    )
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == len(ids("hello world")) + 1


async def test_model_without_a_template(make_api: MakeApi) -> None:
    response = await make_api(Script(), template=None).chat()
    assert response.status_code == 400
    assert "/v1/completions" in response.json()["error"]["message"]


async def test_template_that_refuses(make_api: MakeApi) -> None:
    api = make_api(Script(), template="{{ raise_exception('only one message, please') }}")
    response = await api.chat()
    assert response.status_code == 400
    assert "only one message, please" in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == "messages"


async def test_going_on_with_the_last_message(make_api: MakeApi) -> None:
    import numpy as np

    api = make_api(Script(ids("ok")))
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]
    await api.chat(messages=messages, continue_final_message=True)
    prompt = np.frombuffer(api.scheduler.submitted[0].prompt, dtype="<i4")
    text = tiny_tokenizer().decode(prompt, skip_special=False)
    assert text == "<|start|>user\nhi<|end|>\n<|start|>assistant\nWell, "


async def test_special_tokens_on_request(make_api: MakeApi) -> None:
    api = make_api(Script([1, *ids("lo")]))
    assert (await api.chat()).json()["choices"][0]["message"]["content"] == "lo"
    body = (await api.chat(skip_special_tokens=False)).json()
    assert body["choices"][0]["message"]["content"] == "<|start|>lo"


async def test_stop_token_is_no_part_of_the_text(make_api: MakeApi) -> None:
    token = ids("lo")[0]
    api = make_api(Script([*ids("hello"), *ids("lo")]))
    body = (await api.chat(stop_token_ids=[token])).json()
    assert body["choices"][0]["message"]["content"] == "hello"
    assert body["choices"][0]["finish_reason"] == "stop"
    body = (await api.chat(stop_token_ids=[token], include_stop_str_in_output=True)).json()
    assert body["choices"][0]["message"]["content"] == "hellol"


async def test_stop_strings_wait_for_min_tokens(make_api: MakeApi) -> None:
    api = make_api(Script([*ids("hello"), *ids(" wor"), *ids("hello")]))
    body = (await api.chat(stop="hello", min_tokens=2)).json()
    assert body["choices"][0]["message"]["content"] == "hello wor"
