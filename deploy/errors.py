"""The launcher's errors. Each message is shown to the user as it stands."""

from __future__ import annotations


class DeployError(Exception):
    """Base of what the launcher raises on purpose."""


class StartFailedError(DeployError):
    """A process could not be brought up; the message says which and why."""


class PortTakenError(DeployError):
    """The HTTP port can't be bound."""


class NoGpuError(DeployError):
    """No GPU can be had for a worker; the message says which there are and who holds them."""
