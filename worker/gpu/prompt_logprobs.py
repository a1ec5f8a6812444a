"""Logprobs of prompt tokens: computed from a pass's hidden states, in pieces that bound the memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from proto.codec import pack_f32, pack_i32
from proto.worker_pb2 import PromptLogprobs
from worker.gpu.decoder import GpuDecoder
from worker.gpu.logprobs import top_logprobs
from worker.gpu.step_plan import StepPlan
from worker.runner import StepBatch

_LOGIT_ROWS = 256
"""Prompt positions whose logits are held at once."""


@dataclass(slots=True)
class PromptPart:
    """Of one row's chunk, on the way to the host."""

    row: int
    epoch: int
    start: int
    n_top: int
    tensors: list[torch.Tensor]
    """chosen, top ids, top values"""

    def pack(self) -> PromptLogprobs:
        """Once the tensors lie on the host."""
        chosen, top_ids, top_values = self.tensors
        return PromptLogprobs(
            row=self.row,
            epoch=self.epoch,
            start=self.start,
            chosen=pack_f32(chosen.numpy()),
            n_top=self.n_top,
            top_ids=pack_i32(top_ids.numpy()),
            top_values=pack_f32(top_values.numpy()),
        )


def prompt_part(
    decoder: GpuDecoder, batch: StepBatch, index: int, *, plan: StepPlan, n_prompt: int, n_top: int
) -> PromptPart | None:
    """Of the chunk at `index` of the batch, whose pass was just launched; None when none of its positions
    predicts a prompt token. Position p's logits speak of the token at p + 1."""
    row = int(batch.rows[index])
    kv_len, q_len = int(batch.kv_lens[index]), int(batch.q_lens[index])
    first, last = kv_len - q_len + 1, min(kv_len + 1, n_prompt)
    if last <= first:
        return None
    targets = _to_device(batch.tokens[row, first:last].astype(np.int64), decoder.gpu.device)
    start = plan.n_padded + int(batch.q_lens[batch.n_decode : index].sum())
    chosen, top_ids, top_values = [], [], []
    for at in range(0, last - first, _LOGIT_ROWS):
        stop = min(at + _LOGIT_ROWS, last - first)
        logits = decoder.prompt_logits(start=start + at, end=start + stop)
        total = torch.logsumexp(logits, dim=-1, keepdim=True)
        chosen.append((logits.gather(-1, targets[at:stop, None]) - total).squeeze(-1))
        ids, values = top_logprobs(logits, total, n_top=n_top)
        top_ids.append(ids.reshape(-1))
        top_values.append(values.reshape(-1))
    return PromptPart(
        row=row,
        epoch=int(batch.epochs[index]),
        start=first,
        n_top=n_top,
        tensors=[torch.cat(chosen), torch.cat(top_ids), torch.cat(top_values)],
    )


def _to_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """Through page-locked memory, which torch keeps until the copy has ended: nothing waits."""
    host = torch.empty(len(values), dtype=torch.int64, pin_memory=True)
    host.copy_(torch.from_numpy(values))
    return host.to(device, non_blocking=True)
