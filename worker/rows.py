"""The row table: what the worker remembers of each row between steps, and the only reader of deltas.

It owns lengths, block tables, known tokens and the decode set, and checks every step against them. It
never touches the device and knows nothing of sampling: a runner computes what `apply` returns.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from proto.codec import unpack_i32
from proto.worker_pb2 import Admit, Step
from worker.errors import ProtocolError
from worker.runner import I32, RunnerCapacity, StepBatch

_EMPTY: I32 = np.zeros(0, dtype=np.int32)
_MAX_EPOCH = 2**31 - 1


class RowTable:
    """State of all rows of one Run. Not thread-safe: the compute thread owns it.

    `apply` raises ProtocolError and leaves the table in an undefined state when a step contradicts it: the
    stream has to end, and `reset` comes before the next one.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        max_context: int,
        block_size: int,
        n_blocks: int,
        vocab_size: int,
        max_step_tokens: int,
    ) -> None:
        self.max_rows = max_rows
        self.max_context = max_context
        self.block_size = block_size
        self.n_blocks = n_blocks
        self.vocab_size = vocab_size
        self.max_step_tokens = max_step_tokens
        self.max_blocks_per_row = -(-max_context // block_size)
        # np.zeros maps pages lazily: only what rows really use takes memory.
        self.block_tables: I32 = np.zeros((max_rows, self.max_blocks_per_row), dtype=np.int32)
        self.tokens: I32 = np.zeros((max_rows, max_context), dtype=np.int32)
        self.n_known: I32 = np.zeros(max_rows, dtype=np.int32)
        self._writer: I32 = np.zeros(n_blocks, dtype=np.int32)
        self.reset()

    @classmethod
    def for_capacity(cls, capacity: RunnerCapacity) -> RowTable:
        return cls(
            max_rows=capacity.max_rows,
            max_context=capacity.max_context,
            block_size=capacity.block_size,
            n_blocks=capacity.n_blocks,
            vocab_size=capacity.vocab_size,
            max_step_tokens=capacity.max_step_tokens,
        )

    def reset(self) -> None:
        """Forget every row: a new Run begins, its first step has seq 1."""
        self.seq = 0
        self.active: npt.NDArray[np.bool_] = np.zeros(self.max_rows, dtype=np.bool_)
        self.decoding: npt.NDArray[np.bool_] = np.zeros(self.max_rows, dtype=np.bool_)
        self.epochs: I32 = np.full(self.max_rows, -1, dtype=np.int32)
        self.lengths: I32 = np.zeros(self.max_rows, dtype=np.int32)
        """KV positions written so far, the step last applied included."""
        self.table_lengths: I32 = np.zeros(self.max_rows, dtype=np.int32)
        """Valid entries of each row of `block_tables`."""

    def apply(self, step: Step) -> StepBatch:
        """Apply a delta in the order that the protocol states, and resolve what the step computes."""
        if step.seq != self.seq + 1:
            raise ProtocolError(f"step {step.seq} came after step {self.seq}; expected {self.seq + 1}")
        if step.HasField("open"):
            raise ProtocolError(f"step {step.seq} carries `open`, which only the first message may")
        self.seq = step.seq
        evicts = self._evict(_ints(step, "evicts", step.evicts)) if step.evicts else _EMPTY
        zero_blocks = (
            self._zeroed(_ints(step, "zero_blocks", step.zero_blocks)) if step.zero_blocks else _EMPTY
        )
        admits = list(step.admits)
        for admit in admits:
            self._admit(admit)
        if step.grow_rows or step.grow_blocks:
            self._grow(_ints(step, "grow_rows", step.grow_rows), _ints(step, "grow_blocks", step.grow_blocks))
        return self._compose(step, admits=admits, evicts=evicts, zero_blocks=zero_blocks)

    # ---- the parts of a delta, in the protocol's order ----

    def _evict(self, rows: I32) -> I32:
        self._check_rows(rows, "evicts")
        self._check_distinct(rows, "evicts")
        self.active[rows] = False
        self.decoding[rows] = False
        self.lengths[rows] = 0
        self.n_known[rows] = 0
        self.table_lengths[rows] = 0
        return rows

    def _zeroed(self, blocks: I32) -> I32:
        self._check_blocks(blocks, "zero_blocks")
        return blocks

    def _admit(self, admit: Admit) -> None:
        row = admit.row
        where = f"step {self.seq} admits row {row}"
        if row >= self.max_rows:
            raise ProtocolError(
                f"{where}, but the worker has {self.max_rows} rows (0 to {self.max_rows - 1})"
            )
        if self.active[row]:
            raise ProtocolError(
                f"{where} (epoch {admit.epoch}), which is in use since epoch {self.epochs[row]}"
            )
        if not self.epochs[row] < admit.epoch <= _MAX_EPOCH:
            raise ProtocolError(
                f"{where} with epoch {admit.epoch}, which must be above {self.epochs[row]} and at most "
                f"{_MAX_EPOCH}"
            )
        tokens = _ints_of(admit.tokens, f"{where}: tokens")
        blocks = _ints_of(admit.blocks, f"{where}: blocks")
        n_tokens, n_blocks = len(tokens), len(blocks)
        if not 1 <= n_tokens <= self.max_context:
            raise ProtocolError(f"{where} with {n_tokens} tokens, but 1 to {self.max_context} are allowed")
        if not 1 <= admit.n_prompt <= n_tokens:
            raise ProtocolError(f"{where} with n_prompt {admit.n_prompt} of {n_tokens} tokens")
        if admit.n_cached >= n_tokens:
            raise ProtocolError(
                f"{where} with n_cached {admit.n_cached} of {n_tokens} tokens: one must be left to compute"
            )
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            raise ProtocolError(f"{where} with token {bad} outside the vocabulary of {self.vocab_size}")
        if n_blocks > self.max_blocks_per_row:
            raise ProtocolError(
                f"{where} with {n_blocks} blocks, but a row's table has {self.max_blocks_per_row} entries"
            )
        if n_blocks * self.block_size < admit.n_cached:
            raise ProtocolError(
                f"{where} with n_cached {admit.n_cached}, but its {n_blocks} blocks of {self.block_size} "
                f"hold {n_blocks * self.block_size}"
            )
        self._check_blocks(blocks, f"the block table of row {row}")
        self._check_distinct(blocks, f"the block table of row {row}")
        self.active[row] = True
        self.epochs[row] = admit.epoch
        self.tokens[row, :n_tokens] = tokens
        self.n_known[row] = n_tokens
        self.lengths[row] = admit.n_cached
        self.block_tables[row, :n_blocks] = blocks
        self.table_lengths[row] = n_blocks

    def _grow(self, rows: I32, blocks: I32) -> None:
        if len(rows) != len(blocks):
            raise ProtocolError(
                f"step {self.seq}: {len(rows)} grow_rows do not match {len(blocks)} grow_blocks"
            )
        if len(rows) == 0:
            return
        self._check_rows(rows, "grow_rows")
        self._check_blocks(blocks, "grow_blocks")
        # Entries of one row may stand anywhere in the list: sort by row, keep their order, count them up.
        order = np.argsort(rows, kind="stable")
        rows, blocks = rows[order], blocks[order]
        is_first = np.ones(len(rows), dtype=np.bool_)
        np.not_equal(rows[1:], rows[:-1], out=is_first[1:])
        first = np.flatnonzero(is_first)
        last = np.append(first[1:], len(rows)) - 1
        places = self.table_lengths[rows] + (np.arange(len(rows)) - np.repeat(first, last - first + 1))
        if int(places.max()) >= self.max_blocks_per_row:
            row = int(rows[int(places.argmax())])
            raise ProtocolError(
                f"step {self.seq} grows row {row} to {int(places.max()) + 1} blocks, but a row's table has "
                f"{self.max_blocks_per_row} entries (context {self.max_context}, block size "
                f"{self.block_size})"
            )
        self.block_tables[rows, places] = blocks
        self.table_lengths[rows[last]] = places[last] + 1

    def _compose(self, step: Step, *, admits: list[Admit], evicts: I32, zero_blocks: I32) -> StepBatch:
        rows = _EMPTY if step.hold_decode else np.flatnonzero(self.decoding).astype(np.int32)
        n_decode = len(rows)
        if n_decode != step.n_decode_rows:
            raise ProtocolError(
                f"step {self.seq} says n_decode_rows {step.n_decode_rows}, but {n_decode} rows decode here"
            )
        if step.chunk_rows or step.chunk_tokens:
            chunk_rows = _ints(step, "chunk_rows", step.chunk_rows)
            chunk_tokens = _ints(step, "chunk_tokens", step.chunk_tokens)
            self._check_chunks(chunk_rows, chunk_tokens)
            rows = np.concatenate((rows, chunk_rows))
            q_lens = np.ones(len(rows), dtype=np.int32)
            q_lens[n_decode:] = chunk_tokens
            kv_lens = self.lengths[rows] + q_lens
            samples = kv_lens >= self.n_known[rows]
        else:
            q_lens = np.ones(n_decode, dtype=np.int32)
            kv_lens = self.lengths[rows] + 1
            samples = np.ones(n_decode, dtype=np.bool_)
        if len(rows):
            self._check_space(rows, kv_lens=kv_lens, q_lens=q_lens, n_decode=n_decode)
            self.lengths[rows] = kv_lens
            if len(rows) > n_decode:
                self.decoding[rows[samples]] = True
        return StepBatch(
            seq=self.seq,
            admits=admits,
            evicts=evicts,
            zero_blocks=zero_blocks,
            rows=rows,
            n_decode=n_decode,
            q_lens=q_lens,
            kv_lens=kv_lens,
            samples=samples,
            epochs=self.epochs[rows],
            block_tables=self.block_tables,
            tokens=self.tokens,
            n_known=self.n_known,
        )

    # ---- checks ----

    def _check_chunks(self, rows: I32, tokens: I32) -> None:
        if len(rows) != len(tokens):
            raise ProtocolError(
                f"step {self.seq}: {len(rows)} chunk_rows do not match {len(tokens)} chunk_tokens"
            )
        self._check_rows(rows, "chunk_rows")
        self._check_distinct(rows, "chunk_rows")
        left = self.n_known[rows] - self.lengths[rows]
        bad = (tokens < 1) | (tokens > left) | self.decoding[rows]
        if bad.any():
            i = int(bad.argmax())
            row = int(rows[i])
            if self.decoding[row]:
                raise ProtocolError(
                    f"step {self.seq} computes a chunk for row {row}, whose known tokens are all computed"
                )
            raise ProtocolError(
                f"step {self.seq} computes {int(tokens[i])} tokens of row {row}, which has {int(left[i])} "
                f"known tokens left to compute ({int(self.lengths[row])} of {int(self.n_known[row])} done)"
            )

    def _check_space(self, rows: I32, *, kv_lens: I32, q_lens: I32, n_decode: int) -> None:
        """Every position written has a block, no block is written by two rows, the step is small enough."""
        longest = int(kv_lens.max())
        if longest > self.max_context:
            row = int(rows[int(kv_lens.argmax())])
            raise ProtocolError(
                f"step {self.seq} takes row {row} to {longest} positions, but the context is "
                f"{self.max_context}"
            )
        room = self.table_lengths[rows] * self.block_size
        short = kv_lens > room
        if short.any():
            i = int(short.argmax())
            raise ProtocolError(
                f"step {self.seq} writes position {int(kv_lens[i]) - 1} of row {int(rows[i])}, but its "
                f"{int(self.table_lengths[rows[i]])} blocks of {self.block_size} end at {int(room[i])}: "
                "growth is missing"
            )
        n_tokens = len(rows) if len(rows) == n_decode else int(q_lens.sum())
        if n_tokens > self.max_step_tokens:
            raise ProtocolError(
                f"step {self.seq} carries {n_tokens} tokens, but at most {self.max_step_tokens} are allowed"
            )
        places = (kv_lens - 1) // self.block_size
        writers, blocks = rows, self.block_tables[rows, places]
        if len(rows) > n_decode:
            chunk_writers, chunk_blocks = [writers[:n_decode]], [blocks[:n_decode]]
            first = (kv_lens - q_lens) // self.block_size
            for i in range(n_decode, len(rows)):
                row = int(rows[i])
                written = self.block_tables[row, int(first[i]) : int(places[i]) + 1]
                chunk_blocks.append(written)
                chunk_writers.append(np.full(len(written), row, dtype=np.int32))
            writers, blocks = np.concatenate(chunk_writers), np.concatenate(chunk_blocks)
        # A block with two writers keeps only the last one's stamp.
        self._writer[blocks] = writers
        twice = self._writer[blocks] != writers
        if twice.any():
            i = int(twice.argmax())
            raise ProtocolError(
                f"step {self.seq}: block {int(blocks[i])} is written by row {int(writers[i])} and by row "
                f"{int(self._writer[blocks[i]])}"
            )

    def _check_rows(self, rows: I32, what: str) -> None:
        if len(rows) == 0:
            return
        low, high = int(rows.min()), int(rows.max())
        if low < 0 or high >= self.max_rows:
            raise ProtocolError(
                f"step {self.seq}: {what} names row {low if low < 0 else high}, but the worker has "
                f"{self.max_rows} rows (0 to {self.max_rows - 1})"
            )
        known = self.active[rows]
        if not known.all():
            raise ProtocolError(
                f"step {self.seq}: {what} names row {int(rows[int(known.argmin())])}, which is not in use"
            )

    def _check_blocks(self, blocks: I32, what: str) -> None:
        if len(blocks) == 0:
            return
        low, high = int(blocks.min()), int(blocks.max())
        if low < 1 or high >= self.n_blocks:
            raise ProtocolError(
                f"step {self.seq}: {what} names block {low if low < 1 else high}, but blocks are 1 to "
                f"{self.n_blocks - 1} (0 is reserved)"
            )

    def _check_distinct(self, values: I32, what: str) -> None:
        if len(values) < 2:
            return
        ordered = np.sort(values)
        same = ordered[1:] == ordered[:-1]
        if same.any():
            raise ProtocolError(f"step {self.seq}: {what} names {int(ordered[int(same.argmax())])} twice")


def _ints(step: Step, what: str, data: bytes) -> I32:
    return _ints_of(data, f"step {step.seq}: {what}")


def _ints_of(data: bytes, what: str) -> I32:
    try:
        return unpack_i32(data)
    except ValueError:
        raise ProtocolError(f"{what} has {len(data)} bytes, not a multiple of 4") from None
