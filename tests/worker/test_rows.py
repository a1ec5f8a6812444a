from __future__ import annotations

import numpy as np
import pytest

from proto.worker_pb2 import Step
from tests.worker.steps import admit, capacity, opening, step
from worker.errors import ProtocolError
from worker.rows import RowTable


def table(**changes: object) -> RowTable:
    return RowTable.for_capacity(capacity(**changes))


def decoding(**changes: object) -> RowTable:
    """Row 3 holds 5 tokens in blocks 1 and 2, all computed; the next step is number 2."""
    rows = table(**changes)
    rows.apply(step(1, admits=[admit(3, range(5), [1, 2])], chunks=[(3, 5)]))
    return rows


def test_a_prompt_in_two_chunks_then_decodes() -> None:
    rows = table()
    first = rows.apply(step(1, admits=[admit(3, range(10), [1, 2, 3])], chunks=[(3, 4)]))
    assert (first.rows.tolist(), first.q_lens.tolist(), first.kv_lens.tolist()) == ([3], [4], [4])
    assert not first.samples[0]
    second = rows.apply(step(2, chunks=[(3, 6)]))
    assert (second.kv_lens.tolist(), second.samples.tolist(), second.n_decode) == ([10], [True], 0)
    third = rows.apply(step(3, n_decode=1))
    assert (third.rows.tolist(), third.n_decode, third.q_lens.tolist()) == ([3], 1, [1])
    assert third.kv_lens.tolist() == [11]
    assert third.tokens[3, :10].tolist() == list(range(10))
    assert third.block_tables[3, :3].tolist() == [1, 2, 3]
    assert third.epochs.tolist() == [1]


def test_decode_rows_come_before_chunks() -> None:
    rows = decoding()
    batch = rows.apply(step(2, admits=[admit(1, range(6), [5, 6])], chunks=[(1, 6)], n_decode=1))
    assert (batch.rows.tolist(), batch.n_decode) == ([3, 1], 1)
    assert (batch.q_lens.tolist(), batch.kv_lens.tolist()) == ([1, 6], [6, 6])


def test_held_rows_sit_a_step_out_and_go_on_with_the_next() -> None:
    rows = decoding()
    held = rows.apply(step(2, admits=[admit(1, range(6), [5, 6])], chunks=[(1, 6)], hold=True))
    assert (held.rows.tolist(), held.n_decode, held.samples.tolist()) == ([1], 0, [True])
    batch = rows.apply(step(3, n_decode=2))
    assert (batch.rows.tolist(), batch.kv_lens.tolist()) == ([1, 3], [7, 6])


def test_a_cached_prefix_is_not_computed_again() -> None:
    rows = table()
    batch = rows.apply(step(1, admits=[admit(0, range(10), [7, 8, 9], n_cached=8)], chunks=[(0, 2)]))
    assert (batch.q_lens.tolist(), batch.kv_lens.tolist(), batch.samples.tolist()) == ([2], [10], [True])


def test_a_replayed_row_decodes_after_its_known_tokens() -> None:
    rows = table()
    batch = rows.apply(step(1, admits=[admit(0, range(9), [1, 2, 3], n_prompt=5)], chunks=[(0, 9)]))
    assert batch.samples.tolist() == [True]
    assert rows.apply(step(2, n_decode=1)).kv_lens.tolist() == [10]


def test_growth_appends_in_order_for_several_rows_and_blocks() -> None:
    rows = table()
    rows.apply(step(1, admits=[admit(0, range(9), [1]), admit(1, range(5), [2])]))
    batch = rows.apply(step(2, grow=[(1, 10), (0, 11), (0, 12), (1, 13)], chunks=[(0, 9), (1, 5)]))
    assert batch.block_tables[0, :3].tolist() == [1, 11, 12]
    assert batch.block_tables[1, :3].tolist() == [2, 10, 13]


def test_an_evicted_row_can_be_admitted_in_the_same_step() -> None:
    rows = decoding()
    batch = rows.apply(
        step(2, evicts=[3], admits=[admit(3, range(3), [9], epoch=2)], chunks=[(3, 3)], n_decode=0)
    )
    assert (batch.rows.tolist(), batch.epochs.tolist(), batch.kv_lens.tolist()) == ([3], [2], [3])
    assert batch.n_known[3] == 3


def test_a_step_may_compute_nothing() -> None:
    rows = decoding()
    assert len(rows.apply(step(2, evicts=[3])).rows) == 0


def test_blocks_to_zero_are_passed_on() -> None:
    assert table().apply(step(1, zero=[4, 5])).zero_blocks.tolist() == [4, 5]


def test_a_reset_table_starts_over_at_seq_1() -> None:
    rows = decoding()
    rows.reset()
    batch = rows.apply(step(1, admits=[admit(3, range(4), [1])], chunks=[(3, 4)]))
    assert batch.epochs.tolist() == [1]


A = admit  # the cases below stay on one line


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (step(3), "step 3 came after step 1; expected 2"),
        (step(1), "step 1 came after step 1"),
        (Step(seq=2, open=opening().open), "carries `open`"),
        (step(2, evicts=[8]), "evicts names row 8, but the worker has 8 rows"),
        (step(2, evicts=[5]), "evicts names row 5, which is not in use"),
        (step(2, evicts=[3, 3]), "evicts names 3 twice"),
        (step(2, admits=[A(9, [1], [1])]), "admits row 9, but the worker has 8 rows"),
        (
            step(2, admits=[A(3, [1], [9], epoch=2)]),
            r"admits row 3 \(epoch 2\), which is in use since epoch 1",
        ),
        (step(2, evicts=[3], admits=[A(3, [1], [9])]), "epoch 1, which must be above 1"),
        (step(2, admits=[A(0, [], [9])]), "0 tokens, but 1 to 48 are allowed"),
        (step(2, admits=[A(0, range(49), range(4, 17))]), "49 tokens, but 1 to 48"),
        (step(2, admits=[A(0, [1, 2], [9], n_prompt=3)]), "n_prompt 3 of 2 tokens"),
        (step(2, admits=[A(0, [1, 2], [9], n_prompt=0)]), "n_prompt 0 of 2 tokens"),
        (step(2, admits=[A(0, range(4), [9], n_cached=4)]), "n_cached 4 of 4 tokens"),
        (step(2, admits=[A(0, range(9), [9], n_cached=8)]), "1 blocks of 4 hold 4"),
        (step(2, admits=[A(0, [1, 100], [9])]), "token 100 outside the vocabulary of 100"),
        (step(2, admits=[A(0, [1, -1], [9])]), "token -1 outside"),
        (step(2, admits=[A(0, [1], range(1, 14))]), "13 blocks, but a row's table has 12"),
        (step(2, admits=[A(0, [1], [64])]), "block table of row 0 names block 64, but blocks are 1 to 63"),
        (step(2, admits=[A(0, [1], [0])]), "names block 0"),
        (step(2, admits=[A(0, [1], [9, 9])]), "block table of row 0 names 9 twice"),
        (step(2, zero=[64], n_decode=1), "zero_blocks names block 64"),
        (step(2, grow=[(5, 9)], n_decode=1), "grow_rows names row 5, which is not in use"),
        (step(2, grow=[(3, 0)], n_decode=1), "grow_blocks names block 0"),
        (step(2, grow=[(3, b) for b in range(10, 21)], n_decode=1), "grows row 3 to 13 blocks"),
        (step(2, n_decode=0), "n_decode_rows 0, but 1 rows decode here"),
        (step(2, n_decode=2), "n_decode_rows 2, but 1 rows decode here"),
        (step(2, n_decode=1, hold=True), "n_decode_rows 1, but 0 rows decode here"),
        (step(2, chunks=[(5, 1)], n_decode=1), "chunk_rows names row 5, which is not in use"),
        (step(2, chunks=[(3, 1)], n_decode=1), "a chunk for row 3, whose known tokens are all computed"),
        (
            step(2, admits=[A(0, range(4), [9])], chunks=[(0, 5)], n_decode=1),
            "5 tokens of row 0, which has 4",
        ),
        (step(2, admits=[A(0, range(4), [9])], chunks=[(0, 0)], n_decode=1), "computes 0 tokens of row 0"),
        (
            step(2, admits=[A(0, range(4), [9])], chunks=[(0, 1), (0, 1)], n_decode=1),
            "chunk_rows names 0 twice",
        ),
        (
            step(2, admits=[A(0, range(5), [9])], chunks=[(0, 5)], n_decode=1),
            "writes position 4 of row 0.*growth",
        ),
        (step(2, admits=[A(0, range(4), [2])], chunks=[(0, 4)], n_decode=1), "block 2 is written by row"),
    ],
)
def test_a_step_that_contradicts_the_rows_is_refused_by_name(bad: Step, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        decoding().apply(bad)


def test_a_decode_row_needs_a_block_for_its_next_position() -> None:
    rows = table()
    rows.apply(step(1, admits=[admit(3, range(4), [1])], chunks=[(3, 4)]))
    with pytest.raises(ProtocolError, match="writes position 4 of row 3, but its 1 blocks of 4 end at 4"):
        rows.apply(step(2, n_decode=1))


def test_a_row_can_not_pass_the_context() -> None:
    rows = table(max_context=6)
    rows.apply(step(1, admits=[admit(0, range(6), [1, 2])], chunks=[(0, 6)]))
    with pytest.raises(ProtocolError, match="takes row 0 to 7 positions, but the context is 6"):
        rows.apply(step(2, n_decode=1))


def test_a_step_can_not_carry_more_tokens_than_allowed() -> None:
    rows = decoding(max_step_tokens=8)
    with pytest.raises(ProtocolError, match="carries 9 tokens, but at most 8 are allowed"):
        rows.apply(step(2, admits=[admit(0, range(8), [5, 6])], chunks=[(0, 8)], n_decode=1))


def test_bytes_that_are_no_integers_are_refused() -> None:
    with pytest.raises(ProtocolError, match="evicts has 3 bytes, not a multiple of 4"):
        table().apply(Step(seq=1, evicts=b"abc"))
    with pytest.raises(ProtocolError, match="chunk_rows do not match"):
        table().apply(Step(seq=1, chunk_rows=b"\0\0\0\0"))
    with pytest.raises(ProtocolError, match="grow_rows do not match"):
        table().apply(Step(seq=1, grow_rows=b"\0\0\0\0"))


def test_rows_that_share_blocks_may_write_their_own() -> None:
    rows = decoding()
    batch = rows.apply(step(2, admits=[admit(0, range(6), [1, 9], n_cached=4)], chunks=[(0, 2)], n_decode=1))
    assert batch.block_tables[batch.rows, :2].tolist() == [[1, 2], [1, 9]]


def test_random_growth_matches_a_plain_list() -> None:
    random = np.random.default_rng(5)
    rows = table(n_blocks=1000, max_context=400)
    rows.apply(step(1, admits=[admit(r, [1], [r + 1]) for r in range(8)]))
    plain = {r: [r + 1] for r in range(8)}
    block = 20
    for seq in range(2, 40):
        grown = []
        for row in random.integers(0, 8, size=random.integers(1, 20)).tolist():
            grown.append((row, block))
            plain[row].append(block)
            block += 1
        rows.apply(step(seq, grow=grown))
    for row, blocks in plain.items():
        assert rows.block_tables[row, : rows.table_lengths[row]].tolist() == blocks
