from __future__ import annotations

import errno
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from deploy import cli
from deploy.errors import StartFailedError
from deploy.flags import as_arguments, secrets_as_environment, with_settings
from settings.errors import ConfigError
from settings.flag import flag


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    port: int = flag(1, help="A port.")
    fast_path: bool = flag(True, help="A switch.")
    names: tuple[str, ...] = flag(("a", "b"), help="A list.")
    key: str = flag("", help="A secret.", secret=True)


@pytest.fixture
def parse() -> Any:
    """Parses a command line of a command with the settings of Sample."""

    def run(*line: str) -> tuple[Mapping[str, str | None], int]:
        got: list[tuple[Mapping[str, str | None], int]] = []

        def command(*, settings: dict[str, str | None], n: int = 1) -> None:
            got.append((settings, n))

        app = typer.Typer(add_completion=False)
        app.command()(with_settings(command, {Sample: ("names",)}))
        result = CliRunner().invoke(app, line)
        assert result.exit_code == 0, result.output
        return got[0]

    return run


def test_settings_become_options_and_the_commands_own_stay(parse: Any) -> None:
    settings, n = parse("--port", "x9", "--no-fast-path", "--n", "3")
    assert settings == {"port": "x9", "fast_path": "false", "key": None}
    assert n == 3


def test_arguments_for_another_process_round_trip_without_secrets(parse: Any) -> None:
    given = {"port": "5", "fast_path": "true", "key": "hunter2", "unknown": "1"}
    assert as_arguments(given, Sample) == ["--port=5", "--fast-path"]
    assert secrets_as_environment(given, Sample) == {"QUIRE_KEY": "hunter2"}
    settings, _ = parse(*as_arguments(given, Sample))
    assert settings == {"port": "5", "fast_path": "true", "key": None}


def _main(monkeypatch: pytest.MonkeyPatch, *line: str) -> int:
    monkeypatch.setattr(sys, "argv", ["quire", *line])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.mark.parametrize(
    "command", ["serve", "router", "scheduler", "api", "worker", "chat", "fetch", "info"]
)
def test_every_command_has_help(command: str) -> None:
    result = CliRunner().invoke(cli.app, [command, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        (("serve", "--port", "http"), 2, "error: --port is 'http', but must be a whole number"),
        (("serve", "--port", "70000"), 2, "error: --port is 70000, but must be from 0 to 65535"),
        (("serve", "--block-size", "0"), 2, "error: --block-size is 0, but must be from 1 to 4096"),
        (("worker", "--attention", "x"), 2, "error: --attention is 'x', but must be one of"),
        (("fetch", "./nowhere"), 1, "error: no such model folder or file: ./nowhere"),
        (("info", "http://127.0.0.1:1"), 1, "error: http://127.0.0.1:1: "),
        (("chat", "http://127.0.0.1:1"), 1, "error: no server answers at http://127.0.0.1:1"),
        (("chat", "http://127.0.0.1:x"), 1, "error: http://127.0.0.1:x: Invalid port"),
        (("chat", "--api-key", "schlüssel"), 1, "error: the API key (--api-key, QUIRE_API_KEY) holds"),
        (("info", "--api-key", "schlüssel"), 1, "error: http://127.0.0.1:8000: 'ascii' codec can't encode"),
    ],
)
def test_a_mistake_is_one_line_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: tuple[str, ...],
    code: int,
    words: str,
) -> None:
    assert _main(monkeypatch, *line) == code
    shown = capsys.readouterr().err
    assert shown.startswith(words)
    assert len(shown.splitlines()) == 1


def test_a_programming_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "app", broken)
    with pytest.raises(ZeroDivisionError):
        cli.main()


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "error: No space left on device\n"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), "error: Permission denied: /x\n"),
    ],
)
def test_what_the_system_refuses_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: OSError, shown: str
) -> None:
    def broken() -> None:
        raise error

    monkeypatch.setattr(cli, "app", broken)
    assert _main(monkeypatch) == 1
    assert capsys.readouterr().err == shown


def test_config_errors_exit_with_two(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise ConfigError("--x is 1")

    monkeypatch.setattr(cli, "app", refuse)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2


EARLY = """
import os, signal, sys

class Ctrl_C:
    def find_spec(self, name, path, target=None):
        if name == "deploy.cli":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Ctrl_C())
from deploy.__main__ import main
main()
"""


def test_ctrl_c_while_the_command_is_still_being_read_is_silent() -> None:
    done = subprocess.run([sys.executable, "-c", EARLY], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_a_setting_that_a_process_found_unusable_ends_with_code_2(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise StartFailedError("worker ended with code 2: no", exit_code=2)

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as raised:
        cli.main()
    assert raised.value.code == 2
