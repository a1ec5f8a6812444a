"""Where code can't be compiled, torch computes."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from checkpoint.grouped import Grouped
from worker.native import machine

WEIGHT = Grouped(
    4,
    np.zeros((64, 1, 4), dtype=np.uint32),
    np.zeros((64, 1), dtype=np.float32),
    np.zeros((64, 1), dtype=np.float32),
)


@pytest.fixture
def without_llvmlite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    monkeypatch.setattr(machine, "vector_unit", machine.vector_unit.__wrapped__)


@pytest.mark.usefixtures("without_llvmlite")
def test_without_llvmlite_nothing_is_kept() -> None:
    assert machine.vector_unit() is None
    assert not machine.can_keep(WEIGHT)


def test_outputs_that_do_not_fill_a_panel_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "vector_unit", lambda: machine.VectorUnit(lanes=16, block_rows=12))
    assert machine.can_keep(WEIGHT)
    odd = Grouped(4, WEIGHT.words[:40], WEIGHT.scale[:40], WEIGHT.minimum[:40])
    assert not machine.can_keep(odd)


@pytest.mark.skipif(sys.platform != "linux", reason="torch brings libgomp on Linux")
def test_torchs_threads_are_found() -> None:
    assert machine.openmp() is not None
