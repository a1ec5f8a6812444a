"""How an API process talks to the scheduler: one interface, over a socket or within one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from router.ipc.messages import ErrorInfo, Failed, PromptLogprob, RequestSpec, ServerState, Started


class TokenSink(Protocol):
    """Receives what happens to one request, synchronously, on the event loop. Never raises."""

    def on_started(self, started: Started) -> None: ...

    def on_token(self, token: int, reason: int, logprob: tuple[float, bytes, bytes] | None) -> None:
        """One token; `reason` is a FinishReason (NONE: the request goes on). `logprob` is (chosen,
        top ids as i32 bytes, top values as f32 bytes) when the request asked for it."""

    def on_prompt_logprobs(self, part: PromptLogprob) -> None: ...

    def on_failed(self, failed: Failed) -> None:
        """The request ended with an error, the loss of the scheduler included."""


class RefusedError(Exception):
    """The scheduler refused a Submit (full, too long, draining, not ready)."""

    def __init__(self, error: ErrorInfo) -> None:
        super().__init__(error.message)
        self.error = error


class SchedulerClient(Protocol):
    @property
    def state(self) -> ServerState:
        """The last state that the scheduler pushed (not ready while disconnected)."""
        ...

    def next_id(self) -> int: ...

    async def submit(self, requests: Sequence[RequestSpec], sinks: Sequence[TokenSink]) -> None:
        """Returns when accepted. Raises RefusedError. Events may reach the sinks before it returns."""
        ...

    def cancel(self, ids: Sequence[int]) -> None:
        """No further events reach the sinks of these requests."""

    def on_batch_end(self, callback: Any) -> None:
        """Registers a function called after all sinks of one StepEvents were served, so that the API can
        flush one write per stream for everything that waited."""

    async def admin(self, op: str, **args: Any) -> Any:
        """Raises RefusedError."""
        ...

    async def wait_ready(self) -> None: ...

    async def close(self) -> None: ...
