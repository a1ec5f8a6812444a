"""Products with grouped weights against the same product in float64."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from gguf import quants
from gguf.constants import GGMLQuantizationType

from checkpoint.grouped import Grouped, decode
from worker.native.machine import vector_unit

if vector_unit() is None:
    pytest.skip("no vector unit that is served", allow_module_level=True)

from worker.native.grouped_linear import GroupedLinear

SHAPES = [(32, 32), (96, 64), (64, 416)]
ROWS = [1, 2, 3, 5, 8, 12, 13, 25, 96, 97, 300]


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def quantised(kind: str, n_out: int, n_in: int) -> tuple[Grouped, torch.Tensor]:
    values = np.random.default_rng(n_out).standard_normal((n_out, n_in)).astype(np.float32)
    raw = quants.quantize(values, GGMLQuantizationType[kind])
    grouped = decode(kind, raw.reshape(n_out, n_in // 32, -1))
    assert grouped is not None
    return grouped, torch.from_numpy(quants.dequantize(raw, GGMLQuantizationType[kind])).double()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_product(kind: str, threads: int) -> None:
    for n_out, n_in in SHAPES:
        grouped, weight = quantised(kind, n_out, n_in)
        bias = torch.randn(n_out)
        plain, biased = GroupedLinear(grouped, None), GroupedLinear(grouped, bias)
        for n_rows in ROWS:
            # A view with a longer stride, as slices of a wider result are.
            x = torch.randn(n_rows, n_in + 32)[:, :n_in]
            expected = x.double() @ weight.T
            allowed = {"rtol": 0.0, "atol": 1e-5 * expected.abs().max().item()}
            torch.testing.assert_close(plain(x).double(), expected, **allowed)
            torch.testing.assert_close(biased(x).double(), expected + bias, **allowed)
            residual = torch.randn(n_rows, n_out)
            total = residual.double() + expected + bias
            torch.testing.assert_close(biased.plus(x, residual).double(), total, **allowed)


def test_a_row_alone_computes_as_in_company_of_the_same_size(threads: int) -> None:
    """A block's sums do not depend on its neighbours: equal rows give equal results."""
    grouped, _ = quantised("Q4_1", 64, 64)
    row = torch.randn(1, 64)
    out = GroupedLinear(grouped, None)(row.repeat(24, 1))
    assert (out == out[0]).all()
