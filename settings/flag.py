"""One way to declare a setting: the command line, the environment and docs/configuration.md are built
from the same frozen dataclass fields (`router/config.py`, `worker/config.py`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Flag:
    """What a person should know of one setting."""

    help: str
    unit: str = ""
    effect: str = ""
    """What it does to memory and latency."""
    env: tuple[str, ...] = ()
    """Further environment names that are accepted (TGI's own); `QUIRE_<FIELD NAME>` always is."""
    choices: tuple[str, ...] = ()
    secret: bool = False


def flag(
    default: Any,
    *,
    help: str,
    unit: str = "",
    effect: str = "",
    env: tuple[str, ...] = (),
    choices: tuple[str, ...] = (),
    secret: bool = False,
) -> Any:
    """A dataclass field with a `Flag` in its metadata. Mutable defaults are not supported."""
    meta = Flag(help=help, unit=unit, effect=effect, env=env, choices=choices, secret=secret)
    return field(default=default, metadata={"flag": meta})
