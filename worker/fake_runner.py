"""The fake worker's runner: real block tables, real streams and real timing around a pretended model."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from proto.codec import unpack_i32
from proto.worker_pb2 import Admit, Grammar, PromptLogprobs, RowError
from worker.fake_cache import FakeCache, Violation
from worker.fake_faults import FakeFaults
from worker.fake_grammar import check_grammar, constrained_reply
from worker.fake_logprobs import prompt_logprobs_of, sampled_logprobs
from worker.fake_text import N_TOP, FakeSampling, FakeVocab, chain, chain_step, choose, root, token_hash
from worker.fake_timing import FakePending, FakeTiming
from worker.runner import DeviceError, RunnerCapacity, Sampled, StepBatch

I32 = npt.NDArray[np.int32]
U64 = npt.NDArray[np.uint64]
Bool = npt.NDArray[np.bool_]

_MAX_VIOLATIONS = 100
_POISON = np.uint64(0x5851F42D4C957F2D)


class StaleBlockError(RuntimeError):
    """Strict mode: a row read a block that does not hold its text."""


class FakeRunner:
    """Implements `worker.runner.Runner`. Steps launched while others run queue up behind them, as on a
    GPU."""

    def __init__(
        self,
        capacity: RunnerCapacity,
        *,
        vocab: FakeVocab,
        timing: FakeTiming | None = None,
        strict: bool = False,
        faults: FakeFaults | None = None,
    ) -> None:
        self._capacity = capacity
        self._vocab = vocab
        self._timing = timing if timing is not None else FakeTiming()
        self._strict = strict
        self.faults = faults if faults is not None else FakeFaults()
        self.violations: list[Violation] = []
        """Wrong reads so far, over all streams (the first hundred)."""
        self.n_prefill_tokens = 0
        """Prompt tokens computed so far, over all streams."""
        self.n_steps = 0
        self.prepared: list[bytes] = []
        """Grammars in the order in which they were prepared."""
        self.n_unprepared = 0
        """Rows whose grammar was not prepared here before."""
        self.step_sizes: deque[tuple[int, int]] = deque(maxlen=100_000)
        """(decode rows, prefill tokens) of the latest steps."""
        self.cache = FakeCache(
            n_blocks=capacity.n_blocks,
            block_size=capacity.block_size,
            max_rows=capacity.max_rows,
            max_blocks_per_row=-(-capacity.max_context // capacity.block_size),
        )
        self._free_at = self._timing.clock()
        self._forget_rows()

    @property
    def capacity(self) -> RunnerCapacity:
        return self._capacity

    @property
    def vocab(self) -> FakeVocab:
        return self._vocab

    def reset(self) -> None:
        self._forget_rows()

    def prepare(self, grammar: Grammar) -> None:
        self.faults.prepare(grammar)
        check_grammar(grammar)
        self.prepared.append(grammar.SerializeToString())

    def launch(self, batch: StepBatch) -> FakePending:
        if self.faults.device_error_at == batch.seq:
            raise DeviceError(f"injected device error at step {batch.seq}")
        if self.faults.crash_at == batch.seq:
            raise RuntimeError(f"injected crash at step {batch.seq}")
        start = max(self._timing.clock(), self._free_at)
        idle_s = start - self._free_at
        n_prefill = int(batch.q_lens[batch.n_decode :].sum())
        self.n_steps += 1
        self.n_prefill_tokens += n_prefill
        self.step_sizes.append((batch.n_decode, n_prefill))
        sampled = self._compute(batch)
        took_s = self._timing.duration_s(n_rows=len(batch.rows), n_prefill_tokens=n_prefill)
        sampled.step_us = max(1, round(took_s * 1e6))
        sampled.idle_us = min(round(idle_s * 1e6), 2**32 - 1)
        self._free_at = start + took_s
        return FakePending(
            seq=batch.seq,
            sampled=sampled,
            ready_at=self._free_at,
            clock=self._timing.clock,
            faults=self.faults,
        )

    def collect(self, pending: FakePending) -> Sampled:
        left_s = pending.ready_at - self._timing.clock()
        if left_s > 0:
            self._timing.wait(left_s)
        self.faults.wait()
        return pending.sampled

    # ---- one step ----

    def _forget_rows(self) -> None:
        n = self._capacity.max_rows
        self._chain: U64 = np.zeros(n, dtype=np.uint64)
        """Hash of each row's last computed position, from its tokens alone."""
        self._taint: U64 = np.zeros(n, dtype=np.uint64)
        """Not 0: the row read something wrong, so what it writes is wrong from there on."""
        self._is_poisoned: Bool = np.zeros(n, dtype=np.bool_)
        """The taint comes from an injected fault."""
        self._last_token: I32 = np.zeros(n, dtype=np.int32)
        self._n_output: I32 = np.zeros(n, dtype=np.int32)
        self._fingerprint: U64 = np.zeros(n, dtype=np.uint64)
        self._history: U64 = np.zeros(n, dtype=np.uint64)
        self._uses_history: Bool = np.zeros(n, dtype=np.bool_)
        self._min_new: I32 = np.zeros(n, dtype=np.int32)
        self._n_top: I32 = np.full(n, -1, dtype=np.int32)
        """Top logprobs that the row asked for; -1: no logprobs at all."""
        self._admits: dict[int, Admit] = {}
        self._replies: dict[int, list[int]] = {}

    def _compute(self, batch: StepBatch) -> Sampled:
        for row in batch.evicts.tolist():
            self._admits.pop(row, None)
            self._replies.pop(row, None)
        if len(batch.zero_blocks):
            self.cache.zero(batch.zero_blocks)
        for admit in batch.admits:
            self._admit(admit)
        if len(batch.rows) == 0:
            return _sampled(batch, rows=_NO_ROWS, epochs=_NO_ROWS, tokens=_NO_ROWS)
        self._expect_and_write_decode(batch)
        prompt_logprobs: list[PromptLogprobs] = []
        runs: list[tuple[int, int, U64]] = []
        for i in range(batch.n_decode, len(batch.rows)):
            row, end = int(batch.rows[i]), int(batch.kv_lens[i])
            start = end - int(batch.q_lens[i])
            before = int(self._chain[row])
            hashes = chain(before, batch.tokens[row, start:end])
            self.cache.expect_run(row, start, hashes)
            self.cache.write_run(batch.block_tables[row], start, hashes ^ self._taint[row])
            self._chain[row] = hashes[-1]
            runs.append((row, start, hashes))
            admit = self._admits[row]
            if admit.sampling.prompt_logprobs:
                part = prompt_logprobs_of(
                    admit, start=start, hashes=hashes, tokens=batch.tokens[row], vocab=self._vocab
                )
                if part is not None:
                    prompt_logprobs.append(part)
        self._spread_wrong_reads(batch, runs)
        sampled = self._sample(batch, runs)
        sampled.prompt_logprobs = prompt_logprobs
        return sampled

    def _admit(self, admit: Admit) -> None:
        row = admit.row
        tokens = unpack_i32(admit.tokens)
        sampling = admit.sampling
        params = FakeSampling.of(sampling)
        start = root(admit.adapter_id)
        cached = chain(start, tokens[: admit.n_cached])
        self.cache.expect_run(row, 0, cached)
        self._chain[row] = cached[-1] if len(cached) else start
        self._taint[row] = 0
        self._is_poisoned[row] = False
        self._n_output[row] = len(tokens) - admit.n_prompt
        self._fingerprint[row] = params.fingerprint
        self._history[row] = params.history(tokens, n_prompt=admit.n_prompt)
        self._uses_history[row] = params.uses_history
        self._min_new[row] = params.min_new_tokens
        asks = sampling.logprobs or sampling.top_logprobs > 0
        self._n_top[row] = min(sampling.top_logprobs, N_TOP) if asks else -1
        self._admits[row] = admit
        self._replies.pop(row, None)
        if admit.grammar.kind != Grammar.NONE:
            self.n_unprepared += admit.grammar.SerializeToString() not in self.prepared
            self._replies[row] = constrained_reply(
                admit.grammar, prompt=tokens[: admit.n_prompt], vocab=self._vocab
            )
        if self.faults.reply is not None:
            reply = self.faults.reply(tokens[: admit.n_prompt])
            if reply is not None:
                self._replies[row] = list(reply)

    def _expect_and_write_decode(self, batch: StepBatch) -> None:
        if batch.n_decode == 0:
            return
        rows = batch.rows[: batch.n_decode]
        positions = batch.kv_lens[: batch.n_decode] - 1
        hashes = chain_step(self._chain[rows], self._last_token[rows])
        self._chain[rows] = hashes
        self.cache.expect_decode(rows, positions, hashes)
        blocks, slots = self._places(batch, rows, positions)
        self.cache.write_decode(blocks, slots, hashes ^ self._taint[rows])

    def _places(self, batch: StepBatch, rows: I32, positions: I32) -> tuple[I32, I32]:
        size = self._capacity.block_size
        return batch.block_tables[rows, positions // size], positions % size

    def _spread_wrong_reads(self, batch: StepBatch, runs: list[tuple[int, int, U64]]) -> None:
        """A row that reads something wrong also writes something wrong: repeat until nothing new turns up
        (rows of one step may share what one of them writes)."""
        while True:
            which, places, differences = self.cache.differences(batch.rows, batch.kv_lens, batch.block_tables)
            if len(which) == 0:
                return
            fresh = self._taint[batch.rows[which]] == 0
            if not fresh.any():
                return
            for i, place, difference in zip(which[fresh], places[fresh], differences[fresh], strict=True):
                self._wrong_read(batch, int(i), place=int(place), difference=np.uint64(difference), runs=runs)

    def _wrong_read(
        self, batch: StepBatch, i: int, *, place: int, difference: np.uint64, runs: list[tuple[int, int, U64]]
    ) -> None:
        row = int(batch.rows[i])
        if self._taint[row]:
            return
        block = int(batch.block_tables[row, place])
        self._taint[row] = difference
        self._is_poisoned[row] = self.cache.poisoned[block]
        if not self._is_poisoned[row] and len(self.violations) < _MAX_VIOLATIONS:
            violation = self.cache.describe(
                seq=batch.seq,
                row=row,
                epoch=int(batch.epochs[i]),
                place=place,
                block=block,
                kv_len=int(batch.kv_lens[i]),
            )
            self.violations.append(violation)
            if self._strict:
                raise StaleBlockError(violation.message)
        self._rewrite(batch, i, runs)

    def _rewrite(self, batch: StepBatch, i: int, runs: list[tuple[int, int, U64]]) -> None:
        """Put the row's taint into what it wrote in this step."""
        row = int(batch.rows[i])
        if i < batch.n_decode:
            rows = batch.rows[i : i + 1]
            blocks, slots = self._places(batch, rows, batch.kv_lens[i : i + 1] - 1)
            self.cache.write_decode(blocks, slots, self._chain[rows] ^ self._taint[rows])
        else:
            _, start, hashes = runs[i - batch.n_decode]
            self.cache.write_run(batch.block_tables[row], start, hashes ^ self._taint[row])
            size = self._capacity.block_size
            blocks = batch.block_tables[row, start // size : (start + len(hashes) - 1) // size + 1]
        if self._is_poisoned[row]:
            self.cache.poisoned[blocks] = True

    def _sample(self, batch: StepBatch, runs: list[tuple[int, int, U64]]) -> Sampled:
        if batch.samples.all():
            rows, kv_lens, epochs = batch.rows, batch.kv_lens, batch.epochs
        else:
            rows, kv_lens = batch.rows[batch.samples], batch.kv_lens[batch.samples]
            epochs = batch.epochs[batch.samples]
        if len(rows) == 0:
            return _sampled(batch, rows=_NO_ROWS, epochs=_NO_ROWS, tokens=_NO_ROWS)
        hashes = self.cache.last_hashes(rows, kv_lens, batch.block_tables)
        tainted = self._taint[rows] != 0
        if tainted.any():
            hashes = np.where(tainted, token_hash(rows) ^ self._taint[rows] ^ hashes, hashes)
        tokens = choose(
            hashes,
            fingerprints=self._fingerprint[rows],
            histories=self._history[rows],
            eos_allowed=self._n_output[rows] >= self._min_new[rows],
            vocab=self._vocab,
        )
        if self._replies:
            tokens = self._scripted(rows, tokens, tainted)
        errors, failed = self._row_errors(batch, rows, runs) if self.faults.rows else ([], None)
        self._last_token[rows] = tokens
        self._n_output[rows] += 1
        with_history = rows[self._uses_history[rows]]
        if len(with_history):
            self._history[with_history] += token_hash(self._last_token[with_history])
        if failed is not None:
            good = ~failed
            rows, epochs, tokens, hashes = rows[good], epochs[good], tokens[good], hashes[good]
        sampled = _sampled(batch, rows=rows, epochs=epochs, tokens=tokens)
        sampled.errors = errors
        sampled.logprobs = sampled_logprobs(tokens, hashes=hashes, n_top=self._n_top[rows], vocab=self._vocab)
        return sampled

    def _scripted(self, rows: I32, tokens: I32, tainted: Bool) -> I32:
        tokens = tokens.copy()
        for i, row in enumerate(rows.tolist()):
            reply = self._replies.get(row)
            if reply is None:
                continue
            n_output = int(self._n_output[row])
            if n_output < len(reply):
                token = reply[n_output]
            elif self._vocab.eos_token_ids:
                token = self._vocab.eos_token_ids[0]
            else:
                continue
            tokens[i] = (token + 1) % self._vocab.size if tainted[i] else token
        return tokens

    def _row_errors(
        self, batch: StepBatch, rows: I32, runs: list[tuple[int, int, U64]]
    ) -> tuple[list[RowError], Bool | None]:
        errors: list[RowError] = []
        failed = np.zeros(len(rows), dtype=np.bool_)
        for i, row in enumerate(rows.tolist()):
            known = batch.tokens[row, : batch.n_known[row]]
            n_output = int(self._n_output[row])
            fault = next(
                (f for f in self.faults.rows if f.matches(row=row, known=known, n_output=n_output)), None
            )
            if fault is None:
                continue
            fault.times -= 1
            failed[i] = True
            place = int(np.flatnonzero(batch.rows == row)[0])
            epoch = int(batch.epochs[place])
            errors.append(RowError(row=row, epoch=epoch, kind=fault.kind, message=fault.message))
            if fault.kind == RowError.NAN_LOGITS:
                self._taint[row] = _POISON
                self._is_poisoned[row] = True
                self._rewrite(batch, place, runs)
        return errors, failed if errors else None


_NO_ROWS: I32 = np.zeros(0, dtype=np.int32)


def _sampled(batch: StepBatch, *, rows: I32, epochs: I32, tokens: I32) -> Sampled:
    return Sampled(seq=batch.seq, rows=rows, epochs=epochs, tokens=tokens)
