"""schemathesis makes requests out of the API's own description: no 5xx, nothing left running, errors in their
shape, and the next good request served.

CI runs a sample; `make test-full` 10,000 requests.
"""

from __future__ import annotations

import os
from typing import Any

import hypothesis
import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase

from router.api.openapi import OPERATIONS, openapi_description
from tests.api.conftest import Api, MakeApi
from tests.api.scripted import Script, ScriptedClient, model_info, server_state
from tests.api.tiny import byte_ids

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

DESCRIPTION = openapi_description()
ERRORS = {
    style: {**DESCRIPTION["components"]["schemas"][name], "components": DESCRIPTION["components"]}
    for style, name in (("openai", "OpenAIError"), ("tgi", "TgiError"))
}
SCHEMA = schemathesis.openapi.from_dict(DESCRIPTION)
BODIES = [operation for operation in OPERATIONS if operation.bodies]
N_EACH = (10_000 if os.environ.get("QUIRE_TEST_FULL") else 300) // len(BODIES) + 1


def _cases(path: str, method: str, *, seed: int) -> list[Any]:
    """Bodies that the description allows; most of them mean nothing."""
    found: list[Any] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=N_EACH,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(case=SCHEMA[path][method].as_strategy())
    def collect(case: Any) -> None:
        found.append(case.body)

    collect()
    return found


def _api(make_api: MakeApi) -> Api:
    state = server_state(model=model_info(features=["grammar", "prompt_logprobs"]))
    return make_api(scheduler=ScriptedClient(Script(byte_ids("hello world")), state=state))


@pytest.mark.parametrize("operation", BODIES, ids=lambda operation: operation.path)
async def test_described_requests(make_api: MakeApi, operation: Any) -> None:
    api = _api(make_api)
    bodies = _cases(operation.path, operation.method.upper(), seed=1)
    assert len(bodies) >= N_EACH // 2
    for body in bodies:
        response = await api.http.request(operation.method.upper(), operation.path, json=body)
        assert response.status_code < 500, (body, response.text)
        assert response.status_code != 424, (body, response.text)
        if response.status_code >= 400:
            error = response.json()
            style = "tgi" if "error_type" in error else "openai"
            jsonschema.validate(error, ERRORS[style])
        assert not api.scheduler.running, body
    assert (await api.chat()).status_code == 200
