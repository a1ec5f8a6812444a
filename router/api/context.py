"""What all routes of one API process share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from router.api.config import ApiConfig
from router.api.decode import BodyDecoder
from router.api.errors import invalid, unavailable
from router.api.flusher import Flusher
from router.api.metrics import ApiMetrics
from router.api.text_model import TextModel
from router.ipc.client import SchedulerClient
from router.ipc.messages import ErrorInfo, ModelInfo
from settings.tracing import Tracing

_PLACEHOLDERS = ("tgi", "dummy")
"""What TGI's client and the hub's put there when they know an address alone."""


class Interruptible(Protocol):
    def interrupt(self, info: ErrorInfo) -> None:
        """Ends a running answer from our side."""
        ...


class ApiContext:
    """Built once by `create_app`; owns the process's metrics and knows what runs. The text model may come
    later, when a worker has said where it lies."""

    def __init__(
        self,
        *,
        client: SchedulerClient,
        config: ApiConfig,
        text: TextModel | None,
        clock: Callable[[], float],
        tracing: Tracing | None = None,
    ) -> None:
        self.client = client
        self.tracing = tracing
        self.config = config
        self.loaded = text
        """None until the tokenizer is read."""
        self.clock = clock
        self.decoder = BodyDecoder()
        self.metrics = ApiMetrics()
        self.flusher = Flusher()
        self.draining = False
        self.running: set[Interruptible] = set()
        """Answers in progress, for the shutdown."""
        self.on_idle: Callable[[], None] = lambda: None
        """Called whenever the last running answer has ended."""
        client.on_batch_end(self.flusher.flush)

    @property
    def text(self) -> TextModel:
        """Raises ApiError (503) while the tokenizer is not read."""
        if self.loaded is None:
            raise unavailable("No model is being served yet: its tokenizer is still being read.")
        return self.loaded

    @property
    def not_ready_reason(self) -> str | None:
        """None when a request sent now would be served."""
        state = self.client.state
        if self.draining or state.draining:
            return "shutting down"
        if not state.ready:
            return state.reason or "no worker is ready"
        return None if self.loaded is not None else "the tokenizer is still being read"

    @property
    def model(self) -> ModelInfo:
        """Raises ApiError (503) while no worker has said what it serves."""
        state = self.client.state
        if self.draining or state.draining:
            raise unavailable("The server is shutting down.", retry_after_s=5.0)
        if state.model is None:
            raise unavailable(f"No model is being served yet: {state.reason or 'no worker has answered'}.")
        return state.model

    def check_model(self, name: str | None) -> ModelInfo:
        """The served model, if `name` stands for it: the id, its last part, an alias, or nothing at all."""
        model = self.model
        if name is None or name in self.model_names(model):
            return model
        raise invalid(
            f"The model '{name[:200]}' does not exist: this server serves '{model.model_id}'.",
            param="model",
            code="model_not_found",
            status=404,
        )

    def model_names(self, model: ModelInfo) -> tuple[str, ...]:
        whole = model.model_id
        return (whole, whole.rstrip("/").rsplit("/", 1)[-1], *self.config.model_aliases, *_PLACEHOLDERS)

    def begin(self, answer: Interruptible) -> None:
        self.running.add(answer)
        self.metrics.running.inc()

    def end(self, answer: Interruptible) -> None:
        if answer in self.running:
            self.running.discard(answer)
            self.metrics.running.dec()
            if not self.running:
                self.on_idle()
