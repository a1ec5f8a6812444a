"""Weights kept in groups are the file's weights to the bit."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import quants
from gguf.constants import GGMLQuantizationType

from checkpoint.grouped import GROUP, Grouped, decode, join


def test_values_equal_the_dequantised_ones_bit_for_bit() -> None:
    rng = np.random.default_rng(0)
    for kind in ("Q4_0", "Q4_1", "Q8_0"):
        values = rng.standard_normal((24, 3 * GROUP)).astype(np.float32)
        raw = quants.quantize(values, GGMLQuantizationType[kind])
        grouped = decode(kind, raw.reshape(24, 3, -1))
        assert grouped is not None
        expected = quants.dequantize(raw, GGMLQuantizationType[kind])
        np.testing.assert_array_equal(weights(grouped), expected, err_msg=kind)
        order = rng.permutation(24)
        np.testing.assert_array_equal(weights(grouped.rows(order)), expected[order])


@pytest.mark.parametrize("kind", ["F32", "F16", "Q6_K"])
def test_other_formats_are_not_taken(kind: str) -> None:
    assert decode(kind, np.zeros((2, 2, 8), dtype=np.uint8)) is None


def test_parts_join_only_when_their_bits_agree() -> None:
    four = decode("Q4_1", np.zeros((2, 1, 20), dtype=np.uint8))
    eight = decode("Q8_0", np.zeros((2, 1, 34), dtype=np.uint8))
    assert four is not None
    assert eight is not None
    assert join([four, eight]) is None
    joined = join([four, four])
    assert joined is not None
    assert joined.scale.shape == (4, 1)


def weights(grouped: Grouped) -> np.ndarray:
    """scale * q + minimum, by the definition in `Grouped.words`."""
    n_out, n_groups = grouped.scale.shape
    quants_of = grouped.words.view(np.uint8).reshape(n_out, n_groups, -1)
    if grouped.bits == 4:
        quants_of = np.concatenate([quants_of & 15, quants_of >> 4], axis=-1)
    q = quants_of.astype(np.float32)
    return (q * grouped.scale[..., None] + grouped.minimum[..., None]).reshape(n_out, -1)
