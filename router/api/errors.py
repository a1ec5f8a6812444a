"""What goes wrong on the API's side, in OpenAI's error shape."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from router.ipc.messages import ErrorInfo

JSON_HEADERS = (b"content-type", b"application/json")
_BODY_UNREAD = frozenset({408, 413})
"""The rest of the request would be taken for the next one, or waited for without end."""


class ApiError(Exception):
    """Ends a request before its answer began. Carries what the client is told, status included."""

    def __init__(self, info: ErrorInfo) -> None:
        super().__init__(info.message)
        self.info = info


def invalid(
    message: str, *, param: str | None = None, code: str | None = None, status: int = 400
) -> ApiError:
    """The request itself is at fault: `param` is the field's path."""
    return ApiError(
        ErrorInfo(status=status, type="invalid_request_error", message=message, param=param, code=code)
    )


def unavailable(message: str, *, retry_after_s: float | None = 1.0) -> ApiError:
    return ApiError(
        ErrorInfo(
            status=503, type="server_error", message=message, code="unavailable", retry_after_s=retry_after_s
        )
    )


def internal() -> ErrorInfo:
    """For faults of our own, whose details belong in the log."""
    return ErrorInfo(status=500, type="server_error", message="The server failed on this request.")


def error_value(info: ErrorInfo) -> dict[str, Any]:
    return {"error": {"message": info.message, "type": info.type, "param": info.param, "code": info.code}}


def error_body(info: ErrorInfo) -> bytes:
    return msgspec.json.encode(error_value(info))


def error_headers(info: ErrorInfo) -> list[tuple[bytes, bytes]]:
    headers = [JSON_HEADERS]
    if info.retry_after_s is not None:
        headers.append((b"retry-after", str(max(1, math.ceil(info.retry_after_s))).encode()))
    if info.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if info.status in _BODY_UNREAD:
        headers.append((b"connection", b"close"))
    return headers


class ErrorStyle(Protocol):
    """How a route writes what went wrong."""

    def status(self, info: ErrorInfo) -> int: ...

    def body(self, info: ErrorInfo) -> bytes: ...


@dataclass(frozen=True, slots=True)
class OpenAIErrors:
    def status(self, info: ErrorInfo) -> int:
        return info.status

    def body(self, info: ErrorInfo) -> bytes:
        return error_body(info)


OPENAI_ERRORS = OpenAIErrors()
