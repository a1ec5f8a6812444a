"""The choices of one HTTP request, as requests to the scheduler."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from router.api.choice import Choice, ChoiceOptions
from router.api.detokenize import TokenTable
from router.api.params import Params
from router.api.tools.message import MessageRules
from router.ipc.client import SchedulerClient
from router.ipc.messages import ErrorInfo, GrammarSpec, ModelInfo, RequestSpec

I32 = npt.NDArray[np.int32]

_PLAIN = MessageRules()


class Job:
    """Owns all choices of one request: n for each prompt, in the order of their index."""

    def __init__(
        self,
        *,
        prefix: str,
        prompts: Sequence[I32],
        params: Params,
        model: ModelInfo,
        client: SchedulerClient,
        table: TokenTable,
        request_id: str,
        traceparent: str = "",
        grammar: GrammarSpec | None = None,
        rules: MessageRules = _PLAIN,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.prompts = prompts
        self.params = params
        self.n_prompt_tokens = sum(len(prompt) for prompt in prompts)
        self.clock = clock
        self.submitted_s = clock()
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self._client = client
        self._listener: Callable[[Choice], None] = lambda choice: None
        options = ChoiceOptions(
            stops=params.stops,
            include_stop=params.include_stop,
            logprobs=params.sampling.logprobs,
            every_token=params.every_token,
            token_ids=params.return_token_ids,
            splits_reasoning=rules.splits_reasoning,
            starts_in_reasoning=rules.starts_in_reasoning,
            min_tokens=params.sampling.min_new_tokens,
        )
        self.choices: list[Choice] = []
        self._specs: list[RequestSpec] = []
        for prompt in prompts:
            packed = np.ascontiguousarray(prompt, dtype="<i4").tobytes()
            for k in range(params.n):
                choice = Choice(
                    id=client.next_id(),
                    index=len(self.choices),
                    detokenizer=table.detokenizer(prompt),
                    options=options,
                    notify=self._notify,
                )
                self.choices.append(choice)
                self._specs.append(
                    RequestSpec(
                        id=choice.id,
                        prompt=packed,
                        max_new_tokens=params.max_new_tokens_for(len(prompt), model),
                        sampling=params.sampling_of(k),
                        grammar=grammar,
                        priority=params.priority,
                        deadline_s=params.deadline_s,
                        request_id=request_id,
                        traceparent=traceparent,
                    )
                )

    def prompt_of(self, choice: Choice) -> I32:
        return self.prompts[choice.index // self.params.n]

    @property
    def error(self) -> ErrorInfo | None:
        """The first choice's failure fails the request."""
        return next((choice.error for choice in self.choices if choice.error is not None), None)

    @property
    def ended(self) -> bool:
        return all(choice.ended for choice in self.choices)

    @property
    def n_output_tokens(self) -> int:
        return sum(choice.n_tokens for choice in self.choices)

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object. A prompt counts once however many choices it has, and so do its cached
        tokens."""
        n_output = self.n_output_tokens
        cached = sum(choice.cached_tokens for choice in self.choices[:: self.params.n])
        return {
            "prompt_tokens": self.n_prompt_tokens,
            "completion_tokens": n_output,
            "total_tokens": self.n_prompt_tokens + n_output,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {
                "reasoning_tokens": sum(choice.n_reasoning_tokens for choice in self.choices)
            },
        }

    async def submit(self, listener: Callable[[Choice], None]) -> None:
        """`listener` hears of every event from now on. Raises RefusedError."""
        self._listener = listener
        await self._client.submit(self._specs, self.choices)

    def cancel(self) -> None:
        """Ends whatever still runs; nothing is heard of it again."""
        ids = [choice.id for choice in self.choices if not choice.ended]
        for choice in self.choices:
            choice.ended = True
        if ids:
            self._client.cancel(ids)

    def _notify(self, choice: Choice) -> None:
        if choice.stopped_early:
            choice.stopped_early = False
            self._client.cancel([choice.id])
        self._listener(choice)
