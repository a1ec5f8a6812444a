# ruff: noqa: E501
"""Structured output with the default model: every answer obeys its schema, expression or choice, streamed and not,
beside plain requests, after the loss of a worker and after preemption.

CI asks for a fixed dozen of schemas and 12 random ones, 24 requests at once; QUIRE_TEST_FULL=1 for 200 random ones,
300 requests at once.
"""

from __future__ import annotations

import asyncio
import enum
import json
import os
import re
import signal
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pydantic
import pytest

from tests.e2e.clients import Body, Stream, assert_empty, connected, metric, start
from tests.e2e.schemas import DOZEN, Schema, random_schema
from tests.e2e.serving import Server, StartServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

FULL = os.environ.get("QUIRE_TEST_FULL") == "1"
N_RANDOM = 200 if FULL else 12
AT_ONCE = 100 if FULL else 8
"""Schemas; each is asked for twice, beside a plain request."""
ASK = "Invent an example and write it down as JSON.\n"
MANY: Schema = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "minItems": 5,
    "maxItems": 6,
}  # fmt: skip


def bound(schema: Schema, **fields: Any) -> Body:
    """A request that ends by itself: no bounded schema here needs so many tokens."""
    return {
        "prompt": ASK,
        "max_tokens": 700,
        "ignore_eos": False,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}},
        **fields,
    }  # fmt: skip


def check(text: str, schema: Schema) -> Any:
    value = json.loads(text)
    jsonschema.Draft202012Validator(schema).validate(value)
    return value


async def whole(client: httpx.AsyncClient, body: Body) -> str:
    response = await client.post("/v1/completions", json={"temperature": 0, **body})
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] == "stop", choice
    text: str = choice["text"]
    return text


async def streamed(client: httpx.AsyncClient, body: Body) -> str:
    stream = await Stream().read(client, body)
    stream.assert_whole()
    assert stream.reasons == {0: "stop"}, stream.texts
    return stream.texts[0]


def test_every_answer_obeys_its_schema(real_server: Server) -> None:
    """Beside them run plain requests, which don't change."""
    schemas = [*DOZEN.values(), *(random_schema(seed) for seed in range(N_RANDOM))]
    plain = {"prompt": "The river Rhine", "max_tokens": 24, "ignore_eos": True, "temperature": 0}

    async def run() -> list[str]:
        async with connected(real_server) as client:
            gate = asyncio.Semaphore(AT_ONCE)

            async def both(i: int, schema: Schema) -> list[str]:
                async with gate:
                    body = bound(schema, temperature=1.0, seed=i)
                    first, second, _ = await asyncio.gather(
                        streamed(client, body),
                        whole(client, body),
                        client.post("/v1/completions", json=plain),
                    )
                    return [first, second]

            pairs = await asyncio.gather(*(both(i, schema) for i, schema in enumerate(schemas)))
            await assert_empty(client)
            return [text for pair in pairs for text in pair]

    wrong = []
    for i, text in enumerate(asyncio.run(run())):
        try:
            check(text, schemas[i // 2])
        except (ValueError, jsonschema.ValidationError) as error:
            wrong.append(f"{json.dumps(schemas[i // 2])}\n  {text!r}\n  {str(error).splitlines()[0]}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_json_object(real_server: Server, temperature: float) -> None:
    body = {
        "messages": [{"role": "user", "content": "Describe a cat with three short fields, as JSON."}],
        "response_format": {"type": "json_object"},
        "temperature": temperature,
        "seed": 3,
        "max_tokens": 400,
    }
    choice = real_server.post("/v1/chat/completions", body).json()["choices"][0]
    assert choice["finish_reason"] == "stop", choice
    assert isinstance(json.loads(choice["message"]["content"]), dict)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"guided_regex": r"\d{3}-\d{4}"}, r"\d{3}-\d{4}"),
        ({"structured_outputs": {"regex": "(yes|no), [a-z]{3,5}!"}}, "(yes|no), [a-z]{3,5}!"),
        ({"guided_choice": ["red", "größer\n", 'a "b"']}, 'red|größer\n|a "b"'),
        ({"guided_grammar": 'root ::= "<" [a-c]{2,4} ">"'}, "<[a-c]{2,4}>"),
        ({"guided_json": '{"enum": ["N", "S"]}'}, '"[NS]"'),
    ],
)
def test_expressions_choices_and_grammars(real_server: Server, fields: Body, expected: str) -> None:
    async def run() -> list[str]:
        async with connected(real_server) as client:
            body = {"prompt": ASK, "max_tokens": 40, "ignore_eos": False, **fields}
            bodies = [{**body, "temperature": 1.5, "seed": seed} for seed in range(3)]
            return await asyncio.gather(*(streamed(client, b) for b in bodies), whole(client, body))

    for text in asyncio.run(run()):
        assert re.fullmatch(expected, text), text


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"guided_regex": "[a"}, "guided_regex", "Unclosed"),
        ({"guided_regex": "(" * 60 + "a" + "|b)*" * 60}, "guided_regex", "can't be used"),
        ({"guided_json": {"type": "foo"}}, "guided_json", 'type "foo"'),
        ({"guided_json": {"items": {"uniqueItems": True}}}, "guided_json", "$.items.uniqueItems"),
        ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs.grammar", "not defined"),
    ],
)
def test_what_can_not_be_enforced_is_refused(
    real_server: Server, fields: Body, param: str, says: str
) -> None:
    response = real_server.post("/v1/completions", {"prompt": ASK, "max_tokens": 5, "stream": True, **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert says in error["message"]


class Size(enum.StrEnum):
    SMALL = "small"
    LARGE = "large"


class Animal(pydantic.BaseModel):
    kind: Literal["cat", "dog"]
    name: str = pydantic.Field(max_length=10)
    age: int = pydantic.Field(ge=0, le=30, description="in years")
    size: Size = pydantic.Field(description="as seen from afar")


class Farm(pydantic.BaseModel):
    animals: list[Animal] = pydantic.Field(min_length=1, max_length=2)
    owner: str | None = pydantic.Field(pattern="^[A-Z][a-z]{1,8}$")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_official_client_parses_into_a_model(real_server: Server, temperature: float) -> None:
    client = openai.OpenAI(base_url=f"{real_server.url}/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.parse(
        model="smollm2",
        messages=[{"role": "user", "content": "Invent a farm."}],
        response_format=Farm,
        temperature=temperature,
        seed=1,
        max_tokens=400,
    )
    farm = answer.choices[0].message.parsed
    assert isinstance(farm, Farm)
    assert 1 <= len(farm.animals) <= 2


def test_a_killed_worker_s_answer_stays_valid(start_server: StartServer) -> None:
    """Dynamo #7634."""
    server = start_server(workers=2)

    async def run() -> tuple[str, str]:
        async with connected(server) as client:
            body = bound(MANY, temperature=0.8, seed=5)
            undisturbed = await streamed(client, body)
            stream, reading = start(client, body)
            await stream.has(12)
            os.kill(server.busy_worker(), signal.SIGKILL)
            await reading
            stream.assert_whole()
            assert await metric(client, "quire_replicas_lost_total") == 1
            return undisturbed, stream.texts[0]

    undisturbed, disturbed = asyncio.run(run())
    check(disturbed, MANY)
    assert disturbed == undisturbed


def test_preempted_answers_stay_valid(start_server: StartServer) -> None:
    server = start_server(flags=("--max-batch-total-tokens=512", "--max-batch-prefill-tokens=512"))

    async def run() -> list[str]:
        async with connected(server) as client:
            # Many answers start together, for recent ones were short, and outgrow the pool together.
            short = {"prompt": "1", "max_tokens": 1, "ignore_eos": False}
            for _ in range(40):
                await whole_or_cut(client, short)
            bodies = [bound(MANY, temperature=0.7, seed=seed, max_tokens=490) for seed in range(12)]
            texts = await asyncio.gather(*(streamed(client, body) for body in bodies))
            assert await metric(client, "quire_preemptions_total") > 0
            await assert_empty(client)
            return list(texts)

    for text in asyncio.run(run()):
        check(text, MANY)


async def whole_or_cut(client: httpx.AsyncClient, body: Body) -> None:
    response = await client.post("/v1/completions", json={"temperature": 0, **body})
    assert response.status_code == 200, response.text


def test_a_new_schema_does_not_hold_up_plain_streams(start_server: StartServer) -> None:
    """The worker has never compiled anything: its compiler is loaded and a deep schema compiled meanwhile."""
    server = start_server()
    schema: Schema = {"type": "integer", "minimum": 0, "maximum": 9}
    for i in range(12):
        schema = {"type": "object", "properties": {f"level{i}": schema}, "required": [f"level{i}"]}

    async def run() -> tuple[int, str]:
        async with connected(server) as client:
            plain, reading = start(client, {"prompt": "Once upon a time", "max_tokens": 1500})
            await plain.has(5)
            before = len(plain.tokens[0])
            stream, constrained = start(client, bound(schema))
            await stream.has(1)
            n_meanwhile = len(plain.tokens[0]) - before
            await constrained
            stream.assert_whole()
            reading.cancel()
            return n_meanwhile, stream.texts[0]

    n_meanwhile, text = asyncio.run(run())
    check(text, schema)
    assert n_meanwhile > 20, f"the plain stream got {n_meanwhile} tokens until the other one's first"
