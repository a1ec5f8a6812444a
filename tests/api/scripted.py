"""A SchedulerClient that lives in memory and plays scripts, for tests of the API alone."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from router.ipc.client import RefusedError, TokenSink
from router.ipc.messages import (
    ErrorInfo,
    Failed,
    FinishReason,
    ModelInfo,
    PromptLogprob,
    RequestSpec,
    ServerState,
    Started,
)

EOS = 0


def model_info(**changes: Any) -> ModelInfo:
    base = ModelInfo(
        model_id="org/tiny",
        vocab_size=600,
        eos_token_ids=[EOS],
        max_input_tokens=1000,
        max_total_tokens=1200,
        max_batch_total_tokens=10_000,
        max_batch_prefill_tokens=512,
        max_concurrent_requests=64,
        block_size=16,
        prefix_caching=True,
        prefix_caching_reason="",
        max_logprobs=20,
        features=[],
        settings={"window": 2},
    )
    return msgspec.structs.replace(base, **changes)


def server_state(**changes: Any) -> ServerState:
    base = ServerState(
        ready=True, reason="", draining=False, model=model_info(), n_replicas_live=1, n_replicas_known=1
    )
    return msgspec.structs.replace(base, **changes)


@dataclass(frozen=True)
class Script:
    """What a request is answered with."""

    tokens: Sequence[int] = ()
    """Played until max_new_tokens; then LENGTH. When they run out: `end`."""
    end: FinishReason | ErrorInfo | None = FinishReason.STOP
    """STOP sends EOS as its token; an error fails the request; None leaves it hanging."""
    cached_tokens: int = 0
    prompt_logprobs: tuple[PromptLogprob, ...] = ()
    refuse: ErrorInfo | None = None
    hold: bool = False
    """Nothing is played until `release()`."""


@dataclass
class Running:
    spec: RequestSpec
    sink: TokenSink
    script: Script
    n_sent: int = 0


@dataclass
class ScriptedClient:
    """Plays one token per running request and step; steps run by themselves, one per loop turn, unless
    `manual`."""

    script: Callable[[RequestSpec], Script] | Script = field(default_factory=Script)
    state: ServerState = field(default_factory=server_state)
    manual: bool = False
    admin_values: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.submitted: list[RequestSpec] = []
        self.cancelled: list[int] = []
        self.admin_calls: list[tuple[str, dict[str, Any]]] = []
        self.running: dict[int, Running] = {}
        self._ids = itertools.count(1)
        self._callbacks: list[Callable[[], None]] = []
        self._released = False
        self._stepping: asyncio.TimerHandle | asyncio.Handle | None = None
        self.on_submit = asyncio.Event()
        self.on_cancel = asyncio.Event()

    # ---- SchedulerClient ----

    def next_id(self) -> int:
        return next(self._ids)

    async def submit(self, requests: Sequence[RequestSpec], sinks: Sequence[TokenSink]) -> None:
        await asyncio.sleep(0)
        scripts = [self._script_of(spec) for spec in requests]
        for script in scripts:
            if script.refuse is not None:
                raise RefusedError(script.refuse)
        self.submitted.extend(requests)
        for spec, sink, script in zip(requests, sinks, scripts, strict=True):
            self.running[spec.id] = Running(spec=spec, sink=sink, script=script)
        self.on_submit.set()
        self._wake()

    def cancel(self, ids: Sequence[int]) -> None:
        self.cancelled.extend(ids)
        for id in ids:
            self.running.pop(id, None)
        self.on_cancel.set()

    def on_batch_end(self, callback: Any) -> None:
        self._callbacks.append(callback)

    async def admin(self, op: str, **args: Any) -> Any:
        self.admin_calls.append((op, args))
        value = self.admin_values.get(op, {"op": op})
        if isinstance(value, ErrorInfo):
            raise RefusedError(value)
        return value

    async def wait_ready(self) -> None:
        await asyncio.sleep(0)

    async def close(self) -> None:
        await asyncio.sleep(0)

    # ---- for tests ----

    async def wait_submitted(self, n: int) -> None:
        """Returns once so many requests have been taken in all."""
        while len(self.submitted) < n:
            self.on_submit.clear()
            await self.on_submit.wait()

    def set_state(self, **changes: Any) -> None:
        self.state = msgspec.structs.replace(self.state, **changes)

    def release(self) -> None:
        """Lets held scripts go on."""
        for running in self.running.values():
            running.script = replace(running.script, hold=False)
        self._wake()

    def step(self) -> None:
        """One token for each running request, as one batch of events."""
        for running in list(self.running.values()):
            self._play(running)
        for callback in self._callbacks:
            callback()

    def _script_of(self, spec: RequestSpec) -> Script:
        return self.script(spec) if callable(self.script) else self.script

    def _wake(self) -> None:
        if not self.manual and self._stepping is None:
            self._stepping = asyncio.get_running_loop().call_soon(self._auto_step)

    def _auto_step(self) -> None:
        self._stepping = None
        self.step()
        if any(not r.script.hold and not self._hangs(r) for r in self.running.values()):
            self._wake()

    def _hangs(self, running: Running) -> bool:
        return running.script.end is None and running.n_sent >= len(running.script.tokens)

    def _play(self, running: Running) -> None:
        script, spec, sink = running.script, running.spec, running.sink
        if script.hold:
            return
        if running.n_sent == 0:
            sink.on_started(Started(id=spec.id, cached_tokens=script.cached_tokens, queue_s=0.001))
            for part in script.prompt_logprobs:
                sink.on_prompt_logprobs(part)
        if running.n_sent < len(script.tokens):
            token = script.tokens[running.n_sent]
            running.n_sent += 1
            limit = spec.max_new_tokens
            reason = (
                FinishReason.LENGTH if limit is not None and running.n_sent >= limit else FinishReason.NONE
            )
            if token in spec.sampling.stop_token_ids:
                reason = FinishReason.STOP
            self._emit(running, token, reason)
        elif isinstance(script.end, ErrorInfo):
            del self.running[spec.id]
            sink.on_failed(Failed(id=spec.id, error=script.end))
        elif script.end is not None:
            self._emit(running, EOS, script.end)

    def _emit(self, running: Running, token: int, reason: FinishReason) -> None:
        spec = running.spec
        if reason is not FinishReason.NONE:
            self.running.pop(spec.id, None)
        logprob = None
        if spec.sampling.logprobs:
            n = spec.sampling.top_logprobs
            ids = np.arange(token, token + n, dtype="<i4") % 600
            values = -0.5 * np.arange(1, n + 1, dtype="<f4")
            logprob = (-0.5, ids.tobytes(), values.tobytes())
        running.sink.on_token(token, int(reason), logprob)
