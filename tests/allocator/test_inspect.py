"""What people see: hottest prefixes and the map of blocks."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from allocator import make_allocator
from allocator.allocator import RadixAllocator
from allocator.blockmap import MAX_RUNS
from tests.allocator.helpers import allocate, cache, publish, radix, release, span


def states(view: dict[str, Any]) -> list[str]:
    names = view["map"]["states"]
    return [names[state] for state, n in view["map"]["runs"] for _ in range(n)]


def test_the_map_names_each_blocks_state() -> None:
    allocator = radix(12)
    cache(allocator, span(0, 3))
    first = allocate(allocator, span(50, 54))
    publish(allocator, first, span(50, 54))
    allocate(allocator, span(50, 54))
    view = allocator.inspect(limit=10)
    assert states(view) == ["reserved", *["cached"] * 3, *["shared"] * 3, *["leased"] * 2, *["free"] * 4]
    assert view["map"]["blocks_per_cell"] == 1
    assert json.loads(json.dumps(view)) == view
    allocator.flush()
    assert states(allocator.inspect(limit=0)).count("shared") == 3


def test_the_hottest_prefixes_come_first() -> None:
    now = [100.0]
    allocator = RadixAllocator(n_blocks=100, block_size=2, clock_s=lambda: now[0])
    prompt = span(0, 8)
    for i in range(4):
        cache(allocator, np.concatenate([prompt, span(20 * i, 20 * i + 4)]))
    cache(allocator, span(60, 66), salt="adapter")
    release(allocator, allocate(allocator, span(60, 68), salt="adapter"))
    now[0] = 130.0
    held = allocate(allocator, np.concatenate([prompt, span(90, 94)]))
    now[0] = 131.5
    hottest, second = allocator.inspect(limit=2)["prefixes"]
    assert hottest == {
        "salt": "",
        "first_tokens": list(range(8)),
        "last_tokens": [],
        "n_tokens": 8,
        "n_blocks": 4,
        "hits": 4,
        "n_leases": 1,
        "age_s": 31.5,
        "idle_s": 0.0,
    }
    assert (second["salt"], second["n_tokens"], second["hits"], second["idle_s"]) == ("adapter", 6, 1, 31.5)
    release(allocator, held)
    assert allocator.inspect(limit=1)["prefixes"][0]["n_leases"] == 0
    assert allocator.inspect(limit=0)["prefixes"] == []


@pytest.mark.parametrize(("n", "n_last"), [(32, 0), (40, 8), (64, 12), (200, 12)])
def test_a_long_prefix_is_shown_by_both_its_ends(n: int, n_last: int) -> None:
    allocator = RadixAllocator(n_blocks=100, block_size=8)
    cache(allocator, span(0, n))
    release(allocator, allocate(allocator, span(0, n + 8)))
    (prefix,) = allocator.inspect(limit=5)["prefixes"]
    assert prefix["n_tokens"] == n
    assert prefix["first_tokens"] == list(range(32))
    assert prefix["last_tokens"] == list(range(n - n_last, n))


def test_a_long_map_is_coarsened() -> None:
    allocator = radix(5 * MAX_RUNS)
    leases = [allocate_quick(allocator, i) for i in range(5 * MAX_RUNS)]
    for lease in leases[::2]:
        allocator.release(lease)
    allocator.check()
    view = allocator.inspect(limit=1)["map"]
    assert len(view["runs"]) <= MAX_RUNS
    assert view["blocks_per_cell"] > 1
    n_cells = sum(n for _, n in view["runs"])
    assert (n_cells - 1) * view["blocks_per_cell"] < view["n_blocks"] <= n_cells * view["blocks_per_cell"]


def test_the_simple_allocator_has_a_map_too() -> None:
    allocator = make_allocator(n_blocks=8, block_size=4, prefix_caching=False)
    lease = allocator.allocate(span(0, 9), n_tokens=9)
    assert lease is not None
    assert states(allocator.inspect(limit=5)) == ["reserved", *["leased"] * 3, *["free"] * 4]


def allocate_quick(allocator: RadixAllocator, token: int) -> Any:
    return allocator.allocate(np.array([token], dtype=np.int32), n_tokens=1)
