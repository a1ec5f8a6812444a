"""Is the wanted TCP port free?"""

from __future__ import annotations

import errno
import socket

from deploy.errors import PortTakenError


def check_free(host: str, port: int) -> None:
    """Raises PortTakenError when `port` can't be bound on `host`. Port 0 always can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: a connection that lingers from the last run does not occupy a port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortTakenError(
                    f"port {port} on {host} is taken by another program: choose another with --port "
                    f"(make run PORT={port + 1})"
                ) from error
            raise PortTakenError(
                f"can't listen on {host} port {port} (--host, --port): {error.strerror or error}"
            ) from error
