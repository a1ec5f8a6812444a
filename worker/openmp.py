"""How OpenMP's helper threads wait between parallel regions.

By default they spin for milliseconds. A worker shares its cores with the router and its clients, and a
spinning helper takes the core from just those who would send the next step; worse, the system then counts
it as busy and lets it wait a whole time slice when its turn matters. Measured on 2 busy cores: a decode
step of 32 rows takes 1,500 ms with spinning helpers and 250 ms with waiting ones.
"""

from __future__ import annotations

import os

_SETTINGS = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}
"""A short spin (some microseconds) bridges two regions that follow one another."""


def set_wait_policy() -> None:
    """To be called before torch is imported, which reads the environment once. What the user set stays."""
    if not any(name in os.environ for name in _SETTINGS):
        os.environ.update(_SETTINGS)
