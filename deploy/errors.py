"""The launcher's errors. Each message is shown to the user as it stands."""

from __future__ import annotations


class DeployError(Exception):
    """Base of what the launcher raises on purpose."""


class StartFailedError(DeployError):
    """A process could not be brought up; the message says which and why. `exit_code` is 2 when that process
    found a setting that can't be used, as when the command line is refused at once."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class PortTakenError(DeployError):
    """The HTTP port can't be bound."""


class NoGpuError(DeployError):
    """No GPU can be had for a worker; the message says which there are and who holds them."""
