"""Faults that tests inject into a fake worker, by hand or from its settings."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from proto.worker_pb2 import Grammar, RowError

Reply = Callable[[npt.NDArray[np.int32]], Sequence[int] | None]
"""From a prompt to the answer it gets (EOS follows); None: the usual one."""


@dataclass(slots=True, kw_only=True)
class RowFault:
    """Fails one row's sample. A row matches when every given condition holds."""

    kind: RowError.Kind.ValueType = RowError.NAN_LOGITS
    token: int | None = None
    """A token id among the row's tokens at admission."""
    row: int | None = None
    after: int = 0
    """Output tokens that the row has when it fails (those committed before a replay count)."""
    times: int = 1
    """How often it strikes."""
    message: str = "injected fault"

    def matches(self, *, row: int, known: npt.NDArray[np.int32], n_output: int) -> bool:
        return (
            self.times > 0
            and (self.row is None or self.row == row)
            and self.after == n_output
            and (self.token is None or bool((known == self.token).any()))
        )


@dataclass(slots=True)
class FakeFaults:
    """May be changed from any thread between steps."""

    device_error_at: int = 0
    """The launch of this step raises DeviceError; 0: never."""
    crash_at: int = 0
    """The launch of this step raises an error that nobody foresaw; 0: never."""
    rows: list[RowFault] = field(default_factory=list)
    reply: Reply | None = None
    refuse_grammars: str = ""
    """Why `prepare` refuses; empty: it does not."""
    _compiler: threading.Event = field(default_factory=threading.Event)
    _open: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._open.set()
        self._compiler.set()

    def hang_compiler(self) -> None:
        """`prepare` does not end until `unhang_compiler`; steps go on."""
        self._compiler.clear()

    def unhang_compiler(self) -> None:
        self._compiler.set()

    def prepare(self, grammar: Grammar) -> None:
        """Called by the runner where a grammar would be compiled."""
        self._compiler.wait()
        if self.refuse_grammars:
            raise ValueError(self.refuse_grammars)

    def hang(self) -> None:
        """The running step does not end until `unhang`: no progress, as with a stuck device."""
        self._open.clear()

    def unhang(self) -> None:
        self._open.set()

    @property
    def hanging(self) -> bool:
        return not self._open.is_set()

    def wait(self) -> None:
        """Called by the runner where a step would wait for its device."""
        self._open.wait()
