"""Messages on a stream: `u32 LE length ‖ message`. Pure.

A length is bounded before anything is kept for it, so a peer costs at most one message and one read.
"""

from __future__ import annotations

import struct
from typing import Final

from kvobj.errors import InvalidRequestError

LENGTH_BYTES: Final = 4
_LENGTH: Final = struct.Struct("<I")


def framed(message: bytes) -> bytes:
    """A message as it stands on the stream."""
    return _LENGTH.pack(len(message)) + message


class Unframer:
    """Cuts what arrives into messages of at most `bytes_max`, which may be set anew at any time."""

    __slots__ = ("_buffer", "bytes_max")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._buffer = bytearray()

    @property
    def buffered_bytes(self) -> int:
        """What has arrived and is not taken yet."""
        return len(self._buffer)

    def feed(self, data: bytes | memoryview) -> None:
        """Some bytes have arrived."""
        self._buffer += data

    def clear(self) -> None:
        """Drop what has arrived and is not taken yet."""
        self._buffer = bytearray()

    def take(self) -> bytes | None:
        """The next whole message; None where more has to arrive. `InvalidRequestError` for a length that no message has."""
        buffer = self._buffer
        if len(buffer) < LENGTH_BYTES:
            return None
        (length,) = _LENGTH.unpack_from(buffer)
        if not 0 < length <= self.bytes_max:
            raise InvalidRequestError("a message is empty or too long", size_bytes=length, limit_bytes=self.bytes_max)
        end = LENGTH_BYTES + length
        if len(buffer) < end:
            return None
        message = bytes(buffer[LENGTH_BYTES:end])
        del buffer[:end]
        return message
