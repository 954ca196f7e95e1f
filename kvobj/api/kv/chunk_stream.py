"""`application/vnd.kvobj.stream`: items of `u32 LE header length ‖ msgpack header ‖ payload`, and an end that counts them.

A stream without its end is not whole. The same framing carries ?mget's reply and ?mput's request (docs/kv-api.md).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Annotated, Any, Final

import msgspec

from kvobj.api.message import ByteSource
from kvobj.errors import IncompleteBodyError, InvalidRequestError

CONTENT_TYPE: Final = "application/vnd.kvobj.stream"
MAX_HEADER_BYTES: Final = 8 * 1024
"""Room for a key and a parent of 1,024 bytes each, and the rest."""
_LENGTH: Final = struct.Struct("<I")
_Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class ItemHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One header of a stream that comes in. `id` and `parent` are raw ids or strings, which is for the reader to
    check; `end` and `items` end it."""

    i: _Size | None = None
    size_bytes: _Size = 0
    id: Any = None
    parent: Any = None
    namespace: str | None = None
    tokens: Annotated[int, msgspec.Meta(ge=1, lt=2**32)] | None = None
    digest: bytes | None = None
    codec: str = "raw"
    layer: int | None = None
    status: int | None = None
    end: bool = False
    items: _Size | None = None


_decode = msgspec.msgpack.Decoder(ItemHeader).decode


def framed(header: dict[str, object]) -> bytes:
    """A header as it stands in a stream."""
    encoded = msgspec.msgpack.encode(header)
    return _LENGTH.pack(len(encoded)) + encoded


async def read_header(source: ByteSource) -> tuple[ItemHeader, int]:
    """The next header and how many bytes of the stream it took.

    Raises `InvalidRequestError` (too long, no msgpack, an unknown field) and `IncompleteBodyError` (the stream has no end).
    """
    length = bytearray(_LENGTH.size)
    with memoryview(length) as view:
        await source.receive_into(view, _ignore)
    (size_bytes,) = _LENGTH.unpack(length)
    if not 0 < size_bytes <= MAX_HEADER_BYTES:
        raise InvalidRequestError(f"a header of the stream has 1 to {MAX_HEADER_BYTES} bytes")
    raw = bytearray(size_bytes)
    with memoryview(raw) as view:
        await source.receive_into(view, _ignore)
    try:
        return _decode(bytes(raw)), _LENGTH.size + size_bytes
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"a header of the stream: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError("a header of the stream is no msgpack document") from error


class BoundedSource:
    """A source that is not read past `size_bytes`: where a stream says more than its request carries."""

    __slots__ = ("_source", "left_bytes")

    def __init__(self, source: ByteSource, size_bytes: int) -> None:
        self._source = source
        self.left_bytes = size_bytes

    async def receive_into(self, buffer: memoryview, on_bytes: Callable[[int], None]) -> None:
        """See `message.ByteSource`."""
        if len(buffer) > self.left_bytes:
            raise IncompleteBodyError("the stream ends before its end", left_bytes=self.left_bytes)
        self.left_bytes -= len(buffer)
        if len(buffer):
            await self._source.receive_into(buffer, on_bytes)


def _ignore(_: int) -> None:
    """A few bytes have arrived."""
