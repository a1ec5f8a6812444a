"""Command-line options generated from configuration classes, so that a setting is declared once."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Collection, Mapping
from typing import Any, get_args

import typer

from settings.load import Setting, settings_of

_PARAMETER = inspect.Parameter


def with_settings(
    command: Callable[..., None], configs: Mapping[type[Any], Collection[str]]
) -> Callable[..., None]:
    """A function for typer: `command`'s own options, then one for each setting.

    `configs` maps each class to those of its fields that the command decides itself. A field that two
    classes share is one option for both, described as the first has it. `command` takes the settings as
    its parameter `settings`: a dict of field name to text, None where the command line says nothing.
    """
    fields: dict[str, Setting] = {}
    for config, decided in configs.items():
        for setting in settings_of(config):
            if setting.name not in decided:
                fields.setdefault(setting.name, setting)

    @functools.wraps(command)
    def run(**given: Any) -> None:
        settings = {name: _text(given.pop(name)) for name in fields}
        command(settings=settings, **given)

    own = inspect.signature(command, eval_str=True).parameters
    parameters = [parameter for name, parameter in own.items() if name != "settings"]
    parameters += [_parameter(setting) for setting in fields.values()]
    parameters = [parameter.replace(kind=_PARAMETER.KEYWORD_ONLY) for parameter in parameters]
    del run.__wrapped__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # read by typer
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def as_arguments(settings: Mapping[str, str | None], config: type[Any]) -> list[str]:
    """The given settings that `config` knows, as a command line for another process. Secrets are left out:
    a command line is for all to see; `secrets_as_environment` has them."""
    arguments = []
    for setting in settings_of(config):
        value = settings.get(setting.name)
        if value is None or setting.flag.secret:
            continue
        if _is_switch(setting):
            arguments.append(setting.option if value == "true" else _off(setting))
        else:
            arguments.append(f"{setting.option}={value}")
    return arguments


def secrets_as_environment(settings: Mapping[str, str | None], config: type[Any]) -> dict[str, str]:
    """The given secret settings that `config` knows, under their environment names."""
    return {
        setting.env_names[0]: value
        for setting in settings_of(config)
        if setting.flag.secret and (value := settings.get(setting.name)) is not None
    }


def shown_default(setting: Setting) -> str:
    """The default as help and documentation show it."""
    default = setting.default
    if default is None or default in ("", ()):
        return "unset"
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    return str(default)


def _parameter(setting: Setting) -> inspect.Parameter:
    unit = f" [{setting.flag.unit}]" if setting.flag.unit else ""
    choices = f" ({', '.join(setting.flag.choices)})" if setting.flag.choices else ""
    text = f"{setting.flag.help}{choices}{unit} Default: {shown_default(setting)}."
    names = [f"{setting.option}/{_off(setting)}"] if _is_switch(setting) else [setting.option]
    hint: Any = bool | None if _is_switch(setting) else str | None
    option = typer.Option(None, *names, help=text, show_default=False)
    return _PARAMETER(setting.name, _PARAMETER.KEYWORD_ONLY, default=option, annotation=hint)


def _is_switch(setting: Setting) -> bool:
    hint = setting.hint
    return hint is bool or (isinstance(hint, types.UnionType) and bool in get_args(hint))


def _off(setting: Setting) -> str:
    return "--no-" + setting.option.removeprefix("--")


def _text(value: Any) -> str | None:
    if isinstance(value, bool):
        return "true" if value else "false"
    return None if value is None else str(value)
