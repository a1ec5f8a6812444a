"""The KV budget and the memory it is found from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worker.model.test_attention import SPEC
from worker.config import WorkerConfig
from worker.errors import StartError
from worker.host_memory import HostMemory, host_memory
from worker.kv_budget import CPU_DEFAULT_CAP_BYTES, KvBudget, activation_bytes, cpu_kv_budget

PER_TOKEN = 1 * 2 * 2 * 8 * 4
MIB = 1 << 20


def budget_of(available: int, **settings: Any) -> KvBudget:
    config = WorkerConfig(model="m", **settings)
    return cpu_kv_budget(config, SPEC, dtype=torch.float32, memory=HostMemory(available, "machine"))


def test_free_memory_times_wiggle_room() -> None:
    work = activation_bytes(WorkerConfig(model="m"), SPEC, dtype=torch.float32)
    budget = budget_of(work + 100 * MIB, wiggle_room=0.5)
    assert budget.n_blocks == 50 * MIB // (PER_TOKEN * 16)
    assert budget.n_tokens == (budget.n_blocks - 1) * 16
    assert f"= {budget.n_tokens} tokens in {budget.n_blocks - 1} blocks of 16" in budget.arithmetic
    assert "0.5 wiggle_room = 50 MiB" in budget.arithmetic


def test_a_shared_host_is_not_taken_whole() -> None:
    budget = budget_of(1 << 40)
    assert (budget.n_blocks - 1) * 16 * PER_TOKEN <= CPU_DEFAULT_CAP_BYTES
    assert "by default" in budget.arithmetic


def test_lowered_by_the_user() -> None:
    budget = budget_of(1 << 40, max_batch_total_tokens=1000)
    assert (budget.n_blocks, budget.n_tokens) == (64, 1008)


def test_more_than_fits_names_both_numbers() -> None:
    with pytest.raises(StartError, match=r"--max-batch-total-tokens is 99999999999, but \d+ tokens fit"):
        budget_of(1 << 33, max_batch_total_tokens=99_999_999_999)


def test_not_enough_for_one_block() -> None:
    with pytest.raises(StartError, match=r"not enough memory for one KV block: \(1 MiB available"):
        budget_of(MIB)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 4000 kB\n"}


def test_the_machine(tmp_path: Path) -> None:
    root = write(
        tmp_path, {**MEMINFO, "sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "5"}
    )
    assert host_memory(root) == HostMemory(4000 * 1024, "machine")


def test_a_container_of_either_cgroup_version(tmp_path: Path) -> None:
    v2 = {
        "sys/fs/cgroup/memory.max": "3000000\n",
        "sys/fs/cgroup/memory.current": "1000000\n",
        "sys/fs/cgroup/memory.stat": "anon 3\ninactive_file 500000\n",
    }
    assert host_memory(write(tmp_path / "2", {**MEMINFO, **v2})) == HostMemory(2_500_000, "container")
    v1 = {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "3000000\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000000\n",
        "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 100000\n",
    }
    assert host_memory(write(tmp_path / "1", {**MEMINFO, **v1})) == HostMemory(2_100_000, "container")
