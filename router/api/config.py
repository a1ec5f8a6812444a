"""The API's own settings. `router/config.py` builds on them; tests build them alone."""

from __future__ import annotations

from dataclasses import dataclass

from settings.flag import flag

TOOL_PARSER_CHOICES = ("auto", "hermes", "llama3", "mistral", "json", "none")
REASONING_PARSER_CHOICES = ("auto", "think", "none")


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiConfig:
    """Everything that an API process needs beyond the scheduler's address and the model."""

    host: str = flag("0.0.0.0", help="Address that the HTTP server listens on.")
    port: int = flag(8000, help="Port of the HTTP server; 0 takes a free one.", env=("PORT",))
    share_port: bool = flag(
        False,
        help="Let several API processes listen on the port; the kernel spreads connections over them.",
        effect="A port in use by another server of the same user is not noticed.",
    )
    api_keys: tuple[str, ...] = flag(
        (),
        help="Keys that clients must send as `Authorization: Bearer …` on every route but health."
        " None: open to all, and the admin routes answer only to this host.",
        env=("API_KEY",),
        secret=True,
    )
    api_key_file: str | None = flag(
        None,
        help="File with further keys, one a line (# begins a comment). A changed file counts within a second"
        " or two; an empty one lets nobody in.",
    )
    model_aliases: tuple[str, ...] = flag(
        (), help="Further model names that requests may use, beside the model id and its last part."
    )
    chat_template: str | None = flag(
        None, help="File with a Jinja chat template that replaces the model's own."
    )
    control_tokens_in_messages: bool = flag(
        False,
        help="Let control tokens (such as <|im_end|>) that stand in a chat's messages count as tokens. By"
        " default they are plain text there: what a user writes can't end a turn or begin another.",
    )
    tool_parser: str = flag(
        "auto",
        help="How the model writes function calls: hermes (also Qwen), llama3, mistral, or json (any model"
        " that is told to). auto goes by the chat template; none refuses tools unless a call is forced.",
        choices=TOOL_PARSER_CHOICES,
    )
    reasoning_parser: str = flag(
        "auto",
        help="think: what stands between <think> and </think> goes to `reasoning_content`, not to `content`."
        " auto: when the model knows these tags.",
        choices=REASONING_PARSER_CHOICES,
    )
    max_body_bytes: int = flag(
        32 * 1024 * 1024, help="Largest request body.", unit="bytes", effect="Memory per request in flight."
    )
    body_timeout_s: float = flag(
        60.0,
        help="How long a client may take to send a request's body before it gets a 408.",
        unit="seconds",
        effect="Memory that slow or silent clients hold.",
    )
    max_n: int = flag(
        128, help="Largest `n` (choices per prompt).", effect="Each choice is a request of its own."
    )
    max_prompts: int = flag(
        1024, help="Most prompts in one completions request.", effect="Each is a request of its own."
    )
    max_stop_sequences: int = flag(16, help="Most stop strings per request.", env=("MAX_STOP_SEQUENCES",))
    max_stop_chars: int = flag(
        1024, help="Longest stop string.", unit="characters", effect="Text held back while one may begin."
    )
    max_logit_bias: int = flag(1024, help="Most entries of `logit_bias`.")
    max_grammar_bytes: int = flag(
        128 * 1024,
        help="Longest JSON schema, regular expression, list of choices or grammar that binds an answer.",
        unit="bytes",
        effect="Larger ones take longer to compile before their request is queued.",
    )
    max_grammar_depth: int = flag(
        64, help="Deepest nesting of brackets in such a schema, expression or grammar.", unit="levels"
    )
    cors_allow_origin: tuple[str, ...] = flag(
        (), help="Origins that browsers may call from; `*` for all.", env=("CORS_ALLOW_ORIGIN",)
    )
    shutdown_grace_s: float = flag(
        30.0, help="How long running answers may go on after SIGTERM.", unit="seconds"
    )
