"""What the tests of the page do and look for in a browser."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tests.e2e.browser import Tab

if TYPE_CHECKING:
    from playwright.sync_api import Page

CONTRAST = """() => {
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const ground = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const [r, g, b, a = 1] = parse(getComputedStyle(at).backgroundColor);
      if (a === 1) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const poor = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !node.checkVisibility() || node.closest(".stale")) continue;
    const [high, low] = [parse(getComputedStyle(node).color).slice(0, 3), ground(node)]
      .map(luminance).sort((a, b) => b - a);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < 4.5) poor.push(`${walker.currentNode.data.trim().slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return poor;
}"""
NAMELESS = """() => [...document.querySelectorAll("button, input, textarea, [role=img], [role=region]")]
  .filter((node) => node.checkVisibility())
  .filter((node) => !(node.textContent.trim() || node.labels?.length || node.getAttribute("aria-label")
    || node.getAttribute("aria-labelledby")))
  .map((node) => node.outerHTML.slice(0, 80))"""


def ask(page: Page, text: str = "Tell me a story.", *, max_tokens: int = 4000) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Max tokens").fill(str(max_tokens))
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Message").fill(text)
    page.get_by_role("button", name="Send").click()


def show_engine(page: Page) -> None:
    button = page.get_by_role("button", name="Engine", exact=True)
    if button.is_visible():
        button.click()


def show_chat(page: Page) -> None:
    button = page.get_by_role("button", name="Chat", exact=True)
    if button.is_visible():
        button.click()


def wait_for(page: Page, script: str, argument: object = None) -> None:
    page.wait_for_function(script, arg=argument, timeout=20_000)


def answer_text(page: Page) -> str:
    return page.locator(".answer .content").last.inner_text()


def wait_grown(page: Page, n_chars: int) -> None:
    script = "(n) => [...document.querySelectorAll('.answer .content')].at(-1)?.innerText.length > n"
    wait_for(page, script, n_chars)


def wait_ended(page: Page) -> None:
    wait_for(page, "() => !document.querySelector('.answer.running') && document.querySelector('.answer')")


def canned(page: Page, *parts: str) -> None:
    """The next chat answers with these pieces of text."""
    chunks = [{"choices": [{"delta": {"content": part}, "finish_reason": None}]} for part in parts]
    chunks.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=200, content_type="text/event-stream", body=body),
        times=1,
    )


def quiet(tab: Tab) -> None:
    assert tab.faults == []
    assert tab.outside == []


def large_server() -> dict[str, Any]:
    """An event of a server with 64 replicas of 61,000 blocks and long names."""
    n_blocks, n_rows = 61_001, 200
    replicas = [
        {
            "id": i,
            "address": f"quire-worker-{i}.quire-worker.llm.svc.cluster.local:50051",
            "state": "live",
            "reason": "",
            "device": "NVIDIA H200",
            "n_running": n_rows,
            "max_rows": 256,
            "draining": i == 9,
            "suspect": i == 8,
            "half_open": i == 7,
            "last_step_us": 9000,
            "blocks": {
                "n_blocks": n_blocks,
                "free": 1000,
                "cached": 20_000,
                "leased": 40_000,
                "shared": 10_000,
            },
        }
        for i in range(63)
    ]
    reason = "the worker's vocabulary is 128256, but 151936 was expected"
    replicas.append({"id": 63, "address": "10.0.0.63:50051", "state": "refused", "reason": reason})
    prefix = {"salt": "", "first_tokens": [1], "last_tokens": [2], "first_text": "You are " * 9}
    prefix |= {"last_text": "end", "n_tokens": 12_000, "n_blocks": 750, "hits": 123_456, "n_leases": 33}
    runs = [[4, 1], *([2, 19], [1, 20], [3, 11], [0, 11]) * 1000]
    states = ["free", "cached", "leased", "shared", "reserved"]
    rows = {"row": list(range(n_rows)), "prompt": [4000] * n_rows, "cached": [1600] * n_rows}
    rows |= {"target": [4000] * n_rows, "done": [3000] * n_rows, "known": [4000] * n_rows}
    return {
        "time_s": 5.0,
        "ready": True,
        "reason": "",
        "n_waiting": 312,
        "oldest_wait_s": 4.2,
        "totals": dict.fromkeys(("output_tokens", "prompt_tokens", "hit_tokens", "asked_tokens"), 10**9),
        "prefix_caching": True,
        "block_size": 16,
        "replicas": replicas,
        "detail": {
            "replica": 0,
            "rows": rows,
            "prefixes": [prefix] * 8,
            "map": {"n_blocks": n_blocks, "blocks_per_cell": 1, "states": states, "runs": runs},
        },
    }
