"""The page at /: files that are the same for everybody, and the live view behind the key."""

from __future__ import annotations

import asyncio
import json
import re
from html.parser import HTMLParser
from typing import Any

import httpx
import pytest

from router.api.app import create_app
from router.api.config import ApiConfig
from router.api.context import ApiContext
from router.api.errors import ApiError
from router.api.page.feed import LiveFeed, Watcher
from router.api.page.routes import read_files
from router.ipc.messages import ErrorInfo
from tests.api.conftest import MakeApi
from tests.api.live import serving
from tests.api.scripted import Script, ScriptedClient
from tests.api.tiny import ids, tiny_tokenizer

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
FILES = read_files()
SCRIPTS = sorted(name for name in FILES if name.endswith(".js"))
LIMIT_S = 20.0


def live_value(**changes: Any) -> dict[str, Any]:
    detail = {
        "replica": 0,
        "rows": {
            "row": [0],
            "prompt": [3],
            "cached": [0],
            "target": [3],
            "done": [3],
            "known": [4],
            "end": [9],
        },
        "prefixes": [{"salt": "", "first_tokens": ids("hello world"), "last_tokens": ids("h")}],
        "map": {"n_blocks": 4, "blocks_per_cell": 1, "states": ["free"], "runs": [[0, 4]]},
    }
    value = {"time_s": 5.0, "ready": True, "reason": "", "replicas": [], "details": {"0": detail}}
    return value | changes


def text_of(name: str) -> str:
    return FILES[name].body.decode()


# ---- the files ----


async def test_browsers_get_the_page_without_a_key(make_api: MakeApi) -> None:
    api = make_api(Script(), api_keys=("sekrit",), peer="10.0.0.9")
    page = await api.http.get("/", headers=BROWSER)
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "<h1" in page.text
    head = await api.http.head("/", headers=BROWSER)
    assert head.status_code == 200
    for name in re.findall(r'(?:src|href)="(page/[^"]+)"', page.text):
        file = await api.http.get(f"/{name}")
        assert file.status_code == 200, name
        assert file.text


async def test_others_still_get_the_health_there(make_api: MakeApi) -> None:
    """TGI's probes ask GET / for a status."""
    api = make_api(Script(), api_keys=("sekrit",))
    probe = await api.http.get("/")
    assert probe.json()["status"] == "ok"
    assert probe.headers["vary"] == "Accept"
    assert (await api.http.get("/", headers=BROWSER)).headers["vary"] == "Accept"
    api.scheduler.set_state(ready=False, reason="no worker")
    assert (await api.http.get("/")).status_code == 503
    assert (await api.http.get("/", headers=BROWSER)).status_code == 200, "the page tells it itself"


async def test_the_key_still_stands_before_everything_else(make_api: MakeApi) -> None:
    api = make_api(Script(), api_keys=("sekrit",))
    assert (await api.http.post("/", json={"inputs": "hi"})).status_code == 401
    assert (await api.http.post("/page/main.js")).status_code == 401
    assert (await api.http.get("/admin/live")).status_code == 401
    assert (await api.http.get("/page")).status_code == 401
    wrong = await api.http.get("/admin/live", headers={"authorization": "Bearer wrong"})
    assert wrong.status_code == 401


@pytest.mark.parametrize("name", ["nothing.js", "..%2froutes.py", "%2e%2e/routes.py", "routes.py", "a/b.js"])
async def test_only_the_pages_own_files_are_served(make_api: MakeApi, name: str) -> None:
    response = await make_api(Script()).http.get(f"/page/{name}")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "unknown_url"


@pytest.mark.parametrize("path", ["/", *(f"/page/{name}" for name in sorted(FILES))])
async def test_headers_let_nothing_else_in(make_api: MakeApi, path: str) -> None:
    response = await make_api(Script()).http.get(path, headers=BROWSER)
    rules = dict(rule.split(None, 1) for rule in response.headers["content-security-policy"].split("; "))
    assert rules["default-src"] == "'none'"
    assert {rules[name] for name in ("script-src", "style-src", "img-src", "connect-src")} == {"'self'"}
    assert {rules[name] for name in ("base-uri", "form-action", "frame-ancestors")} == {"'none'"}
    assert rules["require-trusted-types-for"] == "'script'", "no text may become markup"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"


async def test_a_browser_asks_whether_its_copy_is_right(make_api: MakeApi) -> None:
    api = make_api(Script())
    first = await api.http.get("/page/main.js")
    assert first.headers["cache-control"] == "no-cache"
    again = await api.http.get("/page/main.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    other = await api.http.get("/page/style.css", headers={"if-none-match": first.headers["etag"]})
    assert other.status_code == 200


@pytest.mark.parametrize("name", sorted(FILES))
def test_nothing_points_outside(name: str) -> None:
    urls = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w[^\s\"'`]*", text_of(name)))
    assert urls <= {"http://www.w3.org/2000/svg"}, "a name, not an address"


class Markup(HTMLParser):
    """Collects what the policy forbids and what a label names."""

    def __init__(self) -> None:
        super().__init__()
        self.inline: list[str] = []
        self.ids: list[str] = []
        self.named: list[str] = []
        self.images_without_alt = 0
        self.lang: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.inline += [name for name in values if name == "style" or name.startswith("on")]
        if tag == "style" or (tag == "script" and "src" not in values):
            self.inline.append(tag)
        if values.get("id"):
            self.ids.append(str(values["id"]))
        for name in ("for", "aria-labelledby", "aria-controls"):
            self.named += (values.get(name) or "").split()
        self.images_without_alt += tag == "img" and "alt" not in values
        if tag == "html":
            self.lang = values.get("lang")


def test_the_markup_is_sound() -> None:
    markup = Markup()
    markup.feed(text_of("index.html"))
    assert markup.inline == []
    assert len(markup.ids) == len(set(markup.ids))
    assert set(markup.named) <= set(markup.ids)
    assert markup.images_without_alt == 0
    assert markup.lang == "en"


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_script_makes_markup_of_text(name: str) -> None:
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert word not in text_of(name)


def test_every_element_that_a_script_asks_for_is_there() -> None:
    markup = Markup()
    markup.feed(text_of("index.html"))
    for name in SCRIPTS:
        asked = set(re.findall(r'\$\("([\w-]+)"\)', text_of(name)))
        assert asked <= set(markup.ids), name


# ---- the live view ----


async def test_live_without_keys_answers_this_host_alone(make_api: MakeApi) -> None:
    response = await make_api(Script(), peer="10.0.0.9").http.get("/admin/live")
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "admin_needs_key", "the page tells it by this code"


@pytest.mark.parametrize("replica", ["x", "-1", "1.5", "", "9" * 30, "１"])
async def test_live_with_a_wrong_replica(make_api: MakeApi, replica: str) -> None:
    response = await make_api(Script()).http.get("/admin/live", params={"replica": replica})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "replica"


async def test_live_streams_events_with_the_key() -> None:
    scheduler = ScriptedClient(admin_values={"live": live_value()})
    async with serving(scheduler, api_keys=("k",)) as live, httpx.AsyncClient(base_url=live.url) as http:
        headers = {"authorization": "Bearer k"}
        async with http.stream("GET", "/admin/live?replica=0", headers=headers, timeout=LIMIT_S) as response:
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            lines = response.aiter_lines()
            events = [json.loads((await anext(lines)).removeprefix("data: "))]
            assert await anext(lines) == ""
        head = await http.head("/admin/live", headers=headers, timeout=LIMIT_S)
    assert head.status_code == 200
    (event,) = events
    assert "details" not in event
    assert event["ready"] is True
    assert event["detail"]["map"]["runs"] == [[0, 4]]
    (prefix,) = event["detail"]["prefixes"]
    assert (prefix["first_text"], prefix["last_text"]) == ("hello world", "h")
    assert scheduler.admin_calls[0] == ("live", {"replicas": [0], "limit": 8})


async def test_an_open_live_view_does_not_hold_up_the_shutdown() -> None:
    """The server is stopped by `serving` while the stream is open; it ends by itself."""
    scheduler = ScriptedClient(admin_values={"live": live_value()})
    async with (
        httpx.AsyncClient() as http,
        serving(scheduler, shutdown_grace_s=LIMIT_S) as live,
        http.stream("GET", f"{live.url}/admin/live", timeout=LIMIT_S) as response,
    ):
        lines = response.aiter_lines()
        assert json.loads((await anext(lines)).removeprefix("data: "))["ready"] is True
        live.server.stop()
        rest = [json.loads(line[6:]) async for line in lines if line]
    assert rest[-1]["reason"] == "shutting down"


# ---- the feed ----


class Turns:
    """The feed's pause, ended by the test."""

    def __init__(self) -> None:
        self._turn = asyncio.Event()
        self.waiting = asyncio.Event()

    async def __call__(self, _: float) -> None:
        self.waiting.set()
        await self._turn.wait()
        self._turn.clear()

    async def next(self) -> None:
        """Lets the feed look again and waits until it has."""
        self.waiting.clear()
        self._turn.set()
        await self.seen()

    async def seen(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            await self.waiting.wait()


def make_feed(scheduler: ScriptedClient, **options: Any) -> tuple[LiveFeed, Turns, ApiContext]:
    app = create_app(client=scheduler, config=ApiConfig(), tokenizer=tiny_tokenizer())
    turns = Turns()
    context: ApiContext = app.state.context
    return LiveFeed(context, pause=turns, **options), turns, context


async def read(watcher: Watcher) -> dict[str, Any]:
    async with asyncio.timeout(LIMIT_S):
        event = await watcher.next()
    assert event is not None
    value: dict[str, Any] = json.loads(event.removeprefix(b"data: "))
    return value


async def test_all_watchers_share_one_look() -> None:
    scheduler = ScriptedClient(admin_values={"live": live_value()})
    feed, turns, _ = make_feed(scheduler)
    one, two, same = feed.join(0), feed.join(7), feed.join(0)
    await turns.seen()
    assert scheduler.admin_calls == [("live", {"replicas": [0, 7], "limit": 8})]
    assert (await read(one))["detail"]["replica"] == 0
    assert (await read(two))["detail"] is None
    assert (await read(same))["detail"]["replica"] == 0
    await turns.next()
    assert len(scheduler.admin_calls) == 2
    for watcher in (one, two, same):
        feed.leave(watcher)


async def test_many_replicas_looked_at_take_turns() -> None:
    """So that no look holds up the scheduler for long, whoever watches."""
    scheduler = ScriptedClient(admin_values={"live": live_value()})
    feed, turns, _ = make_feed(scheduler)
    watchers = [feed.join(replica) for replica in range(6)]
    await turns.seen()
    await turns.next()
    await turns.next()
    asked = [args["replicas"] for _, args in scheduler.admin_calls]
    assert asked == [[0, 1, 2, 3], [4, 5, 0, 1], [2, 3, 4, 5]]
    for watcher in watchers:
        await read(watcher)
        feed.leave(watcher)


async def test_nothing_is_asked_while_nobody_watches() -> None:
    scheduler = ScriptedClient(admin_values={"live": live_value()})
    feed, turns, _ = make_feed(scheduler)
    watcher = feed.join(0)
    await turns.seen()
    feed.leave(watcher)
    turns._turn.set()
    for _ in range(10):
        await asyncio.sleep(0)
    assert feed.n_watchers == 0
    assert len(scheduler.admin_calls) == 1
    turns._turn.clear()
    turns.waiting.clear()
    again = feed.join(0)
    await turns.seen()
    assert len(scheduler.admin_calls) == 2, "who comes later is served again"
    feed.leave(again)


async def test_a_slow_reader_gets_the_newest_alone() -> None:
    scheduler = ScriptedClient(admin_values={"live": live_value()})
    feed, turns, _ = make_feed(scheduler)
    watcher = feed.join(0)
    await turns.seen()
    for time_s in (6.0, 7.0, 8.0):
        scheduler.admin_values["live"] = live_value(time_s=time_s)
        await turns.next()
    assert (await read(watcher))["time_s"] == 8.0
    feed.leave(watcher)


async def test_a_lost_scheduler_is_told_and_asked_again() -> None:
    lost = ErrorInfo(status=503, type="server_error", message="the connection to the scheduler was lost")
    scheduler = ScriptedClient(admin_values={"live": lost})
    feed, turns, _ = make_feed(scheduler)
    watcher = feed.join(0)
    await turns.seen()
    assert await read(watcher) == {"error": "the connection to the scheduler was lost"}
    scheduler.admin_values["live"] = live_value()
    await turns.next()
    assert (await read(watcher))["ready"] is True
    feed.leave(watcher)


async def test_too_many_watchers_are_refused() -> None:
    feed, turns, _ = make_feed(ScriptedClient(admin_values={"live": live_value()}), max_watchers=2)
    first, second = feed.join(0), feed.join(0)
    with pytest.raises(ApiError, match="2 live views are open") as refused:
        feed.join(0)
    assert refused.value.info.status == 503
    feed.leave(second)
    third = feed.join(0)
    await turns.seen()
    feed.leave(first)
    feed.leave(third)


async def test_the_view_ends_with_the_server() -> None:
    feed, turns, context = make_feed(ScriptedClient(admin_values={"live": live_value()}))
    watcher = feed.join(0)
    await turns.seen()
    context.draining = True
    turns._turn.set()
    await read(watcher)
    while (event := await watcher.next()) is not None:
        assert b"shutting down" in event
    feed.leave(watcher)


async def test_before_the_tokenizer_is_read_prefixes_have_no_text() -> None:
    feed, turns, context = make_feed(ScriptedClient(admin_values={"live": live_value()}))
    context.loaded = None
    watcher = feed.join(0)
    await turns.seen()
    event = await read(watcher)
    assert event["reason"] == "the tokenizer is still being read"
    assert "first_text" not in event["detail"]["prefixes"][0]
    feed.leave(watcher)
