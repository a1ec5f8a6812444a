"""The matchers of a runner's rows: which tokens each may sample next.

Masks are computed on threads of their own while the forward pass runs. The order in a step is

    job = rows.begin_step(sampling_rows)     # None: no row of the step is constrained
    … launch the forward pass …
    masks = job.wait()                       # int32 bits, one line per constrained row
    … sample, and have the tokens on the host …
    rows.accept(sampled_rows, tokens)        # before the next begin_step

A runner that launches step N + 1 before N's tokens are on the host waits for them between N + 1's forward
pass and `begin_step`. Nothing is ever rolled back.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from proto.worker_pb2 import Grammar
from worker.grammar.compiler import GrammarCompiler
from worker.grammar.pool import MaskPool

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

MASK_TIMEOUT_S = 5.0
"""A row whose mask takes longer fails. A trial has shown that its grammar is faster than that."""


@dataclass(slots=True)
class Masks:
    """For the constrained rows of one step."""

    index: I64
    """[m] their places among the rows given to `begin_step`, ascending."""
    bits: I32
    """[m, ceil(vocab / 32)]: bit i % 32 of word i // 32 is set where token i is allowed."""
    ends: Bool
    """[m] only a stop token is allowed: the text is complete."""
    errors: dict[int, str] = field(default_factory=dict)
    """Rows that no token is allowed for, and why. They are not among `index`."""


@dataclass(slots=True)
class _Row:
    compiled: Future[Any]
    pending: list[int]
    """Tokens that the matcher has not seen yet: those replayed at the start, then what was sampled."""
    matcher: Any = None
    error: str = ""


class GrammarRows:
    """Owns one matcher per constrained row. Called from the runner's one thread; `MaskJob` does the work."""

    def __init__(
        self, compiler: GrammarCompiler, *, n_threads: int = 0, timeout_s: float = MASK_TIMEOUT_S
    ) -> None:
        self._compiler = compiler
        self._n_threads = n_threads or max(1, min(8, (os.cpu_count() or 1) // 2))
        self._timeout_s = timeout_s
        self._rows: dict[int, _Row] = {}
        self._pool = MaskPool(self._n_threads)
        exists = np.arange(-(-compiler.vocab_size // 32) * 32) < compiler.vocab_size
        self._exists = _packed(exists)
        exists[list(compiler.stop_token_ids)] = False
        self._goes_on = _packed(exists)

    def prepare(self, grammar: Grammar) -> None:
        """Compile and keep it (any thread; waits). Raises ValueError with a message for the user."""
        self._compiler.submit(grammar).result()

    def reset(self) -> None:
        self._rows.clear()

    def evict(self, row: int) -> None:
        self._rows.pop(row, None)

    def admit(self, row: int, grammar: Grammar | None, *, output: Sequence[int]) -> None:
        """`output`: the tokens after the original prompt, which the matcher goes through first. Never waits:
        a grammar that was not prepared here is compiled meanwhile."""
        self._rows.pop(row, None)
        if grammar is not None and grammar.kind != Grammar.NONE:
            self._rows[row] = _Row(self._compiler.submit(grammar), list(output))

    def constrained(self, rows: I32) -> Bool:
        """[n] which of them have a grammar."""
        if not self._rows:
            return np.zeros(len(rows), dtype=np.bool_)
        return np.fromiter((row in self._rows for row in rows.tolist()), dtype=np.bool_, count=len(rows))

    def begin_step(self, rows: I32) -> MaskJob | None:
        """Start to compute the masks of the tokens that these rows sample next. None when none of them is
        constrained."""
        index = np.flatnonzero(self.constrained(rows))
        if not len(index):
            return None
        return MaskJob(self, index, [self._rows[int(rows[i])] for i in index], rows[index])

    def accept(self, rows: I32, tokens: I32) -> None:
        """What these rows have sampled. Cheap: the matchers move on with the next `begin_step`."""
        if not self._rows:
            return
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            state = self._rows.get(row)
            if state is not None:
                state.pending.append(token)

    def close(self) -> None:
        self._pool.close()
        self._compiler.close()

    # ---- for MaskJob ----

    def _start(self, states: list[_Row], bits: I32) -> list[Future[bool] | None]:
        """None for a row that has failed: a stuck thread may still be in its matcher."""
        return [
            None if state.error else self._pool.submit(partial(self._fill, state, bits, i))
            for i, state in enumerate(states)
        ]

    def _abandon_pool(self) -> None:
        """One of its threads is stuck in a matcher and can't be stopped: the others go on in a new pool."""
        self._pool.close()
        self._pool = MaskPool(self._n_threads)

    def _fill(self, state: _Row, bits: I32, line: int) -> bool:
        """Bring the matcher up to date and write its mask. False: the row is free (its text has ended)."""
        if state.matcher is None:
            import xgrammar

            state.matcher = xgrammar.GrammarMatcher(state.compiled.result(self._timeout_s))
        matcher = state.matcher
        for token in state.pending:
            if matcher.is_terminated():
                break
            if not matcher.accept_token(token):
                raise ValueError(f"token {token} was sampled, which the grammar does not allow")
        state.pending.clear()
        if matcher.is_terminated():
            return False
        matcher.fill_next_token_bitmask(bits, line)
        return True


class MaskJob:
    """The masks of one step, on their way."""

    def __init__(self, owner: GrammarRows, index: I64, states: list[_Row], rows: I32) -> None:
        self._owner = owner
        self._index = index
        self._states = states
        self._rows = rows
        self._bits = np.full((len(states), len(owner._exists)), -1, dtype=np.int32)
        self._futures = owner._start(states, self._bits)

    def wait(self) -> Masks:
        """Until all are there; at most a little longer than the time limit for one row."""
        owner = self._owner
        deadline_s = time.monotonic() + owner._timeout_s
        kept: list[int] = []
        errors: dict[int, str] = {}
        stuck = False
        for i, (state, future) in enumerate(zip(self._states, self._futures, strict=True)):
            row = int(self._rows[i])
            if future is not None:
                try:
                    if future.result(max(0.0, deadline_s - time.monotonic())):
                        kept.append(i)
                        continue
                except FutureTimeoutError:
                    stuck = True
                    state.error = f"its mask was not ready within {owner._timeout_s:g} s"
                except ValueError as error:
                    state.error = str(error)
                except RuntimeError as error:
                    state.error = f"the matcher failed: {error}"
            if state.error:
                errors[row] = state.error
        if stuck:
            owner._abandon_pool()
        bits = self._bits[kept]
        bits &= owner._exists
        possible: Bool = np.asarray(bits.any(axis=1), dtype=np.bool_)
        for place in np.flatnonzero(~possible).tolist():
            row = int(self._rows[kept[place]])
            self._states[kept[place]].error = errors[row] = "no token continues this text"
        places = np.asarray(kept, dtype=np.int64)[possible]
        bits = bits[possible]
        goes_on: Bool = np.asarray((bits & owner._goes_on).any(axis=1), dtype=np.bool_)
        return Masks(index=self._index[places], bits=bits, ends=~goes_on, errors=errors)


def _packed(bits: Bool) -> I32:
    """[32 n] as [n] words, the first bit the lowest."""
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
