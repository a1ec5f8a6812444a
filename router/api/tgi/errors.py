"""TGI's error shape: a message, and a type by which its clients choose an exception."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from router.ipc.messages import ErrorInfo

TGI_PATHS = frozenset({"/", "/generate", "/generate_stream", "/invocations", "/chat_tokenize"})
"""`/tokenize` speaks both dialects: the body decides."""

_STATUS = {400: 422, 500: 424, 502: 424}
_TYPES = {
    408: "timeout",
    401: "authentication",
    403: "authentication",
    424: "generation",
    429: "overloaded",
    503: "unavailable",
    504: "timeout",
}


@dataclass(frozen=True, slots=True)
class TgiErrors:
    """An ErrorStyle: bad input is 422, a failed generation 424; other statuses stay."""

    def status(self, info: ErrorInfo) -> int:
        return _STATUS.get(info.status, info.status)

    def body(self, info: ErrorInfo) -> bytes:
        error_type = _TYPES.get(self.status(info), "validation")
        return msgspec.json.encode({"error": info.message, "error_type": error_type})


TGI_ERRORS = TgiErrors()
