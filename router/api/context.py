"""What all routes of one API process share."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Protocol

from checkpoint.chat_template import ChatTemplate
from checkpoint.tokenizer import Tokenizer
from router.api.config import ApiConfig
from router.api.decode import BodyDecoder
from router.api.detokenize import TokenTable, build_token_table
from router.api.encoder import PromptEncoder
from router.api.errors import invalid, unavailable
from router.api.flusher import Flusher
from router.api.logprobs import TokenNames
from router.api.metrics import ApiMetrics
from router.ipc.client import SchedulerClient
from router.ipc.messages import ErrorInfo, ModelInfo


class Interruptible(Protocol):
    def interrupt(self, info: ErrorInfo) -> None:
        """Ends a running answer from our side."""
        ...


class ApiContext:
    """Built once by `create_app`; owns the process's tables, encoder and metrics, and knows what runs."""

    def __init__(
        self,
        *,
        client: SchedulerClient,
        config: ApiConfig,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        clock: Callable[[], float],
    ) -> None:
        self.client = client
        self.config = config
        self.tokenizer = tokenizer
        self.template = template
        self.clock = clock
        self.encoder = PromptEncoder(tokenizer)
        self.decoder = BodyDecoder()
        self.metrics = ApiMetrics()
        self.flusher = Flusher()
        self.draining = False
        self.running: set[Interruptible] = set()
        """Answers in progress, for the shutdown."""
        self.on_idle: Callable[[], None] = lambda: None
        """Called whenever the last running answer has ended."""
        self.table = build_token_table(tokenizer)
        client.on_batch_end(self.flusher.flush)

    @cached_property
    def full_table(self) -> TokenTable:
        """The table that shows special tokens; few requests need it."""
        return build_token_table(self.tokenizer, skip_special=False)

    @cached_property
    def names(self) -> TokenNames:
        return TokenNames(self.full_table)

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
        return (whole, whole.rstrip("/").rsplit("/", 1)[-1], *self.config.model_aliases)

    def begin(self, answer: Interruptible) -> None:
        self.running.add(answer)
        self.metrics.running.inc()

    def end(self, answer: Interruptible) -> None:
        if answer in self.running:
            self.running.discard(answer)
            self.metrics.running.dec()
            if not self.running:
                self.on_idle()
