"""What the API knows of the served model's text side: tokenizer, template and the tables made of them."""

from __future__ import annotations

from functools import cached_property

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
        self.table = build_token_table(tokenizer)

    @cached_property
    def full_table(self) -> TokenTable:
        """The table that shows special tokens; few requests need it."""
        return build_token_table(self.tokenizer, skip_special=False)

    @cached_property
    def names(self) -> TokenNames:
        return TokenNames(self.full_table)

    def table_for(self, *, skip_special: bool) -> TokenTable:
        return self.table if skip_special else self.full_table
