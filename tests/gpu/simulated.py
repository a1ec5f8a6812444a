"""The GPU core on a machine without a GPU: Triton's interpreter runs the kernels, streams and events are
stand-ins that run everything at once, and FlashInfer's prefill is replaced by plain attention over the same
pages.

The interpreter is chosen in `conftest.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from worker.attention.flashinfer_backend import PrefillShape, Source
from worker.gpu import core as core_module
from worker.gpu.buffers import make_buffers
from worker.gpu.cache import PagedCache
from worker.gpu.choices import DecodeTiles, most_decode_programs
from worker.gpu.core import CoreShape, GpuCore
from worker.gpu.device import Gpu
from worker.gpu.graph_sizes import graph_sizes
from worker.gpu.graphs import DecodeGraph, GraphSet
from worker.gpu.runner import GpuRunner
from worker.gpu.token_sizes import candidates
from worker.grammar.rows import GrammarRows
from worker.models.spec import DecoderWeights, ModelSpec
from worker.runner import RunnerCapacity


class Event:
    def __init__(self, **kwargs: Any) -> None:
        self.recorded = False

    def record(self, stream: Any = None) -> None:
        self.recorded = True

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Event) -> float:
        return 1.0


class Stream:
    def __init__(self, device: Any = None) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class PlainPrefill:
    """What `FlashInferPrefill` computes, token by token."""

    def __init__(self, spec: ModelSpec, *, block_size: int, **_: Any) -> None:
        self.spec, self.block_size = spec, block_size
        self.n_waits = 0
        self.attends_own = True
        self.pages: torch.Tensor | None = None

    def source(self, shape: PrefillShape) -> Source:
        return Source.OWN if bool((shape.q_lens == shape.kv_lens).all()) else Source.BLOCKS

    def plan_own(self, shape: PrefillShape) -> None:
        self.shape, self.pages = shape, None

    def plan(self, shape: PrefillShape, pages: torch.Tensor) -> None:
        self.shape, self.pages = shape, pages.clone()

    def finish(self, event: Any) -> None:
        pass

    def run(
        self,
        layer: int,
        q: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        *,
        own: tuple[torch.Tensor, torch.Tensor],
        scale: float,
    ) -> None:
        at, page_at = 0, 0
        window = self.spec.sliding_windows[layer] if self.spec.sliding_windows else None
        group = self.spec.n_heads // self.spec.n_kv_heads
        for q_len, kv_len in zip(self.shape.q_lens.tolist(), self.shape.kv_lens.tolist(), strict=True):
            n_pages = -(-kv_len // self.block_size)
            if self.pages is None:
                k, v = (part[at : at + q_len].repeat_interleave(group, 1) for part in own)
            else:
                pages = self.pages[page_at : page_at + n_pages].long()
                k, v = (part[pages].flatten(0, 1)[:kv_len].repeat_interleave(group, 1) for part in cache)
            scores = torch.einsum("qhd,thd->hqt", q[at : at + q_len], k) * self.spec.head_dim**-0.5
            positions = torch.arange(kv_len)
            allowed = positions[None, :] <= (torch.arange(q_len) + kv_len - q_len)[:, None]
            if window is not None:
                allowed &= positions[None, :] > (torch.arange(q_len) + kv_len - q_len)[:, None] - window
            scores = scores.masked_fill(~allowed, -torch.inf)
            out[at : at + q_len] = torch.einsum("hqt,thd->qhd", scores.softmax(-1), v)
            at += q_len
            page_at += n_pages


@pytest.fixture
def simulated_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    real = {name: getattr(torch, name) for name in ("zeros", "full", "empty")}

    def unpinned(name: str) -> Any:
        def make(*args: Any, **kwargs: Any) -> torch.Tensor:
            kwargs.pop("pin_memory", None)
            return real[name](*args, **kwargs)

        return make

    for name in real:
        monkeypatch.setattr(torch, name, unpinned(name))
    real_mm = torch.mm

    def mm(a: torch.Tensor, b: torch.Tensor, *, out_dtype: Any = None, out: Any = None) -> torch.Tensor:
        return real_mm(a, b) if out is None else real_mm(a, b, out=out)

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", nothing)
    monkeypatch.setattr(torch.cuda, "device", nothing)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: None)
    monkeypatch.setattr(core_module, "FlashInferPrefill", PlainPrefill)


GPU = Gpu(device=torch.device("cpu"), name="simulated", capability=(8, 0), n_sms=4, memory_bytes=1 << 30)


class Replay:
    """A captured graph: its body, run again."""

    def __init__(self, body: Callable[[], None]) -> None:
        self.replay = body


def make_runner(
    weights: DecoderWeights,
    *,
    block_size: int,
    graphs: bool = False,
    max_rows: int = 8,
    max_tokens: int = 128,
    n_blocks: int = 400,
    grammars: GrammarRows | None = None,
) -> GpuRunner:
    spec = weights.spec
    shape = CoreShape(
        max_rows=max_rows,
        max_step_tokens=max_tokens,
        max_context=256,
        block_size=block_size,
        graph_sizes=graph_sizes(max_rows) if graphs else (),
    )
    buffers = make_buffers(
        spec,
        max_tokens=max_tokens,
        max_rows=max_rows,
        n_programs=most_decode_programs(max_rows=max_rows, n_kv_heads=spec.n_kv_heads, n_sms=GPU.n_sms),
        dtype=torch.float32,
        device=GPU.device,
    )
    cache = PagedCache(spec, n_blocks=n_blocks, block_size=block_size, dtype=torch.float32, device=GPU.device)
    core = GpuCore(
        weights,
        gpu=GPU,
        shape=shape,
        buffers=buffers,
        cache=cache,
        dtype=torch.float32,
        tiles=DecodeTiles(block_t=16, warps=4, stages=2),
    )
    if graphs:
        core.token_sizes = candidates(max_tokens)
        core.graphs = GraphSet(
            graphs={
                size: DecodeGraph(
                    Replay(partial(core._decode_forward, size)),  # type: ignore[arg-type]
                    Replay(partial(core.sampler.launch, n_rows=size, filtered=False)),  # type: ignore[arg-type]
                )
                for size in shape.graph_sizes
            },
            pieces={
                n: [Replay(body) for body in core.mixed.pieces(n)]  # type: ignore[misc]
                for n in core.token_sizes
            },
            attends={
                size: [
                    Replay(partial(core.decoder.decode_attention, layer, n_rows=size, head=core.head))  # type: ignore[misc]
                    for layer in range(spec.n_layers)
                ]
                for size in shape.graph_sizes
            },
            tails={
                size: Replay(partial(core.mixed.tail, size))  # type: ignore[misc]
                for size in shape.graph_sizes
            },
            seconds=0.0,
        )
    capacity = RunnerCapacity(
        model_id="tiny",
        model_hash="tiny",
        model_path="",
        block_size=block_size,
        n_blocks=n_blocks,
        max_rows=max_rows,
        max_step_tokens=max_tokens,
        max_context=shape.max_context,
        vocab_size=spec.vocab_size,
        eos_token_ids=(2,),
        attention="flashinfer",
        device="simulated",
        dtype="float32",
        kv_cache_dtype="float32",
        max_batch_total_tokens=n_blocks * block_size,
        memory_arithmetic="",
        features=("prompt_logprobs",),
    )
    return GpuRunner(core, capacity, use_graphs=graphs, grammars=grammars)


def rng_prompts(lengths: tuple[int, ...], *, vocab: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, vocab, n).tolist() for n in lengths]
