"""The device side of the runner: weights, cache, inputs, sampler and graphs, and how one step is launched.

One compute stream carries every kernel; results leave on a stream of their own. Nothing here waits for the
device, except for a buffer whose last copy has not ended (which a window of steps never meets).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from worker.attention.flashinfer_backend import FlashInferPrefill, PrefillShape, Source
from worker.gpu.buffers import Buffers
from worker.gpu.cache import PagedCache
from worker.gpu.choices import DecodeTiles, decode_chunk, max_groups
from worker.gpu.decoder import GpuDecoder
from worker.gpu.device import Gpu
from worker.gpu.graph_sizes import pick_size
from worker.gpu.graphs import GraphSet, capture
from worker.gpu.inputs import StepInputs
from worker.gpu.mixed import MixedPass
from worker.gpu.sampler import GpuSampler, Needs
from worker.gpu.sharing import Sharing, SharingCache
from worker.gpu.step_plan import StepPlan, pack
from worker.models.spec import DecoderWeights
from worker.runner import StepBatch
from worker.sampling import RawLogprobs, TokenMasks

I32 = npt.NDArray[np.int32]

LAUNCH_DEPTH = 2
"""Steps launched and not yet collected."""
_N_SLOTS = LAUNCH_DEPTH + 2


@dataclass(frozen=True, slots=True)
class CoreShape:
    """The limits that everything is sized by."""

    max_rows: int
    max_step_tokens: int
    max_context: int
    block_size: int
    graph_sizes: tuple[int, ...]
    """Decode rows"""

    @property
    def max_blocks_per_row(self) -> int:
        return -(-self.max_context // self.block_size)


@dataclass(slots=True)
class Launched:
    """A step on the device."""

    batch_rows: I32
    """Of the rows that sample, in their order."""
    epochs: I32
    slot: int
    started: torch.cuda.Event
    ended: torch.cuda.Event
    """After the last kernel."""
    copied: torch.cuda.Event
    """After the result has reached the host."""
    before: torch.cuda.Event | None
    """The end of the step in front."""
    raw_logprobs: RawLogprobs | None = None
    extra: list[torch.Tensor] = field(default_factory=list)
    """Kept alive until the copies have ended."""


class GpuCore:
    def __init__(
        self,
        weights: DecoderWeights,
        *,
        gpu: Gpu,
        shape: CoreShape,
        buffers: Buffers,
        cache: PagedCache,
        dtype: torch.dtype,
        tiles: DecodeTiles | None = None,
    ) -> None:
        self.gpu = gpu
        self.shape = shape
        self.buffers = buffers
        self.cache = cache
        self.spec = weights.spec
        device = gpu.device
        self.stream = torch.cuda.Stream(device)
        self.copy_stream = torch.cuda.Stream(device)
        self.inputs = StepInputs(
            max_rows=shape.max_rows,
            max_step_tokens=shape.max_step_tokens,
            max_blocks_per_row=shape.max_blocks_per_row,
            block_size=shape.block_size,
            n_blocks=cache.n_blocks,
            buffers=buffers,
            device=device,
            n_slots=LAUNCH_DEPTH + 1,
        )
        self.head = self.inputs.head
        self.decoder = GpuDecoder(
            weights,
            buffers=buffers,
            cache=cache,
            rows=self.inputs.rows,
            gpu=gpu,
            max_context=shape.max_context,
            tiles=tiles,
        )
        self._sharing = SharingCache(block_size=shape.block_size, group_rows=self.decoder.group_rows)
        self.prefill = FlashInferPrefill(
            weights.spec,
            block_size=shape.block_size,
            dtype=dtype,
            kv_dtype=cache.dtype,
            device=device,
            n_turns=LAUNCH_DEPTH + 1,
            fa3=gpu.capability[0] == 9,
            max_context=shape.max_context,
        )
        self.decoder.leaves_keys = self.prefill.attends_own
        self.mixed = MixedPass(
            self.decoder, prefill=self.prefill, head=self.head, graph_sizes=shape.graph_sizes
        )
        self.sampler = GpuSampler(
            buffers=buffers,
            head=self.head,
            last=self.inputs.rows.last,
            vocab_size=weights.spec.vocab_size,
            max_rows=shape.max_rows,
            n_slots=_N_SLOTS,
            device=device,
            pdl=gpu.has_pdl,
        )
        self.results = torch.full((_N_SLOTS, shape.max_rows), -1, dtype=torch.int32, pin_memory=True)
        self.graphs: GraphSet | None = None
        self.token_sizes: tuple[int, ...] = ()
        """Of mixed steps, captured"""
        self._slot = 0
        self._last_end: torch.cuda.Event | None = None

    # ---- setup ----

    def capture_graphs(self, token_sizes: tuple[int, ...] = ()) -> None:
        """Of every decode size in the shape, and of mixed steps of these token counts. The staged head
        describes no live row then: all is padding."""
        self.token_sizes = token_sizes
        self.inputs.clear()
        torch.cuda.synchronize(self.gpu.device)
        self.graphs = capture(
            self.shape.graph_sizes,
            forward=self._decode_forward,
            sample=lambda size: self.sampler.launch(n_rows=size, filtered=False),
            token_sizes=token_sizes,
            pieces=self.mixed.pieces,
            tail=self.mixed.tail,
            attend=lambda layer, size: self.decoder.decode_attention(layer, n_rows=size, head=self.head),
            n_layers=self.spec.n_layers,
            stream=self.stream,
        )

    def reset(self) -> None:
        torch.cuda.synchronize(self.gpu.device)
        self.inputs.delta.reset()
        self._sharing.reset()
        self._last_end = None

    def forget_row(self, row: int) -> None:
        """The row starts anew: the device knows none of its blocks."""
        self.inputs.delta.forget(row)

    # ---- a step ----

    def launch(
        self,
        batch: StepBatch,
        *,
        allow_graph: bool = True,
        after_forward: Callable[[StepPlan], None] | None = None,
        find_masks: Callable[[], TokenMasks | None] | None = None,
    ) -> Launched:
        """Start the step; at least one row computes. Called within the compute stream's context.
        after_forward may launch more work on the pass's hidden states; find_masks, given when a grammar
        constrains some row, is called once the pass runs, and may wait."""
        size = None
        decode_only = batch.n_decode == len(batch.rows)
        if decode_only and allow_graph and self.graphs is not None:
            size = pick_size(self.shape.graph_sizes, batch.n_decode)
        places = np.flatnonzero(batch.samples)
        rows, positions = batch.rows[places].copy(), batch.kv_lens[places].copy()
        needs = self.sampler.needs(rows, positions, masked=find_masks is not None)
        n = batch.n_decode
        sharing = self._find_sharing(batch)
        self._slot = (self._slot + 1) % _N_SLOTS
        slot, staging = self._slot, self.inputs.take(batch)
        plan = pack(
            batch,
            buffer=staging.buffer,
            layout=self.inputs.layout,
            delta=self.inputs.delta,
            n_padded=size if size is not None else batch.n_decode,
            keys=self.sampler.keys(rows, positions),
            slot=slot,
            chunk=decode_chunk(
                n_positions=int((batch.kv_lens[:n] - sharing.prefix).sum()) + sharing.n_positions,
                n_kv_heads=self.spec.n_kv_heads,
                n_sms=self.gpu.n_sms,
            ),
            sharing=sharing,
        )
        n_total = plan.n_tokens
        if not decode_only and allow_graph and self.graphs is not None:
            n_total = pick_size(self.token_sizes, n_total) or n_total
        started = torch.cuda.Event(enable_timing=True)
        started.record(self.stream)
        self.inputs.send(staging, plan)
        if size is not None:
            assert self.graphs is not None
            self.graphs.graphs[size].forward.replay()
        elif decode_only:
            self._decode_forward(plan.n_decode)
        else:
            self.inputs.stage_chunks(plan, n_total=n_total)
            self._plan_prefill(plan)
            self.mixed.run(
                plan,
                n_total=n_total,
                graphs=self.graphs if allow_graph else None,
                n_sampled=len(rows),
                whole=after_forward is not None,
            )
        if after_forward is not None:
            after_forward(plan)
        masks = find_masks() if find_masks is not None else None
        raw = self._sample(needs, rows=rows, positions=positions, slot=slot, size=size, masks=masks)
        ended = torch.cuda.Event(enable_timing=True)
        ended.record(self.stream)
        if not decode_only:
            self.prefill.finish(ended)
        launched = Launched(
            batch_rows=rows,
            epochs=batch.epochs[places].copy(),
            slot=slot,
            started=started,
            ended=ended,
            copied=torch.cuda.Event(),
            before=self._last_end,
            raw_logprobs=raw,
        )
        self._last_end = ended
        return launched

    def copy_out(self, launched: Launched, *, extra: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
        """Bring the step's tokens to the host, beside whatever computes next; `extra` too, and return where
        it will lie. All is there once `launched.copied` has passed."""
        n_sampled = len(launched.batch_rows)
        with torch.cuda.stream(self.copy_stream):
            self.copy_stream.wait_event(launched.ended)
            if n_sampled:
                self.results[launched.slot, :n_sampled].copy_(
                    self.sampler.ring[launched.slot, :n_sampled], non_blocking=True
                )
            raw = launched.raw_logprobs
            if raw is not None:
                launched.extra += [raw.chosen, raw.top_ids, raw.top_values]
                raw.chosen = self._to_host(raw.chosen)
                raw.top_ids = self._to_host(raw.top_ids)
                raw.top_values = self._to_host(raw.top_values)
            launched.extra += extra
            hosts = [self._to_host(tensor) for tensor in extra]
            launched.copied.record(self.copy_stream)
        return hosts

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        return host

    # ---- parts ----

    def _find_sharing(self, batch: StepBatch) -> Sharing:
        n = batch.n_decode
        return self._sharing.find(
            rows=batch.rows[:n],
            epochs=batch.epochs[:n],
            kv_lens=batch.kv_lens[:n],
            block_tables=batch.block_tables,
            # Whatever launch runs has room for at least as many.
            max_groups=max_groups(n_rows=n, group_rows=self._sharing.group_rows),
        )

    def _decode_forward(self, size: int) -> None:
        self.inputs.decode_inputs(size)
        self.decoder.forward(n_rows=size, head=self.head)
        self.decoder.logits(n_rows=size, index=None)

    def _plan_prefill(self, plan: StepPlan) -> None:
        chunks = PrefillShape(plan.chunk_q_lens, plan.chunk_kv_lens)
        source = self.prefill.source(chunks)
        if source is Source.OWN:
            self.prefill.plan_own(chunks)
        elif source is Source.GATHERED:
            self.prefill.plan_gathered(chunks, self.inputs.chunk_tables(plan))
        else:
            self.prefill.plan(chunks, self.inputs.chunk_pages(plan))

    def _sample(
        self,
        needs: Needs,
        *,
        rows: I32,
        positions: I32,
        slot: int,
        size: int | None,
        masks: TokenMasks | None,
    ) -> RawLogprobs | None:
        if not len(rows):
            return None
        if size is not None and needs.lean:
            assert self.graphs is not None
            self.graphs.graphs[size].sample.replay()
        else:
            self.sampler.sample(rows, positions, needs, masks=masks)
        return self.sampler.logprobs(rows, positions, needs, slot=slot)
