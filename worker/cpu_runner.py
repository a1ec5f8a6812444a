"""Computes steps on the CPU: decode rows and prompt chunks in one forward pass. The runner itself works on
whatever device its decoder lies on.

Owns the weights, the KV cache and each row's last sampled token. `launch` computes the whole step before it
returns; `collect` hands out its result.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import structlog
import torch

from checkpoint.checkpoint import Checkpoint
from proto.codec import pack_f32, pack_i32, unpack_i32
from proto.worker_pb2 import Grammar, PromptLogprobs, RowError
from worker.attention.interface import I32, Attention, AttentionBatch, KvCache
from worker.attention.native_backend import make_attention
from worker.config import WorkerConfig
from worker.cpu_tuning import ThreadPlan, keep_freed_memory, plan_threads
from worker.errors import StartError
from worker.grammar.rows import GrammarRows, MaskJob
from worker.grammar.start import NO_GRAMMARS, make_grammar_rows
from worker.kv_budget import KvBudget, cpu_kv_budget
from worker.models.compiled import fastest
from worker.models.config import spec_from_config
from worker.models.decoder import Decoder
from worker.native.machine import can_keep
from worker.runner import RunnerCapacity, Sampled, SampledLogprobs, StepBatch
from worker.sampling import RawLogprobs, Sampler
from worker.weights import dummy_weights, load_weights

_DTYPES = {
    "auto": torch.float32,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_PROMPT_LOGIT_ROWS = 256
"""Prompt positions whose logits are held at once."""
_MAX_LOGPROBS = 20


@dataclass(slots=True)
class _Done:
    """A computed step."""

    seq: int
    sampled: Sampled


@dataclass(slots=True)
class _RowInfo:
    epoch: int
    n_prompt: int
    prompt_logprobs: int
    error: str = ""
    """Why its sampling parameters can't be used."""


class CpuRunner:
    """Implements `worker.runner.Runner`."""

    def __init__(
        self,
        decoder: Decoder,
        capacity: RunnerCapacity,
        *,
        attention: Attention,
        threads: ThreadPlan,
        grammars: GrammarRows | None = None,
    ) -> None:
        self._attention = attention
        self._decoder = fastest(decoder, attention)
        self._capacity = capacity
        self._threads = threads
        self._sampler = Sampler(
            vocab_size=capacity.vocab_size, max_rows=capacity.max_rows, device=decoder.device
        )
        self._grammars = grammars
        self._last_token = np.zeros(capacity.max_rows, dtype=np.int32)
        self._rows: dict[int, _RowInfo] = {}

    @property
    def capacity(self) -> RunnerCapacity:
        return self._capacity

    def reset(self) -> None:
        self._rows.clear()
        if self._grammars is not None:
            self._grammars.reset()

    def launch(self, batch: StepBatch) -> _Done:
        started = time.perf_counter()
        with torch.inference_mode():
            sampled = self._compute(batch)
        sampled.step_us = int((time.perf_counter() - started) * 1e6)
        return _Done(batch.seq, sampled)

    def collect(self, pending: _Done) -> Sampled:
        return pending.sampled

    def prepare(self, grammar: Grammar) -> None:
        if self._grammars is None:
            raise ValueError(NO_GRAMMARS)
        self._grammars.prepare(grammar)

    def _compute(self, batch: StepBatch) -> Sampled:
        if len(batch.zero_blocks):
            self._attention.zero_blocks(batch.zero_blocks)
        for row in batch.evicts.tolist():
            self._rows.pop(row, None)
            if self._grammars is not None:
                self._grammars.evict(row)
        for admit in batch.admits:
            info = _RowInfo(admit.epoch, admit.n_prompt, admit.sampling.prompt_logprobs)
            self._rows[admit.row] = info
            try:
                self._sampler.admit(
                    admit.row, admit.sampling, tokens=unpack_i32(admit.tokens), n_prompt=admit.n_prompt
                )
            except ValueError as error:
                info.error = str(error)
            if self._grammars is not None:
                output = unpack_i32(admit.tokens)[admit.n_prompt :]
                self._grammars.admit(admit.row, admit.grammar, output=output.tolist())
        if not len(batch.rows):
            return _nothing(batch.seq)
        return self._forward(batch)

    def _forward(self, batch: StepBatch) -> Sampled:
        tokens = self._input_tokens(batch)
        self._threads.apply(n_tokens=len(tokens))
        self._attention.plan(
            AttentionBatch(
                n_decode=batch.n_decode,
                q_lens=batch.q_lens,
                kv_lens=batch.kv_lens,
                block_tables=batch.block_tables[batch.rows],
            )
        )
        ends = np.cumsum(batch.q_lens)
        sampling = np.flatnonzero(batch.samples)
        job = self._grammars.begin_step(batch.rows[sampling]) if self._grammars is not None else None
        wanted = ends[sampling] - 1
        prompt_rows = [
            index
            for index in range(batch.n_decode, len(batch.rows))
            if self._rows[int(batch.rows[index])].prompt_logprobs
        ]
        keep = None if prompt_rows else self._tensor(wanted)
        hidden = self._decoder.hidden(self._tensor(tokens), self._attention, keep)
        prompt_logprobs = [self._prompt_logprobs(batch, index, hidden, ends) for index in prompt_rows]
        if prompt_rows:
            hidden = hidden.index_select(0, self._tensor(wanted))
        if len(sampling):
            sampled = self._sample(batch, hidden, sampling, job)
        else:
            sampled = _nothing(batch.seq)
        sampled.prompt_logprobs = [part for part in prompt_logprobs if part is not None]
        return sampled

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._decoder.device)

    def _input_tokens(self, batch: StepBatch) -> I32:
        n = batch.n_decode
        tokens = np.empty(int(batch.q_lens.sum()), dtype=np.int32)
        tokens[:n] = self._last_token[batch.rows[:n]]
        at = n
        for index in range(n, len(batch.rows)):
            q_len, kv_len = int(batch.q_lens[index]), int(batch.kv_lens[index])
            tokens[at : at + q_len] = batch.tokens[batch.rows[index], kv_len - q_len : kv_len]
            at += q_len
        return tokens

    def _sample(
        self, batch: StepBatch, hidden: torch.Tensor, sampling: np.ndarray, job: MaskJob | None
    ) -> Sampled:
        rows, epochs = batch.rows[sampling].copy(), batch.epochs[sampling].copy()
        logits = self._decoder.logits(hidden)
        masks = job.wait() if job is not None else None
        result = self._sampler.sample(logits, rows, batch.kv_lens[sampling], masks=masks)
        tokens = result.tokens.cpu().numpy().astype(np.int32)
        self._last_token[rows] = tokens
        if self._grammars is not None:
            self._grammars.accept(rows, tokens)
        usable, finite = result.usable.cpu().numpy(), result.finite.cpu().numpy()
        dead_ends = masks.errors if masks is not None else {}
        errors = []
        for index, row in enumerate(rows.tolist()):
            why = self._rows[row].error
            if why:
                kind, message = RowError.INVALID, why
            elif row in dead_ends:
                kind, message = RowError.GRAMMAR, dead_ends[row]
            elif finite[index] and not usable[index]:
                kind, message = RowError.GRAMMAR, "logit_bias forbids every token that it allows"
            elif not usable[index]:
                kind, message = RowError.NAN_LOGITS, "the model's logits hold no usable number"
            else:
                continue
            errors.append(RowError(row=row, epoch=int(epochs[index]), kind=kind, message=message))
        logprobs = _pack_logprobs(result.logprobs) if result.logprobs is not None else None
        return Sampled(batch.seq, rows, epochs, tokens, logprobs=logprobs, errors=errors)

    def _prompt_logprobs(
        self, batch: StepBatch, index: int, hidden: torch.Tensor, ends: np.ndarray
    ) -> PromptLogprobs | None:
        """Position p's logits speak of the token at p + 1, as long as that is part of the prompt."""
        row = int(batch.rows[index])
        info = self._rows[row]
        kv_len, q_len = int(batch.kv_lens[index]), int(batch.q_lens[index])
        first = kv_len - q_len + 1
        last = min(kv_len + 1, info.n_prompt)
        if last <= first:
            return None
        targets = self._tensor(batch.tokens[row, first:last].astype(np.int64))
        start = int(ends[index]) - q_len
        n_top = min(info.prompt_logprobs - 1, self._capacity.vocab_size)
        chosen, top_ids, top_values = [], [], []
        for at in range(0, last - first, _PROMPT_LOGIT_ROWS):
            stop = min(at + _PROMPT_LOGIT_ROWS, last - first)
            logits = self._decoder.logits(hidden[start + at : start + stop])
            total = torch.logsumexp(logits, dim=-1, keepdim=True)
            chosen.append((logits.gather(-1, targets[at:stop, None]) - total).squeeze(-1))
            if n_top:
                top = logits.topk(n_top, dim=-1)
                top_ids.append(top.indices.reshape(-1))
                top_values.append((top.values - total).reshape(-1))
        return PromptLogprobs(
            row=row,
            epoch=int(batch.epochs[index]),
            start=first,
            chosen=pack_f32(torch.cat(chosen).cpu().numpy()),
            n_top=n_top,
            top_ids=pack_i32(torch.cat(top_ids).cpu().numpy()) if n_top else b"",
            top_values=pack_f32(torch.cat(top_values).cpu().numpy()) if n_top else b"",
        )


def make_cpu_runner(config: WorkerConfig, checkpoint: Checkpoint) -> CpuRunner:
    """Load, size the KV cache, warm up. Raises StartError or CheckpointError with a message for the user."""
    log = structlog.get_logger("worker.cpu")
    threads = plan_threads(config.threads)
    keep_freed_memory()
    torch.set_num_threads(threads.many)
    dtype = _DTYPES[config.dtype]
    kv_dtype = dtype if config.kv_cache_dtype == "auto" else _DTYPES.get(config.kv_cache_dtype)
    if kv_dtype != dtype:
        raise StartError(
            f"--kv-cache-dtype is {config.kv_cache_dtype}, but on a CPU it must be auto or equal to --dtype"
        )
    grammars = make_grammar_rows(config, checkpoint)
    device = torch.device("cpu")
    spec = spec_from_config(checkpoint.config)
    started = time.perf_counter()
    if config.load_format == "dummy":
        weights = dummy_weights(spec, device=device, dtype=dtype)
    else:
        weights = load_weights(
            checkpoint, spec, device=device, dtype=dtype, keep=can_keep if dtype == torch.float32 else None
        )
    decoder = Decoder(weights)
    log.info("weights loaded", seconds=round(time.perf_counter() - started, 2), dtype=str(dtype)[6:])
    max_context = min(checkpoint.max_context, config.max_total_tokens or checkpoint.max_context)
    budget = cpu_kv_budget(config, spec, dtype=dtype)
    log.info("KV cache sized", arithmetic=budget.arithmetic)
    cache = KvCache(spec, n_blocks=budget.n_blocks, block_size=config.block_size, dtype=dtype, device=device)
    attention = make_attention(decoder.spec, cache)
    runner = CpuRunner(
        decoder,
        _capacity(
            config,
            checkpoint,
            budget,
            max_context=max_context,
            with_grammars=grammars is not None,
            attention=attention.name,
        ),
        attention=attention,
        threads=threads,
        grammars=grammars,
    )
    _warm_up(runner)
    log.info("ready to compute", threads=threads.many, threads_of_small_steps=threads.few)
    return runner


def _capacity(
    config: WorkerConfig,
    checkpoint: Checkpoint,
    budget: KvBudget,
    *,
    max_context: int,
    with_grammars: bool,
    attention: str,
) -> RunnerCapacity:
    dtype = str(_DTYPES[config.dtype])[6:]
    return RunnerCapacity(
        model_id=checkpoint.name,
        model_hash=checkpoint.fingerprint,
        model_path=str(checkpoint.path),
        block_size=config.block_size,
        n_blocks=budget.n_blocks,
        max_rows=config.max_batch_size,
        max_step_tokens=config.max_step_tokens,
        max_context=max_context,
        vocab_size=checkpoint.vocab_size,
        eos_token_ids=checkpoint.eos_token_ids,
        attention=attention,
        device="cpu",
        dtype=dtype,
        kv_cache_dtype=dtype,
        max_batch_total_tokens=budget.n_tokens,
        memory_arithmetic=budget.arithmetic,
        max_logprobs=_MAX_LOGPROBS,
        features=("prompt_logprobs", "grammar") if with_grammars else ("prompt_logprobs",),
        launch_depth=1,
    )


def _warm_up(runner: CpuRunner) -> None:
    """One prompt and one decode step, so that the first request doesn't pay for lazy initialisation. They
    write into block 0, which is zeroed again."""
    size = runner.capacity.block_size
    table = np.zeros((1, 2), dtype=np.int32)
    zero = np.zeros(1, dtype=np.int32)
    for seq, (q_len, kv_len, n_decode) in enumerate(((size, size, 0), (1, size, 1)), start=1):
        runner._rows[0] = _RowInfo(0, size, 0)
        runner.launch(
            StepBatch(
                seq=seq,
                admits=[],
                evicts=zero[:0],
                zero_blocks=zero[:0],
                rows=zero,
                n_decode=n_decode,
                q_lens=np.array([q_len], dtype=np.int32),
                kv_lens=np.array([kv_len], dtype=np.int32),
                samples=np.ones(1, dtype=np.bool_),
                epochs=zero,
                block_tables=table,
                tokens=np.zeros((1, size), dtype=np.int32),
                n_known=np.array([size], dtype=np.int32),
            )
        )
    runner._attention.zero_blocks(zero)
    runner.reset()


def _nothing(seq: int) -> Sampled:
    empty = np.zeros(0, dtype=np.int32)
    return Sampled(seq, empty, empty, empty)


def _pack_logprobs(raw: RawLogprobs) -> SampledLogprobs:
    """Cut the padded top lists to what each row asked for."""
    n_top = np.minimum(raw.n_top, raw.top_ids.shape[1])
    inside = np.arange(raw.top_ids.shape[1]) < n_top[:, None]
    return SampledLogprobs(
        index=raw.index.astype(np.int32),
        chosen=raw.chosen.cpu().numpy(),
        n_top=n_top.astype(np.int32),
        top_ids=raw.top_ids.cpu().numpy()[inside].astype(np.int32),
        top_values=raw.top_values.cpu().numpy()[inside],
    )
