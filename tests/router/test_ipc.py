"""The socket between API processes and the scheduler."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path

import pytest

from router.ipc.address import IpcAddress
from router.ipc.client import RefusedError
from router.ipc.framing import MAX_FRAME_BYTES, Codec, FrameBuffer, FrameError
from router.ipc.messages import (
    IPC_VERSION,
    Accepted,
    AdminCall,
    Cancel,
    Failed,
    Hello,
    Refused,
    ServerState,
    Started,
    StepEvents,
    Submit,
    TokenLogprob,
    Welcome,
)
from router.ipc.server import IpcServer
from router.ipc.socket_client import SocketClient
from settings.errors import ConfigError
from tests.router.service import ask, scheduler, until
from tests.router.sim import text
from worker.testing import fake_worker


def test_frames_come_out_as_they_went_in_whatever_the_pieces() -> None:
    codec = Codec()
    messages = [
        Hello(version=1, api_id="a"),
        Cancel(ids=[1, 2**40]),
        AdminCall(call_id=3, op="cache", args={"limit": 5}),
        Submit(requests=[]),
    ]
    data = b"".join(map(codec.frame, messages))
    for size in (1, 2, 3, 7, 1000):
        buffer = FrameBuffer()
        frames = [f for at in range(0, len(data), size) for f in buffer.feed(data[at : at + size])]
        assert [codec.to_scheduler(f) for f in frames] == messages


def test_events_survive_the_way() -> None:
    codec = Codec()
    events = StepEvents(
        ids=b"\1" * 16,
        tokens=b"\2" * 8,
        reasons=b"\0\1",
        logprobs=[TokenLogprob(1, -0.5, b"abcd", b"efgh")],
        started=[Started(7, 16, 0.25)],
        failed=[Failed(9, Refused(ids=[], error=_error()).error)],
    )
    (frame,) = FrameBuffer().feed(codec.frame(events))
    assert codec.to_api(frame) == events
    state = ServerState(
        ready=False, reason="x", draining=False, model=None, n_replicas_live=0, n_replicas_known=1
    )
    for message in (state, Welcome(version=IPC_VERSION), Accepted(ids=[1])):
        assert codec.to_api(FrameBuffer().feed(codec.frame(message))[0]) == message


def _error():  # type: ignore[no-untyped-def]  # a one-line helper of this file
    from router.errors import OverloadedError

    return OverloadedError("full", retry_after_s=1.0).info


def test_nonsense_is_refused() -> None:
    with pytest.raises(FrameError, match="at most"):
        FrameBuffer().feed(struct.pack("<I", MAX_FRAME_BYTES + 1))
    with pytest.raises(FrameError):
        Codec().to_scheduler(b"\xc1\xff")


@pytest.mark.parametrize("text", ["", "nowhere", "unix:", "host:port", "1.2.3.4:70000"])
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--scheduler-address"):
        IpcAddress.parse(text)


@pytest.mark.parametrize("kind", ["unix", "tcp"])
async def test_two_api_processes(kind: str, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s.sock" if kind == "unix" else "127.0.0.1:0"
    async with fake_worker(fake_strict=True) as worker, scheduler(worker.address) as s:
        server = IpcServer(IpcAddress.parse(address), s)
        await server.start()
        clients = [SocketClient.connect(str(server.address)) for _ in range(2)]
        for client in clients:
            await asyncio.wait_for(client.wait_ready(), 10)
        answers = [await ask(clients[i % 2], text(10 + i, seed=i)) for i in range(10)]
        for answer in answers:
            await answer.end()
            answer.assert_right(worker)
        assert clients[0].state.model is not None
        with pytest.raises(RefusedError) as refused:
            await ask(clients[0], text(10, seed=1), n_new=10**6)
        assert refused.value.error.status == 400
        for client in clients:
            await client.close()
            assert not client.state.ready
        await server.close()


async def test_an_api_process_that_drops_cancels_its_requests_alone(tmp_path: Path) -> None:
    async with fake_worker(fake_strict=True, fake_step_ms=1.0) as worker, scheduler(worker.address) as s:
        server = IpcServer(IpcAddress.parse(f"unix:{tmp_path}/s.sock"), s)
        await server.start()
        gone = SocketClient.connect(str(server.address))
        stays = SocketClient.connect(str(server.address))
        await asyncio.wait_for(asyncio.gather(gone.wait_ready(), stays.wait_ready()), 10)
        lost = [await ask(gone, text(10, seed=i), n_new=5000) for i in range(4)]
        kept = await ask(stays, text(10, seed=9), n_new=100)
        await lost[0].has(2)
        await gone.close()
        assert lost[0].error is not None
        await kept.end()
        kept.assert_right(worker)
        core = s.core
        assert core is not None
        await until(lambda: core.n_requests == 0, "nothing of the dropped connection is left")
        core.check()
        await stays.close()
        await server.close()


async def test_the_client_finds_a_scheduler_that_starts_again(tmp_path: Path) -> None:
    async with fake_worker(fake_strict=True, fake_step_ms=1.0) as worker, scheduler(worker.address) as s:
        address = IpcAddress.parse(f"unix:{tmp_path}/s.sock")
        client = SocketClient.connect(str(address))  # before anybody listens
        with pytest.raises(RefusedError):
            await ask(client, text(10, seed=1))
        server = IpcServer(address, s)
        await server.start()
        await asyncio.wait_for(client.wait_ready(), 10)
        answer = await ask(client, text(10, seed=1), n_new=5000)
        await answer.has(1)
        await server.close()
        await answer.end()
        assert answer.error is not None
        assert answer.error.status == 503
        server = IpcServer(address, s)
        await server.start()
        await asyncio.wait_for(client.wait_ready(), 10)
        again = await ask(client, text(10, seed=1))
        await again.end()
        again.assert_right(worker)
        await client.close()
        await server.close()


async def test_a_cancelled_answer_is_silent(tmp_path: Path) -> None:
    async with fake_worker(fake_strict=True, fake_step_ms=1.0) as worker, scheduler(worker.address) as s:
        server = IpcServer(IpcAddress.parse(f"unix:{tmp_path}/s.sock"), s)
        await server.start()
        client = SocketClient.connect(str(server.address))
        await asyncio.wait_for(client.wait_ready(), 10)
        batches = []
        client.on_batch_end(lambda: batches.append(1))
        answer = await ask(client, text(10, seed=1), n_new=5000)
        await answer.has(3)
        client.cancel([answer.id])
        n = len(answer.tokens)
        core = s.core
        assert core is not None
        await until(lambda: core.n_requests == 0, "the scheduler has dropped it")
        assert len(answer.tokens) == n
        assert not answer.ended.is_set()
        assert len(batches) >= 3
        await client.close()
        await server.close()


async def test_an_address_in_use_says_so(tmp_path: Path) -> None:
    async with scheduler("127.0.0.1:1", ready=False) as s:
        address = IpcAddress.parse(f"unix:{tmp_path}/s.sock")
        server = IpcServer(address, s)
        await server.start()
        with pytest.raises(ConfigError, match=r"--scheduler-address is unix:.*in use"):
            await IpcServer(address, s).start()
        await server.close()
        (tmp_path / "s.sock").write_text("a file")
        with pytest.raises(ConfigError, match="no socket"):
            await IpcServer(address, s).start()


async def test_a_socket_that_was_removed_is_made_anew_and_open_connections_stay(tmp_path: Path) -> None:
    async with fake_worker(fake_strict=True) as worker, scheduler(worker.address) as s:
        folder = tmp_path / "run"
        folder.mkdir()
        address = IpcAddress.parse(f"unix:{folder}/s.sock")
        server = IpcServer(address, s, check_socket_s=0.01)
        await server.start()
        first = SocketClient.connect(str(address))
        await asyncio.wait_for(first.wait_ready(), 10)
        (folder / "s.sock").unlink()
        folder.rmdir()
        second = SocketClient.connect(str(address))
        await asyncio.wait_for(second.wait_ready(), 10)
        for client in (first, second):
            answer = await ask(client, text(10, seed=1))
            await answer.end()
            answer.assert_right(worker)
            await client.close()
        assert (folder / "s.sock").stat().st_mode & 0o777 == 0o600
        await server.close()
        assert not (folder / "s.sock").exists()


async def test_another_version_is_turned_away(tmp_path: Path) -> None:
    async with scheduler("127.0.0.1:1", ready=False) as s:
        server = IpcServer(IpcAddress.parse(f"unix:{tmp_path}/s.sock"), s)
        await server.start()
        reader, writer = await asyncio.open_unix_connection(f"{tmp_path}/s.sock")
        writer.write(Codec().frame(Hello(version=IPC_VERSION + 1, api_id="old")))
        data = await asyncio.wait_for(reader.read(), 5)
        assert Codec().to_api(FrameBuffer().feed(data)[0]) == Welcome(version=IPC_VERSION)
        writer.close()
        reader, writer = await asyncio.open_unix_connection(f"{tmp_path}/s.sock")
        writer.write(Codec().frame(Cancel(ids=[1])))  # no greeting
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        await server.close()
