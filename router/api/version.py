"""The version that answers carry."""

from __future__ import annotations

import importlib.metadata


def _version() -> str:
    try:
        return importlib.metadata.version("quire")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


VERSION = _version()
FINGERPRINT = f"quire-{VERSION}"
"""`system_fingerprint`: TGI's client wants a string there."""
