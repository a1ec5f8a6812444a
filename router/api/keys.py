"""The API keys that clients may use: those of the settings and those of a file, which is read again when it
changes."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import structlog

from checkpoint.paths import user_path
from router.api.config import ApiConfig
from settings.errors import ConfigError

_MAX_FILE_BYTES = 1 << 20
_LOOK_EVERY_S = 1.0
"""A changed file counts after so long at the latest."""

_log = structlog.get_logger("quire.api")
_Stamp = tuple[int, int, int]


class ApiKeys:
    """Knows the keys by their digests alone. A file that can't be read any more keeps the keys that were read
    from it last; an empty one lets nobody in."""

    def __init__(self, config: ApiConfig, *, clock: Callable[[], float]) -> None:
        """Raises ConfigError when the file can't be read or holds no key."""
        self._clock = clock
        self._given = _digests(key.encode() for key in config.api_keys if key)
        self._path = None if config.api_key_file is None else user_path(config.api_key_file)
        self._read: tuple[bytes, ...] = ()
        self._stamp: _Stamp | None = None
        self._trouble = ""
        self._looked_s = clock()
        if self._path is not None:
            self._stamp = _stamp_of(self._path)
            self._read = _digests(read_key_file(self._path))
            if not self._read:
                raise ConfigError(f"--api-key-file {self._path} holds no key: one a line is wanted")
        self.required = bool(self._given) or self._path is not None
        """Whether clients must send one at all."""

    def fits(self, key: bytes) -> bool:
        """Every key is compared, each in constant time: timing tells nothing of which came close."""
        self._look()
        digest = _digest(key)
        return bool(sum(hmac.compare_digest(digest, other) for other in (*self._given, *self._read)))

    def _look(self) -> None:
        now = self._clock()
        if self._path is None or now - self._looked_s < _LOOK_EVERY_S:
            return
        self._looked_s = now
        try:
            stamp = _stamp_of(self._path)
            if stamp != self._stamp:
                self._read = _digests(read_key_file(self._path))
                self._stamp, self._trouble = stamp, ""
                _log.info("API keys read again", n_keys=len(self._read))
        except ConfigError as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                _log.warning("API keys stay as they were", error=self._trouble)


def read_key_file(path: Path) -> list[bytes]:
    """One key a line; empty lines and those that begin with # are none. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise _unreadable(path, error) from error
    if len(data) > _MAX_FILE_BYTES:
        raise ConfigError(f"--api-key-file {path} is larger than {_MAX_FILE_BYTES} bytes")
    lines = (line.strip() for line in data.removeprefix(b"\xef\xbb\xbf").splitlines())
    return [line for line in lines if line and not line.startswith(b"#")]


def _stamp_of(path: Path) -> _Stamp:
    try:
        found = os.stat(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    return found.st_mtime_ns, found.st_size, found.st_ino


def _unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"--api-key-file {path} can't be read: {error.strerror or error}")


def _digest(key: bytes) -> bytes:
    """So that their lengths tell nothing either."""
    return hashlib.sha256(key).digest()


def _digests(keys: Iterable[bytes]) -> tuple[bytes, ...]:
    return tuple(dict.fromkeys(map(_digest, keys)))
