"""How many connections the system lets one process hold."""

from __future__ import annotations

import contextlib
import resource


def raise_open_files() -> None:
    """To the most that an ordinary process may ask for. A shell's usual limit of 1,024 open files would be
    reached by the default --max-concurrent-requests alone, and then new clients are cut off unheard."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # some systems refuse what they name themselves
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
