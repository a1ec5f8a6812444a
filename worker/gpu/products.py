"""The decoder's matrix products with what is folded into them, and the pointwise kernels around them.

Each product is computed by what `choices.py` chose for its shape: a skinny kernel with the norm in front,
bias, gate or residual inside, or cuBLAS with these as kernels of their own.
"""

from __future__ import annotations

import torch

from worker.gpu.buffers import Buffers
from worker.gpu.choices import Role, choose
from worker.gpu.device import Gpu
from worker.gpu.linear import Kernel, LinearChoice, dot, matvec


class Products:
    """Owns no memory: activations and split sums lie in `Buffers`."""

    def __init__(self, *, buffers: Buffers, gpu: Gpu, rms_eps: float) -> None:
        self._buffers = buffers
        self._eps = rms_eps
        self._sm_major = gpu.capability[0]
        self._pdl = gpu.has_pdl
        self._choices: dict[tuple[Role, int], LinearChoice] = {}

    def choose(self, role: Role, *, n: int, k: int, m: int) -> LinearChoice:
        key = (role, m)
        if key not in self._choices:
            self._choices[key] = choose(role, n=n, k=k, m=m, sm_major=self._sm_major)
        return self._choices[key]

    def normed(
        self, role: Role, x: torch.Tensor, g: torch.Tensor, w: torch.Tensor, out: torch.Tensor
    ) -> None:
        """out [m, n] = RMS norm of x [m, k] with weights g, times w.T."""
        m = x.shape[0]
        choice = self.choose(role, n=w.shape[0], k=w.shape[1], m=m)
        if choice.fuse_norm:
            self.run(x, w, out, choice=choice, g=g)
            return
        self.norm(x, g, self._buffers.normed, n_rows=m)
        normed = self._buffers.normed[:m]
        if choice.kernel is Kernel.CUBLAS:
            torch.mm(normed, w.t(), out=out)
        else:
            self.run(normed, w, out, choice=choice)

    def residual(
        self, role: Role, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, hidden: torch.Tensor
    ) -> None:
        """hidden [m, n] += x [m, k] @ w.T + bias."""
        choice = self.choose(role, n=w.shape[0], k=w.shape[1], m=x.shape[0])
        if choice.kernel is Kernel.CUBLAS:
            torch.addmm(hidden, x, w.t(), out=hidden)
            if bias is not None:
                self._add_bias(hidden, bias)
        else:
            self.run(x, w, hidden, choice=choice, bias=bias, residual=True)

    def run(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        out: torch.Tensor,
        *,
        choice: LinearChoice,
        g: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        gated: bool = False,
        residual: bool = False,
        normed: bool = False,
    ) -> None:
        """`normed`: x is normalised already, whatever the choice says."""
        eps = self._eps
        if choice.kernel is Kernel.MATVEC:
            matvec(
                x,
                w,
                out,
                choice=choice,
                g=g,
                eps=eps,
                bias=bias,
                gated=gated,
                residual=residual,
                pdl=self._pdl,
            )
        else:
            dot(
                x,
                w,
                out,
                choice=choice,
                workspace=self._buffers.split,
                g=g,
                eps=eps,
                bias=bias,
                gated=gated,
                residual=residual,
                pdl=self._pdl,
            )

    def norm(
        self,
        x: torch.Tensor,
        g: torch.Tensor,
        out: torch.Tensor,
        *,
        n_rows: int,
        index: torch.Tensor | None = None,
    ) -> None:
        from worker.gpu.kernels.pointwise import rms_norm_kernel

        hidden = g.shape[0]
        block = 1 << (hidden - 1).bit_length()
        rms_norm_kernel[(n_rows,)](
            x,
            g,
            out,
            self._buffers.ids if index is None else index,
            hidden,
            self._eps,
            INDEXED=index is not None,
            BLOCK=block,
            PDL=self._pdl,
            num_warps=8 if block >= 4096 else 4,
            launch_pdl=self._pdl,
        )

    def silu_mul(self, gate_up: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        from worker.gpu.kernels.pointwise import silu_mul_kernel

        n_tokens, inner = out.shape
        silu_mul_kernel[(n_tokens, -(-inner // 2048))](
            gate_up,
            gate_up if bias is None else bias,
            out,
            inner,
            BIAS=bias is not None,
            BLOCK=2048,
            PDL=self._pdl,
            num_warps=8,
            launch_pdl=self._pdl,
        )

    def _add_bias(self, x: torch.Tensor, bias: torch.Tensor) -> None:
        from worker.gpu.kernels.pointwise import add_bias_kernel

        n_tokens, width = x.shape
        add_bias_kernel[(n_tokens, -(-width // 1024))](
            x, bias, width, BLOCK=1024, PDL=self._pdl, launch_pdl=self._pdl
        )
