"""A request body from bytes to a typed struct, with errors that name the field."""

from __future__ import annotations

import asyncio
import re
from typing import Any, TypeVar

import msgspec
import structlog
from starlette.types import Receive

from router.api.config import ApiConfig
from router.api.errors import invalid

T = TypeVar("T", bound=msgspec.Struct)

_PATH = re.compile(r"^(?P<what>.*) - at `(?P<path>[^`]*)`$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(?P<name>[^`]*)`")
_NESTING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[{}\[\]]', re.DOTALL)
"""Strings as a whole, and brackets."""
_MAX_DEPTH = 200
_MAX_KNOWN_UNKNOWNS = 256

_log = structlog.get_logger("quire.api")


class ClientGoneError(Exception):
    """The client closed the connection before its request was complete."""


async def read_body(receive: Receive, limits: ApiConfig) -> bytes:
    """Raises ApiError (413) past the limit of bytes, (408) past that of time, and ClientGoneError when the
    client leaves in the middle."""
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            return await _whole_body(receive, max_body_bytes=limits.max_body_bytes)
    except TimeoutError:
        raise invalid(
            f"The request body was not complete within {limits.body_timeout_s:g} s (body_timeout_s).",
            code="request_timeout",
            status=408,
        ) from None


async def _whole_body(receive: Receive, *, max_body_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        part = message.get("body", b"")
        size += len(part)
        if size > max_body_bytes:
            raise invalid(
                f"The request body is larger than {max_body_bytes} bytes (max_body_bytes).",
                code="request_too_large",
                status=413,
            )
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


class BodyDecoder:
    """Remembers which unknown fields were told already: each is logged once per process."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._keys = msgspec.json.Decoder(dict[str, msgspec.Raw])

    def decode(self, body: bytes, kind: type[T]) -> T:
        """Raises ApiError (400) whose `param` is the path of the field at fault."""
        if is_too_deep(body):
            raise invalid(
                f"The JSON of the request body is nested deeper than {_MAX_DEPTH} levels.", code="too_deep"
            )
        try:
            fields = self._keys.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if isinstance(error, msgspec.ValidationError):
                raise invalid("The request body must be a JSON object.") from error
            raise invalid(f"The request body is not valid JSON: {error}") from error
        self._note_unknown(fields, kind)
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.ValidationError as error:
            raise _field_error(error) from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise invalid(f"The request body is not valid JSON: {error}") from error

    def _note_unknown(self, fields: dict[str, Any], kind: type[msgspec.Struct]) -> None:
        unknown = fields.keys() - set(kind.__struct_fields__) - self._seen
        for name in sorted(unknown):
            if len(self._seen) < _MAX_KNOWN_UNKNOWNS:
                self._seen.add(name)
                _log.info("unknown request field ignored", field=name[:100], body=kind.__name__)


def is_too_deep(body: bytes) -> bool:
    """What walks through a body calls itself for each level."""
    if body.count(b"{") + body.count(b"[") <= _MAX_DEPTH:
        return False
    depth = 0
    for match in _NESTING.finditer(body):
        first = match[0][:1]
        if first in b"{[":
            depth += 1
            if depth > _MAX_DEPTH:
                return True
        elif first in b"}]":
            depth -= 1
    return False


def _field_error(error: msgspec.ValidationError) -> Exception:
    text = str(error)
    missing = _MISSING.search(text)
    match = _PATH.match(text)
    path = match["path"].removeprefix("$").removeprefix(".").removesuffix("[...]") if match else ""
    what = match["what"] if match else text
    if missing:
        path = f"{path}.{missing['name']}" if path else missing["name"]
        return invalid(f"Missing required field: '{path}'.", param=path, code="missing_required_parameter")
    shown = f" for '{path}'" if path else ""
    return invalid(f"Invalid value{shown}: {what}.", param=path or None, code="invalid_type")
