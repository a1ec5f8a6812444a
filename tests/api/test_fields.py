"""Fields that change little: what is ignored is ignored, what is handed on arrives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.api.conftest import Api, MakeApi
from tests.api.scripted import Script
from tests.api.tiny import TEMPLATE, ids, tiny_tokenizer

ANSWER = Script(ids("ok"))
IGNORED: dict[str, Any] = {
    "prediction": {"type": "content", "content": "ok"},
    "reasoning_effort": "high",
    "verbosity": "low",
    "web_search_options": {},
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "auto"},
    "prompt_cache_retention": "24h",
    "service_tier": "priority",
    "store": True,
    "metadata": {"a": 1},
    "user": "u",
}


def _prompt(api: Api) -> str:
    packed = np.frombuffer(api.scheduler.submitted[-1].prompt, dtype="<i4")
    return tiny_tokenizer().decode(packed, skip_special=False)


@pytest.mark.parametrize("field", IGNORED)
async def test_ignored(make_api: MakeApi, field: str) -> None:
    api = make_api(ANSWER)
    await api.chat()
    assert (await api.chat(**{field: IGNORED[field]})).status_code == 200
    plain, with_field = api.scheduler.submitted
    assert (plain.prompt, plain.sampling, plain.grammar) == (
        with_field.prompt,
        with_field.sampling,
        with_field.grammar,
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"audio": {"voice": "x"}},
        {"modalities": ["text", "audio"]},
        {"moderation": {"model": "x"}},
        {"use_beam_search": True},
        {"allowed_token_ids": [5]},
        {"bad_words": ["x"]},
        {"truncate_prompt_tokens": 5},
    ],
)
async def test_refused(make_api: MakeApi, fields: dict[str, Any]) -> None:
    api = make_api(ANSWER)
    response = await api.chat(**fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == next(iter(fields))
    assert not api.scheduler.submitted


async def test_template_variables_and_documents(make_api: MakeApi) -> None:
    template = "{{ mood }}{% for d in documents or [] %}[{{ d.text }}]{% endfor %}" + TEMPLATE
    api = make_api(ANSWER, template=template)
    await api.chat(chat_template_kwargs={"mood": "calm"}, documents=[{"text": "one"}, {"text": "two"}])
    assert _prompt(api).startswith("calm[one][two]<|start|>user")


async def test_special_tokens_of_a_prompt(make_api: MakeApi) -> None:
    """The tiny tokenizer adds none, so that both are the same; the flag is handed on."""
    api = make_api(ANSWER)
    asked: list[bool] = []
    tokenizer = api.app.state.context.text.tokenizer
    encode = tokenizer.encode_batch

    def noting(texts: list[str], *, special: bool = True) -> Any:
        asked.append(special)
        return encode(texts, special=special)

    tokenizer.encode_batch = noting
    try:
        await api.complete()
        await api.complete(add_special_tokens=False)
    finally:
        del tokenizer.encode_batch
    assert asked == [True, False]
