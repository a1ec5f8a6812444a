"""How many CPUs this process may use: those it is bound to, or less when its container has a quota.

Sources: the affinity mask; cgroup v2 (cpu.max) and v1 (cpu.cfs_quota_us, cpu.cfs_period_us). torch looks at
the mask alone and would start threads that wait for each other's share of the quota.
"""

from __future__ import annotations

import os
from pathlib import Path


def host_cpus(root: Path = Path("/")) -> int:
    """At least 1. `root` is where sys is looked for."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(root / "sys/fs/cgroup")
    return bound if quota is None else max(1, min(bound, int(quota)))


def _quota(folder: Path) -> float | None:
    """CPUs; None: unlimited, or not to be found."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (folder / "cpu/cpu.cfs_quota_us").read_text()
            period = (folder / "cpu/cpu.cfs_period_us").read_text()
        except OSError:
            return None
    try:
        limit = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None  # "max"
    return limit if limit > 0 else None
