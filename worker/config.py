"""Every setting of a worker. Frozen, built once, passed down; checked when it is built."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from settings.errors import ConfigError
from settings.flag import Flag, flag

ATTENTION_CHOICES = ("auto", "torch", "flashinfer", "fake")
DTYPE_CHOICES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPE_CHOICES = ("auto", "float32", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2")
LOAD_FORMAT_CHOICES = ("auto", "dummy")
CUDA_GRAPHS_CHOICES = ("on", "off")
LOG_FORMAT_CHOICES = ("auto", "text", "json")
LOG_LEVEL_CHOICES = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Raises ConfigError, naming the flag and its limit, when a value can't be used."""

    model: str = flag(
        "smollm2",
        help="The model: a hub id, a local safetensors folder, a GGUF file, or `smollm2`. With "
        "`--attention fake` it may be empty: then a synthetic vocabulary is used.",
        env=("MODEL_ID",),
    )
    revision: str = flag(
        "", help="Branch, tag or commit of a hub model; empty: its main branch.", env=("REVISION",)
    )
    host: str = flag("127.0.0.1", help="Address that the gRPC server listens on; 0.0.0.0 for all.")
    port: int = flag(0, help="TCP port of the gRPC server; 0 lets the system choose a free one.")
    port_file: str = flag(
        "",
        help="Write the bound port into this file, in one piece, once the worker is ready (for launchers).",
    )
    attention: str = flag(
        "auto",
        help="Attention backend: flashinfer on NVIDIA, torch anywhere, fake without a model. "
        "auto takes flashinfer when a GPU and the library are there, else torch.",
        choices=ATTENTION_CHOICES,
        env=("ATTENTION",),
    )
    dtype: str = flag(
        "auto",
        help="Number format of the weights and activations. auto: bfloat16 on a GPU, float32 on a CPU.",
        effect="float32 doubles the memory of the weights.",
        choices=DTYPE_CHOICES,
        env=("DTYPE",),
    )
    kv_cache_dtype: str = flag(
        "auto",
        help="Number format of the KV cache; auto: as dtype.",
        effect="An 8-bit cache holds twice the tokens at a small loss of accuracy.",
        choices=KV_CACHE_DTYPE_CHOICES,
        env=("KV_CACHE_DTYPE",),
    )
    block_size: int = flag(
        16,
        help="KV positions per block.",
        unit="tokens",
        effect="Smaller shares prefixes more exactly; larger makes tables shorter.",
        env=("BLOCK_SIZE",),
    )
    max_batch_size: int = flag(
        256,
        help="Rows of device state: requests that may run at once on this worker.",
        unit="rows",
        effect="Each row costs a little device memory; more rows raise throughput and the time per step.",
        env=("MAX_BATCH_SIZE",),
    )
    max_batch_prefill_tokens: int = flag(
        4096,
        help="Prompt tokens that one step may compute, beside the decode rows.",
        unit="tokens",
        effect="Sizes the activation memory; larger steps delay the tokens of running requests more.",
        env=("MAX_BATCH_PREFILL_TOKENS",),
    )
    max_batch_total_tokens: int | None = flag(
        None,
        help="Upper limit of the KV cache; unset: what the warm-up finds.",
        unit="tokens",
        effect="Lowers the memory that the KV cache takes.",
        env=("MAX_BATCH_TOTAL_TOKENS",),
    )
    max_total_tokens: int | None = flag(
        None,
        help="Longest prompt plus answer; unset: what the model allows.",
        unit="tokens",
        effect="Sizes the block tables.",
        env=("MAX_TOTAL_TOKENS",),
    )
    wiggle_room: float = flag(
        0.95,
        help="Share of the free memory that the KV cache may take.",
        effect="The rest absorbs what the warm-up did not foresee.",
        env=("TGI_WIGGLE_ROOM",),
    )
    load_format: str = flag(
        "auto",
        help="dummy makes random weights of the model's shape instead of reading them (for benchmarks).",
        choices=LOAD_FORMAT_CHOICES,
    )
    cuda_graphs: str = flag(
        "on",
        help="Replay decode steps as CUDA graphs.",
        effect="Saves launch time in each step; capturing takes a few seconds and some memory at start.",
        choices=CUDA_GRAPHS_CHOICES,
    )
    window: int = flag(
        4,
        help="Steps that a router may have in flight here, queued or running; its own --window is at most "
        "this.",
        unit="steps",
    )
    threads: int = flag(
        0,
        help="CPU threads that compute; 0: all available cores, one less for steps of under 4 tokens.",
        unit="threads",
    )
    grammar_timeout_s: float = flag(
        5.0, help="Longest time that compiling a request's grammar may take.", unit="seconds"
    )
    grammar_cache_mb: int = flag(
        256, help="Compiled grammars that are kept; the least recently used leave first.", unit="MiB"
    )
    cache_dir: str = flag(
        "",
        help="Folder for downloaded models; empty: the usual cache folder of the user.",
        env=("HUGGINGFACE_HUB_CACHE",),
    )
    offline: bool = flag(False, help="Never use the network.", env=("HF_HUB_OFFLINE",))
    otlp_endpoint: str = flag(
        "",
        help="Where traces of requests go (OTLP over HTTP), e.g. http://collector:4318; empty: nowhere. "
        "Needs the extra `otel`.",
    )
    profile_dir: str = flag(
        "",
        help="On SIGUSR2 the worker watches its GPU for a second and writes what it did into this folder; "
        "empty: the signal is ignored.",
    )
    log_format: str = flag(
        "auto", help="auto: key=value on a terminal, JSON otherwise.", choices=LOG_FORMAT_CHOICES
    )
    log_level: str = flag("info", help="Least severe messages to log.", choices=LOG_LEVEL_CHOICES)

    fake_step_ms: float = flag(1.0, help="Fake worker: time of a step, before rows and tokens.", unit="ms")
    fake_row_us: float = flag(0.0, help="Fake worker: further time per row of a step.", unit="µs")
    fake_prefill_token_us: float = flag(0.0, help="Fake worker: further time per prompt token.", unit="µs")
    fake_vocab_size: int = flag(1000, help="Fake worker without a model: vocabulary size.", unit="tokens")
    fake_n_blocks: int = flag(
        4096, help="Fake worker: blocks of its KV cache, the reserved one included.", unit="blocks"
    )
    fake_grammar: bool = flag(True, help="Fake worker: whether it can constrain answers to a grammar.")
    fake_eos_rate: float = flag(0.0, help="Fake worker: probability that a sampled token ends the answer.")
    fake_strict: bool = flag(
        False, help="Fake worker: end the stream when a row reads a wrong or uncomputed KV block."
    )
    fake_device_error_at: int = flag(
        0, help="Fake worker: lose the device at this step of a stream; 0: never.", unit="step"
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            meta = item.metadata["flag"]
            assert isinstance(meta, Flag)
            value = getattr(self, item.name)
            if meta.choices and value not in meta.choices:
                allowed = ", ".join(meta.choices)
                raise ConfigError(f"{option(item.name)} is {value!r}, but must be one of: {allowed}")
        self._check_range("port", low=0, high=65535)
        self._check_range("block_size", low=1, high=4096)
        self._check_range("max_batch_size", low=1, high=65536)
        self._check_range("max_batch_prefill_tokens", low=1, high=2**24)
        self._check_range("max_batch_total_tokens", low=1, high=2**40)
        if self.max_batch_total_tokens is not None and self.max_batch_total_tokens < self.block_size:
            raise ConfigError(
                f"--max-batch-total-tokens is {self.max_batch_total_tokens}, but one block holds "
                f"{self.block_size} tokens (--block-size): at least {self.block_size}"
            )
        self._check_range("max_total_tokens", low=2, high=2**30)
        self._check_range("window", low=1, high=64)
        self._check_range("threads", low=0, high=4096)
        self._check_range("grammar_timeout_s", low=0.1, high=20)
        self._check_range("grammar_cache_mb", low=1, high=2**20)
        self._check_range("fake_step_ms", low=0, high=3_600_000)
        self._check_range("fake_row_us", low=0, high=1_000_000)
        self._check_range("fake_prefill_token_us", low=0, high=1_000_000)
        self._check_range("fake_vocab_size", low=32, high=2**30)
        self._check_range("fake_n_blocks", low=2, high=2**30)
        self._check_range("fake_eos_rate", low=0, high=1)
        self._check_range("fake_device_error_at", low=0, high=2**63 - 1)
        if not 0 < self.wiggle_room <= 1:
            raise ConfigError(f"--wiggle-room is {self.wiggle_room}, but must be above 0 and at most 1")
        if not self.host:
            raise ConfigError("--host is empty, but must be an address such as 127.0.0.1 or 0.0.0.0")
        if not self.model and self.attention != "fake":
            raise ConfigError("--model is empty: name a hub id, a folder, a GGUF file or `smollm2`")
        if self.port_file:
            self._check_port_file(Path(self.port_file).absolute())

    @property
    def max_step_tokens(self) -> int:
        """Tokens that one step may carry: the prompt tokens allowed, and one for each row."""
        return self.max_batch_prefill_tokens + self.max_batch_size

    def _check_port_file(self, path: Path) -> None:
        """The file is replaced as a whole: a device or a pipe in its place would be gone."""
        if not path.parent.is_dir():
            raise ConfigError(
                f"--port-file is {self.port_file!r}, but its folder {path.parent} does not exist"
            )
        if path.exists() and not path.is_file():
            raise ConfigError(f"--port-file is {self.port_file!r}, but that is not an ordinary file")

    def _check_range(self, name: str, *, low: float, high: float) -> None:
        value = getattr(self, name)
        if value is not None and not low <= value <= high:
            raise ConfigError(f"{option(name)} is {value}, but must be from {low} to {high}")


def option(field_name: str) -> str:
    """The command-line form of a field: max_batch_size as --max-batch-size."""
    return "--" + field_name.replace("_", "-")
