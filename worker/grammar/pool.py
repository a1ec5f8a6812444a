"""A few threads that never hold up the end of the process.

The standard pool waits for its threads at exit; one that is stuck in a matcher would wait for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

_Job = tuple["Future[bool]", Callable[[], bool]]


class MaskPool:
    """Jobs start in the order in which they came."""

    def __init__(self, n_threads: int) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._n_threads = n_threads
        for number in range(n_threads):
            threading.Thread(target=self._work, name=f"grammar-masks-{number}", daemon=True).start()

    def submit(self, job: Callable[[], bool]) -> Future[bool]:
        future: Future[bool] = Future()
        self._jobs.put((future, job))
        return future

    def close(self) -> None:
        """Threads end after the jobs before this; a stuck one never does."""
        for _ in range(self._n_threads):
            self._jobs.put(None)

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            future, job = item
            try:
                future.set_result(job())
            except Exception as error:
                future.set_exception(error)
