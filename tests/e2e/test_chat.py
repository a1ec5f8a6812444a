"""The official client against the default model, started as `make run` starts it."""

from __future__ import annotations

import json
import shlex
import subprocess

import pytest
from openai import OpenAI

from tests.e2e.serving import Server

pytestmark = pytest.mark.slow

CAPITAL = {"role": "user", "content": "What is the capital of France?"}


@pytest.fixture
def client(real_server: Server) -> OpenAI:
    return OpenAI(base_url=f"{real_server.url}/v1", api_key="none", max_retries=0)


def test_it_lists_the_model(client: OpenAI) -> None:
    assert "smollm2" in [model.id for model in client.models.list()]


def test_it_chats(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="smollm2", messages=[CAPITAL], temperature=0, max_tokens=40)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_it_streams_the_same_text(client: OpenAI) -> None:
    whole = client.chat.completions.create(model="smollm2", messages=[CAPITAL], temperature=0, max_tokens=40)
    parts = []
    usage = None
    for chunk in client.chat.completions.create(
        model="smollm2",
        messages=[CAPITAL],
        temperature=0,
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    ):
        usage = chunk.usage or usage
        parts += [choice.delta.content or "" for choice in chunk.choices]
    assert len(parts) > 3
    assert "".join(parts) == whole.choices[0].message.content
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_the_second_turn_computes_only_its_new_words(client: OpenAI) -> None:
    question = {"role": "user", "content": "Tell me about the river Rhine and the towns along it."}
    first = client.chat.completions.create(model="smollm2", messages=[question], temperature=0, max_tokens=48)
    assert first.usage is not None
    turn = [
        question,
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And the Danube?"},
    ]
    second = client.chat.completions.create(
        model="smollm2",
        messages=turn,  # type: ignore[arg-type]  # plain dicts, as users write them
        temperature=0,
        max_tokens=8,
    )
    assert second.usage is not None
    details = second.usage.prompt_tokens_details
    assert details is not None
    # All but the last block of the first turn: the last token's KV is never written, and blocks are whole.
    assert (details.cached_tokens or 0) >= first.usage.total_tokens - 2 * 16


def test_the_printed_curl_line_works_as_it_stands(real_server: Server) -> None:
    line = next(line for line in real_server.banner.splitlines() if line.strip().startswith("curl"))
    done = subprocess.run(
        [*shlex.split(line), "--silent", "--fail"], capture_output=True, text=True, check=True, timeout=120
    )
    assert "Paris" in json.loads(done.stdout)["choices"][0]["message"]["content"]


def test_health_and_metrics_answer(real_server: Server) -> None:
    for path in ("/health", "/health/live", "/health/ready", "/info", "/metrics"):
        assert real_server.get(path).status_code == 200, path
