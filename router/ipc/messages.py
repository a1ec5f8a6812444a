"""What the API processes and the scheduler process say to each other.

One message is one msgpack-encoded tagged struct; on a socket each is framed by a little-endian u32
length. The same objects pass unencoded when both sides live in one process (tests).
Token arrays travel as packed little-endian bytes: `i32[]` and `i64[]` below.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

IPC_VERSION = 1


class FinishReason(enum.IntEnum):
    """Why a request ended; NONE inside `StepEvents.reasons` means that it goes on."""

    NONE = 0
    STOP = 1  # an EOS token (it is the entry's token), or a stop token id
    LENGTH = 2  # max_new_tokens or the context limit
    CANCELLED = 3  # by the API (stop string, disconnect): not reported back


class SamplingSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Validated sampling parameters; the neutral value of each is its default."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    """None: the scheduler draws one, so that every request can be replayed."""
    min_new_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = []
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: int = 0


class GrammarSpec(msgspec.Struct, frozen=True, kw_only=True):
    kind: int  # proto Grammar.Kind
    source: str
    strict: bool = False
    param: str = "response_format"
    """The client's field that it came from, for messages."""


class RequestSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One choice of one client request."""

    id: int
    """Unique per API process; the scheduler keys requests by (API connection, id)."""
    prompt: bytes
    """i32[], at least one token."""
    max_new_tokens: int | None = None
    """None: as many as `max_total_tokens` allows."""
    sampling: SamplingSpec = SamplingSpec()
    grammar: GrammarSpec | None = None
    priority: int = 0
    """Smaller runs first."""
    deadline_s: float | None = None
    """Seconds from arrival until the request fails if it is unfinished. None: the server's default."""
    salt: str = ""
    """Roots a separate prefix trie (adapter, image hash, tenant)."""
    adapter_id: str = ""
    request_id: str = ""
    """For logs and traces."""
    traceparent: str = ""
    """W3C Trace Context of the HTTP request; empty when it is not traced."""


# ---- API to scheduler ----


class Hello(msgspec.Struct, tag="hello", kw_only=True):
    version: int
    api_id: str


class Submit(msgspec.Struct, tag="submit", kw_only=True):
    """All requests are accepted or refused together (n choices, a list of prompts)."""

    requests: list[RequestSpec]


class Cancel(msgspec.Struct, tag="cancel", kw_only=True):
    """Acts when the next step is composed. Unknown ids are ignored; nothing is reported back."""

    ids: list[int]


class AdminCall(msgspec.Struct, tag="admin", kw_only=True):
    """`op` is one of: "ping", "state", "live", "metrics", "cache", "flush_cache", "check", "drain",
    "drain_replica"."""

    call_id: int
    op: str
    args: dict[str, Any] = {}


# ---- scheduler to API ----


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the API needs to know of the served model and the limits in force."""

    model_id: str
    vocab_size: int
    eos_token_ids: list[int]
    max_input_tokens: int
    max_total_tokens: int
    max_batch_total_tokens: int
    max_batch_prefill_tokens: int
    max_concurrent_requests: int
    block_size: int
    prefix_caching: bool
    prefix_caching_reason: str
    max_logprobs: int
    features: list[str]
    settings: dict[str, Any]
    """Every flag in force, for /info."""


class Welcome(msgspec.Struct, tag="welcome", kw_only=True):
    version: int


class ServerState(msgspec.Struct, tag="state", kw_only=True):
    """Pushed when it changes (a replica comes or goes, ready, draining). `model` is None until the first
    replica has told its capacity."""

    ready: bool
    reason: str
    """Why not ready, for people."""
    draining: bool
    model: ModelInfo | None
    n_replicas_live: int
    n_replicas_known: int


class Accepted(msgspec.Struct, tag="accepted", kw_only=True):
    ids: list[int]


class Refused(msgspec.Struct, tag="refused", kw_only=True):
    """The whole Submit was refused; nothing of it is queued."""

    ids: list[int]
    error: ErrorInfo


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True):
    status: int
    """HTTP status that fits when no byte of the answer has been sent."""
    type: str
    """OpenAI's error type: invalid_request_error, rate_limit_error, server_error, timeout_error."""
    message: str
    code: str | None = None
    param: str | None = None
    retry_after_s: float | None = None


class TokenLogprob(msgspec.Struct, array_like=True):
    entry: int
    """Index into the entries of this StepEvents."""
    chosen: float
    top_ids: bytes  # i32[]
    top_values: bytes  # f32[]


class PromptLogprob(msgspec.Struct, array_like=True):
    id: int
    start: int
    chosen: bytes  # f32[]
    n_top: int
    top_ids: bytes
    top_values: bytes


class Started(msgspec.Struct, array_like=True):
    """The request met a replica for the first time."""

    id: int
    cached_tokens: int
    queue_s: float


class Failed(msgspec.Struct, array_like=True):
    id: int
    error: ErrorInfo


class StepEvents(msgspec.Struct, tag="events", kw_only=True, omit_defaults=True):
    """What one composition or one step result means for one API connection. Entries are in order; a
    request may occur more than once."""

    ids: bytes = b""  # i64[]
    tokens: bytes = b""  # i32[]
    reasons: bytes = b""  # u8[], FinishReason
    logprobs: list[TokenLogprob] = []
    prompt_logprobs: list[PromptLogprob] = []
    started: list[Started] = []
    failed: list[Failed] = []


class AdminReply(msgspec.Struct, tag="admin_reply", kw_only=True):
    call_id: int
    value: Any = None
    error: ErrorInfo | None = None


ToScheduler = Hello | Submit | Cancel | AdminCall
ToApi = Welcome | ServerState | Accepted | Refused | StepEvents | AdminReply
