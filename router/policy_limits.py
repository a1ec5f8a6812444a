"""The numbers that bound what one step carries."""

from __future__ import annotations

from dataclasses import dataclass

from router.dealing import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLimits:
    max_batch_prefill_tokens: int
    """Prompt tokens of one step."""
    mixed_step_tokens: int
    """Room of a step that also carries running answers, in prompt tokens (see `router/pace.py`)."""
    decode_pause_ratio: float
    """Running answers pause while waiting requests are at least this share of them and too many for
    `max_waiting_tokens` steps; 0: never."""
    waiting_served_ratio: float
    """As in TGI: waiting requests may join a running batch once they are at least this share of it …"""
    max_waiting_tokens: int
    """… or once this many steps have run since requests last joined."""
    prefill_chunking: bool
    prefix_caching: bool
    max_passes: int
    """How often a request that does not fit may be passed by smaller ones behind it."""
    placement: Placement = Placement.EXACT
