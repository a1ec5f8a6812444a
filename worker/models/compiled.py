"""Chooses between the decoder in torch and the compiled one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from worker.attention.interface import Attention
from worker.attention.native_backend import NativeAttention
from worker.models.decoder import Decoder
from worker.native.machine import vector_unit

if TYPE_CHECKING:
    from worker.native.forward import CompiledDecoder


def fastest(decoder: Decoder, attention: Attention) -> Decoder | CompiledDecoder:
    """The compiled one where all of the model's parts have compiled code on this machine."""
    if vector_unit() is None or not isinstance(attention, NativeAttention):
        return decoder
    from worker.native.forward import CompiledDecoder, can_compile

    return CompiledDecoder(decoder, attention) if can_compile(decoder) else decoder
