"""The pass of a step that computes prompts' chunks, decode rows beside them.

Between two layers' attentions everything is replayed from graphs where the step's token count was captured.
Of the last layer only the rows that sample are needed behind its attention: its output, its MLP and the head
are computed for those alone, and its attention not at all when none samples (a chunk in the middle of a long
prompt). Its keys and values are written all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from worker.attention.flashinfer_backend import FlashInferPrefill
from worker.gpu.decoder import GpuDecoder
from worker.gpu.graph_sizes import pick_size
from worker.gpu.graphs import GraphSet
from worker.gpu.head import HeadTensors
from worker.gpu.step_plan import StepPlan


class MixedPass:
    """Owns the order of a mixed step's kernels, and no memory."""

    def __init__(
        self,
        decoder: GpuDecoder,
        *,
        prefill: FlashInferPrefill,
        head: HeadTensors,
        graph_sizes: tuple[int, ...],
    ) -> None:
        self._decoder = decoder
        self._prefill = prefill
        self._head = head
        self._graph_sizes = graph_sizes
        self._last = decoder.spec.n_layers - 1

    def run(
        self, plan: StepPlan, *, n_total: int, graphs: GraphSet | None, n_sampled: int, whole: bool
    ) -> None:
        """From the staged inputs to the logits of the rows that sample, in their order. n_total: tokens with
        padding. whole: all hidden states are wanted; they lie in `buffers.hidden`."""
        pieces = graphs.pieces.get(n_total) if graphs is not None else None
        size = None
        if pieces is not None and graphs is not None:
            size = pick_size(self._graph_sizes, plan.n_decode) if plan.n_decode else None
            attends = graphs.attends[size] if size is not None else None
            for index, piece in enumerate(pieces):
                piece.replay()
                if index == self._last and not (n_sampled or whole):
                    return
                # Padding rows of decode attention write nothing, so chunks may follow the live rows at once.
                if attends is not None:
                    attends[index].replay()
                self._attend_chunks(index, plan)
        else:
            self._run_layers(plan, skip_last=not (n_sampled or whole))
        if whole:
            self._decoder.after_attention(
                self._last, n_tokens=n_total if pieces is not None else plan.n_tokens
            )
            if n_sampled:
                self._decoder.logits(n_rows=n_sampled, index=self._head.sample_index)
        elif n_sampled:
            size = pick_size(self._graph_sizes, n_sampled) if graphs is not None else None
            if graphs is not None and size is not None:
                graphs.tails[size].replay()
            else:
                self.tail(n_sampled)
            self._decoder.logits(n_rows=n_sampled, index=None)

    def pieces(self, n_tokens: int) -> list[Callable[[], None]]:
        """What lies in front of each layer's attention, in a step of `n_tokens` tokens."""
        decoder = self._decoder

        def first() -> None:
            decoder.embed(n_tokens)
            decoder.before_attention(0, n_tokens=n_tokens, first_chunk=0)

        def between(index: int) -> None:
            decoder.after_attention(index - 1, n_tokens=n_tokens)
            decoder.before_attention(index, n_tokens=n_tokens, first_chunk=0)

        return [first, *(partial(between, index) for index in range(1, self._last + 1))]

    def tail(self, n_rows: int) -> None:
        """What lies behind the last attention, of the `n_rows` rows that sample (padding included)."""
        self._decoder.finish_rows(n_rows=n_rows, index=self._head.sample_index)

    def _run_layers(self, plan: StepPlan, *, skip_last: bool) -> None:
        decoder, n_tokens = self._decoder, plan.n_tokens
        decoder.embed(n_tokens)
        for index in range(self._last + 1):
            decoder.before_attention(index, n_tokens=n_tokens, first_chunk=plan.n_decode)
            if index == self._last and skip_last:
                return
            if plan.n_decode:
                decoder.decode_attention(index, n_rows=plan.n_decode, head=self._head)
            self._attend_chunks(index, plan)
            if index < self._last:
                decoder.after_attention(index, n_tokens=n_tokens)

    def _attend_chunks(self, index: int, plan: StepPlan) -> None:
        self._decoder.prefill_attention(
            index, first=plan.n_decode, n_chunk=plan.n_chunk_tokens, prefill=self._prefill
        )
