"""Logprobs of a prompt's own tokens, gathered from the parts in which they were computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from router.api.logprobs import TokenNames
from router.ipc.messages import PromptLogprob

I32 = npt.NDArray[np.int32]
_LOWEST = -9999.0


@dataclass(frozen=True, slots=True)
class PromptScores:
    """By position; None where nothing was computed (position 0 has no logprob at all)."""

    prompt: I32
    chosen: list[float | None]
    top: list[list[tuple[int, float]]]

    def as_lists(self, names: TokenNames) -> dict[str, list[Any]]:
        """Completions' parallel lists."""
        spelled = [names.spelled(token) for token in self.prompt.tolist()]
        offsets, at = [], 0
        for token in self.prompt.tolist():
            offsets.append(at)
            at += len(names.text(token))
        return {
            "tokens": spelled,
            "token_logprobs": list(self.chosen),
            "top_logprobs": [
                None if value is None else {names.spelled(token): score for token, score in top}
                for value, top in zip(self.chosen, self.top, strict=True)
            ],
            "text_offset": offsets,
        }

    def as_objects(self, names: TokenNames) -> list[dict[str, Any] | None]:
        """One object per position: the prompt's token and the alternatives, by token id."""
        result: list[dict[str, Any] | None] = []
        for token, value, top in zip(self.prompt.tolist(), self.chosen, self.top, strict=True):
            if value is None:
                result.append(None)
                continue
            scores = dict(top)
            scores[token] = value
            result.append(
                {str(i): {"logprob": score, "decoded_token": names.text(i)} for i, score in scores.items()}
            )
        return result


def prompt_scores(prompt: I32, parts: Sequence[PromptLogprob]) -> PromptScores:
    """A position that was computed twice (after a preemption) keeps its last value."""
    chosen: list[float | None] = [None] * len(prompt)
    top: list[list[tuple[int, float]]] = [[] for _ in range(len(prompt))]
    for part in parts:
        values = np.frombuffer(part.chosen, dtype="<f4").tolist()
        ids = np.frombuffer(part.top_ids, dtype="<i4").tolist()
        scores = np.frombuffer(part.top_values, dtype="<f4").tolist()
        for i, value in enumerate(values):
            position = part.start + i
            if position >= len(prompt):
                break
            span = slice(i * part.n_top, (i + 1) * part.n_top)
            chosen[position] = max(value, _LOWEST)
            top[position] = [
                (token, max(score, _LOWEST)) for token, score in zip(ids[span], scores[span], strict=True)
            ]
    return PromptScores(prompt=prompt, chosen=chosen, top=top)
