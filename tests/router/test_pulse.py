"""A scheduler that is stopped, or stuck, behind a connection that looks well."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from router.ipc.client import RefusedError
from router.ipc.framing import Codec, FrameBuffer
from router.ipc.messages import IPC_VERSION, Accepted, AdminCall, AdminReply, ServerState, Submit, Welcome
from router.ipc.pulse import Pulse, PulseCheck
from router.ipc.socket_client import SocketClient
from tests.router.service import ask, until


def test_questions_without_an_answer_are_counted() -> None:
    check = PulseCheck(silent_after=2, lost_after=4)
    assert [check.ask() for _ in range(5)] == [
        Pulse.WELL,
        Pulse.WELL,
        Pulse.SILENT,
        Pulse.SILENT,
        Pulse.LOST,
    ]
    check.heard()
    assert check.ask() is Pulse.WELL


class Mute:
    """Plays a scheduler that can be made to say nothing."""

    def __init__(self) -> None:
        self.mute = False
        self.submits: list[Submit] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        codec, buffer = Codec(), FrameBuffer()
        state = ServerState(
            ready=True, reason="", draining=False, model=None, n_replicas_live=1, n_replicas_known=1
        )
        writer.write(codec.frame(Welcome(version=IPC_VERSION)) + codec.frame(state))
        while data := await reader.read(65536):
            for message in map(codec.to_scheduler, buffer.feed(data)):
                if isinstance(message, Submit):
                    self.submits.append(message)
                    writer.write(codec.frame(Accepted(ids=[r.id for r in message.requests])))
                elif isinstance(message, AdminCall) and not self.mute:
                    writer.write(codec.frame(AdminReply(call_id=message.call_id)))
        writer.close()


@pytest.fixture
async def mute(tmp_path: Path) -> AsyncIterator[tuple[Mute, SocketClient]]:
    scheduler = Mute()
    server = await asyncio.start_unix_server(scheduler.serve, path=str(tmp_path / "s"))
    client = SocketClient.connect(f"unix:{tmp_path}/s", ping_s=0.005)
    await asyncio.wait_for(client.wait_ready(), 10)
    yield scheduler, client
    await client.close()
    server.close()


async def test_a_silent_scheduler_is_not_ready_and_gets_nothing_new(mute: tuple[Mute, SocketClient]) -> None:
    scheduler, client = mute
    scheduler.mute = True
    await until(lambda: not client.state.ready, "not ready")
    assert client.state.reason == "the scheduler does not answer"
    with pytest.raises(RefusedError):
        await ask(client, [1, 2, 3])
    assert not scheduler.submits
    scheduler.mute = False
    await until(lambda: client.state.ready, "ready again")
    await ask(client, [1, 2, 3])
    assert len(scheduler.submits) == 1


async def test_after_a_while_its_requests_fail(mute: tuple[Mute, SocketClient]) -> None:
    scheduler, client = mute
    answer = await ask(client, [1, 2, 3])
    scheduler.mute = True
    await answer.end()
    assert answer.error is not None
    assert answer.error.code == "scheduler_lost"
