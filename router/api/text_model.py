"""What the API knows of the served model's text side: tokenizer, template and the tables made of them."""

from __future__ import annotations

from checkpoint.chat_template import ChatTemplate
from checkpoint.tokenizer import Tokenizer
from router.api.detokenize import TokenTable, build_token_table
from router.api.encoder import PromptEncoder
from router.api.logprobs import TokenNames


class TextModel:
    """Built once per model, off the event loop (about 0.1 s for 100,000 tokens); never changes."""

    def __init__(self, *, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.encoder = PromptEncoder(tokenizer)
        self._shown = build_token_table(tokenizer, skip_special=False)
        self._hidden = self._shown.without_special()
        self.names = TokenNames(self._shown)

    def table_for(self, *, skip_special: bool) -> TokenTable:
        return self._hidden if skip_special else self._shown
