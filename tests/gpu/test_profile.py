from __future__ import annotations

import pytest

from worker.gpu.profile import summarise


def test_overlapping_kernels_are_busy_once() -> None:
    profile = summarise([("b", 10.0, 20.0), ("a", 0.0, 5.0), ("b", 15.0, 30.0), ("a", 16.0, 18.0)])
    assert (profile.span_us, profile.busy_us) == (30.0, 25.0)
    assert profile.idle_share == pytest.approx(5 / 30)
    assert [(kernel.name, kernel.count, kernel.total_us) for kernel in profile.kernels] == [
        ("b", 2, 25.0),
        ("a", 2, 7.0),
    ]


def test_nothing_ran() -> None:
    profile = summarise([])
    assert (profile.span_us, profile.idle_share, profile.kernels) == (0.0, 0.0, ())
    assert "idle 0.00%" in profile.markdown(title="empty")
