"""The page in a real browser, at the width of a desk and of a phone, before workers without a model."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.browser import DESKTOP, PHONE, Tab, chromium
from tests.e2e.page import (
    CONTRAST,
    NAMELESS,
    answer_text,
    ask,
    canned,
    large_server,
    quiet,
    show_chat,
    show_engine,
    wait_ended,
    wait_for,
    wait_grown,
)
from tests.e2e.serving import Server, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.slow

FAKE = ("--attention=fake", "--fake-step-ms=15", "--fake-n-blocks=600")
KEY = "a key of this test"
WIDTHS = pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
OpenTab = Callable[..., Tab]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def server(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Started after the browser: without one, no server is."""
    with serving(tmp_path_factory.mktemp("page"), workers=2, flags=FAKE) as server:
        yield server


@pytest.fixture
def open_tab(browser: Browser, server: Server) -> Iterator[OpenTab]:
    with contextlib.ExitStack() as stack:

        def open(url: str = server.url, **options: Any) -> Tab:
            tab = Tab(browser, url, **options)
            stack.callback(tab.close)
            tab.open()
            return tab

        yield open


@WIDTHS
def test_a_chat_streams_and_the_block_map_moves(open_tab: OpenTab, size: dict[str, int]) -> None:
    tab = open_tab(viewport=size)
    page = tab.page
    wait_for(page, "() => document.querySelector('#status').textContent === 'Ready'")
    assert page.locator("#model").inner_text() == "smollm2"
    show_engine(page)
    wait_for(page, "() => document.querySelector('#feed').textContent === 'Live'")
    wait_for(page, "() => document.querySelector('#map').height > 0")
    still = page.evaluate("() => document.querySelector('#map').toDataURL()")
    show_chat(page)

    ask(page)
    wait_grown(page, 20)
    assert page.locator(".answer.running").count() == 1, "text is shown while more comes"
    grown = len(answer_text(page))
    wait_grown(page, grown + 20)
    assert re.search(
        r"\d tokens/s · first token .* prompt tokens cached", page.locator(".answer .facts").inner_text()
    )

    show_engine(page)
    leased = "() => Number(document.querySelector('#legend b').textContent)"
    # The map is the first replica's; the answer may be computed by the other.
    buttons = page.locator("#replicas button")
    wait_for(page, "() => /[1-9]\\d* of \\d+ rows/.test(document.querySelector('#replicas').textContent)")
    buttons.filter(has_text=re.compile(r"live\s*1 of \d+ rows")).first.click()
    wait_for(page, f"() => ({leased})() > 0")
    assert "leased" in str(page.locator("#map").get_attribute("aria-label"))
    before = page.evaluate(leased)
    wait_for(page, f"(n) => ({leased})() > n", before)
    wait_for(page, "(old) => document.querySelector('#map').toDataURL() !== old", still)
    assert page.locator("#rows li").count() == 1
    wait_for(page, "() => Number(document.querySelector('[data-tile=output] b').textContent) > 0")

    show_chat(page)
    page.get_by_role("button", name="Stop").click()
    wait_ended(page)
    assert page.locator(".answer .facts").inner_text().endswith("stopped")
    show_engine(page)
    wait_for(page, f"() => ({leased})() === 0 && document.querySelectorAll('#rows li').length === 0")
    overflow = "() => document.documentElement.scrollWidth - innerWidth"
    assert page.evaluate(overflow) <= 0, "nothing sticks out at the side"
    quiet(tab)


@WIDTHS
def test_a_large_server_fits(open_tab: OpenTab, server: Server, size: dict[str, int]) -> None:
    tab = open_tab("about:blank", viewport=size)
    page = tab.page
    events = f"data: {json.dumps(large_server())}\n\n"
    page.route("**/admin/live*", lambda route: route.fulfill(content_type="text/event-stream", body=events))
    page.goto(server.url)
    show_engine(page)
    wait_for(page, "() => document.querySelectorAll('#replicas li').length === 64")
    wait_for(page, "() => document.querySelector('#map').clientHeight > 100")
    assert page.evaluate("() => document.querySelector('#map').clientHeight") <= 300
    assert re.search(r"61,000 blocks of 16 tokens, \d+ per cell", page.locator("#map-note").inner_text())
    assert "200 running, 24 shown" in page.locator("#rows-note").inner_text()
    assert page.locator("#prefixes tr").count() == 8
    assert page.get_by_text("vocabulary is 128256").count() == 1
    assert page.evaluate("() => document.documentElement.scrollWidth - innerWidth") <= 0
    engine = "() => { const e = document.querySelector('.engine'); return e.scrollWidth - e.clientWidth; }"
    assert page.evaluate(engine) <= 0
    assert tab.faults == []


def test_the_hottest_prefixes_are_shown_as_text(open_tab: OpenTab) -> None:
    tab = open_tab()
    page = tab.page
    for _ in range(3):
        ask(page, "One river, two rivers, three rivers. " * 4, max_tokens=4)
        wait_ended(page)
        page.get_by_role("button", name="Clear").click()
    wait_for(page, "() => document.querySelectorAll('#replicas button').length === 2")
    for i in range(2):
        page.locator("#replicas button").nth(i).click()
        wait_for(page, f"() => document.querySelectorAll('#replicas button')[{i}].ariaPressed === 'true'")
        if page.locator("#prefixes tr").count():
            break
    assert "system" in page.locator("#prefixes tr").first.inner_text()
    quiet(tab)


def test_a_seed_gives_the_same_answer_again_and_regenerate_replaces_it(open_tab: OpenTab) -> None:
    tab = open_tab()
    page = tab.page
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Seed").fill("7")
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Max tokens").fill("12")
    page.get_by_label("Message").fill("hi")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.keyboard.press("Enter")
    body = sent.value.post_data_json
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]
    assert (body["seed"], body["max_tokens"], body["temperature"], body["top_p"]) == (7, 12, 0.7, 1)
    wait_ended(page)
    first = answer_text(page)
    assert page.locator(".answer .facts").inner_text().endswith("reached max tokens")
    page.get_by_role("button", name="Regenerate").click()
    wait_ended(page)
    assert answer_text(page) == first
    assert page.locator(".answer").count() == 1
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_label("Message").fill("and then?")
        page.keyboard.press("Enter")
    roles = [message["role"] for message in sent.value.post_data_json["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    wait_ended(page)
    page.get_by_role("button", name="Clear").click()
    assert page.locator(".message").count() == 0
    assert page.get_by_text("Ask the model something.").is_visible()
    quiet(tab)


def test_what_a_model_writes_stays_text(open_tab: OpenTab) -> None:
    tab = open_tab()
    page = tab.page
    hostile = "<img src=x onerror=alert(1)><script>alert(1)</script><b>bold</b>"
    canned(page, "See:\n", hostile, "\n``", "`js\nlet a =", " 1;\n<i>\n`", "``\nDone <u>", "now</u>.")
    ask(page, hostile)
    wait_ended(page)
    assert page.locator(".user").inner_text() == hostile
    content = page.locator(".answer .content")
    assert content.locator(".text").first.inner_text().rstrip() == f"See:\n{hostile}"
    assert content.locator("pre").inner_text().rstrip() == "let a = 1;\n<i>"
    assert content.locator(".text").last.inner_text() == "Done <u>now</u>."
    assert page.locator(".message img, .message script, .message b, .message i, .message u").count() == 0
    quiet(tab)


def test_the_engine_is_asked_only_while_it_is_seen(open_tab: OpenTab, server: Server) -> None:
    page = open_tab("about:blank", viewport=PHONE).page
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(server.url)
    wait_for(page, "() => document.querySelector('#status').textContent === 'Ready'")
    assert not [url for url in asked if "/admin/live" in url]
    show_engine(page)
    wait_for(page, "() => document.querySelector('#feed').textContent === 'Live'")
    assert len([url for url in asked if "/admin/live" in url]) == 1
    with page.expect_event("requestfailed", lambda request: "/admin/live" in request.url):
        show_chat(page)  # it ends the stream


def test_thoughts_stand_apart_from_the_answer(open_tab: OpenTab) -> None:
    tab = open_tab()
    page = tab.page
    deltas = [{"reasoning_content": "Hm, "}, {"reasoning_content": "<b>easy</b>."}, {"content": "Four."}]
    chunks = [{"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(content_type="text/event-stream", body=body),
        times=1,
    )
    ask(page, "2 + 2?")
    wait_ended(page)
    assert answer_text(page) == "Four."
    assert page.locator(".thoughts div div").inner_text() == "Hm, <b>easy</b>."
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_label("Message").fill("Sure?")
        page.keyboard.press("Enter")
    assert sent.value.post_data_json["messages"][1] == {"role": "assistant", "content": "Four."}
    page.keyboard.press("Escape")
    wait_ended(page)
    quiet(tab)


def test_by_keyboard_alone(open_tab: OpenTab) -> None:
    tab = open_tab()
    page = tab.page
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Shift+Tab")
    assert page.evaluate("() => document.activeElement.tagName") != "TEXTAREA"
    page.locator(".skip").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("() => document.activeElement.id") == "prompt"
    page.keyboard.type("first line")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("second line")
    page.keyboard.press("Enter")
    assert page.locator(".user").inner_text() == "first line\nsecond line"
    wait_grown(page, 5)
    page.keyboard.press("Escape")
    wait_ended(page)
    assert page.evaluate("() => document.activeElement.id") == "prompt"
    assert page.locator(".answer .facts").inner_text().endswith("stopped")
    quiet(tab)


@WIDTHS
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_and_names(open_tab: OpenTab, size: dict[str, int], scheme: str) -> None:
    """WCAG AA for text: 4.5 to 1; everything that can be used has a name."""
    tab = open_tab(viewport=size, color_scheme=scheme, reduced_motion="reduce")
    page = tab.page
    ask(page, max_tokens=30)
    wait_ended(page)
    page.get_by_role("button", name="Settings").click()
    for show in (show_chat, show_engine):
        show(page)
        wait_for(
            page,
            "() => document.querySelector('.engine').checkVisibility() === false"
            " || document.querySelector('#feed').textContent === 'Live'",
        )
        assert page.evaluate(CONTRAST) == []
        assert page.evaluate(NAMELESS) == []
    quiet(tab)


def test_the_theme_is_chosen_and_remembered(open_tab: OpenTab) -> None:
    tab = open_tab(color_scheme="light")
    page = tab.page
    ground = "() => getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.get_by_role("button", name="Theme: auto").click()
    page.get_by_role("button", name="Theme: light").click()
    dark = page.evaluate(ground)
    assert dark != light
    page.reload()
    assert page.evaluate(ground) == dark
    page.get_by_role("button", name="Theme: dark").click()
    assert page.evaluate(ground) == light
    quiet(tab)


def test_a_refused_live_view_is_told_and_the_chat_goes_on(open_tab: OpenTab, server: Server) -> None:
    """As from another host when the server has no keys."""
    page = open_tab("about:blank").page
    error = {"error": {"message": "no", "type": "invalid_request_error", "code": "admin_needs_key"}}
    page.route("**/admin/live*", lambda route: route.fulfill(status=403, json=error))
    page.goto(server.url)
    page.get_by_text("The live view is shown only on the server's own host").wait_for()
    assert not page.locator("#live").is_visible()
    ask(page, max_tokens=5)
    wait_ended(page)
    assert answer_text(page)


def test_errors_are_shown_and_can_be_tried_again(open_tab: OpenTab) -> None:
    tab = open_tab()
    page = tab.page
    busy = {"error": {"message": "The server is full.", "type": "rate_limit_error", "code": None}}
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=429, json=busy, headers={"retry-after": "2"}),
        times=1,
    )
    ask(page, max_tokens=5)
    page.get_by_text("The server is full. Try again in 2 s.").wait_for()
    page.get_by_role("button", name="Try again").click()
    wait_ended(page)
    assert page.locator(".error:visible").count() == 0
    assert answer_text(page)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Max tokens").fill("0")
    page.get_by_label("Message").fill("again")
    page.keyboard.press("Enter")
    assert page.locator(".user").count() == 1, "a wrong setting is shown, nothing is sent"
    assert page.locator("#settings").is_visible()


def test_a_server_with_keys_asks_for_one(open_tab: OpenTab, tmp_path_factory: pytest.TempPathFactory) -> None:
    with serving(tmp_path_factory.mktemp("keys"), flags=FAKE, env={"QUIRE_API_KEYS": KEY}) as server:
        tab = open_tab(server.url)
        page = tab.page
        dialog = page.get_by_role("dialog")
        dialog.wait_for()
        dialog.get_by_label("Key", exact=True).fill("wrong")
        page.keyboard.press("Enter")
        page.get_by_role("alert").get_by_text("does not accept this API key").wait_for()
        dialog.get_by_label("Key", exact=True).fill(KEY)
        page.keyboard.press("Enter")
        wait_for(page, "() => document.querySelector('#status').textContent === 'Ready'")
        wait_for(page, "() => document.querySelector('#feed').textContent === 'Live'")
        ask(page, max_tokens=5)
        wait_ended(page)
        assert answer_text(page)
        assert KEY in page.evaluate("() => Object.values(sessionStorage)")
        assert page.evaluate("() => Object.values(localStorage)") == []
        page.reload()
        wait_for(page, "() => document.querySelector('#feed').textContent === 'Live'")
        assert KEY not in page.content()
        page.get_by_role("button", name="API key").click()
        page.get_by_role("button", name="Forget key").click()
        page.get_by_text("The live view needs an API key.").wait_for()
        assert page.evaluate("() => sessionStorage.getItem('quire.key')") is None
        refused = [fault for fault in tab.faults if "401" not in fault]
        assert refused == [], "the browser itself notes each 401; nothing else is wrong"


def test_a_server_that_ends_is_told(open_tab: OpenTab, tmp_path_factory: pytest.TempPathFactory) -> None:
    with serving(tmp_path_factory.mktemp("ends"), flags=FAKE) as server:
        page = open_tab(server.url).page
        wait_for(page, "() => document.querySelector('#feed').textContent === 'Live'")
        server.end()
        wait_for(page, "() => document.querySelector('#live').classList.contains('stale')")
        assert page.locator("#feed").inner_text() != "Live"
        ask(page)
        page.get_by_text("The server can't be reached.").wait_for()
