"""What the API knows of the served model's text side: tokenizer, template and the tables made of them."""

from __future__ import annotations

from dataclasses import replace

from checkpoint.chat_template import ChatTemplate
from checkpoint.tokenizer import Tokenizer
from router.api.config import ApiConfig
from router.api.detokenize import TokenTable, build_token_table
from router.api.encoder import PromptEncoder
from router.api.literal import ControlTokens
from router.api.logprobs import TokenNames
from router.api.reasoning import END
from router.api.tools.formats import Marks
from router.api.tools.lines import choose_line


class TextModel:
    """Built once per model, off the event loop (about 0.1 s for 100,000 tokens); never changes."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
        control_tokens_in_messages: bool = False,
    ) -> None:
        """The two parsers as their flags name them."""
        source = "" if template is None else template.source
        self.tokenizer = tokenizer
        self.template = template
        self.tool_line = choose_line(tool_parser, template=source)
        special = {text: i for i in tokenizer.special_ids if (text := tokenizer.token(i))}
        self.marks = Marks(special)
        self.control_tokens = ControlTokens(() if control_tokens_in_messages else special)
        """Those that messages can't hold."""
        self.splits_reasoning = reasoning_parser == "think" or (
            reasoning_parser == "auto" and (END in source or tokenizer.backend.token_to_id(END) is not None)
        )
        self.encoder = PromptEncoder(tokenizer)
        self._shown = build_token_table(tokenizer, skip_special=False)
        self._hidden = self._shown.without_special()
        self._with_markers: dict[frozenset[int], TokenTable] = {}
        """By the special tokens that are shown: one for each tool parser in use."""
        self.names = TokenNames(self._shown)

    def table_for(self, *, skip_special: bool, markers: tuple[str, ...] = ()) -> TokenTable:
        """`markers`: tokens that are shown although they may be special."""
        if not skip_special:
            return self._shown
        tokens = {self.tokenizer.backend.token_to_id(marker) for marker in markers}
        kept = frozenset(token for token in tokens if token in self.tokenizer.special_ids)
        if not kept:
            return self._hidden
        if kept not in self._with_markers:
            self._with_markers[kept] = self._table_with(kept)
        return self._with_markers[kept]

    def _table_with(self, kept: frozenset[int]) -> TokenTable:
        if self._shown.kind == "generic":  # the library's decoder hides all special tokens or none
            return self._shown
        data, texts = list(self._hidden.data), list(self._hidden.texts)
        for token in kept:
            data[token], texts[token] = self._shown.data[token], self._shown.texts[token]
        return replace(self._hidden, data=data, texts=texts)


def text_model(config: ApiConfig, tokenizer: Tokenizer, template: ChatTemplate | None) -> TextModel:
    return TextModel(
        tokenizer=tokenizer,
        template=template,
        tool_parser=config.tool_parser,
        reasoning_parser=config.reasoning_parser,
        control_tokens_in_messages=config.control_tokens_in_messages,
    )
