"""The child's side of supervision: it dies with its supervisor and reports when it is ready."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from typing import NoReturn

PARENT_ENV = "QUIRE_SUPERVISOR_PID"
REPORT_ENV = "QUIRE_REPORT_FD"
READY = b"ready\n"
_PR_SET_PDEATHSIG = 1


def die_with_supervisor(env: Mapping[str, str] = os.environ) -> None:
    """Has the kernel kill this process when its supervisor is gone, even by kill -9. Without one: nothing."""
    parent = env.get(PARENT_ENV)
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The supervisor may have died between the fork and the line above.
    if os.getppid() != int(parent):
        os._exit(1)


def leave(code: int) -> NoReturn:
    """Ends the process at once. What it served is closed by now; taking the interpreter apart, torch's
    libraries above all, would only keep the user waiting."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def report_ready(env: Mapping[str, str] = os.environ) -> None:
    """Tells the supervisor, once. Never raises: a supervisor that is gone takes this process along."""
    fd = env.get(REPORT_ENV)
    if fd is None:
        return
    try:
        os.write(int(fd), READY)
        os.close(int(fd))
    except OSError:
        return
