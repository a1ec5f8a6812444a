"""POST /tokenize and /detokenize: the model's own tokenizer, for clients that count."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from router.api.chat import render_chat
from router.api.context import ApiContext
from router.api.decode import read_body
from router.api.errors import invalid
from router.api.literal import Rendered
from router.api.reply import json_reply
from router.api.schema import DetokenizeRequest, TokenizeRequest
from router.api.tgi.errors import TGI_ERRORS
from router.api.tgi.tokens import TgiTokenRoutes


class TokenRoutes:
    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._tgi = TgiTokenRoutes(context)
        self._fields = msgspec.json.Decoder(dict[str, msgspec.Raw])

    async def tokenize(self, request: Request) -> Response:
        context = self._context
        body = await read_body(request.receive, context.config)
        if self._has_inputs(body):
            request.scope["exchange"].errors = TGI_ERRORS
            return await self._tgi.tokenize(body)
        wanted = context.decoder.decode(body, TokenizeRequest)
        model = context.check_model(wanted.model)
        if (wanted.prompt is None) == (wanted.messages is None):
            raise invalid("Send either 'prompt' or 'messages'.", param="prompt")
        if wanted.messages is not None:
            rendered = render_chat(
                context,
                wanted.messages,
                add_generation_prompt=wanted.add_generation_prompt is not False,
                continue_final_message=bool(wanted.continue_final_message),
                variables=wanted.chat_template_kwargs,
            )
            special = bool(wanted.add_special_tokens)
        else:
            rendered = Rendered((wanted.prompt or "",))
            special = wanted.add_special_tokens is not False
        ids = (await context.text.encoder.encode_rendered(rendered, special=special)).tolist()
        value: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": model.max_total_tokens}
        if wanted.return_token_strs:
            value["token_strs"] = [context.text.names.text(token) for token in ids]
        return json_reply(value)

    def _has_inputs(self, body: bytes) -> bool:
        """TGI's body; what can't be read is left to the decoder's own messages."""
        try:
            return "inputs" in self._fields.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False

    async def detokenize(self, request: Request) -> Response:
        context = self._context
        body = await read_body(request.receive, context.config)
        wanted = context.decoder.decode(body, DetokenizeRequest)
        model = context.check_model(wanted.model)
        for i, token in enumerate(wanted.tokens):
            if not 0 <= token < model.vocab_size:
                raise invalid(
                    f"Invalid value for 'tokens[{i}]': {token} is outside the vocabulary of"
                    f" {model.vocab_size}.",
                    param=f"tokens[{i}]",
                )
        ids = np.asarray(wanted.tokens, dtype=np.int32)
        text = context.text.tokenizer.decode(ids, skip_special=bool(wanted.skip_special_tokens))
        return json_reply({"prompt": text})
