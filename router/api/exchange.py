"""One HTTP request and its response: identity, status, what the access log tells of it."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.types import Message, Send

from router.api.errors import JSON_HEADERS, OPENAI_ERRORS, ErrorStyle, error_headers
from router.ipc.messages import ErrorInfo

Header = tuple[bytes, bytes]


class Exchange:
    """Made by the guard for every request. `send` is the server's own: routes that write often use it as it
    is."""

    __slots__ = (
        "disconnected",
        "error_type",
        "errors",
        "extra_headers",
        "n_output_tokens",
        "n_prompt_tokens",
        "request_id",
        "send",
        "started_s",
        "status",
        "traceparent",
    )

    def __init__(
        self, *, request_id: str, send: Send, started_s: float, errors: ErrorStyle = OPENAI_ERRORS
    ) -> None:
        self.request_id = request_id
        self.send = send
        self.started_s = started_s
        self.errors = errors
        self.status: int | None = None
        self.extra_headers: list[Header] = [(b"x-request-id", request_id.encode("latin-1"))]
        self.n_prompt_tokens: int | None = None
        self.n_output_tokens: int | None = None
        self.error_type: str | None = None
        self.disconnected = False
        self.traceparent = ""
        """Of the request's own span; empty when it is not traced."""

    def start_message(self, status: int, headers: Sequence[Header]) -> Message:
        """The response's first message; notes the status."""
        self.status = status
        return {
            "type": "http.response.start",
            "status": status,
            "headers": [*headers, *self.extra_headers],
        }

    async def respond(self, status: int, body: bytes, headers: Sequence[Header] = (JSON_HEADERS,)) -> None:
        length = (b"content-length", str(len(body)).encode())
        await self.send(self.start_message(status, [*headers, length]))
        await self.send({"type": "http.response.body", "body": body, "more_body": False})

    async def fail(self, info: ErrorInfo) -> None:
        self.error_type = info.code or info.type
        await self.respond(self.errors.status(info), self.errors.body(info), error_headers(info))
