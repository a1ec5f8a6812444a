from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from router.config import RouterConfig
from settings.errors import ConfigError
from settings.flag import flag
from settings.load import load, settings_of
from worker.config import WorkerConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    port: int = flag(1, help="A port.", env=("PORT", "HOSTNAME"))
    ratio: float = flag(0.5, help="A ratio.")
    cache: bool = flag(True, help="A switch.", env=("USE_CACHE",))
    limit: int | None = flag(None, help="A limit.")
    names: tuple[str, ...] = flag((), help="A list.")
    folder: Path | None = flag(None, help="A folder.")
    mode: str = flag("a", help="A choice.", choices=("a", "b"))
    key: int = flag(0, help="A secret.", secret=True)


def test_defaults_without_anything() -> None:
    assert load(Sample, env={}, args={}) == Sample()


def test_each_type_is_read() -> None:
    env = {
        "QUIRE_PORT": "80",
        "QUIRE_RATIO": "1e-1",
        "QUIRE_CACHE": "Off",
        "QUIRE_LIMIT": "7",
        "QUIRE_NAMES": "x, y,,",
        "QUIRE_FOLDER": "/tmp",
        "QUIRE_MODE": "b",
    }
    assert load(Sample, env=env, args={}) == Sample(
        port=80, ratio=0.1, cache=False, limit=7, names=("x", "y"), folder=Path("/tmp"), mode="b"
    )


def test_command_line_over_own_name_over_other_names() -> None:
    env = {"PORT": "3", "QUIRE_PORT": "2"}
    assert load(Sample, env=env, args={"port": "4"}).port == 4
    assert load(Sample, env=env, args={"port": None}).port == 2
    assert load(Sample, env={"PORT": "3"}, args={}).port == 3


def test_an_empty_variable_is_not_set_and_none_is_none() -> None:
    assert load(Sample, env={"QUIRE_PORT": "", "PORT": "5"}, args={}).port == 5
    assert load(Sample, env={}, args={"limit": "none"}).limit is None


def test_hostname_is_never_read() -> None:
    assert load(Sample, env={"HOSTNAME": "99"}, args={}).port == 1


@pytest.mark.parametrize(
    ("env", "args", "message"),
    [
        ({}, {"port": "x"}, "--port is 'x', but must be a whole number"),
        ({"PORT": "1.5"}, {}, "--port is '1.5' (from PORT), but must be a whole number"),
        ({"QUIRE_RATIO": "half"}, {}, "--ratio is 'half' (from QUIRE_RATIO), but must be a number"),
        ({"USE_CACHE": "maybe"}, {}, "--cache is 'maybe' (from USE_CACHE), but must be true or false"),
        ({}, {"mode": "c"}, "--mode is 'c', but must be one of: a, b"),
        ({}, {"key": "hunter2"}, "--key is (secret), but must be a whole number"),
    ],
)
def test_a_bad_value_names_flag_value_source_and_what_is_allowed(
    env: dict[str, str], args: dict[str, str | None], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(Sample, env=env, args=args)
    assert str(caught.value) == message


@pytest.mark.parametrize("config", [RouterConfig, WorkerConfig])
def test_every_field_of_the_real_configurations_can_be_set(config: type) -> None:
    settings = settings_of(config)
    assert settings
    for setting in settings:
        assert setting.flag.help.strip().endswith((".", ")")), f"{setting.option}: help is a sentence"
        shown = setting.default
        text = ",".join(shown) if isinstance(shown, tuple) else "" if shown is None else str(shown)
        value = getattr(load(config, env={}, args={setting.name: text}), setting.name)
        assert value == setting.default


def test_tgi_names_are_accepted() -> None:
    env = {"MAX_BATCH_PREFILL_TOKENS": "128", "WAITING_SERVED_RATIO": "1.2", "PREFIX_CACHING": "0"}
    config = load(RouterConfig, env=env, args={})
    assert config.max_batch_prefill_tokens == 128
    assert config.waiting_served_ratio == 1.2
    assert config.prefix_caching is False


def test_a_port_that_a_cluster_injects_is_passed_over_with_a_warning() -> None:
    warnings: list[str] = []
    env = {"QUIRE_PORT": "tcp://10.96.0.7:8000", "PORT": "9000"}
    assert load(RouterConfig, env=env, args={}, warn=warnings.append).port == 9000
    assert len(warnings) == 1
    assert "QUIRE_PORT=tcp://10.96.0.7:8000" in warnings[0]
    assert "enableServiceLinks" in warnings[0]
    assert load(RouterConfig, env=env, args={"port": "7"}, warn=warnings.append).port == 7
    assert len(warnings) == 1, "the command line decides before the environment is asked"


def test_a_port_that_a_person_got_wrong_is_still_an_error() -> None:
    with pytest.raises(ConfigError, match=r"--port is '10\.0\.0\.1:8000'"):
        load(RouterConfig, env={"QUIRE_PORT": "10.0.0.1:8000"}, args={})
