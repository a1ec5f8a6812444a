"""The seam between the engine (protocol, rows, threads) and whatever computes a step.

A runner owns the KV cache, the weights and the per-row device state. It knows nothing of gRPC or of
the router. `worker/fake.py`, the CPU runner and the GPU runner implement it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from proto.worker_pb2 import Admit, Grammar, PromptLogprobs, RowError

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]


@dataclass(slots=True, frozen=True)
class RunnerCapacity:
    """What a runner holds and can take, found by its warm-up."""

    model_id: str
    model_hash: str
    model_path: str
    block_size: int
    n_blocks: int
    """Blocks in the KV cache, the reserved block 0 included."""
    max_rows: int
    max_step_tokens: int
    max_context: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    attention: str
    device: str
    dtype: str
    kv_cache_dtype: str
    max_batch_total_tokens: int
    memory_arithmetic: str
    graph_sizes: tuple[int, ...] = ()
    max_logprobs: int = 20
    features: tuple[str, ...] = ()
    launch_depth: int = 2
    """Steps that may be launched and not yet collected. 1: `launch` computes the whole step before it
    returns, so the engine collects it at once instead of launching the next one first."""


@dataclass(slots=True)
class StepBatch:
    """One step, resolved from a delta by the row table. Decode rows come first, then prefill chunks.

    All arrays may be views of the row table: a runner reads what it needs before `launch` returns.
    """

    seq: int
    admits: list[Admit]
    """Rows (re)started by this step, before anything is computed; `admit.tokens` are i32 bytes."""
    evicts: I32
    zero_blocks: I32
    """Blocks whose KV is set to zero before the step computes."""
    rows: I32
    """[n] rows that compute in this step: `n_decode` decode rows, then the chunk rows."""
    n_decode: int
    q_lens: I32
    """[n] tokens that each row computes (1 for decode rows)."""
    kv_lens: I32
    """[n] KV length of each row after this step: query positions are kv_len - q_len … kv_len - 1."""
    samples: Bool
    """[n] whether the row samples a token in this step (a decode row, or a prompt's last chunk)."""
    epochs: I32
    """[n]"""
    block_tables: I32
    """[max_rows, max_blocks_per_row] of the whole row table, indexed by row, not by place in the batch."""
    tokens: I32
    """[max_rows, max_context] host copy of the known tokens (prompt + committed output at admission).
    A decode row's input token is known only to the runner: it is what that row sampled last."""
    n_known: I32
    """[max_rows] how many entries of `tokens` are valid."""


@dataclass(slots=True)
class SampledLogprobs:
    """Packed as in `proto.Logprobs`."""

    index: I32
    chosen: F32
    n_top: I32
    top_ids: I32
    top_values: F32


@dataclass(slots=True)
class Sampled:
    """The result of one step, on the host."""

    seq: int
    rows: I32
    epochs: I32
    tokens: I32
    logprobs: SampledLogprobs | None = None
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    errors: list[RowError] = field(default_factory=list)
    step_us: int = 0
    idle_us: int = 0


class Pending(Protocol):
    """A launched step whose result has not been collected. Opaque to the engine."""

    seq: int


@runtime_checkable
class PollablePending(Pending, Protocol):
    """A launched step that can be asked whether it has ended. Optional: with it the engine launches a step
    that arrives while the one before still runs, instead of blocking in `collect` until that one's end."""

    def done(self) -> bool:
        """True when `collect` would not wait. Cheap (a CUDA event's query)."""
        ...


class Runner(Protocol):
    """Computes steps. Every method but `prepare` is called from the engine's one compute thread."""

    @property
    def capacity(self) -> RunnerCapacity: ...

    def reset(self) -> None:
        """A new Run begins: wait for the running step and forget all rows. KV content may stay (nothing
        refers to it any more)."""

    def launch(self, batch: StepBatch) -> Pending:
        """Start the step. On a GPU it returns while the device still works; tokens sampled by earlier
        launched steps feed this one on the device. Raises `DeviceError` when the device is lost."""
        ...

    def collect(self, pending: Any) -> Sampled:
        """Wait for a launched step (oldest first; what `launch` returned) and bring its result to the
        host."""
        ...

    def prepare(self, grammar: Grammar) -> None:
        """Compile and cache a grammar (any thread). Raises ValueError with a message for the user."""


class DeviceError(RuntimeError):
    """The device can't go on: the stream ends and the worker exits non-zero."""
