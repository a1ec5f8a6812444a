"""The connections to all workers: found by address list or name, kept, and left when they leave the list."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from proto.worker_pb2 import Capacity
from router.config import RouterConfig
from router.discovery import Discovery, Lookup
from router.errors import ReplicaMismatchError
from router.replica import LinkOwner, LinkState, LinkTiming, ReplicaLink

log = structlog.get_logger("router.fleet")


class Fleet:
    """Owns one `ReplicaLink` and its task per address. `on_task_done` hears of each task that ends."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        router_id: str,
        lookup: Lookup,
        clock: Callable[[], float],
        owner: LinkOwner,
        on_task_done: Callable[[asyncio.Task[None]], None],
    ) -> None:
        self.links: dict[int, ReplicaLink] = {}
        self._config = config
        self._router_id = router_id
        self._clock = clock
        self._owner = owner
        self._on_task_done = on_task_done
        self._discovery = Discovery(config.replicas, lookup=lookup)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._n_links = 0
        # Above every generation of an earlier process that had these workers.
        self._generation = time.time_ns() // 1_000_000

    @property
    def n_live(self) -> int:
        return sum(link.state is LinkState.LIVE for link in self.links.values())

    def next_generation(self) -> int:
        self._generation += 1
        return self._generation

    def why_none(self) -> str:
        """Why no worker is live, for people."""
        causes = [f"{link.address}: {link.reason}" for link in self.links.values()]
        return "no worker is connected" + (f" ({'; '.join(causes[:4])})" if causes else "")

    def check_unique(self, link: ReplicaLink, capacity: Capacity) -> None:
        """Raises ReplicaMismatchError when the same worker is reached under two addresses."""
        for other in self.links.values():
            if (
                other is not link
                and other.state is LinkState.LIVE
                and other.capacity is not None
                and other.capacity.worker_id == capacity.worker_id
            ):
                raise ReplicaMismatchError(
                    f"worker {capacity.worker_id} at {link.address} is already in use as {other.address}"
                )

    # ---- addresses ----

    async def resolve(self) -> None:
        """Connects to addresses that are new and leaves those that are gone."""
        addresses = await self._discovery.resolve()
        known = {link.address: replica_id for replica_id, link in self.links.items()}
        for address in addresses:
            if address not in known:
                self._add(address)
        for address, replica_id in known.items():
            if address not in addresses:
                await self._remove(replica_id)

    async def resolve_forever(self, on_resolved: Callable[[], None]) -> None:
        """Names change their addresses; a plain list never does, and nothing is done then."""
        while not self._discovery.is_static:
            await asyncio.sleep(self._config.resolve_interval_s)
            await self.resolve()
            on_resolved()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()

    def _add(self, address: str) -> None:
        config = self._config
        replica_id = self._n_links
        self._n_links += 1
        link = ReplicaLink(
            replica_id=replica_id,
            address=address,
            router_id=self._router_id,
            window=config.window,
            timing=LinkTiming(
                connect_timeout_s=config.connect_timeout_s,
                health_interval_s=config.health_interval_s,
                health_timeout_s=config.health_timeout_s,
                stall_timeout_s=config.stall_timeout_s,
                max_backoff_s=config.max_backoff_s,
            ),
            owner=self._owner,
            clock=self._clock,
        )
        self.links[replica_id] = link
        task = asyncio.get_running_loop().create_task(link.run(), name=f"replica {address}")
        task.add_done_callback(self._on_task_done)
        self._tasks[replica_id] = task

    async def _remove(self, replica_id: int) -> None:
        log.info("replica left the address list", address=self.links[replica_id].address)
        task = self._tasks.pop(replica_id)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        del self.links[replica_id]
