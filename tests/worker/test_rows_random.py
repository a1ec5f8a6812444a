"""The row table beside a naive one, over random legal traffic."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import numpy as np
import pytest

from proto.worker_pb2 import Admit, Step
from tests.worker.steps import admit, capacity, step
from worker.rows import RowTable

N_ROWS = 12
CONTEXT = 60
N_STEPS = 20_000 if os.environ.get("QUIRE_TEST_FULL") == "1" else 400


@dataclass
class NaiveRow:
    epoch: int
    tokens: list[int]
    blocks: list[int]
    length: int
    decoding: bool = False


@dataclass
class NaiveRouter:
    """Knows each row as a plain object and composes legal steps at random."""

    block_size: int
    random: np.random.Generator
    rows: dict[int, NaiveRow] = field(default_factory=dict)
    epochs: dict[int, int] = field(default_factory=dict)
    free: list[int] = field(default_factory=lambda: list(range(1, 2000)))
    seq: int = 0

    def next_step(self) -> tuple[Step, list[tuple[int, int, int, bool]]]:
        """The step, and what it has to compute: (row, tokens, length after, samples)."""
        self.seq += 1
        evicts = [row for row in self.rows if self.random.random() < 0.1 or self.is_full(row)]
        for row in evicts:
            self.free += self.rows.pop(row).blocks
        free_rows = [row for row in self.random.permutation(N_ROWS).tolist() if row not in self.rows]
        admits = [self.start(row) for row in free_rows if self.random.random() < 0.3]
        grow: list[tuple[int, int]] = []
        want = []
        for row in sorted(r for r, it in self.rows.items() if it.decoding):
            self.rows[row].length += 1
            want.append((row, 1, self.rows[row].length, True))
            self.cover(row, grow)
        n_decode = len(want)
        chunks = []
        for row, it in self.rows.items():
            left = len(it.tokens) - it.length
            if not it.decoding and self.random.random() < 0.8:
                n = int(self.random.integers(1, left + 1))
                it.length += n
                it.decoding = n == left
                chunks.append((row, n))
                want.append((row, n, it.length, it.decoding))
                self.cover(row, grow)
        order = self.random.permutation(len(grow)).tolist()
        # Blocks of one row stay in their order; rows may be mixed.
        queues: dict[int, list[int]] = {}
        for row, block in grow:
            queues.setdefault(row, []).append(block)
        mixed = [(grow[i][0], queues[grow[i][0]].pop(0)) for i in order]
        built = step(self.seq, admits=admits, evicts=evicts, grow=mixed, chunks=chunks, n_decode=n_decode)
        return built, want

    def start(self, row: int) -> Admit:
        self.epochs[row] = self.epochs.get(row, 0) + int(self.random.integers(1, 3))
        tokens = self.random.integers(0, 100, self.random.integers(1, 40)).tolist()
        n_cached = int(self.random.integers(0, (len(tokens) - 1) // self.block_size + 1)) * self.block_size
        n_blocks = n_cached // self.block_size + int(self.random.integers(0, 3))
        blocks = [self.free.pop(0) for _ in range(min(n_blocks, CONTEXT // self.block_size))]
        self.rows[row] = NaiveRow(self.epochs[row], tokens, blocks, n_cached)
        n_prompt = int(self.random.integers(1, len(tokens) + 1))
        return admit(row, tokens, blocks, epoch=self.epochs[row], n_cached=n_cached, n_prompt=n_prompt)

    def is_full(self, row: int) -> bool:
        return self.rows[row].length == CONTEXT

    def cover(self, row: int, grow: list[tuple[int, int]]) -> None:
        it = self.rows[row]
        while len(it.blocks) * self.block_size < it.length:
            block = self.free.pop(0)
            it.blocks.append(block)
            grow.append((row, block))


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_random_traffic_gives_what_a_naive_table_gives(block_size: int) -> None:
    random = np.random.default_rng(block_size)
    router = NaiveRouter(block_size, random)
    table = RowTable.for_capacity(
        capacity(
            block_size=block_size, n_blocks=2000, max_rows=N_ROWS, max_context=CONTEXT, max_step_tokens=1000
        )
    )
    for _ in range(N_STEPS):
        built, want = router.next_step()
        batch = table.apply(built)
        got = zip(
            batch.rows.tolist(),
            batch.q_lens.tolist(),
            batch.kv_lens.tolist(),
            batch.samples.tolist(),
            strict=True,
        )
        assert list(got) == want
        for row, it in router.rows.items():
            assert table.active[row]
            assert table.epochs[row] == it.epoch
            assert table.block_tables[row, : table.table_lengths[row]].tolist() == it.blocks
            assert batch.tokens[row, : batch.n_known[row]].tolist() == it.tokens
        assert int(table.active.sum()) == len(router.rows)
