"""TGI's /tokenize and /chat_tokenize, beside vLLM's /tokenize on the same path."""

from __future__ import annotations

from tests.api.conftest import MakeApi
from tests.api.scripted import Script
from tests.api.tiny import ids

TEXT = "hello wörld 👍"


async def test_tokens_with_their_places(make_api: MakeApi) -> None:
    tokens = (await make_api(Script()).http.post("/tokenize", json={"inputs": TEXT})).json()
    assert [token["id"] for token in tokens] == ids(TEXT)
    assert tokens[0] == {"id": ids("hello")[0], "text": "hello", "start": 0, "stop": 5}
    for token in tokens:
        assert token["text"] == TEXT[token["start"] : token["stop"]]


async def test_vllms_shape_on_the_same_path(make_api: MakeApi) -> None:
    body = (await make_api(Script()).http.post("/tokenize", json={"prompt": TEXT})).json()
    assert body["tokens"] == ids(TEXT)


async def test_chat(make_api: MakeApi) -> None:
    request = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    body = (await make_api(Script()).http.post("/chat_tokenize", json=request)).json()
    assert body["templated_text"] == "<|start|>user\nhi<|end|>\n<|start|>assistant\n"
    assert [token["id"] for token in body["tokenize_response"]] == ids(body["templated_text"])
    assert "".join(token["text"] for token in body["tokenize_response"]) == body["templated_text"]


async def test_errors_are_tgis(make_api: MakeApi) -> None:
    http = make_api(Script()).http
    for path, body in (("/tokenize", {"inputs": 3}), ("/chat_tokenize", {"messages": []})):
        response = await http.post(path, json=body)
        assert response.status_code == 422
        assert response.json()["error_type"] == "validation"
    assert (await http.post("/tokenize", json={"prompt": 3})).json()["error"]["param"] == "prompt"
