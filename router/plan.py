"""What one composed step does, and its form on the wire."""

from __future__ import annotations

from dataclasses import dataclass, field

from proto.codec import pack_i32
from proto.worker_pb2 import Admit, Step


@dataclass(slots=True)
class StepPlan:
    """A delta in the making. Rows named here are rows of the replica it is composed for."""

    admits: list[Admit] = field(default_factory=list)
    grow_rows: list[int] = field(default_factory=list)
    grow_blocks: list[int] = field(default_factory=list)
    chunk_rows: list[int] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    zero_blocks: list[int] = field(default_factory=list)
    n_prefill_tokens: int = 0
    n_preempted: int = 0
    hold_decode: bool = False
    """No decode row computes in this step."""

    def grow(self, row: int, blocks: list[int]) -> None:
        self.grow_rows.extend([row] * len(blocks))
        self.grow_blocks.extend(blocks)

    def forget_growth(self, row: int) -> None:
        """The row left before the step was complete."""
        if row not in self.grow_rows:
            return
        kept = [i for i, grown in enumerate(self.grow_rows) if grown != row]
        self.grow_rows = [self.grow_rows[i] for i in kept]
        self.grow_blocks = [self.grow_blocks[i] for i in kept]

    def chunk(self, row: int, n_tokens: int) -> None:
        self.chunk_rows.append(row)
        self.chunk_tokens.append(n_tokens)
        self.n_prefill_tokens += n_tokens

    def encode(self, *, seq: int, evicts: list[int], n_decode: int) -> Step:
        step = Step(seq=seq, n_decode_rows=n_decode, hold_decode=self.hold_decode)
        if evicts:
            step.evicts = pack_i32(evicts)
        if self.admits:
            step.admits.extend(self.admits)
        if self.grow_rows:
            step.grow_rows = pack_i32(self.grow_rows)
            step.grow_blocks = pack_i32(self.grow_blocks)
        if self.chunk_rows:
            step.chunk_rows = pack_i32(self.chunk_rows)
            step.chunk_tokens = pack_i32(self.chunk_tokens)
        if self.zero_blocks:
            step.zero_blocks = pack_i32(self.zero_blocks)
        return step
