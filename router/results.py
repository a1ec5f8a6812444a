"""What a step's result changes: tokens are committed, blocks published, answers ended, failures contained."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from allocator.interface import Lease
from proto.codec import unpack_f32, unpack_i32
from proto.worker_pb2 import RowError, StepResult
from router.errors import GrammarError, RouterError, RowFailedError, StepProtocolError
from router.ipc.messages import FinishReason, PromptLogprob
from router.outbox import Logprob, Outbox
from router.replica_state import ReplicaState
from router.stats import CoreStats

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
Bool = npt.NDArray[np.bool_]

_NEVER = 2**31 - 1
_STOP = np.uint8(FinishReason.STOP)
_LENGTH = np.uint8(FinishReason.LENGTH)
_NONE = np.uint8(FinishReason.NONE)


class ResultApplier:
    """Owns nothing: works on a replica's state and tells its owner what ended."""

    def __init__(
        self,
        *,
        outbox: Outbox,
        stats: CoreStats,
        is_eos: Bool,
        on_finished: Callable[[ReplicaState, int, int, float], None],
        on_failed: Callable[[ReplicaState, int, RouterError], None],
        on_damaged: Callable[[ReplicaState, int], None],
    ) -> None:
        self._outbox = outbox
        self._stats = stats
        self._is_eos = is_eos
        self._on_finished = on_finished
        self._on_failed = on_failed
        self._on_damaged = on_damaged

    def apply(self, rs: ReplicaState, result: StepResult, now: float) -> None:
        """Raises StepProtocolError when the result can't be the answer to the oldest step in flight."""
        if not rs.in_flight or rs.in_flight[0].seq != result.seq:
            due = rs.in_flight[0].seq if rs.in_flight else None
            raise StepProtocolError(f"the worker answered step {result.seq}, but step {due} is due")
        step = rs.in_flight[0]
        try:
            rows, epochs, tokens = (
                unpack_i32(result.rows),
                unpack_i32(result.epochs),
                unpack_i32(result.tokens),
            )
        except ValueError as error:
            raise StepProtocolError(f"step {result.seq}: {error}") from None
        self._check(rs, result.seq, rows, epochs, tokens)
        rs.in_flight.popleft()
        rs.probing = False
        rs.last_step_us = result.step_us
        rs.note_idle(step, step_us=result.step_us, idle_us=result.idle_us)
        rs.worker_queue = result.queued_steps
        stats = self._stats
        stats.n_steps += 1
        stats.n_prompt_tokens += step.n_prefill_tokens
        rs.n_prefill_tokens += step.n_prefill_tokens
        stats.worker_step_s.add(result.step_us * 1e-6)
        stats.batch_rows.add(float(len(rows)))
        if result.errors:
            self._contain(rs, result.errors)
        if result.prompt_logprobs:
            self._pass_prompt_logprobs(rs, result)
        live = epochs == rs.epoch[rows]
        kept: I64 | None = None
        if not live.all():
            kept = np.flatnonzero(live)
            stats.n_wasted_tokens += len(rows) - len(kept)
            rows, tokens = rows[kept], tokens[kept]
        if len(rows):
            logprobs = _logprobs(result, kept) if result.HasField("logprobs") else None
            self._commit(rs, rows, tokens, logprobs=logprobs, now=now)

    def _check(self, rs: ReplicaState, seq: int, rows: I32, epochs: I32, tokens: I32) -> None:
        if not len(rows) == len(epochs) == len(tokens):
            raise StepProtocolError(
                f"step {seq}: {len(rows)} rows, {len(epochs)} epochs and {len(tokens)} tokens don't match"
            )
        if not len(rows):
            return
        if int(rows.min()) < 0 or int(rows.max()) >= rs.shape.max_rows:
            raise StepProtocolError(f"step {seq}: a row is outside 0 to {rs.shape.max_rows - 1}")
        if int(tokens.min()) < 0 or int(tokens.max()) >= rs.shape.vocab_size:
            raise StepProtocolError(f"step {seq}: a token is outside the vocabulary of {rs.shape.vocab_size}")

    # ---- tokens ----

    def _commit(
        self, rs: ReplicaState, rows: I32, tokens: I32, *, logprobs: dict[int, Logprob] | None, now: float
    ) -> None:
        at = rs.n_committed[rows]
        ends = at + 1
        if (ends > rs.end_len[rows]).any():
            raise StepProtocolError("the worker sampled a token beyond the end of an answer")
        repeated = self._repeated(rs, rows, at, tokens) if rs.n_quiet else None
        if repeated is not None:
            rows, tokens, at, ends = rows[repeated], tokens[repeated], at[repeated], ends[repeated]
            logprobs = _select(logprobs, repeated)
        rs.tokens[rows, at] = tokens
        rs.n_committed[rows] = ends
        reasons = self._reasons(rs, rows, tokens, ends)
        self._publish(rs, rows, ends)
        self._observe(rs, rows, now)
        fresh = at >= rs.quiet_until[rows] if rs.n_quiet else None
        if fresh is None or fresh.all():
            self._outbox.tokens(
                conns=rs.conn[rows],
                ids=rs.request_id[rows],
                tokens=tokens,
                reasons=reasons,
                logprobs=logprobs,
            )
        else:
            new = np.flatnonzero(fresh)
            self._outbox.tokens(
                conns=rs.conn[rows[new]],
                ids=rs.request_id[rows[new]],
                tokens=tokens[new],
                reasons=reasons[new],
                logprobs=_select(logprobs, new),
            )
        ended = np.flatnonzero(reasons)
        for i in ended.tolist():
            self._on_finished(rs, int(rows[i]), int(reasons[i]), now)

    def _reasons(self, rs: ReplicaState, rows: I32, tokens: I32, ends: I32) -> U8:
        stop = self._is_eos[tokens] & ~rs.ignore_eos[rows]
        if rs.n_watched:
            for i in np.flatnonzero(rs.watched[rows]).tolist():
                request = rs.requests[rows[i]]
                assert request is not None
                stop[i] |= int(tokens[i]) in request.stop_token_ids
        return np.where(stop, _STOP, np.where(ends >= rs.end_len[rows], _LENGTH, _NONE))

    def _publish(self, rs: ReplicaState, rows: I32, ends: I32) -> None:
        """Blocks that are complete now, if their KV is in a step that was sent."""
        due = np.minimum(ends, rs.n_scheduled[rows]) >= rs.publish_at[rows]
        for row in rows[due].tolist():
            if rs.leases[row] is not None:
                rs.publish(row)

    def _observe(self, rs: ReplicaState, rows: I32, now: float) -> None:
        stats = self._stats
        stats.n_output_tokens += len(rows)
        rs.n_output_tokens += len(rows)
        before = rs.last_token_s[rows]
        rs.last_token_s[rows] = now
        if before.min() >= 0:
            stats.inter_token_s.add_many(now - before)
            return
        later = before[before >= 0]
        if len(later):
            stats.inter_token_s.add_many(now - later)
        for row in rows[before < 0].tolist():
            request = rs.requests[row]
            assert request is not None
            request.first_token_s = now
            stats.first_token_s.add(now - request.arrival_s)
            stats.prefill_s.add(now - request.started_s)

    def _repeated(self, rs: ReplicaState, rows: I32, at: I32, tokens: I32) -> I64 | None:
        """Tokens computed anew, of which the client already has some: indexes that agree with what was sent.
        None when nothing of this result was sent before. A request that came out different fails."""
        if not (at < rs.quiet_until[rows]).any():
            return None
        agree = []
        for i, row in enumerate(rows.tolist()):
            request = rs.requests[row]
            assert request is not None
            place = int(at[i])
            if request.sent is not None and place < len(request.sent) and request.sent[place] != tokens[i]:
                self._on_failed(
                    rs,
                    row,
                    RowFailedError("a damaged cache block was found after text that rested on it was sent"),
                )
            else:
                agree.append(i)
        return np.array(agree, dtype=np.int64)

    # ---- logprobs of the prompt ----

    def _pass_prompt_logprobs(self, rs: ReplicaState, result: StepResult) -> None:
        for part in result.prompt_logprobs:
            if part.row >= rs.shape.max_rows or int(rs.epoch[part.row]) != part.epoch:
                continue
            request = rs.requests[part.row]
            assert request is not None
            n = len(part.chosen) // 4
            # Position 0 has no logprob; a position computed again after a migration is not sent twice, and
            # the answer is not part of the prompt.
            first = max(part.start, request.n_prompt_logprobs_sent)
            end = min(part.start + n, request.n_prompt)
            if first >= end:
                continue
            request.n_prompt_logprobs_sent = end
            low, high = first - part.start, end - part.start
            self._outbox.prompt_logprob(
                request.conn,
                PromptLogprob(
                    request.id,
                    first,
                    part.chosen[4 * low : 4 * high],
                    part.n_top,
                    part.top_ids[4 * low * part.n_top : 4 * high * part.n_top],
                    part.top_values[4 * low * part.n_top : 4 * high * part.n_top],
                ),
            )

    # ---- failures ----

    def _contain(self, rs: ReplicaState, errors: Iterable[RowError]) -> None:
        """Rows that failed: their requests end, and whatever rests on blocks they wrote is computed again."""
        failed: dict[int, RowError] = {}
        for error in errors:
            if error.row < rs.shape.max_rows and int(rs.epoch[error.row]) == error.epoch:
                failed[error.row] = error
        damaged = {row for row, error in failed.items() if error.kind in _DAMAGING}
        hit_by: dict[int, set[int]] = {}
        row_of = {id(lease): row for row, lease in enumerate(rs.leases) if lease is not None}
        pending = sorted(damaged)
        seen = set(pending)
        while pending:
            row = pending.pop()
            lease = rs.leases[row]
            if lease is None:
                continue
            rs.may_be_dirty = True
            rs.publish_at[row] = _NEVER
            for other in _rows(rs.allocator.invalidate(lease), row_of):
                hit_by.setdefault(other, set()).add(row)
                if other not in seen:
                    seen.add(other)
                    pending.append(other)
        # A row that failed after reading what another failing row wrote is a victim, not a cause.
        victims = {row for row in seen if hit_by.get(row)}
        for row, error in failed.items():
            if row not in victims:
                self._on_failed(rs, row, _error_of(error))
        for row in sorted(victims):
            self._on_damaged(rs, row)


_DAMAGING = frozenset({RowError.UNKNOWN, RowError.NAN_LOGITS})


def _select(logprobs: dict[int, Logprob] | None, kept: I64) -> dict[int, Logprob] | None:
    """The same by place among the entries that are kept."""
    if not logprobs:
        return None
    return {new: logprobs[old] for new, old in enumerate(kept.tolist()) if old in logprobs}


def _rows(leases: Iterable[Lease], row_of: dict[int, int]) -> list[int]:
    return [row_of[id(lease)] for lease in leases if id(lease) in row_of]


def _error_of(error: RowError) -> RouterError:
    if error.kind == RowError.GRAMMAR:
        return GrammarError(f"the grammar allows no further token: {error.message}")
    if error.kind == RowError.NAN_LOGITS:
        return RowFailedError("the model gave numbers that are not finite for this request")
    return RowFailedError(f"the worker could not compute this request: {error.message}")


def _logprobs(result: StepResult, kept: I64 | None) -> dict[int, Logprob]:
    """By index into the entries that are kept."""
    packed = result.logprobs
    index, chosen, n_top = unpack_i32(packed.index), unpack_f32(packed.chosen), unpack_i32(packed.n_top)
    ends = np.cumsum(n_top)
    place = None if kept is None else {int(old): new for new, old in enumerate(kept.tolist())}
    found: dict[int, Logprob] = {}
    for i, old in enumerate(index.tolist()):
        at = old if place is None else place.get(old)
        if at is None:
            continue
        low, high = 4 * int(ends[i] - n_top[i]), 4 * int(ends[i])
        found[at] = (float(chosen[i]), packed.top_ids[low:high], packed.top_values[low:high])
    return found
