"""An answer that is sent as a whole: waits for all choices or the client's leaving, whichever comes first."""

from __future__ import annotations

import asyncio

from starlette.types import Receive

from router.api.choice import Choice
from router.api.decode import ClientGoneError
from router.api.errors import ApiError
from router.api.job import Job
from router.ipc.messages import ErrorInfo


class Unary:
    """Owns the wait for one job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._interrupted: ErrorInfo | None = None

    async def run(self, receive: Receive) -> None:
        """Returns when every choice has ended. Raises ApiError with the first failure, RefusedError, and
        ClientGoneError when the client left; then the job is cancelled."""
        job = self._job
        try:
            await job.submit(self._notify)
            await self._wait(receive)
            error = self._interrupted or job.error
            if error is not None:
                raise ApiError(error)
        finally:
            job.cancel()

    def interrupt(self, info: ErrorInfo) -> None:
        """Ends the wait from our side (shutdown)."""
        self._interrupted = info
        self._wake()

    def _notify(self, choice: Choice) -> None:
        job = self._job
        now = job.clock()
        if choice.n_tokens:
            job.last_token_s = now
            if job.first_token_s is None:
                job.first_token_s = now
        if choice.error is not None or (choice.ended and job.ended):
            self._wake()

    def _wake(self) -> None:
        if not self._done.done():
            self._done.set_result(None)

    async def _wait(self, receive: Receive) -> None:
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((self._done, gone), return_when=asyncio.FIRST_COMPLETED)
            if not self._done.done():
                raise ClientGoneError
        finally:
            gone.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
