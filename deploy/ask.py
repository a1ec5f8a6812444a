"""One question to the router of this container, for tools outside it: prints the answer's JSON.

    python -m deploy.ask GET /admin/state
    python -m deploy.ask POST /admin/replicas/drain '{"address": "10.0.0.2:50051"}'

From inside, admin routes answer without a key being handed around: the router's own environment has it.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence

from deploy.health import ROUTER_PORT, port_of

TIMEOUT_S = 10.0


def ask(method: str, path: str, body: str, *, env: Mapping[str, str]) -> tuple[int, str]:
    """(exit code, what to print: the answer, or why there is none)."""
    keys = [key.strip() for key in env.get("QUIRE_API_KEYS", env.get("API_KEY", "")).split(",")]
    request = urllib.request.Request(
        f"http://127.0.0.1:{port_of(env, default=ROUTER_PORT)}{path}",
        data=body.encode() if body else (b"{}" if method == "POST" else None),
        headers={"Authorization": f"Bearer {keys[0]}", "Content-Type": "application/json"},
        method=method,
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=TIMEOUT_S) as response:
            return 0, response.read().decode()
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")
        try:
            return 1, str(json.loads(text)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            return 1, f"{path} answered {error.code}"
    except OSError as error:
        return 1, f"{path}: {error}"


def main(argv: Sequence[str]) -> int:
    if len(argv) not in (2, 3):
        print(__doc__, file=sys.stderr)
        return 2
    code, text = ask(argv[0], argv[1], argv[2] if len(argv) > 2 else "", env=os.environ)
    print(text, file=sys.stderr if code else sys.stdout)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
