"""What captured graphs read of a step: views of the staging buffer, at fixed addresses."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class HeadTensors:
    """Views of the staging buffer on the device, at fixed addresses; see `staging.HEAD_FIELDS`."""

    rows: torch.Tensor
    lens: torch.Tensor
    sample_rows: torch.Tensor
    sample_index: torch.Tensor
    key0: torch.Tensor
    key1: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    log_min_p: torch.Tensor
    prefix: torch.Tensor
    """Leading positions that a row's group attends to for it; see `sharing.py`"""
    members: torch.Tensor
    """[groups, group_rows], flat"""
    slot: torch.Tensor
    """int32 [1]: where the step's result goes"""
    chunk: torch.Tensor
    """int32 [1]: KV positions that one split of decode attention holds"""
