"""TGI's own Python client and the hub's InferenceClient against the real server."""

from __future__ import annotations

import asyncio

import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import GenerationError, OverloadedError, ValidationError

from router.ipc.messages import ErrorInfo
from tests.api.live import serving
from tests.api.scripted import Script, ScriptedClient, model_info, server_state
from tests.api.tiny import END, ids

text_generation = pytest.importorskip("text_generation")
pytestmark = pytest.mark.filterwarnings("ignore:The `dict` method is deprecated")

STATE = server_state(model=model_info(features=["prompt_logprobs"]))


def _scheduler(script: Script | None = None) -> ScriptedClient:
    return ScriptedClient(script or Script(ids("hello world")), state=STATE)


async def test_text_generation_client() -> None:
    async with serving(_scheduler()) as live:
        client = text_generation.Client(live.url)
        response = await asyncio.to_thread(
            client.generate,
            "hi",
            max_new_tokens=20,
            decoder_input_details=True,
            top_n_tokens=2,
            do_sample=True,
        )
        assert response.generated_text == "hello world"
        assert response.details.finish_reason == text_generation.types.FinishReason.EndOfSequenceToken
        assert [token.text for token in response.details.prefill] == ["h", "i"]
        assert response.details.tokens[-1].special
        assert response.details.seed is not None
        best = await asyncio.to_thread(client.generate, "hi", best_of=2, do_sample=True)
        assert len(best.details.best_of_sequences) == 1
        events = await asyncio.to_thread(lambda: list(client.generate_stream("hi")))
        assert "".join(e.token.text for e in events if not e.token.special) == "hello world"
        assert events[-1].generated_text == "hello world"
        chat = await asyncio.to_thread(
            client.chat, messages=[text_generation.types.Message(role="user", content="hi")]
        )
        assert chat.choices[0].message.content == "hello world"


async def test_text_generation_async_client() -> None:
    async with serving(_scheduler()) as live:
        client = text_generation.AsyncClient(live.url)
        assert (await client.generate("hi", stop_sequences=["o w"])).generated_text == "hell"
        texts = [event.token.text async for event in client.generate_stream("hi")]
        assert "".join(texts) == "hello world" + END


@pytest.mark.parametrize(
    ("status", "name"), [(429, "OverloadedError"), (500, "GenerationError"), (400, "ValidationError")]
)
async def test_text_generation_errors(status: int, name: str) -> None:
    info = ErrorInfo(status=status, type="server_error", message="no")
    async with serving(_scheduler(Script(refuse=info))) as live:
        client = text_generation.Client(live.url)
        with pytest.raises(getattr(text_generation.errors, name), match="no"):
            await asyncio.to_thread(client.generate, "hi")
        with pytest.raises(getattr(text_generation.errors, name), match="no"):
            await asyncio.to_thread(lambda: list(client.generate_stream("hi")))


async def test_hub_client() -> None:
    async with serving(_scheduler()) as live:
        client = InferenceClient(live.url)
        text = await asyncio.to_thread(client.text_generation, "hi", return_full_text=False, top_p=0.9)
        assert text == "hello world"
        output = await asyncio.to_thread(
            client.text_generation, "hi", details=True, decoder_input_details=True, return_full_text=False
        )
        assert output.generated_text == "hello world"
        assert output.details is not None
        assert output.details.finish_reason == "eos_token"
        assert [token.text for token in output.details.prefill] == ["h", "i"]
        pieces = await asyncio.to_thread(lambda: list(client.text_generation("hi", stream=True)))
        assert "".join(pieces) == "hello world" + END
        events = await asyncio.to_thread(
            lambda: list(client.text_generation("hi", stream=True, details=True, stop=["wor"]))
        )
        assert events[-1].details is not None
        assert events[-1].details.finish_reason == "stop_sequence"


async def test_hub_client_chats() -> None:
    async with serving(_scheduler()) as live:
        client = AsyncInferenceClient(base_url=live.url)
        messages = [{"role": "user", "content": "hi"}]
        whole = await client.chat_completion(messages)
        assert whole.choices[0].message.content == "hello world"
        stream = await client.chat_completion(messages, stream=True, max_tokens=50)
        deltas = [chunk.choices[0].delta.content async for chunk in stream]
        assert "".join(delta or "" for delta in deltas) == "hello world"


@pytest.mark.parametrize(
    ("status", "kind"), [(429, OverloadedError), (500, GenerationError), (400, ValidationError)]
)
async def test_hub_client_errors(status: int, kind: type[Exception]) -> None:
    info = ErrorInfo(status=status, type="server_error", message="no")
    async with serving(_scheduler(Script(refuse=info))) as live:
        with pytest.raises(kind, match="no"):
            await AsyncInferenceClient(live.url).text_generation("hi")
