"""The runner for one NVIDIA GPU: implements `worker.runner.Runner` over `GpuCore`.

`launch` returns while the device works; what it sampled feeds the next launched step on the device, so the
engine keeps a step queued behind the running one and the device never waits for the host.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from proto.codec import pack_f32, pack_i32, unpack_i32
from proto.worker_pb2 import Grammar, PromptLogprobs, RowError
from worker.gpu.core import GpuCore, Launched
from worker.gpu.step_plan import StepPlan
from worker.runner import DeviceError, RunnerCapacity, Sampled, SampledLogprobs, StepBatch
from worker.sampling import RawLogprobs

_PROMPT_LOGIT_ROWS = 256
"""Prompt positions whose logits are held at once."""


@dataclass(slots=True)
class _RowInfo:
    epoch: int
    n_prompt: int
    prompt_logprobs: int
    error: str = ""
    """Why its sampling parameters can't be used."""


@dataclass(slots=True)
class _PromptPart:
    """Logprobs of one row's prompt positions, on the way to the host."""

    row: int
    epoch: int
    start: int
    n_top: int
    tensors: list[torch.Tensor]
    """chosen, top ids, top values"""


@dataclass(slots=True)
class GpuPending:
    """A launched step."""

    seq: int
    launched: Launched | None
    """None: no row computed."""
    errors: dict[int, str] = field(default_factory=dict)
    """By row."""
    prompt: list[_PromptPart] = field(default_factory=list)

    def done(self) -> bool:
        return self.launched is None or self.launched.copied.query()


class GpuRunner:
    def __init__(self, core: GpuCore, capacity: RunnerCapacity, *, use_graphs: bool) -> None:
        self.core = core
        self._capacity = capacity
        self._use_graphs = use_graphs
        self._rows: dict[int, _RowInfo] = {}

    @property
    def capacity(self) -> RunnerCapacity:
        return self._capacity

    def reset(self) -> None:
        self._rows.clear()
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
        raise ValueError("this worker does not constrain answers by a grammar yet")

    # ---- launching ----

    def _launch(self, batch: StepBatch) -> GpuPending:
        if len(batch.zero_blocks):
            self.core.cache.zero_blocks(batch.zero_blocks)
        for row in batch.evicts.tolist():
            self._rows.pop(row, None)
        for admit in batch.admits:
            info = _RowInfo(admit.epoch, admit.n_prompt, admit.sampling.prompt_logprobs)
            self._rows[admit.row] = info
            self.core.forget_row(admit.row)
            try:
                self.core.sampler.admit(
                    admit.row, admit.sampling, tokens=unpack_i32(admit.tokens), n_prompt=admit.n_prompt
                )
            except ValueError as error:
                info.error = str(error)
        if not len(batch.rows):
            return GpuPending(batch.seq, None)
        pending = GpuPending(batch.seq, None)
        asked = [
            index
            for index in range(batch.n_decode, len(batch.rows))
            if self._rows[int(batch.rows[index])].prompt_logprobs
        ]

        def prompt_logprobs(plan: StepPlan) -> None:
            for index in asked:
                part = self._prompt_part(batch, index, plan)
                if part is not None:
                    pending.prompt.append(part)

        launched = self.core.launch(
            batch, allow_graph=self._use_graphs, after_forward=prompt_logprobs if asked else None
        )
        pending.launched = launched
        extra = [tensor for part in pending.prompt for tensor in part.tensors]
        hosts = self.core.copy_out(launched, extra=extra)
        for number, part in enumerate(pending.prompt):
            part.tensors = hosts[3 * number : 3 * number + 3]
        for row in launched.batch_rows.tolist():
            if self._rows[row].error:
                pending.errors[row] = self._rows[row].error
        return pending

    def _prompt_part(self, batch: StepBatch, index: int, plan: StepPlan) -> _PromptPart | None:
        """Position p's logits speak of the token at p + 1, as long as that is part of the prompt."""
        row = int(batch.rows[index])
        info = self._rows[row]
        kv_len, q_len = int(batch.kv_lens[index]), int(batch.q_lens[index])
        first, last = kv_len - q_len + 1, min(kv_len + 1, info.n_prompt)
        if last <= first:
            return None
        device = self.core.gpu.device
        targets = torch.from_numpy(batch.tokens[row, first:last].astype(np.int64)).to(device)
        start = plan.n_padded + int(batch.q_lens[batch.n_decode : index].sum())
        n_top = min(info.prompt_logprobs - 1, self._capacity.vocab_size)
        chosen, top_ids, top_values = [], [], []
        for at in range(0, last - first, _PROMPT_LOGIT_ROWS):
            stop = min(at + _PROMPT_LOGIT_ROWS, last - first)
            logits = self.core.decoder.prompt_logits(start=start + at, end=start + stop)
            total = torch.logsumexp(logits, dim=-1, keepdim=True)
            chosen.append((logits.gather(-1, targets[at:stop, None]) - total).squeeze(-1))
            top = logits.topk(n_top, dim=-1)
            top_ids.append(top.indices.reshape(-1).to(torch.int32))
            top_values.append((top.values - total).reshape(-1))
        return _PromptPart(
            row=row,
            epoch=int(batch.epochs[index]),
            start=first,
            n_top=n_top,
            tensors=[torch.cat(chosen), torch.cat(top_ids), torch.cat(top_values)],
        )

    # ---- collecting ----

    def _collect(self, pending: GpuPending) -> Sampled:
        launched = pending.launched
        if launched is None:
            empty = np.zeros(0, dtype=np.int32)
            return Sampled(pending.seq, empty, empty, empty, step_us=1)
        launched.copied.synchronize()
        rows = launched.batch_rows
        tokens = self.core.results[launched.slot, : len(rows)].numpy().copy()
        errors = []
        for index, row in enumerate(rows.tolist()):
            if row in pending.errors:
                kind, message = RowError.INVALID, pending.errors[row]
            elif tokens[index] < 0:
                kind, message = RowError.NAN_LOGITS, "the model's logits hold no usable number"
            else:
                continue
            errors.append(RowError(row=row, epoch=int(launched.epochs[index]), kind=kind, message=message))
        raw = launched.raw_logprobs
        before = launched.before
        return Sampled(
            pending.seq,
            rows,
            launched.epochs,
            np.maximum(tokens, 0),
            logprobs=pack_logprobs(raw) if raw is not None else None,
            prompt_logprobs=[_pack_prompt(part) for part in pending.prompt],
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


def _pack_prompt(part: _PromptPart) -> PromptLogprobs:
    chosen, top_ids, top_values = part.tensors
    return PromptLogprobs(
        row=part.row,
        epoch=part.epoch,
        start=part.start,
        chosen=pack_f32(chosen.numpy()),
        n_top=part.n_top,
        top_ids=pack_i32(top_ids.numpy()),
        top_values=pack_f32(top_values.numpy()),
    )
