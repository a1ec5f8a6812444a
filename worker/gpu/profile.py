"""What the device does for a while, seen from outside: kernels, their time, and how long it stands idle.

Owns nothing; it watches the whole process, whatever thread launches.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

SHOWN_KERNELS = 24
_NAME_LENGTH = 100


@dataclass(frozen=True, slots=True)
class KernelTime:
    name: str
    count: int
    total_us: float


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    span_us: float
    """From the first kernel's start to the last one's end."""
    busy_us: float
    """Of it, while at least one kernel or copy ran."""
    kernels: tuple[KernelTime, ...]
    """The costliest first. A kernel that was launched early counts its waiting, so the sum may exceed the
    span."""

    @property
    def idle_share(self) -> float:
        return 1 - self.busy_us / self.span_us if self.span_us > 0 else 0.0

    def markdown(self, *, title: str) -> str:
        lines = [
            f"# {title}",
            "",
            f"{self.span_us / 1e6:.2f} s watched, of which the device was idle {self.idle_share:.2%}, "
            "counted between any two kernels. A kernel that was launched early counts its waiting.",
            "",
            "| ms | launches | kernel |",
            "|---|---|---|",
            *(
                f"| {kernel.total_us / 1000:.1f} | {kernel.count} | `{kernel.name[:_NAME_LENGTH]}` |"
                for kernel in self.kernels[:SHOWN_KERNELS]
            ),
        ]
        return "\n".join(lines) + "\n"


def summarise(events: Iterable[tuple[str, float, float]]) -> DeviceProfile:
    """events: (kernel, start, end) in µs, in any order, overlapping or not."""
    times: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    intervals = []
    for name, start, end in events:
        times[name][0] += 1
        times[name][1] += end - start
        intervals.append((start, end))
    intervals.sort()
    busy, until = 0.0, -float("inf")
    for start, end in intervals:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    kernels = [KernelTime(name, int(count), total) for name, (count, total) in times.items()]
    kernels.sort(key=lambda kernel: -kernel.total_us)
    span = until - intervals[0][0] if intervals else 0.0
    return DeviceProfile(span_us=span, busy_us=busy, kernels=tuple(kernels))


def watch(seconds: float) -> DeviceProfile:
    """Sleeps so long while the device is watched. Run it in a thread beside those that compute; steps take a
    few µs longer per kernel meanwhile."""
    from torch.profiler import ProfilerActivity, profile

    # The first use alone takes seconds to set up.
    with profile(activities=[ProfilerActivity.CUDA]):
        pass
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        time.sleep(seconds)
    return summarise(_device_events(prof.events() or ()))


def _device_events(events: Sequence[object]) -> Iterable[tuple[str, float, float]]:
    for event in events:
        if str(getattr(event, "device_type", "")).endswith("CUDA"):
            interval = event.time_range  # type: ignore[attr-defined]
            yield event.name, interval.start, interval.end  # type: ignore[attr-defined]


def write_profile(folder: Path, *, seconds: float) -> Path:
    """Watches, then writes a table into the folder. Returns the file."""
    profile = watch(seconds)
    stamp = time.strftime("%Y-%m-%d-%H%M%S", time.gmtime())
    path = folder / f"profile-{stamp}.md"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(profile.markdown(title=f"Device profile of {stamp}"))
    return path
