"""Matrix products by rows: every choice compiled, checked and timed."""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from bench.kernels.products import (
    LLAMA_8B,
    Product,
    Weights,
    dot_choices,
    large_workspace,
    matvec_choices,
    reference,
    run_choice,
)
from bench.kernels.timing import graph_time_us
from worker.gpu.linear import Kernel, LinearChoice, SplitWorkspace

if TYPE_CHECKING:
    import torch


def _linear_tasks() -> list[tuple[Product, int, LinearChoice]]:
    tasks: list[tuple[Product, int, LinearChoice]] = []
    for product in LLAMA_8B:
        for m in (1, 2):
            tasks += [(product, m, choice) for choice in matvec_choices(product)]
        for m in (16, 32, 64):
            tasks += [(product, m, choice) for choice in dot_choices(product, m)]
    return tasks


def _compile_share(index: int, n_shares: int) -> None:
    import torch

    g = torch.ones(16, device="cuda", dtype=torch.bfloat16)
    workspace = _workspace_small()
    for product, m, choice in _linear_tasks()[index::n_shares]:
        # Shapes matter only through their divisibility, pointers through their alignment: small stand-ins do.
        x = torch.empty(m, product.k, device="cuda", dtype=torch.bfloat16)
        out = torch.empty(
            m, product.n, device="cuda", dtype=torch.float32 if product.float32_out else torch.bfloat16
        )
        try:
            _warm(product, choice, x, out, g, workspace)
        except Exception as error:
            print(f"compile {product.name} {choice}: {type(error).__name__} {str(error)[:200]}", flush=True)


def _workspace_small() -> SplitWorkspace:
    import torch

    return SplitWorkspace(
        part=torch.empty(64, dtype=torch.float32, device="cuda"),
        count=torch.zeros(64, dtype=torch.int32, device="cuda"),
    )


def _warm(
    product: Product,
    choice: LinearChoice,
    x: torch.Tensor,
    out: torch.Tensor,
    g: torch.Tensor,
    workspace: SplitWorkspace,
) -> None:
    from worker.gpu.kernels.skinny import dot_kernel, matvec_kernel

    norm = g if (product.norm and (choice.kernel is Kernel.MATVEC or choice.fuse_norm)) else None
    if choice.kernel is Kernel.MATVEC:
        matvec_kernel.warmup(
            x, x, out, x, x, 1e-5, product.n, product.k,
            M=x.shape[0], BLOCK_N=choice.block_n, BLOCK_K=choice.block_k,
            N_ITER=-(-product.k // choice.block_k),
            EVEN_K=product.k % choice.block_k == 0, NORM=norm is not None, GATED=product.gated,
            RESIDUAL=product.residual, BIAS=False, PDL=True, num_warps=choice.warps, launch_pdl=True,
            grid=(1,),
        )  # fmt: skip
    else:
        dot_kernel.warmup(
            x, x, out, x, x, workspace.part, workspace.count, 1e-5, x.shape[0], product.n, product.k,
            BLOCK_M=choice.block_m, BLOCK_N=choice.block_n, BLOCK_K=choice.block_k, SPLIT_K=choice.split_k,
            NORM=norm is not None, GATED=product.gated, RESIDUAL=product.residual, BIAS=False, PDL=True,
            STAGES=choice.stages, num_warps=choice.warps, launch_pdl=True, grid=(1, 1),
        )  # fmt: skip


def bench_linear(*, deadline_s: float) -> dict[str, Any]:
    import torch

    started = time.monotonic()
    context = multiprocessing.get_context("spawn")
    n_shares = 12
    workers = [context.Process(target=_compile_share, args=(i, n_shares)) for i in range(n_shares)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=150)
    print(f"compiled in {time.monotonic() - started:.0f} s", flush=True)
    workspace = large_workspace()
    results: list[dict[str, Any]] = []
    best: dict[str, Any] = {}
    for product in LLAMA_8B:
        weights = Weights(product)
        g = torch.rand(product.k, device="cuda", dtype=torch.bfloat16) + 0.5
        n_inner = len(weights.copies) * max(1, 12 // len(weights.copies))
        for m in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            x = torch.randn(m, product.k, device="cuda", dtype=torch.bfloat16)
            wide = torch.empty(
                m, product.n * (2 if product.gated else 1), device="cuda", dtype=torch.bfloat16
            )
            res = torch.randn(m, product.n, device="cuda", dtype=torch.bfloat16)
            logits = (
                torch.empty(m, product.n, device="cuda", dtype=torch.float32) if product.float32_out else None
            )

            def cublas(
                i: int,
                x: Any = x,
                wide: Any = wide,
                res: Any = res,
                logits: Any = logits,
                product: Product = product,
                weights: Weights = weights,
            ) -> None:
                w = weights.copies[i % len(weights.copies)]
                if logits is not None:
                    torch.mm(x, w.t(), out_dtype=torch.float32, out=logits)
                elif product.residual:
                    torch.addmm(res, x, w.t(), out=res)
                else:
                    torch.mm(x, w.t(), out=wide)

            us = graph_time_us(cublas, n_inner=n_inner)
            row = {
                "product": product.name,
                "m": m,
                "kernel": "cublas",
                "us": us,
                "tb_s": weights.n_bytes / us / 1e6,
            }
            results.append(row)
            best[f"{product.name} {m} cublas"] = (us, None)
            choices = matvec_choices(product) if m <= 2 else []
            if m <= 64:
                choices = (
                    choices + dot_choices(product, max(16, m)) if m in (1, 2, 8, 16, 32, 64) else choices
                )
            if m in (2, 8):
                choices = [c for c in choices if c.kernel is Kernel.MATVEC] if m == 2 else []
            for choice in choices:
                if time.monotonic() - started > deadline_s:
                    print("out of time", flush=True)
                    return {"results": results, "best": best}
                out = torch.empty(
                    m,
                    product.n,
                    device="cuda",
                    dtype=torch.float32 if product.float32_out else torch.bfloat16,
                )
                try:
                    out.copy_(res)
                    run_choice(product, choice, x, weights.copies[0], out, g, workspace)
                    norm = product.norm and (choice.kernel is Kernel.MATVEC or choice.fuse_norm)
                    want = reference(product, x, weights.copies[0], res, g, norm=norm)
                    error = float((out.double() - want).norm() / want.norm())

                    def body(
                        i: int,
                        choice: LinearChoice = choice,
                        x: Any = x,
                        out: Any = out,
                        g: Any = g,
                        product: Product = product,
                        weights: Weights = weights,
                    ) -> None:
                        run_choice(
                            product, choice, x, weights.copies[i % len(weights.copies)], out, g, workspace
                        )

                    us = graph_time_us(body, n_inner=n_inner)
                except Exception as exc:
                    print(f"{product.name} {m} {choice}: {type(exc).__name__} {str(exc)[:160]}", flush=True)
                    continue
                results.append(
                    {
                        "product": product.name,
                        "m": m,
                        **asdict(choice),
                        "us": us,
                        "tb_s": weights.n_bytes / us / 1e6,
                        "error": error,
                    }
                )
                if not error < 1e-2:
                    print(f"WRONG {product.name} {m} {choice} error {error}", flush=True)
                    continue
                key = f"{product.name} {m} {choice.kernel.value}" + (" fused" if choice.fuse_norm else "")
                if key not in best or us < best[key][0]:
                    best[key] = (us, asdict(choice))
        # The same best one-row kernel without programmatic launch.
        key = f"{product.name} 1 matvec"
        if key in best:
            choice = LinearChoice(**best[key][1])
            x = torch.randn(1, product.k, device="cuda", dtype=torch.bfloat16)
            out = torch.empty(
                1, product.n, device="cuda", dtype=torch.float32 if product.float32_out else torch.bfloat16
            )

            def plain(
                i: int,
                choice: LinearChoice = choice,
                x: Any = x,
                out: Any = out,
                g: Any = g,
                product: Product = product,
                weights: Weights = weights,
            ) -> None:
                run_choice(
                    product, choice, x, weights.copies[i % len(weights.copies)], out, g, workspace, pdl=False
                )

            best[f"{product.name} 1 matvec no-pdl"] = (graph_time_us(plain, n_inner=n_inner), best[key][1])
    for key, (us, choice_dict) in best.items():
        brief = "" if choice_dict is None else " ".join(str(v) for v in choice_dict.values())
        print(f"{key:28s} {us:8.1f} µs  {brief}", flush=True)
    return {"results": results, "best": best}
