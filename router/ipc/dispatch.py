"""The API's side, whatever carries the messages: requests in flight, their sinks, calls awaiting replies."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import structlog

from router.ipc.client import RefusedError, TokenSink
from router.ipc.messages import (
    Accepted,
    AdminCall,
    AdminReply,
    Cancel,
    ErrorInfo,
    Failed,
    Refused,
    RequestSpec,
    ServerState,
    StepEvents,
    Submit,
    ToApi,
    ToScheduler,
)

DISCONNECTED = ServerState(
    ready=False,
    reason="the API has no connection to the scheduler",
    draining=False,
    model=None,
    n_replicas_live=0,
    n_replicas_known=0,
)
_LOST = ErrorInfo(
    status=503,
    type="server_error",
    message="the connection to the scheduler was lost",
    code="scheduler_lost",
    retry_after_s=1.0,
)

log = structlog.get_logger("router.ipc")


class Dispatcher:
    """Implements `SchedulerClient` but for the transport: a subclass overrides `_send` and calls `_receive`
    and `_lost`."""

    def __init__(self) -> None:
        self._state = DISCONNECTED
        self._ready = asyncio.Event()
        self._ids = itertools.count(1)
        self._calls = itertools.count(1)
        self._sinks: dict[int, TokenSink] = {}
        self._submits: dict[int, asyncio.Future[None]] = {}
        """By the first id of the Submit."""
        self._admin: dict[int, asyncio.Future[Any]] = {}
        self._batch_end: list[Callable[[], None]] = []

    def _send(self, message: ToScheduler) -> bool:
        """Whether there is a connection that takes it."""
        raise AssertionError("a transport must override _send")

    # ---- SchedulerClient ----

    @property
    def state(self) -> ServerState:
        return self._state

    def next_id(self) -> int:
        return next(self._ids)

    async def submit(self, requests: Sequence[RequestSpec], sinks: Sequence[TokenSink]) -> None:
        if len(requests) != len(sinks):
            raise ValueError(f"{len(requests)} requests and {len(sinks)} sinks don't match")
        if not requests:
            return
        ids = [request.id for request in requests]
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sinks.update(zip(ids, sinks, strict=True))
        self._submits[ids[0]] = done
        try:
            if not self._send(Submit(requests=list(requests))):
                raise RefusedError(_LOST)
            await done
        except asyncio.CancelledError:
            self.cancel(ids)
            raise
        except RefusedError:
            for request_id in ids:
                self._sinks.pop(request_id, None)
            raise
        finally:
            self._submits.pop(ids[0], None)

    def cancel(self, ids: Sequence[int]) -> None:
        """Those that ended meanwhile are left out."""
        live = [request_id for request_id in ids if self._sinks.pop(request_id, None) is not None]
        if live:
            self._send(Cancel(ids=live))

    def on_batch_end(self, callback: Callable[[], None]) -> None:
        self._batch_end.append(callback)

    async def admin(self, op: str, **args: Any) -> Any:
        call_id = next(self._calls)
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._admin[call_id] = reply
        try:
            if not self._send(AdminCall(call_id=call_id, op=op, args=args)):
                raise RefusedError(_LOST)
            return await reply
        finally:
            self._admin.pop(call_id, None)

    async def wait_ready(self) -> None:
        await self._ready.wait()

    # ---- from the transport ----

    def _receive(self, message: ToApi) -> None:
        if isinstance(message, StepEvents):
            self._events(message)
        elif isinstance(message, Accepted):
            self._settle(message.ids, None)
        elif isinstance(message, Refused):
            self._settle(message.ids, RefusedError(message.error))
        elif isinstance(message, ServerState):
            self._set_state(message)
        elif isinstance(message, AdminReply):
            reply = self._admin.get(message.call_id)
            if reply is not None and not reply.done():
                if message.error is not None:
                    reply.set_exception(RefusedError(message.error))
                else:
                    reply.set_result(message.value)

    def _settle(self, ids: list[int], error: RefusedError | None) -> None:
        done = self._submits.get(ids[0]) if ids else None
        if done is None or done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def _set_state(self, state: ServerState) -> None:
        self._state = state
        if state.ready:
            self._ready.set()
        else:
            self._ready.clear()

    def _events(self, events: StepEvents) -> None:
        sinks = self._sinks
        for started in events.started:
            sink = sinks.get(started.id)
            if sink is not None:
                sink.on_started(started)
        for part in events.prompt_logprobs:
            sink = sinks.get(part.id)
            if sink is not None:
                sink.on_prompt_logprobs(part)
        if events.ids:
            ids = np.frombuffer(events.ids, dtype="<i8").tolist()
            tokens = np.frombuffer(events.tokens, dtype="<i4").tolist()
            if events.logprobs:
                self._tokens_with_logprobs(ids, tokens, events)
            else:
                for request_id, token, reason in zip(ids, tokens, events.reasons, strict=True):
                    sink = sinks.get(request_id)
                    if sink is None:
                        continue
                    if reason:
                        del sinks[request_id]
                    sink.on_token(token, reason, None)
        for failed in events.failed:
            sink = sinks.pop(failed.id, None)
            if sink is not None:
                sink.on_failed(failed)
        for callback in self._batch_end:
            callback()

    def _tokens_with_logprobs(self, ids: list[int], tokens: list[int], events: StepEvents) -> None:
        logprobs = {part.entry: (part.chosen, part.top_ids, part.top_values) for part in events.logprobs}
        for i, (request_id, token, reason) in enumerate(zip(ids, tokens, events.reasons, strict=True)):
            sink = self._sinks.get(request_id)
            if sink is None:
                continue
            if reason:
                del self._sinks[request_id]
            sink.on_token(token, reason, logprobs.get(i))

    def _lost(self) -> None:
        """The connection is gone: everything in flight has failed."""
        self._set_state(DISCONNECTED)
        for done in self._submits.values():
            if not done.done():
                done.set_exception(RefusedError(_LOST))
        for reply in self._admin.values():
            if not reply.done():
                reply.set_exception(RefusedError(_LOST))
        sinks, self._sinks = self._sinks, {}
        for request_id, sink in sinks.items():
            sink.on_failed(Failed(request_id, _LOST))
        if sinks:
            for callback in self._batch_end:
                callback()
