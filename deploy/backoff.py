"""When a process that died is started again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Backoff:
    """Doubles the pause with every death; a process that lived long enough starts from the first pause."""

    first_s: float = 0.5
    most_s: float = 30.0
    settled_s: float = 60.0
    """A life of at least this long forgives what was before."""
    n_deaths: int = 0

    def after_death(self, *, lived_s: float) -> float:
        """Seconds until the next start."""
        if lived_s >= self.settled_s:
            self.n_deaths = 0
        pause_s = min(self.first_s * 2.0 ** min(self.n_deaths, 30), self.most_s)
        self.n_deaths += 1
        return pause_s
