"""A deterministic worker without a model: the router's whole behaviour is tested and measured against it.

Its KV cache holds a hash per position (`worker/fake_cache.py`), its words are a pure function of what a
row reads there through its block table (`worker/fake_text.py`), so that a stale, foreign or never computed
block gives a wrong token, and is named in `FakeRunner.violations`. `expected_tokens` says what is right.
"""

from __future__ import annotations

from checkpoint.checkpoint import Checkpoint
from worker.config import WorkerConfig
from worker.fake_cache import Violation
from worker.fake_faults import FakeFaults, Reply, RowFault
from worker.fake_runner import FakeRunner, StaleBlockError
from worker.fake_text import N_TOP, FakeVocab, expected_tokens
from worker.fake_timing import FakePending, FakeTiming
from worker.runner import RunnerCapacity

__all__ = [
    "FakeFaults",
    "FakePending",
    "FakeRunner",
    "FakeTiming",
    "FakeVocab",
    "Reply",
    "RowFault",
    "StaleBlockError",
    "Violation",
    "expected_tokens",
    "make_fake_runner",
]

_DEFAULT_CONTEXT = 16384


def make_fake_runner(
    config: WorkerConfig,
    checkpoint: Checkpoint | None = None,
    *,
    timing: FakeTiming | None = None,
    faults: FakeFaults | None = None,
) -> FakeRunner:
    """The runner that `--attention fake` asks for. With a checkpoint it speaks that model's vocabulary, so
    that an API with its tokenizer fits."""
    block_size = config.block_size
    n_blocks = config.fake_n_blocks
    arithmetic = (
        f"{n_blocks - 1} blocks x {block_size} tokens (set, not found: the fake worker has no memory)"
    )
    if config.max_batch_total_tokens is not None:
        cap = config.max_batch_total_tokens // block_size + 1
        if cap < n_blocks:
            n_blocks = cap
            arithmetic = f"{n_blocks - 1} blocks x {block_size} tokens (--max-batch-total-tokens)"
    if checkpoint is None:
        eos: tuple[int, ...] = (2,)
        vocab_size, model_id, model_hash, model_path = (
            config.fake_vocab_size,
            config.model or "fake",
            "fake",
            "",
        )
        context = _DEFAULT_CONTEXT
    else:
        eos, vocab_size = checkpoint.eos_token_ids, checkpoint.vocab_size
        model_id, model_hash, model_path = checkpoint.name, checkpoint.fingerprint, str(checkpoint.path)
        context = checkpoint.max_context
    if config.max_total_tokens is not None:
        context = config.max_total_tokens if checkpoint is None else min(context, config.max_total_tokens)
    capacity = RunnerCapacity(
        model_id=model_id,
        model_hash=model_hash,
        model_path=model_path,
        block_size=block_size,
        n_blocks=n_blocks,
        max_rows=config.max_batch_size,
        max_step_tokens=config.max_step_tokens,
        max_context=context,
        vocab_size=vocab_size,
        eos_token_ids=eos,
        attention="fake",
        device="fake",
        dtype="none",
        kv_cache_dtype="none",
        max_batch_total_tokens=(n_blocks - 1) * block_size,
        memory_arithmetic=arithmetic,
        max_logprobs=N_TOP,
        features=("prompt_logprobs", "grammar") if config.fake_grammar else ("prompt_logprobs",),
    )
    if timing is None:
        timing = FakeTiming(
            step_s=config.fake_step_ms / 1e3,
            row_s=config.fake_row_us / 1e6,
            prefill_token_s=config.fake_prefill_token_us / 1e6,
        )
    if faults is None:
        faults = FakeFaults(device_error_at=config.fake_device_error_at)
    return FakeRunner(
        capacity,
        vocab=FakeVocab(size=vocab_size, eos_token_ids=eos, eos_rate=config.fake_eos_rate),
        timing=timing,
        strict=config.fake_strict,
        faults=faults,
    )
