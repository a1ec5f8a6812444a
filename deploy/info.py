"""What a running server says of itself."""

from __future__ import annotations

import json
import sys

import httpx


def print_info(url: str, *, api_key: str) -> int:
    """Prints the server's /info; the exit code."""
    try:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        response = httpx.get(f"{url.rstrip('/')}/info", headers=headers, timeout=10.0)
        response.raise_for_status()
        print(json.dumps(response.json(), indent=2, ensure_ascii=sys.stdout.encoding.lower() != "utf-8"))
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        print(f"error: {url}: {error or type(error).__name__}", file=sys.stderr)
        return 1
    return 0
