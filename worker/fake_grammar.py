"""What a fake row says under a grammar: one of a choice, or `{}` for any JSON.

Without a tokenizer a text is its bytes, shifted past the first special ids.
"""

from __future__ import annotations

import json

import numpy as np
import numpy.typing as npt

from proto.worker_pb2 import Grammar
from worker.fake_text import FakeVocab, chain, root

_FIRST_BYTE = 4
_JSON = (Grammar.JSON_OBJECT, Grammar.JSON_SCHEMA)


def check_grammar(grammar: Grammar) -> None:
    """Raises ValueError with a message for the user."""
    if grammar.kind == Grammar.CHOICE:
        choices = json.loads(grammar.source)
        if not isinstance(choices, list) or not choices:
            raise ValueError("a choice is a list with at least one string")
    elif grammar.kind == Grammar.JSON_SCHEMA:
        json.loads(grammar.source)
    elif grammar.kind not in _JSON:
        raise ValueError("the fake worker knows choices and JSON only")


def constrained_reply(grammar: Grammar, *, prompt: npt.NDArray[np.int32], vocab: FakeVocab) -> list[int]:
    """The tokens of the whole answer, its end left out; the same on every worker."""
    text = "{}"
    if grammar.kind == Grammar.CHOICE:
        choices = json.loads(grammar.source)
        text = choices[int(chain(root(""), prompt)[-1] >> np.uint64(32)) % len(choices)]
    return [(_FIRST_BYTE + byte) % vocab.size for byte in text.encode()]
