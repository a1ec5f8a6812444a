"""One forward pass of a decoder as a tape: all layers in one call, with buffers that live from step to step.

The tape is written once for buffers of some size; a step only fills in how many rows it has and where its
attention's lists are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from worker.attention.interface import Attention
from worker.attention.native_backend import NativeAttention
from worker.models.decoder import Decoder
from worker.models.spec import ModelSpec
from worker.native.attention import ATTEND_ARGUMENTS
from worker.native.attention_append import APPEND_ARGUMENTS
from worker.native.grouped_linear import CHUNK_ROWS, N_ROWS, GroupedGatedLinear, GroupedLinear
from worker.native.linear_kernel import chunk_rows, scratch_floats
from worker.native.panel import X_PADDING
from worker.native.row_kernel import GATHER_ARGUMENTS, NORM_ARGUMENTS, row_kernel
from worker.native.tape import Tape

_FEWEST_ROWS = 64
"""Buffers hold at least so many rows, and a power of two of them."""
_NORM_ROWS = 1 + NORM_ARGUMENTS.index("n_rows")
_GATHER_ROWS, _GATHER_INDEX = (1 + GATHER_ARGUMENTS.index(name) for name in ("n_rows", "index"))
_APPEND_STEP = [1 + APPEND_ARGUMENTS.index(name) for name in ("cos", "sin", "slots", "n_tokens")]
_ATTEND_NAMES = (
    "items",
    "n_items",
    "pieces",
    "tokens",
    "slots",
    "scratch",
    "most_tokens",
    "n_alone",
    "alone_heads",
)
_ATTEND_STEP = [1 + ATTEND_ARGUMENTS.index(name) for name in _ATTEND_NAMES]


class CompiledDecoder:
    """Computes what `Decoder` does, for the attention it was made with."""

    def __init__(self, decoder: Decoder, attention: NativeAttention) -> None:
        """Needs `can_compile(decoder)`."""
        self._decoder = decoder
        self._attention = attention
        self._buffers: _Buffers | None = None

    @property
    def spec(self) -> ModelSpec:
        return self._decoder.spec

    @property
    def device(self) -> torch.device:
        return self._decoder.device

    def hidden(self, tokens: torch.Tensor, attention: Attention, wanted: torch.Tensor | None) -> torch.Tensor:
        """As `Decoder.hidden`; the result is overwritten by the next call."""
        assert attention is self._attention
        n = len(tokens)
        index = tokens.to(torch.int64)
        chosen = torch.arange(n) if wanted is None else wanted.to(torch.int64)
        n_threads = torch.get_num_threads()
        buffers = self._buffers
        if buffers is None or not buffers.hold(n, n_threads=n_threads):
            buffers = self._buffers = _Buffers(self._decoder, self._attention, n_rows=n, n_threads=n_threads)
        return buffers.run(index, chosen, n_threads=n_threads)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._decoder.logits(hidden)


def can_compile(decoder: Decoder) -> bool:
    """Whether every part of it but attention has compiled code here."""
    return decoder.spec.hidden_size % row_kernel().lanes == 0 and all(
        layer.q_norm is None
        and isinstance(layer.gate_up, GroupedGatedLinear)
        and all(isinstance(part, GroupedLinear) for part in (layer.qkv, layer.o, layer.down))
        for layer in decoder.layers
    )


class _Buffers:
    """What a pass computes in, and the tape over it."""

    def __init__(self, decoder: Decoder, attention: NativeAttention, *, n_rows: int, n_threads: int) -> None:
        spec = decoder.spec
        self._n_rows = max(_FEWEST_ROWS, 1 << (n_rows - 1).bit_length())
        self._attention = attention
        self._n_threads = n_threads
        self._hidden = spec.hidden_size
        self._lanes = row_kernel().lanes
        self._eps = int(np.float32(spec.rms_eps).view(np.int32))
        self._x, self._last_x = self._rows(spec.hidden_size), self._rows(spec.hidden_size)
        self._normed = self._rows(spec.hidden_size)
        width = (spec.n_heads + 2 * spec.n_kv_heads) * spec.head_dim
        self._qkv = torch.empty((self._n_rows, width))
        self._attended = attention.kernel.out(self._n_rows)
        self._last_attended = attention.kernel.out(self._n_rows)
        self._gated = self._rows(spec.intermediate_size)
        self._scratch = torch.empty((n_threads, scratch_floats()))
        self._lines: list[Sequence[int]] = []
        self._fields: dict[str, list[tuple[int, int]]] = {}
        self._write(decoder)
        self._tape = Tape(len(self._lines))
        for op, line in zip(self._tape.ops, self._lines, strict=True):
            op[: len(line)] = line
        self._places: dict[str, Any] = {
            name: tuple(np.array(places, dtype=np.int64).T) for name, places in self._fields.items()
        }

    def hold(self, n_rows: int, *, n_threads: int) -> bool:
        return n_rows <= self._n_rows and n_threads <= self._n_threads

    def run(self, tokens: torch.Tensor, wanted: torch.Tensor, *, n_threads: int) -> torch.Tensor:
        """[n_wanted, hidden]"""
        angles, items = self._attention.angles, self._attention.items
        scratch = self._attention.kernel.scratch(items, n_threads=n_threads)
        n, n_wanted = len(tokens), len(wanted)
        values = {
            "tokens": tokens.data_ptr(),
            "wanted": wanted.data_ptr(),
            "n": n,
            "n_wanted": n_wanted,
            "n_chunk": chunk_rows(n),
            "n_wanted_chunk": chunk_rows(n_wanted),
            "cos": angles.cos.data_ptr(),
            "sin": angles.sin.data_ptr(),
            "token_slots": angles.slots.data_ptr(),
            "items": items.items.ctypes.data,
            "n_items": len(items.items) - 1,
            "pieces": items.pieces.ctypes.data,
            "query_tokens": items.tokens.ctypes.data,
            "slots": items.slots.ctypes.data,
            "scratch": scratch.data_ptr(),
            "most_tokens": items.most_tokens,
            "n_alone": items.n_alone,
            "alone_heads": items.alone_heads,
        }
        ops = self._tape.ops
        for name, places in self._places.items():
            ops[places] = values[name]
        self._tape.run(n_threads=n_threads)
        return self._normed[:n_wanted]

    def _rows(self, width: int) -> torch.Tensor:
        return torch.empty((self._n_rows, width + X_PADDING))[:, :width]

    # ---- the tape ----

    def _write(self, decoder: Decoder) -> None:
        self._gather(decoder.embed, self._x, index="tokens", n="n")
        x, attended, n = self._x, self._attended, "n"
        last = len(decoder.layers) - 1
        for index, layer in enumerate(decoder.layers):
            self._norm(x, layer.input_norm, n=n)
            self._linear(layer.qkv, self._normed, self._qkv, add=0, n=n)
            self._attend(index)
            if index == last:
                # Past the last KV append only the wanted tokens matter.
                n = "n_wanted"
                self._gather(attended, self._last_attended, index="wanted", n=n)
                self._gather(x, self._last_x, index="wanted", n=n)
                x, attended = self._last_x, self._last_attended
            self._linear(layer.o, attended, x, add=1, n=n)
            self._norm(x, layer.post_norm, n=n)
            self._linear(layer.gate_up, self._normed, self._gated, add=0, n=n)
            self._linear(layer.down, self._gated, x, add=1, n=n)
        self._norm(x, decoder.final_norm, n=n)

    def _put(self, line: Sequence[int], **fields: int) -> None:
        """A line, and at which of its places what is filled in for each step."""
        for name, place in fields.items():
            self._fields.setdefault(name, []).append((len(self._lines), place))
        self._lines.append(line)

    def _gather(self, x: torch.Tensor, out: torch.Tensor, *, index: str, n: str) -> None:
        places = (x.data_ptr(), x.stride(0), 0, out.data_ptr(), out.stride(0))
        line = (row_kernel().gather, *places, 0, x.shape[1] // self._lanes)
        self._put(line, **{index: _GATHER_INDEX, n: _GATHER_ROWS})

    def _norm(self, x: torch.Tensor, weight: torch.Tensor, *, n: str) -> None:
        out = self._normed
        places = (x.data_ptr(), x.stride(0), weight.data_ptr(), out.data_ptr(), out.stride(0))
        line = (row_kernel().norm, *places, 0, self._hidden // self._lanes, self._eps)
        self._put(line, **{n: _NORM_ROWS})

    def _linear(self, linear: Any, x: torch.Tensor, out: torch.Tensor, *, add: int, n: str) -> None:
        line = linear.line(x, out, self._scratch, add=add)
        self._put(line, **{n: N_ROWS, f"{n}_chunk": CHUNK_ROWS})

    def _attend(self, layer: int) -> None:
        attention = self._attention
        cache = attention.cache(layer)
        append = attention.kernel.append_line(self._qkv, None, cache)
        self._put(append, **dict(zip(("cos", "sin", "token_slots", "n"), _APPEND_STEP, strict=True)))
        attend = attention.kernel.attend_line(self._qkv, cache, None, self._attended, None)
        names = ["query_tokens" if name == "tokens" else name for name in _ATTEND_NAMES]
        self._put(attend, **dict(zip(names, _ATTEND_STEP, strict=True)))
