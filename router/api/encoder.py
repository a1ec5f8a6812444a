"""Text to tokens without holding up the event loop."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from checkpoint.tokenizer import Tokenizer
from router.api.literal import Rendered

I32 = npt.NDArray[np.int32]
Span = tuple[int, int, int]

_INLINE_CHARS = 8192
"""Up to here (about a millisecond) a thread would cost more than it saves."""


class PromptEncoder:
    """Short texts are done on the spot, long ones in a thread: the tokeniser works outside the interpreter's
    lock, so other streams go on meanwhile."""

    def __init__(self, tokenizer: Tokenizer, *, n_threads: int = 2) -> None:
        self._tokenizer = tokenizer
        self._pool = ThreadPoolExecutor(n_threads, thread_name_prefix="tokenise")

    async def encode(self, text: str, *, special: bool) -> I32:
        """[n] int32."""
        return (await self.encode_all([text], special=special))[0]

    async def encode_all(self, texts: Sequence[str], *, special: bool) -> list[I32]:
        """One array per text."""
        if sum(map(len, texts)) <= _INLINE_CHARS:
            return self._tokenizer.encode_batch(texts, special=special)
        loop = asyncio.get_running_loop()
        encode = functools.partial(self._tokenizer.encode_batch, texts, special=special)
        return await loop.run_in_executor(self._pool, encode)

    async def encode_rendered(self, prompt: Rendered, *, special: bool = False) -> I32:
        """[n] int32: the tokens of its pieces."""
        first, *others = prompt.pieces
        whole = await self.encode(first, special=special)
        return np.concatenate([whole, *await self.encode_all(others, special=False)]) if others else whole

    async def encode_spans(self, text: str, *, special: bool) -> list[Span]:
        """Each token with its first and last + 1 character in `text`."""
        encode = functools.partial(self._tokenizer.encode_spans, text, special=special)
        if len(text) <= _INLINE_CHARS:
            return encode()
        return await asyncio.get_running_loop().run_in_executor(self._pool, encode)

    async def encode_rendered_spans(self, prompt: Rendered) -> list[Span]:
        """As `encode_rendered`, with places in the whole text."""
        spans: list[Span] = []
        at = 0
        for piece in prompt.pieces:
            found = await self.encode_spans(piece, special=False)
            spans += [(token, at + start, at + stop) for token, start, stop in found]
            at += len(piece)
        return spans

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
