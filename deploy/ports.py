"""Is the wanted TCP port free?"""

from __future__ import annotations

import errno
import socket

from deploy.errors import PortTakenError


def check_free(host: str, port: int) -> None:
    """Raises PortTakenError when `port` can't be bound on `host`. Port 0 always can."""
    try:
        # The same address that the server will choose where a name has several.
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # As servers do: a connection that lingers from the last run does not occupy a port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortTakenError(
                f"port {port} on {host} is taken by another program: choose another with --port "
                f"(make run PORT={port + 1 if port < 65_535 else 8000})"
            ) from error
        raise PortTakenError(
            f"can't listen on {host} port {port} (--host, --port): {error.strerror or error}"
        ) from error
    except UnicodeError as error:
        raise PortTakenError(f"--host is {host!r}: that is no address or host name") from error
