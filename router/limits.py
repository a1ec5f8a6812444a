"""The limits in force: what the settings ask for, what the first worker can take, and where they disagree."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from checkpoint.resolve import is_model_name
from proto.version import PROTOCOL_VERSION
from proto.worker_pb2 import Capacity
from router.config import RouterConfig
from router.dealing import Placement
from router.errors import ReplicaMismatchError
from router.ipc.messages import ModelInfo
from router.policy_limits import PolicyLimits
from router.replica_state import ReplicaShape
from settings.errors import ConfigError
from settings.flag import Flag

_FLAG_OF = {"native": "torch"}
"""Compiled code takes over from --attention torch where it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Resolved once, by the first replica. Later replicas must be able to keep them."""

    model_id: str
    model_hash: str
    model_path: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_logprobs: int
    features: tuple[str, ...]
    block_size: int
    pool_tokens: int
    """Tokens that the KV pool holds, in whole blocks, `max_batch_total_tokens` applied."""
    max_context: int
    max_input_tokens: int
    max_total_tokens: int
    max_batch_prefill_tokens: int
    max_batch_size: int
    attention: str
    """What the first worker computes with, likewise its device and number format."""
    device: str
    dtype: str


def resolve_limits(config: RouterConfig, capacity: Capacity) -> Limits:
    """Raises ConfigError, naming the setting, its value and one that fits."""
    block_size = capacity.block_size
    pool_tokens = usable_blocks(config, capacity) * block_size
    asked_pool = config.max_batch_total_tokens
    if asked_pool is not None and asked_pool < block_size:
        raise ConfigError(
            f"--max-batch-total-tokens is {asked_pool}, less than one block of {block_size} tokens: "
            f"{block_size} to {(capacity.n_blocks - 1) * block_size} fit"
        )
    if pool_tokens < block_size:
        raise ConfigError(
            f"the worker's KV cache has {capacity.n_blocks} blocks, the reserved one included: not one is "
            "left for requests (give it more memory, or a smaller --block-size)"
        )
    longest = min(capacity.max_context, pool_tokens)
    if config.max_total_tokens is not None:
        if config.max_total_tokens > capacity.max_context:
            raise ConfigError(
                f"--max-total-tokens is {config.max_total_tokens}, but {capacity.model_id} on this worker "
                f"has a context of {capacity.max_context} tokens: at most that fits"
            )
        if config.max_total_tokens > pool_tokens:
            raise ConfigError(
                f"--max-total-tokens is {config.max_total_tokens}, but the KV cache holds {pool_tokens} "
                f"tokens (max_batch_total_tokens): at most {longest} fits"
            )
    max_total = config.max_total_tokens if config.max_total_tokens is not None else longest
    if max_total < 2:
        raise ConfigError(f"the KV cache holds {pool_tokens} tokens; a request needs at least 2")
    max_rows = min(capacity.max_rows, config.max_batch_size or capacity.max_rows)
    # Room for the prompt tokens of a step in which every row but one decodes.
    most_prefill = max(1, capacity.max_step_tokens - max_rows)
    max_prefill = config.max_batch_prefill_tokens
    if max_prefill is not None and max_prefill > most_prefill:
        raise ConfigError(
            f"--max-batch-prefill-tokens is {max_prefill}, but a step of this worker carries "
            f"{capacity.max_step_tokens} tokens, of which {max_rows} are kept for running requests: at most "
            f"{most_prefill} fits"
        )
    if max_prefill is None:
        max_prefill = most_prefill
    max_input = config.max_input_tokens
    if max_input is None:
        max_input = max_total - 1
        if not config.prefill_chunking:
            max_input = min(max_input, max_prefill)
    if max_input >= max_total:
        raise ConfigError(
            f"--max-input-tokens is {max_input}, but must be below max_total_tokens ({max_total}): at most "
            f"{max_total - 1} fits"
        )
    if not config.prefill_chunking and max_input > max_prefill:
        raise ConfigError(
            f"--max-input-tokens is {max_input}, but without --prefill-chunking a prompt must fit into "
            f"max_batch_prefill_tokens ({max_prefill}): at most {max_prefill} fits"
        )
    return Limits(
        model_id=capacity.model_id,
        model_hash=capacity.model_hash,
        model_path=capacity.model_path,
        vocab_size=capacity.vocab_size,
        eos_token_ids=tuple(capacity.eos_token_ids),
        max_logprobs=capacity.max_logprobs,
        features=tuple(capacity.features),
        block_size=block_size,
        pool_tokens=pool_tokens,
        max_context=capacity.max_context,
        max_input_tokens=max_input,
        max_total_tokens=max_total,
        max_batch_prefill_tokens=max_prefill,
        max_batch_size=max_rows,
        attention=capacity.attention,
        device=capacity.device,
        dtype=capacity.dtype,
    )


def usable_blocks(config: RouterConfig, capacity: Capacity) -> int:
    """Blocks that requests may use: the reserved one left out, the lower of the budgets applied."""
    n_blocks = max(0, capacity.n_blocks - 1)
    for budget in (capacity.max_batch_total_tokens, config.max_batch_total_tokens):
        if budget:
            n_blocks = min(n_blocks, budget // capacity.block_size)
    return n_blocks


def check_replica(limits: Limits | None, config: RouterConfig, capacity: Capacity) -> None:
    """Raises ReplicaMismatchError, saying what differs, when the worker can't stand in for the others."""
    if capacity.protocol_version != PROTOCOL_VERSION:
        raise ReplicaMismatchError(
            f"worker {capacity.worker_id} (version {capacity.quire_version}) speaks step protocol "
            f"{capacity.protocol_version}, this router speaks {PROTOCOL_VERSION}: run one release on both"
        )
    if config.block_size is not None and capacity.block_size != config.block_size:
        raise ReplicaMismatchError(
            f"worker {capacity.worker_id} has blocks of {capacity.block_size} tokens, but --block-size is "
            f"{config.block_size}"
        )
    if config.model and _are_other_models(config.model, capacity.model_id):
        raise ReplicaMismatchError(
            f"worker {capacity.worker_id} serves {capacity.model_id!r}, but --model is {config.model!r}"
        )
    if config.attention not in ("auto", capacity.attention, _FLAG_OF.get(capacity.attention)):
        raise ReplicaMismatchError(
            f"worker {capacity.worker_id} runs attention {capacity.attention!r}, but --attention is "
            f"{config.attention!r}"
        )
    if config.window > max(1, capacity.max_window):
        raise ReplicaMismatchError(
            f"--window is {config.window}, but worker {capacity.worker_id} takes {capacity.max_window} steps "
            "in flight"
        )
    if limits is None:
        return
    if capacity.model_hash != limits.model_hash:
        raise ReplicaMismatchError(
            f"worker {capacity.worker_id} serves {capacity.model_id!r} (digest {capacity.model_hash[:12]}), "
            f"the others serve {limits.model_id!r} (digest {limits.model_hash[:12]})"
        )
    if capacity.vocab_size != limits.vocab_size:
        raise ReplicaMismatchError(
            f"worker {capacity.worker_id} has a vocabulary of {capacity.vocab_size}, the others of "
            f"{limits.vocab_size}"
        )
    if capacity.max_logprobs < limits.max_logprobs:
        raise ReplicaMismatchError(
            f"worker {capacity.worker_id} gives {capacity.max_logprobs} logprobs per token, but "
            f"{limits.max_logprobs} were promised"
        )
    if "prompt_logprobs" in limits.features and "prompt_logprobs" not in capacity.features:
        raise ReplicaMismatchError(
            f"worker {capacity.worker_id} gives no logprobs of prompts, but the others do"
        )
    pool_tokens = usable_blocks(config, capacity) * capacity.block_size
    longest = min(pool_tokens, capacity.max_context)
    if longest < limits.max_total_tokens:
        raise ReplicaMismatchError(
            f"worker {capacity.worker_id} can hold {longest} tokens, but requests of up to "
            f"{limits.max_total_tokens} (max_total_tokens) were promised"
        )
    n_rows = min(capacity.max_rows, limits.max_batch_size)
    if capacity.max_step_tokens - n_rows < limits.max_batch_prefill_tokens and not config.prefill_chunking:
        raise ReplicaMismatchError(
            f"worker {capacity.worker_id} takes {capacity.max_step_tokens} tokens per step, too few for "
            f"max_batch_prefill_tokens ({limits.max_batch_prefill_tokens}) beside {n_rows} running requests"
        )


def shape_of(limits: Limits, config: RouterConfig, capacity: Capacity) -> ReplicaShape:
    return ReplicaShape(
        n_blocks=usable_blocks(config, capacity),
        block_size=capacity.block_size,
        max_rows=capacity.max_rows,
        max_batch_size=min(capacity.max_rows, config.max_batch_size or capacity.max_rows),
        max_step_tokens=capacity.max_step_tokens,
        row_tokens=limits.max_total_tokens,
        vocab_size=capacity.vocab_size,
    )


def arithmetic(limits: Limits, config: RouterConfig, capacity: Capacity) -> str:
    """How max_batch_total_tokens came about, one line for people."""
    n_blocks = usable_blocks(config, capacity)
    text = (
        f"max_batch_total_tokens = {n_blocks * capacity.block_size} "
        f"({n_blocks} blocks of {capacity.block_size}; warm-up: {capacity.max_batch_total_tokens}"
    )
    if config.max_batch_total_tokens:
        text += f"; --max-batch-total-tokens: {config.max_batch_total_tokens}"
    return f"{text}; {capacity.memory_arithmetic})" if capacity.memory_arithmetic else f"{text})"


def _are_other_models(told: str, served: str) -> bool:
    """Whether the names say so. A folder or a file may hold a copy of anything: its name tells nothing."""
    return told != served and all(is_model_name(name) for name in (told, served))


def settings_in_force(config: RouterConfig, limits: Limits) -> dict[str, Any]:
    """Every flag, secrets left out, with what unset ones resolved to."""
    shown: dict[str, Any] = {}
    for item in fields(config):
        meta = item.metadata.get("flag")
        if not isinstance(meta, Flag):
            continue
        value = getattr(config, item.name)
        if meta.secret:
            value = "set" if value else "unset"
        shown[item.name] = list(value) if isinstance(value, tuple) else value
    shown.update(
        max_input_tokens=limits.max_input_tokens,
        max_total_tokens=limits.max_total_tokens,
        max_batch_prefill_tokens=limits.max_batch_prefill_tokens,
        max_batch_total_tokens=limits.pool_tokens,
        max_batch_size=limits.max_batch_size,
        block_size=limits.block_size,
        attention=limits.attention,
        device=limits.device,
        dtype=limits.dtype,
    )
    return shown


def model_info(config: RouterConfig, limits: Limits) -> ModelInfo:
    return ModelInfo(
        model_id=limits.model_id,
        vocab_size=limits.vocab_size,
        eos_token_ids=list(limits.eos_token_ids),
        max_input_tokens=limits.max_input_tokens,
        max_total_tokens=limits.max_total_tokens,
        max_batch_total_tokens=limits.pool_tokens,
        max_batch_prefill_tokens=limits.max_batch_prefill_tokens,
        max_concurrent_requests=config.max_concurrent_requests,
        block_size=limits.block_size,
        prefix_caching=config.prefix_caching,
        prefix_caching_reason="on by default"
        if config.prefix_caching
        else "switched off by --no-prefix-caching",
        max_logprobs=limits.max_logprobs,
        features=list(limits.features),
        settings=settings_in_force(config, limits) | {"model_path": limits.model_path},
    )


def policy_limits(config: RouterConfig, limits: Limits) -> PolicyLimits:
    return PolicyLimits(
        max_batch_prefill_tokens=limits.max_batch_prefill_tokens,
        mixed_step_tokens=config.mixed_step_tokens,
        decode_pause_ratio=config.decode_pause_ratio,
        waiting_served_ratio=config.waiting_served_ratio,
        max_waiting_tokens=config.max_waiting_tokens,
        prefill_chunking=config.prefill_chunking,
        prefix_caching=config.prefix_caching,
        max_passes=config.max_queue_passes,
        placement=Placement(config.placement),
    )
