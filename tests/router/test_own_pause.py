"""The router itself stood still (a stopped process, a frozen virtual machine): its workers did not."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

import grpc
import pytest

from proto.worker_pb2 import HealthRequest, HealthResponse
from router.replica import LinkTiming, LostError, ReplicaLink

TIMING = LinkTiming(
    connect_timeout_s=1.0,
    health_interval_s=0.0,
    health_timeout_s=5.0,
    stall_timeout_s=60.0,
    max_backoff_s=1.0,
)


class Stub:
    """Answers `Health` after the given seconds of a clock of its own; None: not before the deadline."""

    def __init__(self, *answers: float | None) -> None:
        self.now_s = 100.0
        self.asked = asyncio.Event()
        self._answers = list(answers)

    async def Health(self, request: HealthRequest, *, timeout: float) -> HealthResponse:  # noqa: ASYNC109, N802
        if not self._answers:
            self.asked.set()
            await asyncio.Event().wait()
        after_s = self._answers.pop(0)
        self.now_s += timeout if after_s is None else after_s
        if after_s is None or after_s > timeout:
            empty = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, empty, empty)
        return HealthResponse(ready=True)


def _link(stub: Stub) -> ReplicaLink:
    return ReplicaLink(
        replica_id=0,
        address="a:1",
        router_id="r",
        window=2,
        timing=TIMING,
        owner=Mock(),
        clock=lambda: stub.now_s,
    )


async def test_the_worker_is_kept() -> None:
    stub = Stub(0.0, 7.0, None, 0.0)
    watch = asyncio.create_task(_link(stub)._watch(stub))
    await asyncio.wait_for(stub.asked.wait(), 10)
    assert not watch.done()
    watch.cancel()


async def test_a_worker_that_is_silent_is_lost() -> None:
    stub = Stub(0.0, *[None] * 60)
    with pytest.raises(LostError, match=r"no answer for 5\.\d s"):
        await asyncio.wait_for(_link(stub)._watch(stub), 10)
