"""The scheduler core that the settings and the first worker's limits ask for."""

from __future__ import annotations

import random

from allocator.factory import make_allocator
from allocator.interface import Allocator
from router.config import RouterConfig
from router.core import SchedulerCore
from router.limits import Limits, policy_limits
from router.replica_state import ReplicaShape
from router.stats import CoreStats
from settings.tracing import Tracing


def make_core(
    config: RouterConfig,
    limits: Limits,
    *,
    rng: random.Random,
    stats: CoreStats | None = None,
    tracing: Tracing | None = None,
) -> SchedulerCore:
    def allocator(shape: ReplicaShape) -> Allocator:
        return make_allocator(
            n_blocks=shape.n_blocks + 1, block_size=shape.block_size, prefix_caching=config.prefix_caching
        )

    return SchedulerCore(
        limits=limits,
        policy=policy_limits(config, limits),
        make_allocator=allocator,
        window=config.window,
        max_concurrent_requests=config.max_concurrent_requests,
        default_deadline_s=config.default_deadline_s,
        retry_after_s=config.retry_after_s,
        rng=rng,
        stats=stats,
        tracing=tracing,
    )
