"""Frameworks that speak OpenAI's API (the extra `clients`), against the real server."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

from proto.worker_pb2 import Grammar
from router.ipc.messages import RequestSpec
from tests.api.live import serving
from tests.api.scripted import Script, ScriptedClient, model_info, server_state
from tests.api.tiny import byte_ids, tiny_tokenizer
from tests.api.tools.test_chat_tools import CALL, HERMES

pytestmark = [
    pytest.mark.slow,  # importing them takes seconds
    pytest.mark.filterwarnings("ignore:Items? '.*' on TypedDict class"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
CITY = '{"city": "Köln"}'
HI = [{"role": "user", "content": "hi"}]


class Weather(BaseModel):
    """The weather in a city."""

    city: str


def framework_scheduler() -> ScriptedClient:
    """Answers with words, with a call when it is shown tools, and with words again after a result."""

    def script(spec: RequestSpec) -> Script:
        prompt = np.frombuffer(spec.prompt, dtype="<i4")
        text = tiny_tokenizer().decode(prompt, skip_special=False)
        if spec.grammar is not None and spec.grammar.kind != Grammar.STRUCTURAL_TAG:
            return Script(byte_ids(CITY))
        if "12 degrees" in text:
            return Script(byte_ids("It is 12 degrees."))
        return Script(byte_ids(CALL if "weather" in text else "hello world"))

    state = server_state(model=model_info(features=["grammar"]))
    return ScriptedClient(script, state=state)


async def test_langchain() -> None:
    langchain_openai = pytest.importorskip("langchain_openai")

    def weather(city: str) -> str:
        """The weather in a city."""
        return city

    async with serving(framework_scheduler(), template=HERMES) as live:
        model = langchain_openai.ChatOpenAI(
            model="tiny", base_url=f"{live.url}/v1", api_key="x", max_tokens=300
        )
        assert (await model.ainvoke("hi")).content == "hello world"
        assert "".join([chunk.content async for chunk in model.astream("hi")]) == "hello world"
        called = await model.bind_tools([weather]).ainvoke("hi")
        assert [(call["name"], call["args"]) for call in called.tool_calls] == [("weather", {"city": "Köln"})]
        for method in ("json_schema", "function_calling"):
            structured = model.with_structured_output(Weather, method=method)
            assert await structured.ainvoke("hi") == Weather(city="Köln")


async def test_litellm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    async with serving(framework_scheduler(), template=HERMES) as live:
        fields: Any = {"model": "openai/tiny", "api_base": f"{live.url}/v1", "api_key": "x", "messages": HI}
        whole = await litellm.acompletion(**fields)
        assert whole.choices[0].message.content == "hello world"
        chunks = [chunk async for chunk in await litellm.acompletion(stream=True, **fields)]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hello world"


async def test_instructor() -> None:
    instructor = pytest.importorskip("instructor")
    import openai

    async with serving(framework_scheduler(), template=HERMES) as live:
        for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
            plain = openai.OpenAI(base_url=f"{live.url}/v1", api_key="x")
            client = instructor.from_openai(plain, mode=mode)
            answer = await asyncio.to_thread(
                client.chat.completions.create,
                model="tiny",
                messages=HI,
                response_model=Weather,
                max_tokens=300,
                max_retries=0,
            )
            assert answer.city == "Köln"


async def test_pydantic_ai() -> None:
    pytest.importorskip("pydantic_ai")
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async with serving(framework_scheduler(), template=HERMES) as live:
        provider = OpenAIProvider(base_url=f"{live.url}/v1", api_key="x")
        agent = Agent(OpenAIChatModel("tiny", provider=provider), model_settings={"max_tokens": 300})

        @agent.tool_plain
        def weather(city: str) -> str:
            return "12 degrees"

        assert (await agent.run("hi")).output == "It is 12 degrees."
