"""Two workers, one killed in the middle of answers: each client sees one unbroken stream with the text of an
undisturbed run (TGI #2593, Dynamo #984)."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import FAKE
from tests.e2e.serving import Server, StartServer

Body = dict[str, Any]

STORY = "Once upon a time, in a small town by the sea, there lived a"
GREEDY: Body = {"prompt": STORY, "max_tokens": 60, "temperature": 0}
SEEDED: Body = {
    "prompt": STORY,
    "max_tokens": 60,
    "temperature": 0.9,
    "seed": 7,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.1,
    "min_tokens": 50,
    "logprobs": 2,
    "n": 2,
}


def _stream(server: Server, body: Body, *, on_event: Callable[[int], None] = lambda _: None) -> list[Body]:
    """All events of one streamed completion; `on_event` hears how many have come."""
    request = {"model": "smollm2", "stream": True, **body}
    events: list[Body] = []
    ended = False
    with httpx.stream("POST", f"{server.url}/v1/completions", json=request, timeout=120) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if not line.startswith("data:"):
                continue
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                ended = True
                continue
            assert not ended, "nothing comes after the end"
            events.append(json.loads(data))
            assert "error" not in events[-1], events[-1]
            on_event(len(events))
    assert ended
    return events


def _texts(events: list[Body]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


def _tokens(events: list[Body]) -> dict[int, list[str]]:
    tokens: dict[int, list[str]] = {}
    for event in events:
        for choice in event["choices"]:
            if choice.get("logprobs"):
                tokens.setdefault(choice["index"], []).extend(choice["logprobs"]["tokens"])
    return tokens


def _disturbed(server: Server, body: Body, *, after: int) -> list[Body]:
    """The same stream, with the worker that computes it killed after some events."""

    def kill(n_events: int) -> None:
        if n_events == after:
            os.kill(server.busy_worker(), signal.SIGKILL)

    events = _stream(server, body, on_event=kill)
    server.wait_log("was killed by SIGKILL")
    return events


@pytest.mark.slow
@pytest.mark.parametrize("body", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_the_default_model_goes_on_elsewhere(start_server: StartServer, body: Body) -> None:
    server = start_server(workers=2)
    undisturbed = _stream(server, body)
    disturbed = _disturbed(server, body, after=8)
    assert _texts(disturbed) == _texts(undisturbed)
    assert _tokens(disturbed) == _tokens(undisturbed)
    assert len(_texts(disturbed)) == body.get("n", 1)


def test_a_fake_worker_goes_on_elsewhere(start_server: StartServer) -> None:
    server = start_server(workers=2, flags=(*FAKE, "--fake-strict"))
    body = {"prompt": [5, 6, 7], "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    undisturbed = _stream(server, body)
    assert _texts(_disturbed(server, body, after=20)) == _texts(undisturbed)
    assert server.get("/metrics").text.count("quire_replicas_lost_total 1.0") == 1


@pytest.mark.slow
def test_with_one_worker_the_answer_waits_for_its_successor(start_server: StartServer) -> None:
    server = start_server(workers=1, flags=FAKE)
    body = {"prompt": [5, 6, 7], "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    undisturbed = _stream(server, body)
    assert _texts(_disturbed(server, body, after=20)) == _texts(undisturbed)
