"""GET /openapi.json describes what is served."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from router.api.openapi import OPERATIONS, openapi_description
from tests.api.conftest import MakeApi
from tests.api.scripted import Script
from tests.api.tiny import ids

NOT_DESCRIBED = {"/openapi.json", "/v1/embeddings", "/page/{name}"}
"""The description itself, what only says no, and the pages for people."""
BODIES: dict[str, dict[str, Any]] = {
    "ChatRequest": {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "n": 2, "stop": ["x"]},
    "CompletionRequest": {"prompt": "hi", "logprobs": 1, "seed": None},
    "ResponsesRequest": {"input": "hi", "text": {"format": {"type": "text"}}},
    "GenerateRequest": {"inputs": "hi", "parameters": {"top_k": 3, "details": True}},
    "TokenizeRequest": {"prompt": "hi"},
    "InputsTokenizeRequest": {"inputs": "hi"},
    "DetokenizeRequest": {"tokens": [5, 6]},
}


async def test_every_route_is_described(make_api: MakeApi) -> None:
    api = make_api(Script())
    served = {
        (route.path.replace("{name:path}", "{name}"), method)
        for route in api.app.routes
        for method in route.methods - {"HEAD"}
        if route.path not in NOT_DESCRIBED
    }
    served -= {("/", "GET")}  # a page for people; as good as /health for machines
    described = {(o.path, o.method.upper()) for o in OPERATIONS}
    assert described == served
    assert (await api.http.get("/openapi.json")).json() == openapi_description()


def test_references_lead_somewhere() -> None:
    description = openapi_description()

    def check(value: Any) -> None:
        if isinstance(value, dict):
            if "$ref" in value:
                name = value["$ref"].removeprefix("#/components/schemas/")
                assert name in description["components"]["schemas"]
            for item in value.values():
                check(item)
        elif isinstance(value, list):
            for item in value:
                check(item)

    check(description)


@pytest.mark.parametrize("operation", [o for o in OPERATIONS if o.bodies], ids=lambda o: o.path)
async def test_bodies_that_fit_the_description_are_taken(make_api: MakeApi, operation: Any) -> None:
    components = openapi_description()["components"]
    for kind in operation.bodies:
        if kind.__name__ not in BODIES:
            continue
        schema = {"$ref": f"#/components/schemas/{kind.__name__}", "components": components}
        body = BODIES[kind.__name__]
        jsonschema.validate(body, schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({name: [[[{}]]] for name in body}, schema)
        response = await make_api(Script(ids("ok"))).http.post(operation.path, json=body)
        assert response.status_code == 200, response.text


@pytest.mark.parametrize("operation", [o for o in OPERATIONS if o.bodies], ids=lambda o: o.path)
async def test_errors_fit_the_description(make_api: MakeApi, operation: Any) -> None:
    response = await make_api(Script()).http.post(operation.path, json=[])
    assert response.status_code in (400, 422)
    error = openapi_description()["components"]["schemas"][
        "TgiError" if operation.style == "tgi" else "OpenAIError"
    ]
    jsonschema.validate(response.json(), error)
