"""How many prompt tokens the next step may compute, and whether running answers sit it out.

Prompt tokens stretch a step, and so the gap between two tokens of every running answer; prompts that are not
computed keep their clients waiting for the first one. So the pace follows what waits:

* Nothing decodes: a step is as large as it may be.
* Little waits: a step that carries answers has a fixed room (`mixed_step_tokens`), of which each answer
  takes its part. Prompts are computed in the very next steps and answers hardly notice; requests that came
  together fall out of step, so that their followers don't come together again.
* The prompt whose turn it is goes whole, though, when it is not much larger than that room: a second step
  would cost everybody more. And a long one is divided into few chunks, because each of them reads all that
  came before it; the more answers run, the more chunks. Answers that are nearly done are finished first.
* More waits than such steps get to within `max_waiting_tokens`: they grow until they do. A long prompt
  counts as one chunk there: it is one client, and may not slow down everybody by its length.
* And when those that wait are many beside the running (`decode_pause_ratio`) and their prompts short, answers
  pause and prompts are computed alone, in large steps: a burst is one long gap for the answers instead of
  many middling ones, and its clients wait as briefly as they can. After `MAX_HELD` such steps the answers
  have one for themselves, however long the queue. Prompts of many chunks never cause a pause.

All of it is counted in tokens and requests: nothing depends on the clock or on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from router.policy_limits import PolicyLimits
from router.queue import RequestQueue
from router.replica_state import ReplicaState
from router.request import Request

ROW_TOKENS = 6
"""What a decode row adds to a step's time, in prompt tokens: its part of the weights' reading, its token,
and attention over some thousand positions."""
WHOLE = 1.5
"""A prompt goes whole beside answers up to this many times a mixed step's room."""
MAX_CHUNKS = 7
"""Into how many chunks a long prompt is divided at most …"""
LONG_ROW_TOKENS = 64
"""… of which each gets smaller by so many tokens for every decode row that has to wait for it."""
LAST_TOKENS = 16
"""Answers with so few tokens to go get them before a long prompt goes on: beside its chunks they would take
as long as hundreds."""
LEAST_SHARE = 4
"""However many rows decode, a quarter of a mixed step's room stays with the prompts."""
MAX_HELD = 8
"""Steps in a row that decode rows may sit out."""
MAX_SAMPLED = 8
"""Waiting requests whose cached prefix is looked up to estimate the work of all."""


@dataclass(slots=True, frozen=True)
class Pace:
    n_tokens: int
    """Prompt tokens that the step may compute."""
    hold_decode: bool = False
    """Decode rows sit the step out, if it computes any prompt."""


def pace_of(rs: ReplicaState, queue: RequestQueue, *, limits: PolicyLimits, n_replicas: int) -> Pace:
    """For the next step of `rs`, one of `n_replicas` that share the queue."""
    most = limits.max_batch_prefill_tokens
    n_decode = int(np.count_nonzero(rs.decoding))
    if n_decode == 0 or not limits.prefill_chunking or not (rs.prefill or len(queue)):
        return Pace(most)
    whole = limits.mixed_step_tokens
    chunk = min(most, max(whole - ROW_TOKENS * n_decode, whole // LEAST_SHARE, 1))
    room = min(most, whole)
    waiting = _waiting(rs, queue, n_replicas=n_replicas)
    turn = _turn(rs, waiting, limits=limits)
    if turn.is_long and _nearly_done(rs):
        return Pace(0)
    chunk = min(most, max(chunk, turn.n_tokens - (LONG_ROW_TOKENS * n_decode if turn.is_long else 0)))
    n_waiting = len(waiting) + len(rs.prefill)
    in_time = chunk * max(1, limits.max_waiting_tokens)
    if n_waiting * room <= in_time:
        return Pace(chunk)
    demand, n_short = _work(rs, waiting, room=room, caching=limits.prefix_caching)
    if demand <= in_time:
        return Pace(chunk)
    if limits.decode_pause_ratio and n_short >= limits.decode_pause_ratio * n_decode:
        # As efficient as the largest step, and the first of its tokens leave earlier.
        half = max(most // 2, room)
        return Pace(half, hold_decode=True) if rs.n_held < MAX_HELD else Pace(0)
    # Twice its part, because every step takes its part anew of what is left.
    return Pace(min(most, 2 * demand // max(1, limits.max_waiting_tokens)))


def _waiting(rs: ReplicaState, queue: RequestQueue, *, n_replicas: int) -> list[Request]:
    """Queued requests that this replica could start now: as many as it has free rows, of no later priority
    class than its answers, prefixes that another row is about to compute left out."""
    n_most = min(rs.n_free_rows, -(-len(queue) // n_replicas)) if rs.takes_new and not rs.probing else 0
    if n_most < 1:
        return []
    latest = int(rs.priority[rs.decoding].min())
    found: list[Request] = []
    for request in queue:
        if request.priority > latest or len(found) == n_most:
            break
        if request.wait is None or not request.wait.holds:
            found.append(request)
    return found


@dataclass(slots=True, frozen=True)
class _Turn:
    """Of the prompt whose turn it is."""

    n_tokens: int
    """That it should get now, as far as it alone is concerned."""
    is_long: bool = False
    """It is divided."""


def _turn(rs: ReplicaState, waiting: list[Request], *, limits: PolicyLimits) -> _Turn:
    if rs.prefill:
        row = min(rs.prefill, key=lambda row: _key(rs, row))
        n_prompt, left = int(rs.target[row]), int(rs.target[row] - rs.n_scheduled[row])
    elif waiting:
        n_prompt = len(waiting[0].tokens)
        left = _n_new(rs, waiting[0], caching=limits.prefix_caching)
    else:
        return _Turn(0)
    if left <= WHOLE * limits.mixed_step_tokens:
        return _Turn(left)
    return _Turn(n_prompt // MAX_CHUNKS, is_long=True)


def _nearly_done(rs: ReplicaState) -> bool:
    """Whether every decode row has few tokens to go."""
    left = (rs.end_len - rs.n_scheduled)[rs.decoding]
    return bool(left.max() <= LAST_TOKENS)


def _key(rs: ReplicaState, row: int) -> tuple[int, int]:
    request = rs.requests[row]
    assert request is not None
    return request.key


def _n_new(rs: ReplicaState, request: Request, *, caching: bool) -> int:
    """Prompt tokens that are not cached now."""
    n_cached = rs.allocator.match(request.tokens, salt=request.salt) if caching else 0
    return len(request.tokens) - n_cached


def _work(rs: ReplicaState, waiting: list[Request], *, room: int, caching: bool) -> tuple[int, int]:
    """Tokens of the next chunk, at most `room`, of every prompt that waits or is being computed; and how many
    of these prompts end with it."""
    left = (rs.target[rs.prefill] - rs.n_scheduled[rs.prefill]).astype(np.int64)
    demand, n_short = int(np.minimum(left, room).sum()), int(np.count_nonzero(left <= room))
    sample = waiting[:: -(-len(waiting) // MAX_SAMPLED)] if waiting else []
    if sample:
        sizes = [_n_new(rs, request, caching=caching) for request in sample]
        demand += sum(min(room, size) for size in sizes) * len(waiting) // len(sizes)
        n_short += sum(size <= room for size in sizes) * len(waiting) // len(sizes)
    return demand, n_short
