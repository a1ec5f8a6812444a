"""Takes the documentation's pictures of the page: `python -m tests.e2e.page_screenshots docs/images`.

The default model on one CPU worker, a few clients in the background, and a real browser.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.e2e.browser import DESKTOP, PHONE, Tab, chromium
from tests.e2e.serving import serving

N_CLIENTS = 5
SYSTEMS = (
    "You are the support agent of a small bookshop in Lisbon. Answer in two sentences and kindly."
    " Never promise a delivery date that you do not know; say that the order's page has it.",
    "Translate the text of the user into French. Keep names, numbers and code as they are. Write the"
    " translation alone, without any remark before or after it.",
)
QUESTIONS = (
    "Is my parcel on its way?",
    "Do you have Pessoa's poems in hardcover?",
    "How do I send a book back that I don't like?",
    "The train to Porto leaves at 10:45 from platform 3.",
)
QUESTION = "Write a short story about a lighthouse keeper who finds an old book."


@contextlib.contextmanager
def background(url: str) -> Iterator[None]:
    """Clients that share two system prompts."""
    loop = asyncio.new_event_loop()

    async def client(i: int) -> None:
        rng = random.Random(i)
        async with httpx.AsyncClient(base_url=url, timeout=120) as http:
            while True:
                messages = [
                    {"role": "system", "content": rng.choice(SYSTEMS)},
                    {"role": "user", "content": rng.choice(QUESTIONS)},
                ]
                await http.post(
                    "/v1/chat/completions", json={"messages": messages, "max_tokens": rng.randint(40, 160)}
                )

    async def all_clients() -> None:
        async with asyncio.TaskGroup() as group:
            for i in range(N_CLIENTS):
                group.create_task(client(i))

    task = loop.create_task(all_clients())

    def work() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        loop.close()


def take(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    flags = ("--max-batch-total-tokens=10000",)
    with (
        chromium() as browser,
        tempfile.TemporaryDirectory() as logs,
        serving(Path(logs), flags=flags) as server,
        background(server.url),
    ):
        for name, size, scheme in (("desktop", DESKTOP, "light"), ("phone", PHONE, "dark")):
            tab = Tab(browser, server.url, viewport=size, color_scheme=scheme, reduced_motion="reduce")
            page = tab.open()
            page.wait_for_timeout(40_000 if name == "desktop" else 1000)
            page.get_by_label("Message").fill(QUESTION)
            page.get_by_role("button", name="Send").click()
            page.wait_for_timeout(12_000 if name == "desktop" else 5000)
            page.screenshot(path=folder / f"page-{name}-chat.png")
            if name == "phone":
                page.get_by_role("button", name="Engine", exact=True).click()
                page.wait_for_timeout(6000)
            page.locator("#map-title").evaluate("(node) => node.scrollIntoView()")
            page.locator(".engine").evaluate("(node) => node.scrollBy(0, -75)")
            page.wait_for_timeout(500)
            page.screenshot(path=folder / f"page-{name}-engine.png")
            tab.close()


if __name__ == "__main__":
    take(Path(sys.argv[1]))
