"""Is the process in this container well? For healthchecks and probes: quick, and silent when all is well.

    python -m deploy.health router [--live]
    python -m deploy.health worker

The port is the one that the process itself takes from QUIRE_PORT. Exit code 0: well; 1: not, with the reason.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence

from settings.load import SERVICE_LINK

TIMEOUT_S = 4.0
ROUTER_PORT = 8000
WORKER_PORT = 50051


def check_router(port: int, *, live: bool) -> str:
    """Why it is not well; empty when it is. `live`: it answers; else: it can serve a request now."""
    url = f"http://127.0.0.1:{port}/health/{'live' if live else 'ready'}"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        opener.open(url, timeout=TIMEOUT_S).close()
    except urllib.error.HTTPError as error:
        return _reason(error.read()) or f"{url} answered {error.code}"
    except (OSError, ValueError) as error:
        return f"{url}: {error}"
    return ""


def check_worker(port: int) -> str:
    """Why it is not well; empty when it is. A worker that still loads its model does not listen yet."""
    import grpc

    from proto import worker_pb2_grpc
    from proto.worker_pb2 import HealthRequest

    address = f"127.0.0.1:{port}"
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            health = worker_pb2_grpc.WorkerStub(channel).Health(HealthRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return f"{address}: {error.code().name.lower()}"
    return "" if health.ready else health.error or f"{address} is not ready"


def port_of(env: Mapping[str, str], *, default: int) -> int:
    """As the process itself reads it: what a cluster injects (tcp://…) is no port."""
    text = env.get("QUIRE_PORT", "")
    return default if not text or SERVICE_LINK.fullmatch(text) else int(text)


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    match list(argv):
        case ["router", *rest] if rest in ([], ["--live"]):
            reason = check_router(port_of(env, default=ROUTER_PORT), live=bool(rest))
        case ["worker"]:
            reason = check_worker(port_of(env, default=WORKER_PORT))
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    if reason:
        print(reason, file=sys.stderr)
    return 1 if reason else 0


def _reason(body: bytes) -> str:
    try:
        return str(json.loads(body)["reason"])
    except (ValueError, KeyError, TypeError):
        return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
