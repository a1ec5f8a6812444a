"""Linear layers: which kernel computes a product of m rows, and how it is launched.

cuBLAS is best at many rows; at few, the step reads weights once and the Triton kernels of
`kernels/skinny.py` run nearer to memory speed. The choice is a table by (n, k, rows), measured by
`bench/kernels/`; shapes that nobody measured use the same sizes' nearest neighbour by rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Kernel(StrEnum):
    MATVEC = "matvec"
    DOT = "dot"
    CUBLAS = "cublas"


@dataclass(frozen=True, slots=True)
class LinearChoice:
    """How one product is computed. Sizes are those of `kernels/skinny.py`; unused by cuBLAS."""

    kernel: Kernel
    block_n: int = 0
    block_k: int = 0
    warps: int = 4
    stages: int = 3
    split_k: int = 1
    block_m: int = 16
    fuse_norm: bool = False
    """The RMS norm in front is computed inside the product."""


CUBLAS = LinearChoice(kernel=Kernel.CUBLAS)


@dataclass(slots=True)
class SplitWorkspace:
    """Partial sums of split products; shared by all products of one stream."""

    part: torch.Tensor
    """float32, flat"""
    count: torch.Tensor
    """int32, zero between launches"""


def matvec(
    x: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    *,
    choice: LinearChoice,
    g: torch.Tensor | None = None,
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    residual: bool = False,
    pdl: bool = True,
) -> None:
    """out [m, n] (= or += when `residual`) x [m, k] @ w.T for m of 1 or 2. Gated: w is [2 n, k]."""
    from worker.gpu.kernels.skinny import matvec_kernel

    m, k = x.shape
    n = out.shape[-1]
    matvec_kernel[(n // choice.block_n,)](
        x,
        w,
        out,
        w if g is None else g,
        w if bias is None else bias,
        eps,
        n,
        k,
        M=m,
        BLOCK_N=choice.block_n,
        BLOCK_K=choice.block_k,
        N_ITER=-(-k // choice.block_k),
        EVEN_K=k % choice.block_k == 0,
        NORM=g is not None,
        GATED=gated,
        RESIDUAL=residual,
        BIAS=bias is not None,
        PDL=pdl,
        num_warps=choice.warps,
        launch_pdl=pdl,
    )


def dot(
    x: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    *,
    choice: LinearChoice,
    workspace: SplitWorkspace,
    g: torch.Tensor | None = None,
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    residual: bool = False,
    pdl: bool = True,
) -> None:
    """The same for up to `choice.block_m` rows on the tensor cores."""
    from worker.gpu.kernels.skinny import dot_kernel

    m, k = x.shape
    n = out.shape[-1]
    dot_kernel[(n // choice.block_n, choice.split_k)](
        x,
        w,
        out,
        w if g is None else g,
        w if bias is None else bias,
        workspace.part,
        workspace.count,
        eps,
        m,
        n,
        k,
        BLOCK_M=choice.block_m,
        BLOCK_N=choice.block_n,
        BLOCK_K=choice.block_k,
        SPLIT_K=choice.split_k,
        NORM=g is not None,
        GATED=gated,
        RESIDUAL=residual,
        BIAS=bias is not None,
        PDL=pdl,
        STAGES=choice.stages,
        num_warps=choice.warps,
        launch_pdl=pdl,
    )
