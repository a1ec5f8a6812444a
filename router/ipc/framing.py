"""One message is one frame: a little-endian u32 length, then msgpack."""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from router.ipc.messages import ToApi, ToScheduler

_HEADER: Final = struct.Struct("<I")
MAX_FRAME_BYTES: Final = 256 * 1024 * 1024
"""More is a stream out of step, not a message."""


class FrameError(Exception):
    """The bytes received are no frames of this protocol."""


class FrameBuffer:
    """Gathers bytes and gives out whole frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Frames completed by `data`. Raises FrameError."""
        self._data += data
        frames: list[bytes] = []
        at = 0
        while len(self._data) - at >= _HEADER.size:
            (n_bytes,) = _HEADER.unpack_from(self._data, at)
            if n_bytes > MAX_FRAME_BYTES:
                raise FrameError(
                    f"a frame of {n_bytes} bytes was announced; at most {MAX_FRAME_BYTES} may be"
                )
            end = at + _HEADER.size + n_bytes
            if len(self._data) < end:
                break
            frames.append(bytes(self._data[at + _HEADER.size : end]))
            at = end
        if at:
            del self._data[:at]
        return frames


class Codec:
    """Encodes and decodes the messages of one side."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._to_scheduler: msgspec.msgpack.Decoder[ToScheduler] = msgspec.msgpack.Decoder(ToScheduler)
        self._to_api: msgspec.msgpack.Decoder[ToApi] = msgspec.msgpack.Decoder(ToApi)

    def frame(self, message: ToScheduler | ToApi) -> bytes:
        data = self._encoder.encode(message)
        return _HEADER.pack(len(data)) + data

    def to_scheduler(self, data: bytes) -> ToScheduler:
        """Raises FrameError."""
        try:
            return self._to_scheduler.decode(data)
        except msgspec.MsgspecError as error:
            raise FrameError(f"not a message to the scheduler: {error}") from None

    def to_api(self, data: bytes) -> ToApi:
        """Raises FrameError."""
        try:
            return self._to_api.decode(data)
        except msgspec.MsgspecError as error:
            raise FrameError(f"not a message to the API: {error}") from None
