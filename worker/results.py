"""A runner's result as the message that carries it."""

from __future__ import annotations

from proto.codec import pack_f32, pack_i32
from proto.worker_pb2 import Logprobs, StepResult
from worker.runner import Sampled


def to_proto(sampled: Sampled, *, generation: int, queued_steps: int) -> StepResult:
    result = StepResult(
        seq=sampled.seq,
        generation=generation,
        rows=pack_i32(sampled.rows),
        epochs=pack_i32(sampled.epochs),
        tokens=pack_i32(sampled.tokens),
        step_us=sampled.step_us,
        idle_us=sampled.idle_us,
        queued_steps=queued_steps,
        errors=sampled.errors,
        prompt_logprobs=sampled.prompt_logprobs,
    )
    if sampled.logprobs is not None:
        part = sampled.logprobs
        result.logprobs.CopyFrom(
            Logprobs(
                index=pack_i32(part.index),
                chosen=pack_f32(part.chosen),
                n_top=pack_i32(part.n_top),
                top_ids=pack_i32(part.top_ids),
                top_values=pack_f32(part.top_values),
            )
        )
    return result
