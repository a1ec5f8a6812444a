"""Keys, ids, health and the small routes."""

from __future__ import annotations

import pytest

from router.ipc.messages import ErrorInfo
from tests.api.conftest import MakeApi
from tests.api.scripted import Script, ScriptedClient, server_state
from tests.api.tiny import ids

OK = Script(ids("ok"))
CLOSED = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/info"),
    ("GET", "/metrics"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/admin/state"),
    ("GET", "/admin/cache"),
    ("POST", "/admin/cache/flush"),
    ("POST", "/admin/replicas/drain"),
    ("GET", "/nowhere"),
]


@pytest.mark.parametrize(("method", "path"), CLOSED)
@pytest.mark.parametrize(
    "header", [None, "Bearer wrong", "Bearer ", "Basic sekrit", "Bearer sekrit2", "sekrit"]
)
async def test_no_key_or_a_wrong_one(make_api: MakeApi, method: str, path: str, header: str | None) -> None:
    api = make_api(OK, api_keys=("sekrit", "other"))
    headers = {} if header is None else {"authorization": header}
    response = await api.http.request(method, path, headers=headers)
    assert response.status_code == 401
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("key", ["sekrit", "other"])
async def test_each_key_opens(make_api: MakeApi, key: str) -> None:
    api = make_api(OK, api_keys=("sekrit", "other"), headers={"authorization": f"Bearer {key}"})
    assert (await api.chat()).status_code == 200
    assert (await api.http.get("/admin/state")).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready"])
async def test_health_is_open(make_api: MakeApi, path: str) -> None:
    response = await make_api(OK, api_keys=("sekrit",)).http.get(path)
    assert response.status_code == 200
    assert response.json()["status"] == "ok"


async def test_admin_without_keys_answers_this_host_alone(make_api: MakeApi) -> None:
    assert (await make_api(OK).http.get("/admin/state")).status_code == 200
    response = await make_api(OK, peer="10.0.0.9").http.get("/admin/state")
    assert response.status_code == 403
    assert "--api-keys" in response.json()["error"]["message"]


async def test_admin_without_keys_answers_no_page_of_another_site(make_api: MakeApi) -> None:
    """A browser on this host would send it for any page, without asking first."""
    http = make_api(OK).http
    refused = await http.get("/admin/state", headers={"Origin": "http://evil.example"})
    assert refused.status_code == 403
    own = await http.get("/admin/state", headers={"Origin": f"http://{http.base_url.netloc.decode()}"})
    assert own.status_code == 200


async def test_readiness_follows_the_scheduler(make_api: MakeApi) -> None:
    api = make_api(OK)
    api.scheduler.set_state(ready=False, reason="worker 10.0.0.1:50051 is lost", n_replicas_live=0)
    response = await api.http.get("/health")
    assert response.status_code == 503
    assert response.json()["reason"] == "worker 10.0.0.1:50051 is lost"
    assert (await api.http.get("/health/live")).status_code == 200
    api.scheduler.set_state(ready=True)
    assert (await api.http.get("/health")).status_code == 200


async def test_without_a_model_requests_get_503(make_api: MakeApi) -> None:
    state = server_state(ready=False, model=None, reason="no worker has answered")
    api = make_api(scheduler=ScriptedClient(OK, state=state))
    for response in (await api.chat(), await api.complete(), await api.http.get("/v1/models")):
        assert response.status_code == 503
        assert "no worker has answered" in response.json()["error"]["message"]
        assert response.headers["retry-after"] == "1"
    assert (await api.http.get("/info")).json()["ready"] is False


async def test_before_the_tokenizer_is_read(make_api: MakeApi) -> None:
    api = make_api(OK)
    api.app.state.context.loaded = None
    assert (await api.http.get("/health")).status_code == 503
    assert (await api.chat()).status_code == 503
    assert (await api.http.get("/v1/models")).status_code == 200


async def test_models(make_api: MakeApi) -> None:
    api = make_api(OK, model_aliases=("gpt-4o",))
    listed = (await api.http.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["org/tiny", "gpt-4o"]
    for name in ("org/tiny", "tiny", "gpt-4o"):
        assert (await api.http.get(f"/v1/models/{name}")).json()["id"] == name
        assert (await api.chat(model=name)).status_code == 200
    missing = await api.http.get("/v1/models/nope")
    assert missing.status_code == 404


@pytest.mark.parametrize("name", ["tgi", "dummy"])
async def test_names_that_clients_make_up(make_api: MakeApi, name: str) -> None:
    """TGI's client sends "tgi", the hub's "dummy" when it is given an address alone."""
    api = make_api(OK)
    assert (await api.chat(model=name)).json()["model"] == "org/tiny"
    assert name not in str((await api.http.get("/v1/models")).json())


async def test_unknown_model(make_api: MakeApi) -> None:
    response = await make_api(OK).chat(model="gpt-5")
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'gpt-5'" in error["message"]
    assert "'org/tiny'" in error["message"]


async def test_request_ids(make_api: MakeApi) -> None:
    api = make_api(OK)
    given = await api.http.get("/v1/models", headers={"x-request-id": "trace-7"})
    assert given.headers["x-request-id"] == "trace-7"
    made = (await api.chat()).headers["x-request-id"]
    assert made.startswith("req-")
    assert api.scheduler.submitted[0].request_id == made
    odd = await api.http.get("/v1/models", headers={"x-request-id": "x" * 200})
    assert odd.headers["x-request-id"].startswith("req-")


async def test_info(make_api: MakeApi) -> None:
    info = (await make_api(OK).http.get("/info")).json()
    assert info["model_id"] == "org/tiny"
    assert info["max_input_tokens"] == 1000
    assert info["prefix_caching"] is True
    assert info["settings"] == {"window": 2}


async def test_metrics_join_both_processes(make_api: MakeApi) -> None:
    scheduler = ScriptedClient(OK, admin_values={"metrics": "# TYPE quire_queue gauge\nquire_queue 3\n"})
    api = make_api(scheduler=scheduler)
    for _ in range(10):
        await api.chat()
    await api.chat(temperature=9)
    text = (await api.http.get("/metrics")).text
    assert "quire_queue 3" in text
    assert "quire_api_time_to_first_token_seconds_count 10.0" in text
    assert "quire_api_time_per_output_token_seconds_count 10.0" in text
    assert 'quire_api_requests_total{route="/v1/chat/completions",status="200"} 10.0' in text
    assert 'quire_api_requests_total{route="/v1/chat/completions",status="400"} 1.0' in text
    assert "quire_api_running_answers 0.0" in text


async def test_metrics_without_the_scheduler(make_api: MakeApi) -> None:
    lost = ErrorInfo(status=503, type="server_error", message="connection lost")
    api = make_api(scheduler=ScriptedClient(OK, admin_values={"metrics": lost}))
    response = await api.http.get("/metrics")
    assert response.status_code == 200
    assert "connection lost" in response.text


async def test_admin_routes(make_api: MakeApi) -> None:
    api = make_api(OK)
    await api.http.get("/admin/state")
    await api.http.get("/admin/cache?limit=5")
    await api.http.post("/admin/cache/flush")
    await api.http.post("/admin/check")
    ops = [("state", {}), ("cache", {"limit": 5}), ("flush_cache", {}), ("check", {})]
    assert api.scheduler.admin_calls == ops
    for limit in ("0", "x", "-1", "9999"):
        response = await api.http.get(f"/admin/cache?limit={limit}")
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "limit"
    api.scheduler.admin_values["state"] = ErrorInfo(status=503, type="server_error", message="gone")
    assert (await api.http.get("/admin/state")).status_code == 503


async def test_unknown_routes_and_methods(make_api: MakeApi) -> None:
    api = make_api(OK)
    assert (await api.http.get("/v2/nothing")).json()["error"]["code"] == "unknown_url"
    wrong = await api.http.get("/v1/chat/completions")
    assert wrong.status_code == 405
    assert wrong.json()["error"]["code"] == "method_not_allowed"


async def test_tokenize_and_back(make_api: MakeApi) -> None:
    api = make_api(OK)
    body = (await api.http.post("/tokenize", json={"prompt": "hello", "return_token_strs": True})).json()
    assert body["tokens"] == ids("hello")
    assert (body["count"], body["token_strs"]) == (1, ["hello"])
    chat = await api.http.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]})
    assert chat.json()["tokens"] == ids("<|start|>user\nhi<|end|>\n<|start|>assistant\n")
    back = await api.http.post("/detokenize", json={"tokens": body["tokens"]})
    assert back.json() == {"prompt": "hello"}
    neither = await api.http.post("/tokenize", json={})
    assert neither.status_code == 400
    outside = await api.http.post("/detokenize", json={"tokens": [1, 600]})
    assert outside.json()["error"]["param"] == "tokens[1]"


async def test_cross_origin(make_api: MakeApi) -> None:
    api = make_api(OK, cors_allow_origin=("https://app.example",))
    response = await api.http.get("/v1/models", headers={"origin": "https://app.example"})
    assert response.headers["access-control-allow-origin"] == "https://app.example"
    streamed = await api.http.post(
        "/v1/completions",
        json={"prompt": "hi", "stream": True},
        headers={"origin": "https://app.example"},
    )
    assert streamed.headers["access-control-allow-origin"] == "https://app.example"


async def test_logs_never_hold_the_prompt(make_api: MakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    secret = "my very private words"
    await make_api(OK).chat(messages=[{"role": "user", "content": secret}], user=secret, junk=secret)
    logged = capsys.readouterr()
    assert "request_id" in logged.out + logged.err
    assert "output_tokens" in logged.out + logged.err
    assert secret not in logged.out + logged.err


async def test_a_worker_is_drained_by_its_address(make_api: MakeApi) -> None:
    answer = {"address": "10.0.0.2:50051", "draining": True, "n_running": 3}
    api = make_api(scheduler=ScriptedClient(OK, admin_values={"drain_replica": answer}))
    response = await api.http.post("/admin/replicas/drain", json={"address": "10.0.0.2:50051"})
    assert response.json() == answer
    assert (await api.http.post("/admin/replicas/drain", json={"on": True})).status_code == 400
    assert (await api.http.post("/admin/replicas/drain", json={"address": "a", "on": 1})).status_code == 400
