"""Measure the worker's GPU kernels one by one and choose between them.

    python -m bench.kernels linear --out results.json      matrix products of the 8B Llama shape by rows
    python -m bench.kernels decode --out results.json      decode attention: own kernel and FlashInfer's
    python -m bench.kernels prefill --out results.json     prefill attention: FlashInfer fa3 and fa2
    python -m bench.kernels check                          every kernel against a float64 reference

Times are medians of CUDA graph replays in µs, weights cold (each launch reads other memory than the last).
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


def graph_time_us(body: Callable[[int], None], *, n_inner: int, n_replays: int = 7) -> float:
    """Median time of one `body(i)` in µs, i from 0 to n_inner - 1 inside one captured graph."""
    import torch

    body(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(n_inner):
            body(i)
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(n_replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / n_inner)
    del graph
    return float(statistics.median(times))


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


def _workspace() -> SplitWorkspace:
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
    workspace = _workspace()
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


def _decode_setup(
    rows: int, context: int, block_size: int, layout: str, *, shared: int = 0, n_kv: int = 8, d: int = 128
) -> dict[str, Any]:
    import torch

    per_row = -(-context // block_size)
    n_blocks = rows * per_row + 1
    shape = (n_blocks, block_size, n_kv, d) if layout == "NHD" else (n_blocks, n_kv, block_size, d)
    n_sets = max(1, min(4, int(300e6 // (rows * context * n_kv * d * 4)) + 1))
    caches = [
        (
            torch.randn(shape, device="cuda", dtype=torch.bfloat16),
            torch.randn(shape, device="cuda", dtype=torch.bfloat16),
        )
        for _ in range(n_sets)
    ]
    table = (
        (torch.randperm(n_blocks - 1, device="cuda", dtype=torch.int32) + 1).view(rows, per_row).contiguous()
    )
    table[:, : shared // block_size] = table[0, : shared // block_size]
    return {"caches": caches, "table": table, "per_row": per_row}


def decode_call(
    setup: dict[str, Any],
    state: dict[str, Any],
    which: int,
    *,
    layout: str,
    block_size: int,
    config: dict[str, int],
) -> None:
    from worker.gpu.kernels.decode import decode_attention_kernel

    k_cache, v_cache = setup["caches"][which % len(setup["caches"])]
    n_kv, d = 8, 128
    s_block = block_size * n_kv * d
    s_pos, s_head = (n_kv * d, d) if layout == "NHD" else (d, block_size * d)
    rows = state["lens"].shape[0]
    decode_attention_kernel[(n_kv, rows, config["splits"])](
        state["qkv"], state["out"], k_cache, v_cache, state["rows"], state["lens"], state["lens"],
        state["lens"], setup["table"],
        state["cos"], state["sin"], state["qkv"], state["qkv"], state["qkv"], state["part"], state["ml"],
        state["count"], state["chunk"], 1e-5, d**-0.5, 1.0, 0, setup["per_row"], s_block, s_pos, s_head,
        config["splits"], rows,
        N_HEADS=32, N_KV=n_kv, D=d, GROUP=4, GROUP_PAD=16, BLOCK_SIZE=block_size, BLOCK_T=config["block_t"],
        SHARED=False, BIAS=False, QK_NORM=False, WINDOW=False, PDL=True, STAGES=config["stages"],
        num_warps=config["warps"], launch_pdl=True,
    )  # fmt: skip


def _decode_body(i: int, *, setup: Any, state: Any, **how: Any) -> None:
    decode_call(setup, state, i, **how)


def decode_state(rows: int, context: int, splits: int) -> dict[str, Any]:
    import torch

    half = 64
    angles = torch.arange(context + 8, device="cuda", dtype=torch.float32)[:, None] * (
        500000.0 ** (-torch.arange(half, device="cuda", dtype=torch.float32) / half)
    )
    return {
        "qkv": torch.randn(rows, 48 * 128, device="cuda", dtype=torch.bfloat16),
        "out": torch.full((rows, 4096), float("nan"), device="cuda", dtype=torch.bfloat16),
        "rows": torch.arange(rows, device="cuda", dtype=torch.int32),
        "lens": torch.full((rows,), context, device="cuda", dtype=torch.int32),
        "cos": angles.cos(),
        "sin": angles.sin(),
        "part": torch.empty(2 * rows * 8 * splits * 16 * 128, device="cuda", dtype=torch.float32),
        "ml": torch.empty(2 * rows * 8 * splits * 32, device="cuda", dtype=torch.float32),
        "chunk": torch.full((1,), 64, device="cuda", dtype=torch.int32),
        "count": torch.zeros(rows * 8, device="cuda", dtype=torch.int32),
    }


def decode_error(
    setup: dict[str, Any], state: dict[str, Any], *, layout: str, block_size: int, context: int
) -> float:
    """Largest relative error over a few rows against float64, the appended token included."""
    import torch

    k_cache, v_cache = setup["caches"][0]
    worst = 0.0
    for b in range(min(4, state["lens"].shape[0])):
        qkv = state["qkv"][b].double().view(48, 128)
        cos, sin = state["cos"][context - 1].double(), state["sin"][context - 1].double()

        def rope(x: torch.Tensor, cos: torch.Tensor = cos, sin: torch.Tensor = sin) -> torch.Tensor:
            lo, hi = x[:, :64], x[:, 64:]
            return torch.cat([lo * cos - hi * sin, hi * cos + lo * sin], -1)

        q, k_new, v_new = rope(qkv[:32]), rope(qkv[32:40]), qkv[40:]
        blocks = setup["table"][b].long()
        k, v = k_cache[blocks], v_cache[blocks]
        if layout == "HND":
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        k = k.reshape(-1, 8, 128)[:context].double().clone()
        v = v.reshape(-1, 8, 128)[:context].double().clone()
        appended = float((k[-1] - k_new).norm() / k_new.norm()) + float((v[-1] - v_new).norm())
        worst = max(worst, appended)
        k[-1], v[-1] = k_new, v_new
        s = torch.einsum("hgd,thd->hgt", q.view(8, 4, 128), k) * 128**-0.5
        want = torch.einsum("hgt,thd->hgd", s.softmax(-1), v).reshape(-1)
        got = state["out"][b].double()
        worst = max(worst, float((got - want).norm() / want.norm()))
    return worst


DECODE_CASES = (
    (1, 256, 0), (16, 1152, 0), (64, 640, 0), (64, 2240, 0), (64, 2240, 2048), (128, 640, 0), (256, 640, 0),
    (256, 1408, 1024), (4, 30000, 0),
)  # fmt: skip
"""(rows, context, tokens of it that all rows share)"""
DECODE_TILES = (
    (64, 4, 2),
    (128, 8, 2),
    (128, 4, 3),
    (64, 4, 3),
    (64, 4, 5),
    (128, 4, 2),
    (128, 8, 4),
    (64, 2, 3),
    (256, 8, 3),
)
"""(positions a tile, warps, pipeline stages)"""


def _flashinfer_decode(
    rows: int, context: int, setup: dict[str, Any], block_size: int, layout: str, state: dict[str, Any]
) -> float:
    import flashinfer
    import torch

    per_row = setup["per_row"]
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(256 << 20, dtype=torch.uint8, device="cuda"),
        layout,
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=torch.empty(rows + 1, dtype=torch.int32, device="cuda"),
        paged_kv_indices_buffer=torch.empty(rows * per_row, dtype=torch.int32, device="cuda"),
        paged_kv_last_page_len_buffer=torch.empty(rows, dtype=torch.int32, device="cuda"),
    )
    indptr = torch.arange(rows + 1, dtype=torch.int32) * per_row
    last = torch.full((rows,), (context - 1) % block_size + 1, dtype=torch.int32)
    wrapper.plan(
        indptr,
        setup["table"].view(-1),
        last,
        32,
        8,
        128,
        block_size,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    q = torch.randn(rows, 32, 128, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(q)
    caches = setup["caches"]
    return graph_time_us(lambda i: wrapper.run(q, caches[i % len(caches)], out=out), n_inner=8)


def bench_decode(*, deadline_s: float, shared_only: bool = False) -> dict[str, Any]:
    import torch

    started = time.monotonic()
    results: list[dict[str, Any]] = []
    cases = [case for case in DECODE_CASES if case[2] or not shared_only]
    for rows, context, shared in cases:
        floor_us = rows * context * 4096 / 4.26e6
        for layout, block_size in (("NHD", 16), ("NHD", 1)) if not shared else (("NHD", 16),):
            setup = _decode_setup(rows, context, block_size, layout, shared=shared)
            best: tuple[float, dict[str, int], float] | None = None
            grid = DECODE_TILES if block_size == 16 else DECODE_TILES[:2]
            want_splits = max(1, 132 * 2 // (rows * 8))
            for (block_t, warps, stages), factor in itertools.product(grid, (1, 2, 4, 8)):
                if time.monotonic() - started > deadline_s:
                    print("out of time", flush=True)
                    return {"results": results}
                splits = max(1, min(64, want_splits * factor))
                if factor > 1 and (splits > -(-context // 64) or (rows >= 256 and factor > 4)):
                    continue
                config = {
                    "block_t": block_t,
                    "warps": warps,
                    "stages": stages,
                    "splits": splits,
                    "min_chunk": 64,
                }
                state = decode_state(rows, context, splits)
                try:
                    decode_call(setup, state, 0, layout=layout, block_size=block_size, config=config)
                    error = decode_error(setup, state, layout=layout, block_size=block_size, context=context)
                    us = graph_time_us(
                        partial(
                            _decode_body,
                            setup=setup,
                            state=state,
                            layout=layout,
                            block_size=block_size,
                            config=config,
                        ),
                        n_inner=8,
                        n_replays=5,
                    )
                except Exception as exc:
                    print(
                        f"decode {rows}x{context} {config}: {type(exc).__name__} {str(exc)[:160]}", flush=True
                    )
                    continue
                results.append(
                    {
                        "rows": rows,
                        "context": context,
                        "shared": shared,
                        "layout": layout,
                        "block_size": block_size,
                        **config,
                        "us": us,
                        "error": error,
                    }
                )
                if not error < 2e-2:
                    print(
                        f"WRONG decode {rows}x{context} {layout} {block_size} {config} error {error}",
                        flush=True,
                    )
                    continue
                if best is None or us < best[0]:
                    best = (us, config, error)
            fi_us = float("nan")
            try:
                fi_us = _flashinfer_decode(
                    rows, context, setup, block_size, layout, decode_state(rows, context, 1)
                )
                results.append(
                    {
                        "rows": rows,
                        "context": context,
                        "shared": shared,
                        "layout": layout,
                        "block_size": block_size,
                        "kernel": "flashinfer",
                        "us": fi_us,
                    }
                )
            except Exception as exc:
                print(f"flashinfer decode: {type(exc).__name__} {str(exc)[:300]}", flush=True)
            if best is not None:
                print(
                    f"decode {rows:3d} x {context:5d} shared {shared:4d} {layout} {block_size:2d}: "
                    f"own {best[0]:7.1f} {best[1]} err {best[2]:.1e} "
                    f"| flashinfer {fi_us:7.1f} | floor {floor_us:6.1f}",
                    flush=True,
                )
            del setup
            torch.cuda.empty_cache()
    return {"results": results}


def _prefill_body(i: int, *, wrapper: Any, q: Any, cache: Any, out: Any) -> None:
    wrapper.run(q, cache, out=out)


def bench_prefill(*, deadline_s: float) -> dict[str, Any]:
    import flashinfer
    import torch

    results = []
    for backend, layout, block_size, (n_q, n_kv_tokens) in itertools.product(
        ("fa3", "fa2"),
        ("NHD", "HND"),
        (16, 1),
        ((128, 128), (512, 512), (1024, 1024), (8192, 8192), (2048, 30000)),
    ):
        per_row = -(-n_kv_tokens // block_size)
        shape = (per_row + 1, block_size, 8, 128) if layout == "NHD" else (per_row + 1, 8, block_size, 128)
        cache = (
            torch.randn(shape, device="cuda", dtype=torch.bfloat16),
            torch.randn(shape, device="cuda", dtype=torch.bfloat16),
        )
        table = torch.randperm(per_row, device="cuda", dtype=torch.int32) + 1
        try:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                torch.zeros(256 << 20, dtype=torch.uint8, device="cuda"), layout, backend=backend
            )
            args = (
                torch.tensor([0, n_q], dtype=torch.int32),
                torch.tensor([0, per_row], dtype=torch.int32),
                table,
                torch.tensor([(n_kv_tokens - 1) % block_size + 1], dtype=torch.int32),
                32,
                8,
                128,
                block_size,
            )
            kwargs = {"causal": True, "q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
            wrapper.plan(*args, **kwargs)
            torch.cuda.synchronize()
            t0 = time.perf_counter()
            for _ in range(10):
                wrapper.plan(*args, **kwargs)
            plan_us = (time.perf_counter() - t0) * 1e5
            q = torch.randn(n_q, 32, 128, device="cuda", dtype=torch.bfloat16)
            out = torch.full_like(q, float("nan"))
            us = graph_time_us(partial(_prefill_body, wrapper=wrapper, q=q, cache=cache, out=out), n_inner=4)
            k = cache[0][table.long()]
            v = cache[1][table.long()]
            if layout == "HND":
                k, v = k.transpose(1, 2), v.transpose(1, 2)
            k, v = k.reshape(-1, 8, 128)[:n_kv_tokens].double(), v.reshape(-1, 8, 128)[:n_kv_tokens].double()
            last = q[-1].double().view(8, 4, 128)
            want = torch.einsum(
                "hgt,thd->hgd", (torch.einsum("hgd,thd->hgt", last, k) * 128**-0.5).softmax(-1), v
            )
            error = float((out[-1].double() - want.reshape(32, 128)).norm() / want.norm())
        except Exception as exc:
            print(
                f"prefill {backend} {layout} {block_size}: {type(exc).__name__} {str(exc)[:300]}", flush=True
            )
            continue
        row = {
            "backend": backend,
            "layout": layout,
            "block_size": block_size,
            "q": n_q,
            "kv": n_kv_tokens,
            "us": us,
            "plan_us": plan_us,
            "error": error,
        }
        results.append(row)
        print(
            f"prefill {backend} {layout} {block_size:2d} {n_q:5d}/{n_kv_tokens:5d}: "
            f"{us:8.1f} µs plan {plan_us:6.0f} µs err {error:.1e}",
            flush=True,
        )
    return {"results": results}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__)
    parser.add_argument("part", choices=("linear", "decode", "prefill"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--deadline-s", type=float, default=200.0)
    parser.add_argument("--shared-only", action="store_true", help="decode: only rows that share a prefix")
    args = parser.parse_args(argv)
    import torch

    parts = {"linear": bench_linear, "decode": bench_decode, "prefill": bench_prefill}
    if args.shared_only:
        result = bench_decode(deadline_s=args.deadline_s, shared_only=True)
    else:
        result = parts[args.part](deadline_s=args.deadline_s)
    result["device"] = torch.cuda.get_device_name()
    result["torch"] = torch.__version__
    result["command"] = " ".join(["python -m bench.kernels", *(argv if argv is not None else sys.argv[1:])])
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
