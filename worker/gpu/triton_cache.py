"""Triton's compiled kernels as files that can be carried to another host or image.

Triton keeps them under `$TRITON_CACHE_DIR` (else `~/.triton/cache`), one folder a kernel; the list of a
kernel's files holds their whole paths, so it is written anew where they are installed. A kernel is found
again by the same sources, Triton version and GPU architecture, wherever the folder lies.
"""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

PREFIX = "triton"
"""Folder inside an archive."""
_LIST = "__grp__"


def cache_dir() -> Path:
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")


def add_to(archive: tarfile.TarFile, folder: Path) -> int:
    """Puts all finished kernels under `PREFIX`. Returns how many."""
    kernels = [path for path in sorted(folder.glob("*")) if path.is_dir() and any(path.glob(f"{_LIST}*"))]
    for kernel in kernels:
        for file in sorted(path for path in kernel.iterdir() if path.is_file() and path.name != "lock"):
            archive.add(file, arcname=f"{PREFIX}/{kernel.name}/{file.name}")
    return len(kernels)


def install(archive: tarfile.TarFile, folder: Path) -> int:
    """Unpacks what `add_to` packed. Returns how many kernels came."""
    members = [member for member in archive.getmembers() if member.name.startswith(f"{PREFIX}/")]
    for member in members:
        member.name = member.name.removeprefix(f"{PREFIX}/")
        archive.extract(member, folder, filter="data")
    kernels = {member.name.partition("/")[0] for member in members}
    for kernel in kernels:
        for path in (folder / kernel).glob(f"{_LIST}*"):
            _write_paths_anew(path)
    return len(kernels)


def _write_paths_anew(path: Path) -> None:
    content = json.loads(path.read_text())
    content["child_paths"] = {
        name: str(path.parent / Path(old).name) for name, old in content["child_paths"].items()
    }
    path.write_text(json.dumps(content))
