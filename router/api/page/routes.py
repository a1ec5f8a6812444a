"""GET / and /page/…: the page for people, a few files that are the same for everybody.

They hold nothing of the server's, so they need no key; what the page asks for afterwards does.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from router.api.errors import invalid
from router.api.health import HealthRoutes

_FOLDER = Path(__file__).parent / "static"
_INDEX = "index.html"
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    # Nothing from elsewhere, nothing inline, no text that becomes markup.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
        " require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # A new version of the server brings a new page: browsers ask each time whether theirs is still right.
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    body: bytes
    media_type: str
    etag: str


def read_files(folder: Path = _FOLDER) -> dict[str, StaticFile]:
    """By name. Files of another kind than the page is made of are left out."""
    return {
        path.name: StaticFile(
            body=(body := path.read_bytes()),
            media_type=_TYPES[path.suffix],
            etag=f'"{hashlib.sha256(body).hexdigest()[:32]}"',
        )
        for path in sorted(folder.iterdir())
        if path.suffix in _TYPES
    }


class PageRoutes:
    """The files are read once: a request can name one of them and nothing else."""

    def __init__(self, health: HealthRoutes) -> None:
        self._health = health
        self._files = read_files()

    async def index(self, request: Request) -> Response:
        """The page for browsers; for all others what /health says, as probes of TGI's expect it there."""
        if "text/html" in request.headers.get("accept", ""):
            response = self._serve(request, _INDEX)
        else:
            response = await self._health.ready(request)
        response.headers["vary"] = "Accept"
        return response

    async def file(self, request: Request) -> Response:
        name: str = request.path_params["name"]
        if name not in self._files:
            raise invalid(f"The page has no file '{name[:80]}'.", code="unknown_url", status=404)
        return self._serve(request, name)

    def _serve(self, request: Request, name: str) -> Response:
        file = self._files[name]
        headers = {**_HEADERS, "etag": file.etag}
        if file.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(file.body, media_type=file.media_type, headers=headers)
