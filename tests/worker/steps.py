"""Composes steps as a router would, for tests of the worker's side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from proto.codec import pack_i32, unpack_i32
from proto.version import PROTOCOL_VERSION
from proto.worker_pb2 import Admit, Open, Sampling, Step, StepResult
from worker.fake import expected_tokens
from worker.rows import RowTable
from worker.runner import RunnerCapacity


def capacity(**changes: object) -> RunnerCapacity:
    values: dict[str, object] = {
        "model_id": "fake",
        "model_hash": "hash",
        "model_path": "",
        "block_size": 4,
        "n_blocks": 64,
        "max_rows": 8,
        "max_step_tokens": 64,
        "max_context": 48,
        "vocab_size": 100,
        "eos_token_ids": (2,),
        "attention": "fake",
        "device": "fake",
        "dtype": "none",
        "kv_cache_dtype": "none",
        "max_batch_total_tokens": 252,
        "memory_arithmetic": "none",
    }
    return RunnerCapacity(**{**values, **changes})  # type: ignore[arg-type]  # the names are those above


def admit(
    row: int,
    tokens: Sequence[int],
    blocks: Iterable[int],
    *,
    epoch: int = 1,
    n_cached: int = 0,
    n_prompt: int | None = None,
    sampling: Sampling | None = None,
) -> Admit:
    return Admit(
        row=row,
        epoch=epoch,
        tokens=pack_i32(tokens),
        n_prompt=len(tokens) if n_prompt is None else n_prompt,
        blocks=pack_i32(list(blocks)),
        n_cached=n_cached,
        sampling=sampling,
    )


def step(
    seq: int,
    *,
    admits: Sequence[Admit] = (),
    evicts: Sequence[int] = (),
    grow: Sequence[tuple[int, int]] = (),
    chunks: Sequence[tuple[int, int]] = (),
    n_decode: int = 0,
    zero: Sequence[int] = (),
    hold: bool = False,
) -> Step:
    """`grow`: (row, block); `chunks`: (row, tokens)."""
    return Step(
        seq=seq,
        admits=admits,
        evicts=pack_i32(list(evicts)),
        grow_rows=pack_i32([row for row, _ in grow]),
        grow_blocks=pack_i32([block for _, block in grow]),
        chunk_rows=pack_i32([row for row, _ in chunks]),
        chunk_tokens=pack_i32([n for _, n in chunks]),
        n_decode_rows=n_decode,
        zero_blocks=pack_i32(list(zero)),
        hold_decode=hold,
    )


def opening(
    router_id: str = "router-a", *, generation: int = 1, window: int = 2, version: int = PROTOCOL_VERSION
) -> Step:
    return Step(
        open=Open(router_id=router_id, generation=generation, protocol_version=version, window=window)
    )


class Conversation:
    """A router with all the blocks it wants: admits prompts, decodes them, and gathers what comes back."""

    def __init__(self, capacity: RunnerCapacity) -> None:
        self.table = RowTable.for_capacity(capacity)
        self.seq = 0
        self.next_block = 1
        self.tokens: dict[int, list[int]] = {}
        self.answers: dict[int, list[int]] = {}

    def blocks(self, n: int) -> list[int]:
        first, self.next_block = self.next_block, self.next_block + n
        return list(range(first, first + n))

    def start(self, prompts: dict[int, Sequence[int]], *, sampling: Sampling | None = None) -> Step:
        size = self.table.block_size
        admits = []
        for row, prompt in prompts.items():
            self.tokens[row], self.answers[row] = list(prompt), []
            epoch = int(self.table.epochs[row]) + 1
            blocks = self.blocks(-(-len(prompt) // size))
            admits.append(admit(row, prompt, blocks, epoch=epoch, sampling=sampling))
        return self._apply(
            admits=admits,
            chunks=[(row, len(prompt)) for row, prompt in prompts.items()],
            **self._decode_part(),
        )

    def decode(self, *, evicts: Sequence[int] = ()) -> Step:
        return self._apply(evicts=evicts, **self._decode_part(without=evicts))

    def _decode_part(self, *, without: Sequence[int] = ()) -> dict[str, object]:
        """The decode rows of the next step, and a block for each that needs one."""
        table = self.table
        rows = [row for row in np.flatnonzero(table.decoding).tolist() if row not in without]
        short = [row for row in rows if table.lengths[row] + 1 > table.table_lengths[row] * table.block_size]
        return {"grow": [(row, self.blocks(1)[0]) for row in short], "n_decode": len(rows)}

    def hear(self, result: StepResult) -> None:
        rows, tokens = unpack_i32(result.rows), unpack_i32(result.tokens)
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            self.answers[row].append(token)

    def check(self, capacity: RunnerCapacity, **vocab: float) -> None:
        from worker.fake import FakeVocab

        words = FakeVocab(size=capacity.vocab_size, eos_token_ids=capacity.eos_token_ids, **vocab)
        for row, answer in self.answers.items():
            assert answer == expected_tokens(self.tokens[row], n=len(answer), vocab=words, stop_at_eos=False)

    def _apply(self, **parts: object) -> Step:
        self.seq += 1
        built = step(self.seq, **parts)  # type: ignore[arg-type]  # the parts are those of `step`
        # The mirror of the worker's rows derives the decode set for the next step.
        self.table.apply(built)
        return built
