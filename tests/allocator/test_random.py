"""The radix allocator against a naive model: random operations, everything compared after each.

Full size (`QUIRE_TEST_FULL=1`): 192,000 operations. Otherwise a seeded sample of the same code: 19,200.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.allocator.driver import Driver

FULL = os.environ.get("QUIRE_TEST_FULL") == "1"
N_SEEDS = 8 if FULL else 4
N_OPERATIONS = 2000 if FULL else 400
"""Per seed, block size and mood."""
N_BLOCKS = (12, 24, 40, 72)


@pytest.mark.parametrize("mood", ["crowded", "sparse", "broken"])
@pytest.mark.parametrize("block_size", [1, 2, 16, 256])
def test_equals_the_naive_model(block_size: int, mood: str) -> None:
    done: Counter[str] = Counter()
    for seed in range(N_SEEDS):
        driver = Driver(seed=seed, block_size=block_size, n_blocks=N_BLOCKS[seed % len(N_BLOCKS)])
        driver.run(N_OPERATIONS, mood=mood)
        done += driver.done
    # The sample means something only if it met the interesting cases.
    for event in ("hit", "refused", "evicted", "dirty"):
        assert done[event] > 0, f"no {event} in {done}"
