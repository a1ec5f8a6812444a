"""What the scheduler core counts. Counters never go back, whatever happens to a replica."""

from __future__ import annotations

from dataclasses import dataclass, field

from router.histogram import Histogram

SIZE_BOUNDS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


def _sizes() -> Histogram:
    return Histogram(SIZE_BOUNDS)


@dataclass(slots=True)
class CoreStats:
    n_submitted: int = 0
    n_refused: dict[int, int] = field(default_factory=dict)
    """By HTTP status."""
    n_stopped: int = 0
    n_ended_by_length: int = 0
    n_cancelled: int = 0
    n_failed: dict[str, int] = field(default_factory=dict)
    """By error code."""
    n_preempted: int = 0
    n_migrated: int = 0
    """Requests that went back to the queue because their replica was lost."""
    n_replicas_lost: int = 0
    n_steps: int = 0
    n_prompt_tokens: int = 0
    """Prompt tokens computed by steps (recomputed ones included)."""
    n_output_tokens: int = 0
    n_wasted_tokens: int = 0
    """Sampled, but for rows that had ended meanwhile."""
    hit_tokens: int = 0
    """Prompt tokens found cached when a request first met a replica …"""
    asked_tokens: int = 0
    """… and prompt tokens of all those requests."""
    queue_s: Histogram = field(default_factory=Histogram)
    prefill_s: Histogram = field(default_factory=Histogram)
    """From meeting a replica to the first token."""
    decode_s: Histogram = field(default_factory=Histogram)
    """From the first token to the last."""
    first_token_s: Histogram = field(default_factory=Histogram)
    inter_token_s: Histogram = field(default_factory=Histogram)
    e2e_s: Histogram = field(default_factory=Histogram)
    worker_step_s: Histogram = field(default_factory=Histogram)
    batch_rows: Histogram = field(default_factory=_sizes)
    prompt_tokens: Histogram = field(default_factory=_sizes)
    output_tokens: Histogram = field(default_factory=_sizes)
