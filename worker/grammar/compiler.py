"""Compiles grammars off the step path and keeps what it compiled.

Equal requests share one compilation. Each grammar is first tried in a process of its own (`trial.py`), so
that what comes here is known to compile within the time limit.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import structlog

from proto.worker_pb2 import Grammar
from worker.grammar.trial import Trial

Key = tuple[int, str, bool]

_N_THREADS = 2
"""One grammar is compiled while the next one is tried."""


class GrammarCompiler:
    """Thread-safe. The library and the trial's process cost a few hundred megabytes and a second or two: both
    come with the first grammar."""

    def __init__(
        self,
        *,
        vocabulary: list[bytes],
        stop_token_ids: Sequence[int],
        timeout_s: float,
        cache_bytes: int,
    ) -> None:
        self.vocab_size = len(vocabulary)
        self.stop_token_ids = tuple(stop_token_ids)
        self._vocabulary = vocabulary
        self._cache_bytes = cache_bytes
        self._trial = Trial(vocabulary=vocabulary, stop_token_ids=stop_token_ids, timeout_s=timeout_s)
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Key, tuple[Future[Any], int]] = OrderedDict()
        """Least recently used first, with bytes (0 while it is being compiled)."""
        self._threads = ThreadPoolExecutor(_N_THREADS, thread_name_prefix="grammar-compiler")
        self._compiler: Any = None
        self._loading = threading.Lock()
        self._log = structlog.get_logger("worker.grammar")

    def close(self) -> None:
        self._trial.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def submit(self, grammar: Grammar) -> Future[Any]:
        """Of the compiled grammar. Its exception is a ValueError with a message for the user."""
        key = (grammar.kind, grammar.source, grammar.strict)
        with self._lock:
            found = self._compiled.get(key)
            if found is not None:
                self._compiled.move_to_end(key)
                return found[0]
            future = self._threads.submit(self._compile, key)
            self._compiled[key] = (future, 0)
        future.add_done_callback(lambda done: self._settle(key, done))
        return future

    def _load(self) -> Any:
        with self._loading:
            if self._compiler is None:
                import xgrammar

                info = xgrammar.TokenizerInfo(
                    self._vocabulary,
                    xgrammar.VocabType.RAW,
                    vocab_size=self.vocab_size,
                    stop_token_ids=list(self.stop_token_ids),
                )
                self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
            return self._compiler

    def _compile(self, key: Key) -> Any:
        kind, source, strict = key
        grammar = Grammar(kind=Grammar.Kind.ValueType(kind), source=source, strict=strict)
        self._trial.start()
        compiler = self._load()  # meanwhile
        self._trial.check(grammar)
        from worker.grammar.compile import compile_grammar

        return compile_grammar(grammar, compiler)

    def _settle(self, key: Key, done: Future[Any]) -> None:
        """Failures are not kept: the reason may be the moment (a slow host)."""
        with self._lock:
            if done.cancelled() or done.exception() is not None:
                self._compiled.pop(key, None)
                return
            n_bytes = max(1, int(done.result().memory_size_bytes))
            self._compiled[key] = (done, n_bytes)
            total = sum(size for _, size in self._compiled.values())
            for old, (_, size) in list(self._compiled.items()):
                if total <= self._cache_bytes:
                    break
                if size and old != key:
                    del self._compiled[old]
                    total -= size
