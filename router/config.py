"""Every setting of the router (scheduler and API processes). Frozen, built once, passed down."""

from __future__ import annotations

from dataclasses import dataclass, fields

from router.api.config import ApiConfig
from settings.errors import ConfigError
from settings.flag import Flag, flag

LOG_FORMAT_CHOICES = ("auto", "text", "json")
LOG_LEVEL_CHOICES = ("debug", "info", "warning", "error")
ATTENTION_CHOICES = ("auto", "torch", "flashinfer", "fake")
PLACEMENT_CHOICES = ("exact", "random", "round-robin")


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig(ApiConfig):
    """Raises ConfigError, naming the flag and its limit, when a value can't be used."""

    model: str = flag(
        "",
        help="Where the API finds tokenizer and chat template: a hub id, a folder, a GGUF file or `smollm2`. "
        "Empty: what the worker names. A worker of another name is refused; a folder may hold any copy.",
        env=("MODEL_ID",),
    )
    replicas: tuple[str, ...] = flag(
        ("127.0.0.1:50051",),
        help="Workers, comma-separated: host:port, unix:/path, or dns:///name:port, which stands for every "
        "address that the name has and is resolved again and again.",
    )
    scheduler_address: str = flag(
        "unix:/tmp/quire-scheduler.sock",
        help="Where the scheduler listens for API processes: unix:/path or 127.0.0.1:port.",
    )
    window: int = flag(
        2,
        help="Steps in flight to one replica (run-ahead); 1 is synchronous.",
        unit="steps",
        effect="2 hides the way between router and worker; more wastes steps on answers that have ended.",
    )
    max_concurrent_requests: int = flag(
        1024,
        help="Requests that may be queued or running at once; each choice of `n` and each prompt of a list "
        "counts. The surplus gets 429 with Retry-After.",
        unit="requests",
        effect="Bounds the queue, and so the time to the first token under overload.",
        env=("MAX_CONCURRENT_REQUESTS",),
    )
    max_input_tokens: int | None = flag(
        None,
        help="Longest prompt; unset: max_total_tokens - 1.",
        unit="tokens",
        env=("MAX_INPUT_TOKENS", "MAX_INPUT_LENGTH"),
    )
    max_total_tokens: int | None = flag(
        None,
        help="Longest prompt plus answer; unset: what the model and the KV cache allow.",
        unit="tokens",
        effect="Caps the KV memory that one request can take.",
        env=("MAX_TOTAL_TOKENS",),
    )
    max_batch_prefill_tokens: int | None = flag(
        None,
        help="Prompt tokens that one step may compute; unset: what the worker's warm-up allows.",
        unit="tokens",
        effect="Sizes the steps in which no answer runs or all pause; --mixed-step-tokens sizes the others.",
        env=("MAX_BATCH_PREFILL_TOKENS",),
    )
    max_batch_total_tokens: int | None = flag(
        None,
        help="KV budget per replica; unset: what the worker's warm-up found. Rounded down to whole blocks.",
        unit="tokens",
        effect="Less KV memory is used: fewer requests run at once.",
        env=("MAX_BATCH_TOTAL_TOKENS",),
    )
    max_batch_size: int | None = flag(
        None,
        help="Requests that run at once on one replica; unset: as many as the worker has rows.",
        unit="requests",
        effect="Fewer: each answer streams faster, the others wait longer.",
        env=("MAX_BATCH_SIZE",),
    )
    mixed_step_tokens: int = flag(
        768,
        help="Room of a step that computes prompts beside running answers, in prompt tokens; each answer "
        "takes six of it, and at least a quarter is left to the prompts. A prompt of up to 1.5 times as much "
        "goes whole, a longer one in at most seven chunks, and steps grow when more waits than is served "
        "within --max-waiting-tokens of them.",
        unit="tokens",
        effect="More: first tokens come sooner; the running answers wait longer between two tokens.",
    )
    decode_pause_ratio: float = flag(
        0.1,
        help="Running answers pause, up to eight steps in a row, while waiting requests with short prompts "
        "are at least this share of them and too many to be served within --max-waiting-tokens steps. "
        "0: never.",
        effect="Less: bursts get their first tokens sooner and all together; answers stand still meanwhile.",
    )
    waiting_served_ratio: float = flag(
        0.0,
        help="Waiting requests may join a running batch once they are at least this share of it (as in TGI). "
        "0: always.",
        effect="More: longer undisturbed decoding, later first tokens.",
        env=("WAITING_SERVED_RATIO",),
    )
    max_waiting_tokens: int = flag(
        20,
        help="They may join in any case once this many steps have run since some last joined (as in TGI). "
        "Steps grow, or answers pause, when what waits is not served within so many.",
        unit="steps",
        env=("MAX_WAITING_TOKENS",),
    )
    prefix_caching: bool = flag(
        True,
        help="Keep computed blocks and share them between requests with the same beginning.",
        effect="Off: every prompt is computed whole.",
        env=("PREFIX_CACHING", "USE_PREFIX_CACHING"),
    )
    placement: str = flag(
        "exact",
        help="How a request finds its replica. exact: by the prompt tokens that it would compute there, load "
        "and KV pressure. random and round-robin look at none of these: for comparison.",
        choices=PLACEMENT_CHOICES,
    )
    prefill_chunking: bool = flag(
        True,
        help="Split long prompts over several steps.",
        effect="Off: a prompt is computed in one step, so max_input_tokens is at most "
        "max_batch_prefill_tokens and running answers pause meanwhile.",
        env=("PREFILL_CHUNKING",),
    )
    block_size: int | None = flag(
        None,
        help="KV positions per block. The worker decides; a router that is told another size refuses it.",
        unit="tokens",
        env=("BLOCK_SIZE",),
    )
    attention: str = flag(
        "auto",
        help="Attention backend. The worker decides; a router that is told another one refuses the worker.",
        choices=ATTENTION_CHOICES,
        env=("ATTENTION",),
    )
    max_queue_passes: int = flag(
        64,
        help="How often a request that does not fit may be passed by smaller ones behind it.",
        effect="More: fuller batches; large requests wait longer.",
    )
    default_deadline_s: float = flag(
        1800.0,
        help="Time from arrival after which an unfinished request fails, unless it names its own.",
        unit="seconds",
    )
    retry_after_s: float = flag(
        1.0, help="What a refused client is told to wait (Retry-After).", unit="seconds"
    )
    health_interval_s: float = flag(1.0, help="How often a worker's health is asked.", unit="seconds")
    health_timeout_s: float = flag(
        5.0,
        help="A worker that has not answered for so long is lost: its requests go on elsewhere.",
        unit="seconds",
    )
    stall_timeout_s: float = flag(
        120.0,
        help="A worker that answers, but makes no progress for so long while it has work, is lost. Longer "
        "than its longest step.",
        unit="seconds",
    )
    connect_timeout_s: float = flag(5.0, help="How long connecting to a worker may take.", unit="seconds")
    max_backoff_s: float = flag(
        10.0, help="Longest pause between two attempts to reach a worker that was lost.", unit="seconds"
    )
    resolve_interval_s: float = flag(10.0, help="How often DNS names are resolved again.", unit="seconds")
    otlp_endpoint: str = flag(
        "",
        help="Where traces of requests go (OTLP over HTTP), e.g. http://collector:4318; empty: nowhere. "
        "Needs the extra `otel`.",
    )
    log_format: str = flag(
        "auto", help="auto: key=value on a terminal, JSON otherwise.", choices=LOG_FORMAT_CHOICES
    )
    log_level: str = flag("info", help="Least severe messages to log.", choices=LOG_LEVEL_CHOICES)

    def __post_init__(self) -> None:
        for item in fields(self):
            meta = item.metadata.get("flag")
            value = getattr(self, item.name)
            if isinstance(meta, Flag) and meta.choices and value not in meta.choices:
                allowed = ", ".join(meta.choices)
                raise ConfigError(f"{_option(item.name)} is {value!r}, but must be one of: {allowed}")
        self._check_range("port", low=0, high=65535)
        self._check_range("window", low=1, high=64)
        self._check_range("max_concurrent_requests", low=1, high=10**7)
        self._check_range("max_input_tokens", low=1, high=2**30)
        self._check_range("max_total_tokens", low=2, high=2**30)
        self._check_range("max_batch_prefill_tokens", low=1, high=2**24)
        self._check_range("max_batch_total_tokens", low=1, high=2**40)
        self._check_range("max_batch_size", low=1, high=65536)
        self._check_range("mixed_step_tokens", low=1, high=2**24)
        self._check_range("decode_pause_ratio", low=0, high=1000)
        self._check_range("waiting_served_ratio", low=0, high=1000)
        self._check_range("max_waiting_tokens", low=0, high=10**9)
        self._check_range("block_size", low=1, high=4096)
        self._check_range("max_queue_passes", low=0, high=10**9)
        for name in (
            "default_deadline_s",
            "retry_after_s",
            "health_interval_s",
            "health_timeout_s",
            "stall_timeout_s",
            "connect_timeout_s",
            "max_backoff_s",
            "resolve_interval_s",
        ):
            self._check_range(name, low=0.001, high=10**7)
        self._check_range("shutdown_grace_s", low=0, high=10**7)
        if self.health_timeout_s < self.health_interval_s:
            raise ConfigError(
                f"--health-timeout-s is {self.health_timeout_s:g}, but must be at least --health-interval-s "
                f"({self.health_interval_s:g})"
            )
        if not self.host:
            raise ConfigError("--host is empty, but must be an address such as 127.0.0.1 or 0.0.0.0")
        if (
            self.max_input_tokens is not None
            and self.max_total_tokens is not None
            and self.max_input_tokens >= self.max_total_tokens
        ):
            raise ConfigError(
                f"--max-input-tokens is {self.max_input_tokens}, but must be below --max-total-tokens "
                f"({self.max_total_tokens}): an answer has at least one token"
            )
        if (
            not self.prefill_chunking
            and self.max_input_tokens is not None
            and self.max_batch_prefill_tokens is not None
            and self.max_input_tokens > self.max_batch_prefill_tokens
        ):
            raise ConfigError(
                f"--max-batch-prefill-tokens is {self.max_batch_prefill_tokens}, but without "
                f"--prefill-chunking it must be at least --max-input-tokens ({self.max_input_tokens})"
            )

    def _check_range(self, name: str, *, low: float, high: float) -> None:
        value = getattr(self, name)
        if value is not None and not low <= value <= high:
            raise ConfigError(f"{_option(name)} is {value}, but must be from {low} to {high}")


def _option(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")
