"""One worker, one GPU: each worker takes a free one by itself, without a coordinator.

A claim is an exclusive lock (flock) on a file named after the device, in a folder that all workers of a host
share: a volume, when they run in containers. The kernel gives the lock back when its holder ends, however it
ends; there is nothing to clean up and nothing that can go stale. The files stay, and say who holds them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.errors import NoGpuError
from deploy.gpu_list import Gpu, GpuList, allowed_gpus
from settings.flag import flag

DEFAULT_FOLDER = "/dev/shm/quire-gpus"
"""Every user's, gone at reboot, and no cleaner of old files comes there."""
_MAX_NOTE = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimConfig:
    """A worker's settings that concern its GPU. Kept out of WorkerConfig: by the time a worker reads its
    settings, the choice has been made."""

    claim_gpu: bool = flag(
        False,
        help="Take one free NVIDIA GPU for this worker alone and compute on it, so that workers can be "
        "started side by side.",
    )
    gpu_lock_dir: str = flag(
        DEFAULT_FOLDER,
        help="Folder with the locks of claimed GPUs. All workers of a host must share it (in containers, "
        "a volume).",
    )


@dataclass(frozen=True, slots=True)
class Claim:
    """Holds while this object's descriptor is open: until `release`, or the end of the process and of every
    child that it forked (which may compute on the device too)."""

    gpu: Gpu
    fd: int

    def release(self) -> None:
        os.close(self.fd)


def claim_gpu(
    config: ClaimConfig, *, present: Sequence[Gpu], env: MutableMapping[str, str]
) -> tuple[Claim, GpuList]:
    """Claims a free device and shows CUDA only that one, through `env`. To be called before anything loads
    CUDA. Raises NoGpuError, which says what is there and who holds it."""
    found = allowed_gpus(present, env)
    claim = claim_first(found, folder=Path(config.gpu_lock_dir))
    env["CUDA_VISIBLE_DEVICES"] = claim.gpu.uuid
    return claim, found


def claim_first(found: GpuList, *, folder: Path) -> Claim:
    """The first of the list that nobody holds."""
    if not found.gpus:
        raise NoGpuError(
            f"--claim-gpu is on, but there is no NVIDIA GPU for this worker ({found.why}). A container needs "
            "`--gpus all` (docker) or QUIRE_DEVICE=gpu (compose), and the host NVIDIA's container toolkit; "
            "without a GPU leave --claim-gpu (QUIRE_CLAIM_GPU) off"
        )
    _make_folder(folder)
    holders = []
    for gpu in found.gpus:
        fd = _open(_lock_path(folder, gpu))
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holders.append(f"{gpu}: {_note(fd)}")
            os.close(fd)
            continue
        except OSError as error:
            os.close(fd)
            raise NoGpuError(f"can't lock in {folder} (--gpu-lock-dir): {error.strerror}") from error
        _write_note(fd, f"process {os.getpid()} on {socket.gethostname()}")
        return Claim(gpu=gpu, fd=fd)
    n = len(holders)
    held = "the only one is" if n == 1 else f"all {n} are"
    raise NoGpuError(
        f"no GPU is left for this worker: {held} held ({found.why}). "
        f"{'; '.join(holders)}. Start fewer workers (`--workers`, `--scale worker={n}`), or allow more GPUs"
    )


def wants_gpu(attention: str, *, has_flashinfer: bool) -> bool:
    """Whether a worker with these settings computes on a GPU where there is one."""
    return attention == "flashinfer" or (attention == "auto" and has_flashinfer)


def check_enough(found: GpuList, *, n_workers: int) -> None:
    """Before a launch, so that nothing half-started stays behind. Raises NoGpuError."""
    n = len(found.gpus)
    if n_workers > n:
        there = "is 1 GPU" if n == 1 else f"are {n} GPUs"
        raise NoGpuError(
            f"--workers is {n_workers}, but there {there} ({found.why}) and "
            f"each worker needs one: at most {n} fits; --attention torch computes on the CPU instead"
        )


def _lock_path(folder: Path, gpu: Gpu) -> Path:
    # An id comes from the driver or the environment: it must not name a file elsewhere.
    return folder / (re.sub(r"[^A-Za-z0-9-]", "_", gpu.uuid) + ".lock")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o777, parents=True)
        folder.chmod(0o1777)
    except FileExistsError:
        return
    except OSError as error:
        raise NoGpuError(f"can't make the folder {folder} (--gpu-lock-dir): {error.strerror}") from error


def _open(path: Path) -> int:
    """A file that another user made is opened as it is: in a sticky folder O_CREAT would be refused."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    for _ in range(3):
        try:
            return os.open(path, os.O_RDWR | flags)
        except PermissionError:
            with contextlib.suppress(OSError):
                return os.open(path, os.O_RDONLY | flags)
            break
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | flags, 0o666)
                os.fchmod(fd, 0o666)
                return fd
        except OSError as error:
            raise NoGpuError(f"can't open {path} (--gpu-lock-dir): {error.strerror}") from error
    raise NoGpuError(f"can't open {path} (--gpu-lock-dir): it belongs to another user")


def _note(fd: int) -> str:
    try:
        return os.pread(fd, _MAX_NOTE, 0).decode(errors="replace").strip() or "held"
    except OSError:
        return "held"


def _write_note(fd: int, text: str) -> None:
    """Only for people; a file of another user can't be written, and needn't be."""
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{text}\n".encode(), 0)
