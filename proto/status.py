"""How a Run ends: a word in its last message, and in the trailing metadata beside the gRPC status, that tells
a planned end from a crash (a killed process sends neither). The message is the surer way: a router whose
write meets the end of the stream may never be shown the status and the metadata."""

from __future__ import annotations

import enum

RUN_END_KEY = "quire-run-end"
"""Key of the trailing metadata; its value is a `RunEnd`."""


class RunEnd(enum.StrEnum):
    CLIENT = "client"
    """The router closed the stream."""
    SHUTDOWN = "shutdown"
    """UNAVAILABLE: the worker was told to stop. Its last running step was reported."""
    REPLACED = "replaced"
    """ABORTED: a newer generation of the same router took over."""
    HELD = "held"
    """FAILED_PRECONDITION: another router holds the worker; the message names it."""
    STALE = "stale"
    """FAILED_PRECONDITION: the generation is not above that of the live Run of the same router."""
    VERSION = "version"
    """FAILED_PRECONDITION: the protocol versions differ; the message names both."""
    PROTOCOL = "protocol"
    """INVALID_ARGUMENT: a step could not be applied; the message names the values."""
    DEVICE = "device"
    """INTERNAL: the device is lost; the worker process exits."""
    INTERNAL = "internal"
    """INTERNAL: a defect in the worker; the worker process exits."""
