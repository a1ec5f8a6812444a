from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from deploy.chat import ChatError, ChatOptions, Talk


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _delta(text: str) -> str:
    return _event({"choices": [{"index": 0, "delta": {"content": text}}]})


class Stand:
    """An OpenAI-style server that answers with the given stream and keeps what it was asked."""

    def __init__(self, *parts: str, status: int = 200, body: str = "") -> None:
        self.parts = parts
        self.status = status
        self.body = body
        self.asked: list[dict[str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "first"}, {"id": "second"}]})
        self.asked.append(json.loads(request.content))
        if self.status != 200:
            return httpx.Response(self.status, text=self.body)
        return httpx.Response(200, content="".join(self.parts).encode())


def _talk(stand: Stand, **options: Any) -> Talk:
    client = httpx.Client(transport=httpx.MockTransport(stand), base_url="http://server")
    talk = Talk(client, ChatOptions(**options))
    talk.connect()
    return talk


def test_an_answer_streams_and_becomes_part_of_the_talk() -> None:
    stand = Stand(_delta("Hel"), _event({"choices": [], "usage": {}}), _delta("lo"), "data: [DONE]\n\n")
    talk = _talk(stand, system="Be kind.", temperature=0.0, max_tokens=5)
    shown: list[str] = []
    talk.ask("Hi", shown.append)
    talk.ask("Again", shown.append)
    assert shown == ["Hel", "lo", "Hel", "lo"]
    first, second = stand.asked
    assert first["model"] == "first"
    assert (first["temperature"], first["max_tokens"], first["stream"]) == (0.0, 5, True)
    assert [message["content"] for message in second["messages"]] == ["Be kind.", "Hi", "Hello", "Again"]


def test_reset_forgets_all_but_the_system_message() -> None:
    talk = _talk(Stand(_delta("x"), "data: [DONE]\n\n"), system="Be kind.")
    talk.ask("Hi", lambda _: None)
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "Be kind."}]


def test_bytes_that_were_no_characters_of_the_locale_arrive() -> None:
    stand = Stand(_delta("x"), "data: [DONE]\n\n")
    talk = _talk(stand, system="gr\udcc3\udcbcn")
    talk.ask("h\udcc3\udca9llo \udcff", lambda _: None)
    assert [message["content"] for message in stand.asked[0]["messages"]] == ["grün", "héllo \ufffd"]


def test_a_stopped_answer_is_kept_as_far_as_it_came() -> None:
    talk = _talk(Stand(_delta("one "), _delta("two"), "data: [DONE]\n\n"))

    def stop(part: str) -> None:
        if part == "two":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        talk.ask("Count", stop)
    assert talk.messages[-1] == {"role": "assistant", "content": "one two"}


@pytest.mark.parametrize(
    ("stand", "words"),
    [
        (Stand(status=429, body=json.dumps({"error": {"message": "too busy"}})), r"too busy \(HTTP 429\)"),
        (Stand(status=500, body="oops"), r"oops \(HTTP 500\)"),
        (Stand(_delta("a"), _event({"error": {"message": "worker lost"}})), "worker lost"),
        (Stand(_delta("a")), "the stream ended before the answer did"),
        (Stand("data: {broken\n\n"), "does not answer as an OpenAI-style server"),
    ],
)
def test_a_failed_answer_says_why_and_leaves_the_talk_as_it_was(stand: Stand, words: str) -> None:
    talk = _talk(stand)
    with pytest.raises(ChatError, match=words):
        talk.ask("Hi", lambda _: None)
    assert talk.messages == []


def test_no_server() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    client = httpx.Client(transport=httpx.MockTransport(refuse), base_url="http://server")
    with pytest.raises(ChatError, match="no server answers at http://server"):
        Talk(client, ChatOptions()).connect()


def test_the_connection_breaks_in_the_middle() -> None:
    def parts() -> Iterator[bytes]:
        yield _delta("a").encode()
        raise httpx.ReadError("reset")

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": []})
        return httpx.Response(200, content=parts())

    client = httpx.Client(transport=httpx.MockTransport(answer), base_url="http://server")
    talk = Talk(client, ChatOptions(model="mine"))
    talk.connect()
    assert talk.model == "mine"
    with pytest.raises(ChatError, match="reset"):
        talk.ask("Hi", lambda _: None)
