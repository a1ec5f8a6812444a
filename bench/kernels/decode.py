"""Decode attention: the own kernel beside FlashInfer's."""

from __future__ import annotations

import itertools
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from bench.kernels.timing import graph_time_us

if TYPE_CHECKING:
    import torch


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
