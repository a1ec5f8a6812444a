"""The router's errors: one tree, each with the HTTP status and OpenAI type that a client sees."""

from __future__ import annotations

from typing import ClassVar

from router.ipc.messages import ErrorInfo


class RouterError(Exception):
    """Base of what the router raises on purpose. The message is shown as it stands."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def info(self) -> ErrorInfo:
        return ErrorInfo(
            status=self.status,
            type=self.type,
            message=self.message,
            code=self.code,
            param=self.param,
            retry_after_s=self.retry_after_s,
        )


class InvalidRequestError(RouterError):
    """The request can never be served as it is."""

    status = 400
    type = "invalid_request_error"


class ContextLengthError(InvalidRequestError):
    code = "context_length_exceeded"


class UnknownAdapterError(InvalidRequestError):
    status = 404
    code = "adapter_not_found"


class OverloadedError(RouterError):
    """`max_concurrent_requests` is reached."""

    status = 429
    type = "rate_limit_error"
    code = "overloaded"


class UnavailableError(RouterError):
    """Not ready, or draining."""

    status = 503
    code = "unavailable"


class DeadlineError(RouterError):
    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"


class ReplicaLostError(RouterError):
    """The request was running at the loss of two replicas: it may be the cause."""

    code = "replica_lost"


class RowFailedError(RouterError):
    """The worker could not compute this request; others in the same step went on."""

    code = "row_failed"


class GrammarError(RouterError):
    """No token was allowed by the request's grammar."""

    status = 400
    type = "invalid_request_error"
    code = "grammar_dead_end"


class StepProtocolError(RouterError):
    """A worker's message contradicts what was sent: its replica is dropped and connected anew."""

    code = "protocol"


class ReplicaMismatchError(RouterError):
    """A worker can't serve this router: another model, protocol or a pool too small."""

    code = "replica_mismatch"
