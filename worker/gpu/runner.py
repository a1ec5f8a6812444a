"""The runner for one NVIDIA GPU: implements `worker.runner.Runner` over `GpuCore`.

`launch` returns while the device works; what it sampled feeds the next launched step on the device, so the
engine keeps a step queued behind the running one and the device never waits for the host. A step with rows
that a grammar constrains is the exception: once its forward pass runs, `launch` waits for the tokens of the
step before, from which the masks follow.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from proto.codec import unpack_i32
from proto.worker_pb2 import Admit, Grammar, RowError
from worker.gpu.core import GpuCore, Launched
from worker.gpu.prompt_logprobs import PromptPart, prompt_part
from worker.gpu.sampler import NO_TOKEN
from worker.gpu.step_plan import StepPlan
from worker.grammar.rows import GrammarRows
from worker.grammar.start import NO_GRAMMARS
from worker.runner import DeviceError, RunnerCapacity, Sampled, SampledLogprobs, StepBatch
from worker.sampling import RawLogprobs, TokenMasks

I32 = npt.NDArray[np.int32]


@dataclass(slots=True)
class _RowInfo:
    epoch: int
    n_prompt: int
    prompt_logprobs: int
    error: str = ""
    """Why its sampling parameters can't be used."""


@dataclass(slots=True)
class _Failure:
    kind: RowError.Kind.ValueType
    message: str


@dataclass(slots=True)
class GpuPending:
    """A launched step."""

    seq: int
    launched: Launched | None
    """None: no row computed."""
    failures: dict[int, _Failure] = field(default_factory=dict)
    """By row."""
    prompt: list[PromptPart] = field(default_factory=list)
    tokens: I32 | None = None
    """Once they have been read; see `worker.gpu.sampler` for negative ones."""

    def done(self) -> bool:
        return self.launched is None or self.launched.copied.query()


class GpuRunner:
    def __init__(
        self,
        core: GpuCore,
        capacity: RunnerCapacity,
        *,
        use_graphs: bool,
        grammars: GrammarRows | None = None,
    ) -> None:
        self.core = core
        self._capacity = capacity
        self._use_graphs = use_graphs
        self._grammars = grammars
        self._rows: dict[int, _RowInfo] = {}
        self._unread: deque[GpuPending] = deque()
        """Launched steps whose tokens have not been read, oldest first."""

    @property
    def capacity(self) -> RunnerCapacity:
        return self._capacity

    def reset(self) -> None:
        self._rows.clear()
        self._unread.clear()
        if self._grammars is not None:
            self._grammars.reset()
        try:
            self.core.reset()
        except RuntimeError as error:
            raise DeviceError(str(error)) from error

    def launch(self, batch: StepBatch) -> GpuPending:
        try:
            with (
                torch.inference_mode(),
                torch.cuda.device(self.core.gpu.device),
                torch.cuda.stream(self.core.stream),
            ):
                return self._launch(batch)
        except RuntimeError as error:
            raise DeviceError(str(error)) from error

    def collect(self, pending: GpuPending) -> Sampled:
        try:
            return self._collect(pending)
        except RuntimeError as error:
            raise DeviceError(str(error)) from error

    def prepare(self, grammar: Grammar) -> None:
        if self._grammars is None:
            raise ValueError(NO_GRAMMARS)
        self._grammars.prepare(grammar)

    # ---- launching ----

    def _launch(self, batch: StepBatch) -> GpuPending:
        if len(batch.zero_blocks):
            self.core.cache.zero_blocks(batch.zero_blocks)
        for row in batch.evicts.tolist():
            self._rows.pop(row, None)
            if self._grammars is not None:
                self._grammars.evict(row)
        for admit in batch.admits:
            self._admit(admit)
        pending = GpuPending(batch.seq, None)
        if not len(batch.rows):
            return pending
        asked = [
            index
            for index in range(batch.n_decode, len(batch.rows))
            if self._rows[int(batch.rows[index])].prompt_logprobs
        ]
        sampled = batch.rows[batch.samples]
        masked = self._grammars is not None and self._grammars.constrained(sampled).any()
        launched = self.core.launch(
            batch,
            allow_graph=self._use_graphs,
            after_forward=(lambda plan: self._add_prompt_parts(pending, batch, asked, plan))
            if asked
            else None,
            find_masks=(lambda: self._find_masks(pending, sampled)) if masked else None,
        )
        pending.launched = launched
        self._unread.append(pending)
        hosts = self.core.copy_out(
            launched, extra=[tensor for part in pending.prompt for tensor in part.tensors]
        )
        for number, part in enumerate(pending.prompt):
            part.tensors = hosts[3 * number : 3 * number + 3]
        for row in launched.batch_rows.tolist():
            if self._rows[row].error:
                pending.failures[row] = _Failure(RowError.INVALID, self._rows[row].error)
        return pending

    def _admit(self, admit: Admit) -> None:
        info = _RowInfo(admit.epoch, admit.n_prompt, admit.sampling.prompt_logprobs)
        self._rows[admit.row] = info
        self.core.forget_row(admit.row)
        tokens = unpack_i32(admit.tokens)
        try:
            self.core.sampler.admit(admit.row, admit.sampling, tokens=tokens, n_prompt=admit.n_prompt)
        except ValueError as error:
            info.error = str(error)
        if self._grammars is not None:
            self._grammars.admit(admit.row, admit.grammar, output=tokens[admit.n_prompt :].tolist())

    def _add_prompt_parts(
        self, pending: GpuPending, batch: StepBatch, asked: list[int], plan: StepPlan
    ) -> None:
        for index in asked:
            info = self._rows[int(batch.rows[index])]
            part = prompt_part(
                self.core.decoder,
                batch,
                index,
                plan=plan,
                n_prompt=info.n_prompt,
                n_top=min(info.prompt_logprobs - 1, self._capacity.vocab_size),
            )
            if part is not None:
                pending.prompt.append(part)

    def _find_masks(self, pending: GpuPending, rows: I32) -> TokenMasks | None:
        """Of the step that is being launched, whose pass already runs."""
        assert self._grammars is not None
        while self._unread:
            self._read_tokens(self._unread[0])
        job = self._grammars.begin_step(rows)
        if job is None:
            return None
        masks = job.wait()
        for row, message in masks.errors.items():
            pending.failures[row] = _Failure(RowError.GRAMMAR, message)
        return masks

    # ---- collecting ----

    def _read_tokens(self, pending: GpuPending) -> I32:
        """Of the oldest unread step, or of one that was read before: waits for it, and tells the matchers
        once."""
        if pending.tokens is None:
            assert pending is self._unread[0]
            launched = pending.launched
            assert launched is not None
            launched.copied.synchronize()
            rows = launched.batch_rows
            pending.tokens = self.core.results[launched.slot, : len(rows)].numpy().copy()
            self._unread.popleft()
            if self._grammars is not None and self._grammars.constrained(rows).any():
                self._tell_matchers(rows, launched.epochs, pending.tokens)
        return pending.tokens

    def _tell_matchers(self, rows: I32, epochs: I32, tokens: I32) -> None:
        """But not that of a row which another request has taken since."""
        assert self._grammars is not None
        lives = [
            token >= 0 and (info := self._rows.get(row)) is not None and info.epoch == epoch
            for row, epoch, token in zip(rows.tolist(), epochs.tolist(), tokens.tolist(), strict=True)
        ]
        self._grammars.accept(rows[lives], tokens[lives])

    def _collect(self, pending: GpuPending) -> Sampled:
        launched = pending.launched
        if launched is None:
            empty = np.zeros(0, dtype=np.int32)
            return Sampled(pending.seq, empty, empty, empty, step_us=1)
        tokens = self._read_tokens(pending)
        rows = launched.batch_rows
        errors = []
        for index in np.flatnonzero(
            (tokens < 0) | np.isin(rows, np.fromiter(pending.failures, dtype=np.int32))
        ).tolist():
            row = int(rows[index])
            failure = pending.failures.get(row)
            if failure is None and tokens[index] == NO_TOKEN:
                failure = _Failure(RowError.GRAMMAR, "logit_bias forbids every token that it allows")
            if failure is None:
                failure = _Failure(RowError.NAN_LOGITS, "the model's logits hold no usable number")
            errors.append(
                RowError(
                    row=row, epoch=int(launched.epochs[index]), kind=failure.kind, message=failure.message
                )
            )
        raw = launched.raw_logprobs
        before = launched.before
        return Sampled(
            pending.seq,
            rows,
            launched.epochs,
            np.maximum(tokens, 0),
            logprobs=pack_logprobs(raw) if raw is not None else None,
            prompt_logprobs=[part.pack() for part in pending.prompt],
            errors=errors,
            step_us=max(1, round(launched.started.elapsed_time(launched.ended) * 1000)),
            idle_us=max(0, round(before.elapsed_time(launched.started) * 1000)) if before is not None else 0,
        )


def pack_logprobs(raw: RawLogprobs) -> SampledLogprobs:
    """Host tensors; the padded top lists are cut to what each row asked for."""
    n_top = np.minimum(raw.n_top, raw.top_ids.shape[1])
    inside = np.arange(raw.top_ids.shape[1]) < n_top[:, None]
    return SampledLogprobs(
        index=raw.index.astype(np.int32),
        chosen=raw.chosen.numpy(),
        n_top=n_top.astype(np.int32),
        top_ids=raw.top_ids.numpy()[inside].astype(np.int32),
        top_values=raw.top_values.numpy()[inside],
    )
