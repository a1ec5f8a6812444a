"""The matrix products of the 8B Llama shape: the ways to compute each, and what is right."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from worker.gpu.linear import Kernel, LinearChoice, SplitWorkspace, dot, matvec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Product:
    """One product of the decoder. `n` counts outputs: a gated product reads 2 n rows of weights."""

    name: str
    n: int
    k: int
    norm: bool = False
    gated: bool = False
    residual: bool = False
    float32_out: bool = False


LLAMA_8B = (
    Product("qkv", 6144, 4096, norm=True),
    Product("o", 4096, 4096, residual=True),
    Product("gate_up", 14336, 4096, norm=True, gated=True),
    Product("down", 4096, 14336, residual=True),
    Product("head", 128256, 4096, norm=True, float32_out=True),
)


def matvec_choices(product: Product) -> list[LinearChoice]:
    found = []
    for block_n, block_k, warps in (
        (1, 1024, 4),
        (1, 2048, 4),
        (1, 2048, 8),
        (1, 4096, 8),
        (2, 1024, 4),
        (2, 2048, 8),
        (4, 1024, 8),
        (4, 512, 4),
        (2, 512, 4),
    ):
        if block_k < 1024 and product.k > 8192:
            continue
        found.append(LinearChoice(kernel=Kernel.MATVEC, block_n=block_n, block_k=block_k, warps=warps))
    return found


def dot_choices(product: Product, block_m: int) -> list[LinearChoice]:
    found = []
    for block_n, block_k, stages, split_k, warps in (
        (16, 256, 4, 1, 4),
        (32, 128, 4, 1, 4),
        (32, 256, 3, 1, 4),
        (32, 256, 4, 1, 4),
        (32, 128, 6, 1, 4),
        (32, 256, 3, 2, 4),
        (64, 128, 3, 1, 4),
        (64, 128, 5, 1, 4),
        (64, 256, 3, 1, 4),
        (64, 64, 6, 1, 4),
        (64, 128, 4, 2, 4),
        (64, 128, 4, 4, 4),
        (128, 64, 4, 1, 4),
        (128, 64, 6, 1, 4),
        (128, 64, 5, 2, 4),
        (128, 64, 5, 4, 4),
        (128, 64, 4, 1, 8),
        (128, 128, 3, 1, 8),
        (128, 128, 3, 4, 8),
    ):
        tiles = product.n // block_n
        if split_k > 1 and tiles > 300:
            continue
        if product.n % block_n or product.k % (block_k * split_k):
            continue
        streams = 2 if product.gated else 1
        if (block_n * streams + block_m) * block_k * 2 * stages > 225_000:
            continue
        if split_k == 1 and tiles < 64:
            continue
        found.append(
            LinearChoice(
                kernel=Kernel.DOT,
                block_n=block_n,
                block_k=block_k,
                warps=warps,
                stages=stages,
                split_k=split_k,
                block_m=block_m,
            )
        )
    if block_m == 16 and product.norm:
        found += [
            LinearChoice(**{**asdict(c), "fuse_norm": True})
            for c in found
            if c.split_k == 1 and c.block_n <= 64
        ]
    return found


class Weights:
    """Copies of one product's weights, more than the L2 cache holds."""

    def __init__(self, product: Product) -> None:
        import torch

        rows = product.n * (2 if product.gated else 1)
        n_copies = max(1, -(-400_000_000 // (rows * product.k * 2)))
        self.copies = [
            torch.randn(rows, product.k, device="cuda", dtype=torch.bfloat16) * product.k**-0.5
            for _ in range(n_copies)
        ]
        self.n_bytes = rows * product.k * 2


def large_workspace() -> SplitWorkspace:
    import torch

    return SplitWorkspace(
        part=torch.empty(64 << 20, dtype=torch.float32, device="cuda"),
        count=torch.zeros(65536, dtype=torch.int32, device="cuda"),
    )


def run_choice(
    product: Product,
    choice: LinearChoice,
    x: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    g: torch.Tensor,
    workspace: SplitWorkspace,
    *,
    pdl: bool = True,
) -> None:
    if choice.kernel is Kernel.MATVEC:
        matvec(
            x,
            w,
            out,
            choice=choice,
            g=g if product.norm else None,
            eps=1e-5,
            gated=product.gated,
            residual=product.residual,
            pdl=pdl,
        )
    else:
        dot(
            x,
            w,
            out,
            choice=choice,
            workspace=workspace,
            g=g if choice.fuse_norm else None,
            eps=1e-5,
            gated=product.gated,
            residual=product.residual,
            pdl=pdl,
        )


def reference(
    product: Product, x: torch.Tensor, w: torch.Tensor, res: torch.Tensor, g: torch.Tensor, *, norm: bool
) -> torch.Tensor:
    import torch

    xd = x.double()
    if norm:
        xd = xd * torch.rsqrt(xd.square().mean(-1, keepdim=True) + 1e-5) * g.double()
    y = xd @ w.double().t()
    if product.gated:
        gate, up = y.chunk(2, -1)
        y = torch.nn.functional.silu(gate) * up
    return y + res.double() if product.residual else y
