"""API keys from a file, read again when it changes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from router.api.config import ApiConfig
from router.api.keys import ApiKeys
from settings.errors import ConfigError
from tests.api.conftest import MakeApi
from tests.api.scripted import Script
from tests.api.tiny import ids


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def keys_of(path: Path, clock: Clock, *given: str) -> ApiKeys:
    return ApiKeys(ApiConfig(api_key_file=str(path), api_keys=given), clock=clock)


def write(path: Path, data: bytes) -> None:
    """As deployments do: another file takes the name."""
    fresh = path.with_suffix(".new")
    fresh.write_bytes(data)
    os.replace(fresh, path)


def test_keys_of_file_and_settings(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(b"\xef\xbb\xbf# people\nanna\r\n\n  bert  \n#anton\nschl\xc3\xbcssel")
    keys = keys_of(path, Clock(), "carl")
    assert keys.required
    for key in ("anna", "bert", "carl", "schlüssel"):
        assert keys.fits(key.encode())
    for key in ("", "anton", "#anton", "# people", "ann", "anna\n"):
        assert not keys.fits(key.encode())


def test_changed_file_counts_after_a_second(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys", Clock()
    write(path, b"old\n")
    keys = keys_of(path, clock)
    write(path, b"new\n")
    clock.now = 0.5
    assert keys.fits(b"old")
    clock.now = 1.5
    assert keys.fits(b"new")
    assert not keys.fits(b"old")


def test_lost_file_changes_nothing_an_empty_one_lets_nobody_in(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys", Clock()
    write(path, b"old\n")
    keys = keys_of(path, clock)
    path.unlink()
    clock.now = 2.0
    assert keys.fits(b"old")
    write(path, b"# nobody\n")
    clock.now = 4.0
    assert keys.required
    assert not keys.fits(b"old")
    assert not keys.fits(b"")


@pytest.mark.parametrize("content", [None, b"", b"# none\n", b"x" * (2 << 20)])
def test_file_without_use_is_told_at_the_start(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="--api-key-file"):
        keys_of(path, Clock())


def test_folder_is_no_file_of_keys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        keys_of(tmp_path, Clock())


async def test_over_http(make_api: MakeApi, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(b"sekrit\n")
    api = make_api(Script(ids("ok")), api_key_file=str(path))
    assert (await api.chat()).status_code == 401
    api.http.headers["authorization"] = "Bearer sekrit"
    assert (await api.chat()).status_code == 200
    assert (await api.http.get("/admin/state")).status_code == 200
