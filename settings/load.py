"""Builds a frozen configuration from the command line, the environment and the defaults, in that order."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

from settings.convert import convert
from settings.errors import ConfigError
from settings.flag import Flag

T = TypeVar("T")

# Containers set HOSTNAME to their own id: it never was an address to listen on.
_NEVER = frozenset({"HOSTNAME"})
# Kubernetes puts QUIRE_PORT=tcp://10.0.0.1:8000 into each pod beside a service called "quire".
SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://\S+:\d+")


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of a configuration class, as a person sees it."""

    name: str
    hint: Any
    default: Any
    flag: Flag

    @property
    def option(self) -> str:
        """Its command-line form: max_batch_size is --max-batch-size."""
        return "--" + self.name.replace("_", "-")

    @property
    def env_names(self) -> tuple[str, ...]:
        """In order of precedence; the first is Quire's own."""
        further = (name for name in self.flag.env if name not in _NEVER)
        return (f"QUIRE_{self.name.upper()}", *further)


def settings_of(cls: type[Any]) -> tuple[Setting, ...]:
    """The fields that carry a `Flag`, in their order."""
    hints = get_type_hints(cls)
    return tuple(
        Setting(name=item.name, hint=hints[item.name], default=item.default, flag=item.metadata["flag"])
        for item in dataclasses.fields(cls)
        if isinstance(item.metadata.get("flag"), Flag)
    )


def _to_stderr(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr, flush=True)


def load(
    cls: type[T],
    *,
    env: Mapping[str, str],
    args: Mapping[str, str | None],
    warn: Callable[[str], None] = _to_stderr,
) -> T:
    """`args` maps field names to what the command line says (None or absent: nothing). `warn` hears of
    variables that were set by a cluster and are passed over.

    Raises `ConfigError` naming the flag, where the value came from, the value and what is allowed.
    """
    values: dict[str, Any] = {}
    for setting in settings_of(cls):
        found = _find(setting, env=env, args=args, warn=warn)
        if found is None:
            continue
        text, source = found
        try:
            values[setting.name] = convert(text, setting.hint)
        except ValueError as error:
            shown = "(secret)" if setting.flag.secret else repr(text)
            raise ConfigError(f"{setting.option} is {shown}{source}, but must be {error}") from None
        _check_choice(setting, text, source)
    return cls(**values)


def _find(
    setting: Setting,
    *,
    env: Mapping[str, str],
    args: Mapping[str, str | None],
    warn: Callable[[str], None],
) -> tuple[str, str] | None:
    text = args.get(setting.name)
    if text is not None:
        return text, ""
    for name in setting.env_names:
        # An empty variable is how a compose file says "not set".
        value = env.get(name)
        if not value:
            continue
        if name.endswith("_PORT") and SERVICE_LINK.fullmatch(value):
            warn(
                f"{name}={value} was set by the cluster (a service link) and is not a setting: ignored. "
                "`enableServiceLinks: false` in the pod's spec keeps it out"
            )
            continue
        return value, f" (from {name})"
    return None


def _check_choice(setting: Setting, text: str, source: str) -> None:
    choices = setting.flag.choices
    if choices and text not in choices:
        raise ConfigError(f"{setting.option} is {text!r}{source}, but must be one of: {', '.join(choices)}")
