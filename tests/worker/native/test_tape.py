"""Threads that go through a tape together."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from worker.native.machine import vector_unit

if vector_unit() is None:
    pytest.skip("no vector unit that is served", allow_module_level=True)

from worker.native.row_kernel import row_kernel
from worker.native.tape import Tape


@pytest.mark.parametrize("n_threads", [1, 2, 5])
def test_each_operation_sees_all_of_the_one_before(n_threads: int) -> None:
    """A row of permuted copies: a thread that ran ahead would copy what is not there yet. With more threads
    than cores they also sleep and are woken."""
    n_ops, n_rows, lanes = 300, 64, row_kernel().lanes
    rng = np.random.default_rng(0)
    lines = [torch.zeros(n_rows, lanes) for _ in range(n_ops + 1)]
    lines[0][:, 0] = torch.arange(n_rows, dtype=torch.float32)
    orders = [torch.from_numpy(rng.permutation(n_rows)) for _ in range(n_ops)]
    tape = Tape(n_ops)
    for op, order, source, target in zip(tape.ops, orders, lines[:-1], lines[1:], strict=True):
        places = (source.data_ptr(), lanes, order.data_ptr(), target.data_ptr(), lanes)
        op[:8] = (row_kernel().gather, *places, n_rows, 1)
    expected = torch.arange(n_rows)
    for order in orders:
        expected = expected[order]
    for _ in range(3):
        tape.run(n_threads=n_threads)
        assert lines[-1][:, 0].tolist() == expected.tolist()
        lines[-1].zero_()
