"""/v1/chat/completions, streamed and not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.ipc.messages import FinishReason
from tests.api.conftest import MakeApi
from tests.api.scripted import Script
from tests.api.tiny import ids, tiny_tokenizer


def events(text: str) -> list[Any]:
    """The JSON of each event; the last must be [DONE]."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") for block in blocks)
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


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
