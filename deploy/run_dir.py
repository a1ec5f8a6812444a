"""A private folder for the sockets of one launch, and the removal of those that a killed launch left."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "quire-"
_MAX_BASE = 60
"""A socket's path is limited to 107 bytes: with a longer base folder /tmp is used."""


@contextlib.contextmanager
def run_dir() -> Iterator[Path]:
    """A new folder that only this user can enter; removed at the end."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    if len(base) > _MAX_BASE or not os.access(base, os.W_OK):
        base = "/tmp"
    _sweep(Path(base))
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=base))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(base: Path) -> None:
    """Removes this user's folders whose launcher no longer runs."""
    for folder in base.glob(f"{_PREFIX}[0-9]*-*"):
        pid = folder.name.removeprefix(_PREFIX).split("-")[0]
        with contextlib.suppress(OSError):
            if pid.isdigit() and folder.stat().st_uid == os.getuid() and not _runs(int(pid)):
                shutil.rmtree(folder, ignore_errors=True)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
