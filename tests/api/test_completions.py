"""/v1/completions: prompts in every form, echo, choices, logprobs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from router.ipc.messages import FinishReason, PromptLogprob, RequestSpec
from tests.api.conftest import MakeApi
from tests.api.scripted import Script, ScriptedClient, model_info, server_state
from tests.api.sse import events
from tests.api.tiny import byte_ids, ids

ANSWER = Script(ids(" world"))


def _prompts(scheduler: ScriptedClient) -> list[list[int]]:
    return [np.frombuffer(spec.prompt, dtype="<i4").tolist() for spec in scheduler.submitted]


async def test_answer_as_a_whole(make_api: MakeApi) -> None:
    body = (await make_api(ANSWER).complete(prompt="hello")).json()
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": " world", "logprobs": None, "finish_reason": "stop"}]


async def test_streamed_answer(make_api: MakeApi) -> None:
    chunks = events((await make_api(ANSWER).complete(stream=True)).text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == " world"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}


async def test_prompts_in_every_form(make_api: MakeApi) -> None:
    api = make_api(ANSWER)
    for prompt in ("hello", ["hello", "lo"], [5, 6, 7], [[5], [6, 7]], ["hello", [9]]):
        assert (await api.complete(prompt=prompt)).status_code == 200
    hello, lo = ids("hello"), ids("lo")
    assert _prompts(api.scheduler) == [hello, hello, lo, [5, 6, 7], [5], [6, 7], hello, [9]]


async def test_prompt_list_with_several_choices(make_api: MakeApi) -> None:
    """Choices are counted through: n of the first prompt, n of the second."""

    def script(spec: RequestSpec) -> Script:
        return Script(byte_ids(f"to {np.frombuffer(spec.prompt, dtype='<i4')[0]}"), cached_tokens=4)

    api = make_api(script)
    body = (await api.complete(prompt=[[50, 1, 1, 1, 1], [60]], n=2)).json()
    assert [(c["index"], c["text"]) for c in body["choices"]] == [
        (0, "to 50"),
        (1, "to 50"),
        (2, "to 60"),
        (3, "to 60"),
    ]
    assert body["usage"]["prompt_tokens"] == 6
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}
    assert body["usage"]["completion_tokens"] == 4 * 6


async def test_echo(make_api: MakeApi) -> None:
    api = make_api(ANSWER)
    body = (await api.complete(prompt="hello", echo=True)).json()
    assert body["choices"][0]["text"] == "hello world"
    chunks = events((await api.complete(prompt=["hello", "lo"], echo=True, stream=True)).text)
    for index, whole in ((0, "hello world"), (1, "lo world")):
        parts = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(part["text"] for part in parts) == whole


async def test_logprobs(make_api: MakeApi) -> None:
    body = (await make_api(Script([*byte_ids("é"), *ids("lo")])).complete(logprobs=2)).json()
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "l", "o"]
    assert logprobs["token_logprobs"] == [-0.5] * 4
    assert logprobs["text_offset"] == [0, 0, 1, 2]
    assert [len(top) for top in logprobs["top_logprobs"]] == [2] * 4
    assert logprobs["top_logprobs"][2] == {"l": -0.5, "m": -1.0}


async def test_logprobs_of_the_chosen_token_alone(make_api: MakeApi) -> None:
    body = (await make_api(ANSWER).complete(logprobs=0)).json()
    tops = body["choices"][0]["logprobs"]["top_logprobs"]
    assert tops == [{token: -0.5} for token in body["choices"][0]["logprobs"]["tokens"]]


async def test_streamed_logprobs_equal_the_whole(make_api: MakeApi) -> None:
    api = make_api(Script(byte_ids("héllo STOP more")))
    fields = {"logprobs": 1, "stop": "STOP", "max_tokens": 50}
    whole = (await api.complete(**fields)).json()["choices"][0]
    chunks = events((await api.complete(stream=True, **fields)).text)
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    for name, values in whole["logprobs"].items():
        assert [value for part in parts for value in part[name]] == values
    assert whole["text"] == "héllo "
    assert len(whole["logprobs"]["tokens"]) == len("héllo ".encode())


async def test_echo_with_logprobs(make_api: MakeApi) -> None:
    part = PromptLogprob(
        id=0,
        start=1,
        chosen=np.asarray([-1.0, -2.0], dtype="<f4").tobytes(),
        n_top=1,
        top_ids=np.asarray([70, 71], dtype="<i4").tobytes(),
        top_values=np.asarray([-0.25, -0.75], dtype="<f4").tobytes(),
    )
    state = server_state(model=model_info(features=["prompt_logprobs"]))
    scheduler = ScriptedClient(Script(ids("lo"), prompt_logprobs=(part,)), state=state)
    body = (
        await make_api(scheduler=scheduler).complete(prompt=byte_ids("abc"), echo=True, logprobs=1)
    ).json()
    assert scheduler.submitted[0].sampling.prompt_logprobs == 2
    choice = body["choices"][0]
    assert choice["text"] == "abclo"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c", "l", "o"]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -2.0, -0.5, -0.5]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
    assert choice["logprobs"]["top_logprobs"][:2] == [None, {"D": -0.25}]


async def test_best_of(make_api: MakeApi) -> None:
    """The best by mean logprob come back; all count."""

    class Scored(ScriptedClient):
        def _emit(self, running: Any, token: int, reason: FinishReason) -> None:
            if reason is not FinishReason.NONE:
                self.running.pop(running.spec.id, None)
            running.sink.on_token(token, int(reason), (-1.0 / running.spec.id, b"", b""))

    api = make_api(scheduler=Scored(lambda spec: Script(byte_ids(str(spec.id)))))
    body = (await api.complete(prompt=["a", "b"], n=2, best_of=3)).json()
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "3"), (1, "2"), (2, "6"), (3, "5")]
    assert {choice["logprobs"] for choice in body["choices"]} == {None}
    assert body["usage"]["completion_tokens"] == 6 * 2
    with_logprobs = (await api.complete(n=1, best_of=2, logprobs=0)).json()["choices"]
    assert [choice["logprobs"]["token_logprobs"] for choice in with_logprobs] == [[-1.0 / 8]]


@pytest.mark.parametrize("fields", [{"n": 3, "best_of": 2}, {"best_of": 999}, {"best_of": 2, "stream": True}])
async def test_best_of_that_can_not_be(make_api: MakeApi, fields: dict[str, Any]) -> None:
    response = await make_api(ANSWER).complete(**fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "best_of"


async def test_token_ids_beside_the_text(make_api: MakeApi) -> None:
    api = make_api(ANSWER)
    choice = (await api.complete(prompt=[5, 6], return_token_ids=True)).json()["choices"][0]
    assert choice["prompt_token_ids"] == [5, 6]
    whole = choice["token_ids"]
    assert whole[: len(ids(" world"))] == ids(" world")
    chunks = events((await api.complete(stream=True, return_token_ids=True)).text)
    assert [i for chunk in chunks for i in chunk["choices"][0]["token_ids"]] == whole
