"""The radix allocator against a naive model: random operations, everything compared after each.

Full size (`QUIRE_TEST_FULL=1`): 120,000 operations. Otherwise a seeded sample of the same code: 6,400.
"""

from __future__ import annotations

import os

import pytest

from tests.allocator.driver import Driver

FULL = os.environ.get("QUIRE_TEST_FULL") == "1"
N_SEEDS = 15 if FULL else 4
N_OPERATIONS = 2000 if FULL else 400
"""Per seed and block size."""


@pytest.mark.parametrize("block_size", [1, 2, 16, 256])
@pytest.mark.parametrize("seed", range(N_SEEDS))
def test_equals_the_naive_model(block_size: int, seed: int) -> None:
    driver = Driver(seed=seed, block_size=block_size, n_blocks=(12, 24, 40, 72)[seed % 4])
    driver.run(N_OPERATIONS)
    # The sample means something only if it met the interesting cases.
    for event in ("hit", "refused", "evicted"):
        assert driver.done[event] > 0, f"no {event} in {driver.done}"
