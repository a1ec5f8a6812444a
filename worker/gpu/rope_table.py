"""Cosines and sines of every position that the model may reach."""

from __future__ import annotations

import torch

from worker.models.spec import RopeSpec


def rope_tables(
    rope: RopeSpec, *, n_positions: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [n_positions, rotary_dim / 2] each, the attention factor included. The angles are computed in
    float64: at position 100,000 float32 would be wrong by a hundredth of a turn."""
    frequencies = torch.tensor(rope.inv_freq, dtype=torch.float64, device=device)
    cos = torch.empty(n_positions, len(rope.inv_freq), dtype=torch.float32, device=device)
    sin = torch.empty_like(cos)
    step = 1 << 14
    for start in range(0, n_positions, step):
        end = min(start + step, n_positions)
        angles = torch.arange(start, end, dtype=torch.float64, device=device)[:, None] * frequencies
        cos[start:end] = (angles.cos() * rope.attention_factor).float()
        sin[start:end] = (angles.sin() * rope.attention_factor).float()
    return cos, sin
