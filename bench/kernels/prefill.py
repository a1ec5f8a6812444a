"""Prefill attention: FlashInfer's fa3 and fa2."""

from __future__ import annotations

import itertools
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from bench.kernels.timing import graph_time_us

if TYPE_CHECKING:
    pass


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
