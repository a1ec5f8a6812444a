"""Text from a command line or the environment to the type of a setting."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any, Union, get_args, get_origin

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


def convert(text: str, hint: Any) -> Any:
    """`hint` is a field's annotation: str, int, float, bool, Path, tuple[T, ...] (comma-separated), or one
    of them `| None` (written empty or `none`). Raises ValueError that says what was expected."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    kinds = [option for option in options if option is not types.NoneType]
    if len(kinds) != 1:
        raise TypeError(f"a setting can't have the type {hint}")
    if len(kinds) < len(options) and text.strip().lower() in ("", "none"):
        return None
    return _convert_one(text, kinds[0])


def _convert_one(text: str, kind: Any) -> Any:
    if get_origin(kind) is tuple:
        parts = (part.strip() for part in text.split(","))
        return tuple(_convert_one(part, get_args(kind)[0]) for part in parts if part)
    if kind is str:
        return text
    if kind is Path:
        try:
            return Path(text).expanduser()
        except RuntimeError:
            raise ValueError("a path without ~, for this user has no home folder") from None
    if kind is bool:
        return _bool(text)
    if kind is int:
        try:
            return int(text.strip())
        except ValueError:
            raise ValueError("a whole number") from None
    if kind is float:
        try:
            return float(text.strip())
        except ValueError:
            raise ValueError("a number") from None
    raise TypeError(f"a setting can't have the type {kind}")


def _bool(text: str) -> bool:
    word = text.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError("true or false")
