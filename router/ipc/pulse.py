"""Does the other side still answer? It may be stopped, or stuck, behind a connection that looks well."""

from __future__ import annotations

import enum

INTERVAL_S = 1.0
SILENT_AFTER = 5
LOST_AFTER = 60


class Pulse(enum.Enum):
    WELL = enum.auto()
    SILENT = enum.auto()
    """Nothing new is given to it."""
    LOST = enum.auto()
    """What it was given is not waited for any longer."""


class PulseCheck:
    """Counts questions in a row that passed without a sign of life. Questions and not seconds: where the
    whole machine stood still, the other side was not silent."""

    def __init__(self, *, silent_after: int = SILENT_AFTER, lost_after: int = LOST_AFTER) -> None:
        self._silent_after = silent_after
        self._lost_after = lost_after
        self._n_unanswered = 0

    def heard(self) -> None:
        self._n_unanswered = 0

    def ask(self) -> Pulse:
        """Called at each question, before it is sent: what the ones before it have shown."""
        unanswered, self._n_unanswered = self._n_unanswered, self._n_unanswered + 1
        if unanswered >= self._lost_after:
            return Pulse.LOST
        return Pulse.SILENT if unanswered >= self._silent_after else Pulse.WELL
