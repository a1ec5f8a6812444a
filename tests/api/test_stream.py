"""How a stream begins, waits for a slow client, breaks and ends. Runs the stream as the server would."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from router.ipc.messages import ErrorInfo, Failed
from tests.api.conftest import MakeApi
from tests.api.scripted import Script, ScriptedClient
from tests.api.sse import events, open_events
from tests.api.tiny import byte_ids, ids

FULL = ErrorInfo(
    status=429,
    type="rate_limit_error",
    message="64 requests are queued or running (max_concurrent_requests).",
    retry_after_s=1.5,
)
BROKEN = ErrorInfo(status=500, type="server_error", message="The model's numbers broke.", code="nan_logits")


class Connection:
    """One ASGI exchange whose writes can be held up, as a full socket holds them up."""

    def __init__(self, app: Any, path: str, body: dict[str, Any]) -> None:
        self._app = app
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": json.dumps(body).encode()})
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [],
            "client": ("127.0.0.1", 5),
            "server": ("api", 80),
        }
        self.writable = asyncio.Event()
        self.writable.set()
        self.broken = False
        self.messages: list[dict[str, Any]] = []
        self.task = asyncio.ensure_future(app(self.scope, self._incoming.get, self._send))

    async def _send(self, message: dict[str, Any]) -> None:
        if self.broken:
            raise OSError("the client is gone")
        await self.writable.wait()
        self.messages.append(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self.disconnect()

    def disconnect(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

    @property
    def status(self) -> int | None:
        return self.messages[0]["status"] if self.messages else None

    @property
    def bodies(self) -> list[bytes]:
        return [m["body"] for m in self.messages if m["type"] == "http.response.body"]

    @property
    def text(self) -> str:
        return b"".join(self.bodies).decode()


async def turns(n: int = 5) -> None:
    for _ in range(n):
        await asyncio.sleep(0)


def _content(chunks: list[Any]) -> str:
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])


@pytest.fixture
def connect(make_api: MakeApi) -> Callable[..., Connection]:
    def open_chat(scheduler: ScriptedClient, **fields: Any) -> Connection:
        api = make_api(scheduler=scheduler)
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, **fields}
        return Connection(api.app, "/v1/chat/completions", body)

    return open_chat


Connect = Callable[..., Connection]


async def test_nothing_is_sent_before_the_first_token(connect: Connect) -> None:
    scheduler = ScriptedClient(Script(ids("hello world"), hold=True), manual=True)
    connection = connect(scheduler)
    await scheduler.on_submit.wait()
    scheduler.step()
    await turns()
    assert connection.messages == []
    scheduler.release()
    scheduler.step()
    assert connection.status == 200
    assert len(connection.bodies) == 1


async def test_refusal_keeps_its_status(connect: Connect) -> None:
    connection = connect(ScriptedClient(Script(refuse=FULL)))
    await connection.task
    assert connection.status == 429
    assert dict(connection.messages[0]["headers"])[b"retry-after"] == b"2"
    assert json.loads(connection.text)["error"]["type"] == "rate_limit_error"


async def test_failure_before_the_first_token_keeps_its_status(connect: Connect) -> None:
    connection = connect(ScriptedClient(Script(end=BROKEN)))
    await connection.task
    assert connection.status == 500
    assert json.loads(connection.text)["error"] == {
        "message": BROKEN.message,
        "type": "server_error",
        "param": None,
        "code": "nan_logits",
    }


async def test_failure_in_mid_stream_is_an_event_and_the_end(connect: Connect) -> None:
    connection = connect(ScriptedClient(Script(ids("hello"), end=BROKEN)))
    await connection.task
    assert connection.status == 200
    *chunks, last = open_events(connection.text)
    assert _content(chunks) == "hello"
    assert last["error"]["code"] == "nan_logits"


async def test_failure_of_one_choice_cancels_the_others(connect: Connect) -> None:
    scheduler = ScriptedClient(Script(byte_ids("abcdef")), manual=True)
    connection = connect(scheduler, n=2)
    await scheduler.on_submit.wait()
    scheduler.step()
    first, second = list(scheduler.running.values())
    del scheduler.running[first.spec.id]
    first.sink.on_failed(Failed(id=first.spec.id, error=BROKEN))
    scheduler.step()
    await connection.task
    assert scheduler.cancelled == [second.spec.id]
    assert "error" in open_events(connection.text)[-1]


async def test_tokens_of_one_batch_are_one_write(connect: Connect) -> None:
    scheduler = ScriptedClient(Script(byte_ids("abcd")), manual=True)
    connection = connect(scheduler, n=2)
    await scheduler.on_submit.wait()
    for n_writes in (1, 2, 3):
        scheduler.step()
        assert len(connection.bodies) == n_writes


async def test_slow_client_gets_gathered_text(connect: Connect) -> None:
    """While the connection is full nothing piles up but text; then it comes as one chunk."""
    text = "안녕하세요 세계"
    scheduler = ScriptedClient(Script(byte_ids(text)), manual=True)
    connection = connect(scheduler)
    await scheduler.on_submit.wait()
    scheduler.step()
    connection.writable.clear()
    for _ in range(len(text.encode()) - 5):
        scheduler.step()
        await turns(1)
    assert len(connection.messages) == 2
    connection.writable.set()
    await turns()
    n_before = len(connection.messages)
    assert n_before <= 4
    while scheduler.running:
        scheduler.step()
        await turns(1)
    await connection.task
    assert _content(events(connection.text)) == text


async def test_answer_that_ends_while_the_client_is_slow(connect: Connect) -> None:
    scheduler = ScriptedClient(Script(ids("hello world")), manual=True)
    connection = connect(scheduler, stream_options={"include_usage": True})
    await scheduler.on_submit.wait()
    connection.writable.clear()
    while scheduler.running:
        scheduler.step()
        await turns(1)
    assert connection.messages == []
    connection.writable.set()
    await connection.task
    chunks = events(connection.text)
    assert _content(chunks) == "hello world"
    assert chunks[-1]["usage"]["completion_tokens"] == len(ids("hello world")) + 1
    assert scheduler.cancelled == []


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n_steps", [0, 1, 3])
async def test_disconnect_cancels_at_any_phase(connect: Connect, stream: bool, n_steps: int) -> None:
    scheduler = ScriptedClient(Script(byte_ids("hello world, hello")), manual=True)
    connection = connect(scheduler, stream=stream, n=2)
    await scheduler.on_submit.wait()
    for _ in range(n_steps):
        scheduler.step()
    connection.disconnect()
    await connection.task
    assert sorted(scheduler.cancelled) == sorted(spec.id for spec in scheduler.submitted)
    assert scheduler.running == {}


async def test_disconnect_while_the_client_is_slow(connect: Connect) -> None:
    scheduler = ScriptedClient(Script(byte_ids("hello world")), manual=True)
    connection = connect(scheduler)
    await scheduler.on_submit.wait()
    connection.writable.clear()
    scheduler.step()
    connection.disconnect()
    await connection.task
    assert scheduler.running == {}


async def test_write_that_fails_cancels(connect: Connect) -> None:
    scheduler = ScriptedClient(Script(byte_ids("hello world")), manual=True)
    connection = connect(scheduler)
    await scheduler.on_submit.wait()
    scheduler.step()
    connection.broken = True
    scheduler.step()
    assert scheduler.running == {}
    connection.disconnect()
    await connection.task


async def test_disconnect_before_the_body_is_complete(make_api: MakeApi) -> None:
    api = make_api(Script(ids("ok")))
    connection = Connection(api.app, "/v1/chat/completions", {})
    connection._incoming.get_nowait()
    connection.disconnect()
    await connection.task
    assert connection.messages == []
    assert api.scheduler.submitted == []


async def test_stop_string_cancels_the_request(connect: Connect) -> None:
    scheduler = ScriptedClient(Script(byte_ids("one STOP two")), manual=True)
    connection = connect(scheduler, stop="STOP")
    await scheduler.on_submit.wait()
    while scheduler.running:
        scheduler.step()
    await connection.task
    assert scheduler.cancelled == [scheduler.submitted[0].id]
    chunks = events(connection.text)
    assert _content(chunks) == "one "
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_text_held_back_comes_at_the_end(connect: Connect) -> None:
    connection = connect(ScriptedClient(Script(byte_ids("one STO"))), stop="STOP", max_tokens=7)
    await connection.task
    assert _content(events(connection.text)) == "one STO"
