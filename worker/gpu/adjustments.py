"""What changes logits before they are sampled, kept on the device: token counts, bias, end tokens, masks.

A step whose rows need it sends one packed copy, after its forward pass was launched: the parameters of its
rows, what is new of their counts and entries, and the masks of a grammar. Nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from proto.worker_pb2 import Sampling
from worker.gpu.buffers import SAMPLE_TILE, Buffers
from worker.gpu.head import HeadTensors
from worker.gpu.packed import PackedBuffer
from worker.gpu.staging import TailWriter, align
from worker.sampling import TokenMasks
from worker.sampling_params import SamplingParams

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]

_FLOATS = ("repetition", "presence", "frequency", "typical_p")
_FIELDS = (*_FLOATS, "line", "at", "n_entries", "asked")
"""Of the packed buffer's head, per sampled row; `asked` lists places."""
_ALWAYS = 0x7FFFFFFF
"""`until` of an entry that never ends."""
_ENDING = 1 << 30
"""`at` of a row whose grammar allows end tokens alone: entries that forbid them don't count any more."""
_ROOM = 1 << 16
"""Words for what is new, before a step needs a buffer of its own."""


@dataclass(slots=True)
class _Entries:
    """Of one row: value is added to the logit of id while the position is below `until`."""

    ids: I32
    values: F32
    until: I32


class Adjustments:
    """Owns the entries and the packed buffer; `seen` and `work` lie in `Buffers`."""

    def __init__(
        self,
        *,
        params: SamplingParams,
        buffers: Buffers,
        head: HeadTensors,
        ring: torch.Tensor,
        device: torch.device,
        n_slots: int,
        n_entries: int = 256,
    ) -> None:
        """`n_entries`: of one row, before the table grows."""
        self._params = params
        self._buffers = buffers
        self._step = head
        self._ring = ring
        self._device = device
        self._max_rows = params.max_rows
        self._n_mask_words = -(-params.vocab_size // 32)
        self._stride = align(params.max_rows)
        self._n_head = len(_FIELDS) * self._stride
        self._packed = PackedBuffer(
            n_words=self._n_head + _ROOM + params.max_rows * self._n_mask_words,
            n_slots=n_slots,
            device=device,
        )
        self._whole = self._packed.words
        self._bits_at = 0
        self._table = self._new_table(n_entries)
        self._row_entries = np.zeros(params.max_rows, dtype=np.int32)
        self._new_entries: dict[int, _Entries] = {}
        self._new_counts: dict[int, tuple[I32, int]] = {}

    def admit(self, row: int, sampling: Sampling, *, tokens: I32, n_prompt: int) -> None:
        """The row's parameters are set already. Raises ValueError, for the user, when an id is outside the
        vocabulary."""
        self._new_counts.pop(row, None)
        self._new_entries.pop(row, None)
        self._row_entries[row] = 0
        params = self._params
        if params.penalised[row]:
            self._new_counts[row] = (tokens, n_prompt)
        bias, ends = params.bias_of(row, sampling), params.end_tokens_of(sampling)
        parts = []
        if bias is not None:
            ids, places = np.unique(bias[0], return_inverse=True)
            values = np.zeros(len(ids), dtype=np.float32)
            np.add.at(values, places, bias[1])
            parts.append(_Entries(ids, values, np.full(len(ids), _ALWAYS, dtype=np.int32)))
        if ends is not None:
            ids = np.unique(ends)
            until = n_prompt + int(params.min_new_tokens[row])
            parts.append(
                _Entries(
                    ids,
                    np.full(len(ids), -np.inf, dtype=np.float32),
                    np.full(len(ids), min(until, _ENDING), dtype=np.int32),
                )
            )
        if parts:
            entries = _Entries(
                np.concatenate([part.ids for part in parts]),
                np.concatenate([part.values for part in parts]),
                np.concatenate([part.until for part in parts]),
            )
            self._new_entries[row] = entries
            self._row_entries[row] = len(entries.ids)
            self._grow(len(entries.ids))

    def send(self, rows: I32, positions: I32, *, masks: TokenMasks | None, asked: I64) -> None:
        """The step's packed copy, and what is new of its rows into the tables. `asked`: places of rows whose
        logprobs are wanted."""
        n = len(rows)
        counts = [(row, *self._new_counts.pop(row)) for row in rows.tolist() if row in self._new_counts]
        entries = [(row, self._new_entries.pop(row)) for row in rows.tolist() if row in self._new_entries]
        n_words = (
            self._n_head
            + 2 * sum(align(len(tokens)) for _, tokens, _ in counts)
            + 4 * sum(align(len(new.ids)) for _, new in entries)
            + (align(masks.bits.size) if masks is not None else 0)
            + 128
        )
        slot = self._packed.take(n_words)
        buffer, params = slot.buffer, self._params
        for name in _FLOATS:
            self._field(buffer, name)[:n] = getattr(params, name)[rows].view(np.int32)
        line, at = self._field(buffer, "line"), self._field(buffer, "at")
        line[:n], at[:n] = -1, positions
        self._field(buffer, "n_entries")[:n] = self._row_entries[rows]
        self._field(buffer, "asked")[: len(asked)] = asked
        if masks is not None:
            line[masks.index] = np.arange(len(masks.index), dtype=np.int32)
            at[masks.index[masks.ends]] = _ENDING
        tail = TailWriter(buffer, start=self._n_head)
        # The complement marks tokens of the prompt.
        known = [
            np.where(np.arange(len(tokens)) < n_prompt, ~np.int32(row), np.int32(row))
            for row, tokens, n_prompt in counts
        ]
        spans = [tail.add(_joined(known)), tail.add(_joined([tokens for _, tokens, _ in counts]))]
        stride = self._table.shape[2]
        parts = [[row * stride + np.arange(len(new.ids), dtype=np.int32) for row, new in entries]]
        parts += [[new.ids for _, new in entries], [new.values.view(np.int32) for _, new in entries]]
        parts.append([new.until for _, new in entries])
        spans += [tail.add(_joined(part)) for part in parts]
        self._bits_at = tail.add(masks.bits.reshape(-1) if masks is not None else [])[0]
        self._whole = self._packed.send(slot, n_words=tail.n_words, n_fixed=self._n_head)
        self._update([row for row, _, _ in counts], spans)

    def apply(self, *, n_rows: int, with_entries: bool) -> None:
        """From `buffers.logits` to `buffers.work`, with what was sent."""
        from worker.gpu.kernels.adjust import add_entries_kernel, adjust_kernel

        b, vocab = self._buffers, self._params.vocab_size
        adjust_kernel[(-(-vocab // SAMPLE_TILE), n_rows)](
            b.logits,
            b.work,
            self._step.sample_rows,
            self._sent("repetition"),
            self._sent("presence"),
            self._sent("frequency"),
            self._sent("line"),
            b.seen,
            self._whole[self._bits_at :],
            vocab,
            self._n_mask_words,
            BLOCK=SAMPLE_TILE,
        )
        if with_entries:
            add_entries_kernel[(n_rows,)](
                b.work,
                self._step.sample_rows,
                self._sent("at"),
                self._sent("n_entries"),
                *self._table,
                vocab,
                self._table.shape[2],
                BLOCK=256,
            )

    def keep_typical(self, *, n_rows: int) -> None:
        """Typical-p over what `buffers.floor` leaves of `buffers.work`."""
        from worker.gpu.kernels.adjust import typical_kernel

        typical_kernel[(n_rows,)](
            self._buffers.work,
            self._step.sample_rows,
            self._step.temperature,
            self._sent("typical_p"),
            self._buffers.floor,
            self._params.vocab_size,
            BLOCK=8192,
            num_warps=16,
        )

    def count(self, *, n_rows: int) -> None:
        """Add what the penalised rows have just sampled to their counts."""
        from worker.gpu.kernels.adjust import count_sampled_kernel

        count_sampled_kernel[(-(-n_rows // 256),)](
            self._step.sample_rows,
            self._step.slot,
            self._ring,
            self._sent("repetition"),
            self._sent("presence"),
            self._sent("frequency"),
            self._buffers.seen,
            n_rows,
            self._params.vocab_size,
            self._max_rows,
            BLOCK=256,
        )

    def asked(self, n: int) -> torch.Tensor:
        """int32 [n] on the device: the places whose logprobs are wanted."""
        return self._sent("asked")[:n]

    # ---- parts ----

    def _update(self, fresh: list[int], spans: list[tuple[int, int]]) -> None:
        from worker.gpu.kernels.adjust import count_known_kernel, scatter_entries_kernel

        known_rows, known_tokens, entry_at, *entry_parts = (
            self._whole[start : start + length] for start, length in spans
        )
        for row in fresh:
            self._buffers.seen[row].zero_()
        if len(known_rows):
            n = len(known_rows)
            count_known_kernel[(-(-n // 256),)](
                known_rows, known_tokens, self._buffers.seen, n, self._params.vocab_size, BLOCK=256
            )
        if len(entry_at):
            n = len(entry_at)
            scatter_entries_kernel[(-(-n // 256),)](entry_at, *entry_parts, *self._table, n, BLOCK=256)

    def _new_table(self, n_entries: int) -> torch.Tensor:
        """int32 [3, max rows, entries]: ids, values (float32 bits), until."""
        return torch.zeros((3, self._max_rows, n_entries), dtype=torch.int32, device=self._device)

    def _grow(self, n_entries: int) -> None:
        if n_entries > self._table.shape[2]:
            larger = self._new_table(1 << (n_entries - 1).bit_length())
            larger[:, :, : self._table.shape[2]] = self._table
            self._table = larger

    def _field(self, buffer: I32, name: str) -> I32:
        start = _FIELDS.index(name) * self._stride
        return buffer[start : start + self._stride]

    def _sent(self, name: str) -> torch.Tensor:
        start = _FIELDS.index(name) * self._stride
        view = self._packed.words[start : start + self._max_rows]
        return view.view(torch.float32) if name in _FLOATS else view


def _joined(parts: list[I32]) -> I32:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)
