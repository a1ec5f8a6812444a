from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proto.codec import pack_f32, pack_i32, unpack_f32, unpack_i32
from proto.worker_pb2 import Step


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_integers_survive_a_message(values: list[int]) -> None:
    sent = Step(seq=1, evicts=pack_i32(values)).SerializeToString()
    assert unpack_i32(Step.FromString(sent).evicts).tolist() == values


@given(st.lists(st.floats(width=32, allow_nan=False)))
def test_floats_survive(values: list[float]) -> None:
    assert unpack_f32(pack_f32(values)).tolist() == values


def test_the_wire_is_little_endian_whatever_the_array_was() -> None:
    assert pack_i32([1, 256]) == b"\x01\0\0\0\0\x01\0\0"
    assert pack_i32(np.array([1], dtype=">i4")) == b"\x01\0\0\0"
    assert pack_i32(np.arange(10)[::2]) == pack_i32([0, 2, 4, 6, 8])
    assert pack_f32(np.array([1.0], dtype=">f8")) == b"\0\0\x80?"


def test_nothing_is_an_empty_array() -> None:
    assert pack_i32([]) == b""
    assert len(unpack_i32(b"")) == 0


@pytest.mark.parametrize("unpack", [unpack_i32, unpack_f32])
def test_a_cut_array_is_refused(unpack: object) -> None:
    assert callable(unpack)
    with pytest.raises(ValueError, match="buffer size must be a multiple of element size"):
        unpack(b"\0\0\0\0\0")


def test_a_view_can_not_change_the_message() -> None:
    with pytest.raises(ValueError, match="read-only"):
        unpack_i32(pack_i32([1]))[0] = 2
