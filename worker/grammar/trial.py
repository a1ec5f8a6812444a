"""Tries a grammar in a process of its own before it comes near the running rows.

What compiles for minutes, eats the memory or needs seconds for a token is found here: the process is ended
and the grammar refused, while the worker goes on. `python -m worker.grammar.trial FD` is that process.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from proto.worker_pb2 import Grammar

START_TIMEOUT_S = 60.0
"""Importing the compiler on a slow, busy host."""
SLOWEST_TOKEN_S = 0.1
"""CPU time; a grammar that needs more for one token in a trial is refused."""
_N_WALKS = 2
_N_WALK_TOKENS = 32
_MEMORY_BYTES = 1 << 30


class Trial:
    """Owns the process; started when first needed and again after it had to be ended. One trial at a time."""

    def __init__(self, *, vocabulary: list[bytes], stop_token_ids: Sequence[int], timeout_s: float) -> None:
        self._vocabulary = vocabulary
        self._stops = list(stop_token_ids)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def start(self) -> None:
        """Begin to start the process, if none runs."""
        with self._lock:
            if self._process is None:
                self._spawn()

    def check(self, grammar: Grammar) -> None:
        """Raises ValueError with a message for the user when the grammar can't be used."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._spawn()
            connection = self._connection
            assert connection is not None
            try:
                if not connection.poll(START_TIMEOUT_S):
                    raise ValueError("the grammar compiler did not start in time; try again")
                connection.recv()  # ready
                connection.send((grammar.SerializeToString(), self._timeout_s))
                if not connection.poll(self._timeout_s):
                    raise ValueError(
                        f"compiling it takes longer than {self._timeout_s:g} s (--grammar-timeout-s)"
                    )
                error = connection.recv()
            except (EOFError, OSError):
                self._end()
                raise ValueError("compiling it takes more memory than is allowed for a grammar") from None
            except ValueError:
                self._end()
                raise
        if error:
            raise ValueError(error)

    def close(self) -> None:
        with self._lock:
            self._end()

    def _spawn(self) -> None:
        self._end()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "worker.grammar.trial", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                    "OMP_NUM_THREADS": "1",
                },
            )
        self._connection = Connection(ours.detach())
        # A process that ends at once is noticed when its first answer is waited for.
        with contextlib.suppress(OSError):
            self._connection.send((self._vocabulary, self._stops))

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def walk(compiled: Any, *, vocab_size: int, stops: Sequence[int]) -> None:
    """Follow the grammar along random tokens. Raises ValueError when one of them takes too long."""
    import xgrammar

    mask = np.zeros((1, -(-vocab_size // 32)), dtype=np.int32)
    for seed in range(_N_WALKS):
        rng = random.Random(seed)
        matcher = xgrammar.GrammarMatcher(compiled)
        for _ in range(_N_WALK_TOKENS):
            began_s = time.process_time()
            matcher.fill_next_token_bitmask(mask)
            _check_pace(began_s)
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size]
            bits[list(stops)] = 0
            allowed = np.flatnonzero(bits)
            if not len(allowed):
                break
            token = int(allowed[rng.randrange(len(allowed))])
            began_s = time.process_time()
            matcher.accept_token(token)
            _check_pace(began_s)


def _check_pace(began_s: float) -> None:
    took_ms, limit_ms = (time.process_time() - began_s) * 1e3, SLOWEST_TOKEN_S * 1e3
    if took_ms > limit_ms:
        raise ValueError(f"it needs {took_ms:.0f} ms for one token, but at most {limit_ms:.0f} are allowed")


def _limit_cpu(limit_s: float) -> None:
    """The kernel ends this process when nobody is left to do it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    end_s = math.ceil(used.ru_utime + used.ru_stime + limit_s) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (end_s, resource.RLIM_INFINITY))


def main(fd: int) -> None:
    """Serves trials until the other side closes."""
    os.nice(5)
    connection = Connection(fd)
    vocabulary, stops = connection.recv()
    import xgrammar

    from worker.grammar.compile import compile_grammar

    info = xgrammar.TokenizerInfo(
        vocabulary, xgrammar.VocabType.RAW, vocab_size=len(vocabulary), stop_token_ids=stops
    )
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    with open("/proc/self/statm") as file:
        n_bytes = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (n_bytes + _MEMORY_BYTES, n_bytes + _MEMORY_BYTES))
    with contextlib.suppress(EOFError, OSError):
        while True:
            connection.send(None)
            message, timeout_s = connection.recv()
            grammar = Grammar.FromString(message)
            _limit_cpu(timeout_s)
            try:
                compiled = compile_grammar(grammar, compiler)
                walk(compiled, vocab_size=len(vocabulary), stops=stops)
                error = ""
            except ValueError as problem:
                error = str(problem)
            except MemoryError:
                error = "compiling it takes more memory than is allowed for a grammar"
            connection.send(error)


if __name__ == "__main__":
    main(int(sys.argv[1]))
