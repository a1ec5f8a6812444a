"""Collects what compositions and results mean for each API connection, one message per flush."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from router.ipc.messages import ErrorInfo, Failed, PromptLogprob, Started, StepEvents, TokenLogprob

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
Logprob = tuple[float, bytes, bytes]


@dataclass(slots=True)
class _Pending:
    n_entries: int = 0
    ids: list[bytes] = field(default_factory=list)
    tokens: list[bytes] = field(default_factory=list)
    reasons: list[bytes] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)


class Outbox:
    """Events by API connection, in order, until `take`."""

    def __init__(self) -> None:
        self._pending: dict[int, _Pending] = {}

    def _of(self, conn: int) -> _Pending:
        pending = self._pending.get(conn)
        if pending is None:
            pending = self._pending[conn] = _Pending()
        return pending

    def tokens(
        self, *, conns: I32, ids: I64, tokens: I32, reasons: U8, logprobs: dict[int, Logprob] | None = None
    ) -> None:
        """[n] entries of one result. `logprobs` by index into them."""
        if not len(ids):
            return
        first = int(conns[0])
        if (conns == first).all():
            self._append(first, ids, tokens, reasons, logprobs)
            return
        for conn in np.unique(conns).tolist():
            mine = np.flatnonzero(conns == conn)
            part = None
            if logprobs:
                part = {i: logprobs[at] for i, at in enumerate(mine.tolist()) if at in logprobs}
            self._append(conn, ids[mine], tokens[mine], reasons[mine], part)

    def _append(
        self, conn: int, ids: I64, tokens: I32, reasons: U8, logprobs: dict[int, Logprob] | None
    ) -> None:
        pending = self._of(conn)
        if logprobs:
            pending.logprobs.extend(
                TokenLogprob(pending.n_entries + at, chosen, top_ids, top_values)
                for at, (chosen, top_ids, top_values) in logprobs.items()
            )
        pending.n_entries += len(ids)
        pending.ids.append(ids.astype("<i8", copy=False).tobytes())
        pending.tokens.append(tokens.astype("<i4", copy=False).tobytes())
        pending.reasons.append(reasons.tobytes())

    def started(self, conn: int, started: Started) -> None:
        self._of(conn).started.append(started)

    def prompt_logprob(self, conn: int, part: PromptLogprob) -> None:
        self._of(conn).prompt_logprobs.append(part)

    def failed(self, conn: int, request_id: int, error: ErrorInfo) -> None:
        self._of(conn).failed.append(Failed(request_id, error))

    def drop(self, conn: int) -> None:
        self._pending.pop(conn, None)

    def take(self) -> list[tuple[int, StepEvents]]:
        """What has gathered, one message per connection; the outbox is empty afterwards."""
        if not self._pending:
            return []
        taken = [
            (
                conn,
                StepEvents(
                    ids=b"".join(p.ids),
                    tokens=b"".join(p.tokens),
                    reasons=b"".join(p.reasons),
                    logprobs=p.logprobs,
                    prompt_logprobs=p.prompt_logprobs,
                    started=p.started,
                    failed=p.failed,
                ),
            )
            for conn, p in self._pending.items()
        ]
        self._pending = {}
        return taken
