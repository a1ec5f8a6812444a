"""The worker's tree of errors (`worker.runner.DeviceError` stands beside it, as runners raise it)."""

from __future__ import annotations


class WorkerError(Exception):
    """Base of what the worker raises on purpose."""


class ProtocolError(WorkerError):
    """A step can't be applied to the rows. It ends the stream, not the process; the message names the
    values that contradict each other."""


class RunRefused(WorkerError):  # noqa: N818 (a refusal, not a fault)
    """A Run can't be opened. The message is for the router's log."""


class StartError(WorkerError):
    """The worker can't start, for a reason that its user can mend. The message is shown as it stands."""
