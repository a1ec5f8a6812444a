"""The tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.hardware import host_line
from bench.report import markdown_table, runs_table
from bench.scaling.goals import Goal, rows
from bench.scaling.loss import LossRun
from bench.scaling.measure import PrefixedRun


def placement_table(runs: Sequence[tuple[str, PrefixedRun]]) -> str:
    head = [
        "placement", "hit rate", "prefixes computed", "on one replica alone", "tokens per replica differ by",
        "output tok/s", "TTFT p50 ms", "TTFT p99 ms", "TPOT p50 ms", "failed",
    ]  # fmt: skip
    body = [
        [
            name,
            f"{r.hit_rate:.1%}",
            f"{sum(r.computed)} times",
            f"{sum(n == 1 for n in r.computed)} of {len(r.computed)}",
            f"{r.run.imbalance:.1%}",
            f"{r.run.summary.output_tok_s:,.0f}",
            f"{r.run.summary.ttft_ms.p50 or 0:,.0f}",
            f"{r.run.summary.ttft_ms.p99 or 0:,.0f}",
            f"{r.run.summary.tpot_ms.p50 or 0:,.2f}",
            f"{r.run.n_failed}",
        ]
        for name, r in runs
    ]
    return markdown_table(head, body)


def loss_text(loss: LossRun) -> str:
    back = loss.share_back_s
    phases = [
        ["from the start to the kill", loss.mean_tok_s(0, loss.killed_s)],
        ["while it was gone", loss.mean_tok_s(loss.killed_s, loss.back_s)],
        ["from its return until the last answer ended", loss.mean_tok_s(loss.back_s, len(loss.output_per_s))],
    ]
    lines = [
        f"{loss.load}; {loss.summary.n_requests:,} requests, {loss.summary.n_errors} failed, "
        f"{loss.summary.n_short} short. Killed after {loss.killed_s:.1f} s, its stream was back after "
        f"{loss.back_s:.1f} s; "
        + ("its share was not seen again." if back is None else f"80 % of a fair share {back:.1f} s later."),
        "",
        markdown_table(["phase", "output tok/s"], [[str(name), f"{rate:,.0f}"] for name, rate in phases]),
        "",
        "Tokens that reached the clients in each second, and the killed worker's part of what was sampled:",
        "",
        markdown_table(["second", "tokens", "its part"], _seconds(loss)),
    ]
    return "\n".join(lines)


def _seconds(loss: LossRun) -> list[list[str]]:
    found = []
    for second, n in enumerate(loss.output_per_s):
        parts = [share for t, share in loss.share_per_s if second < t <= second + 1]
        mark = " (killed)" if second == int(loss.killed_s) else ""
        mark += " (back)" if second == int(loss.back_s) else ""
        found.append([f"{second}{mark}", f"{n:,.0f}", f"{parts[-1]:.0%}" if parts else ""])
    return found


def markdown(doc: dict[str, Any], *, sections: Sequence[tuple[str, str]], goals: Sequence[Goal]) -> str:
    lines = [
        f"# {doc['n_devices']} replicas beside one",
        "",
        host_line(doc["host"]),
        "",
        f"Server: `{doc['server']}`, with `--workers 1` or `--workers {doc['n_devices']}`",
        "",
        f"Command: `{doc['command']}`",
        "",
        *(f"* {text}" for text in doc["devices"]),
        "",
        markdown_table(["goal", "wanted", "found", ""], rows(goals)),
    ]
    for title, text in sections:
        lines += ["", f"## {title}", "", text]
    if "stopped" in doc:
        lines += ["", f"**The run stopped early:** {doc['stopped']}"]
    return "\n".join(lines)


def gain_table(one: dict[str, Any], all_: dict[str, Any], *, n: int) -> str:
    return runs_table([("one replica", one), (f"{n} replicas, {n} times the load", all_)])
