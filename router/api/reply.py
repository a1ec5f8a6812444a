"""JSON responses of the small routes."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response


def json_reply(value: Any, *, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")
