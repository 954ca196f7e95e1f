"""`application/vnd.kvobj.stream` as clients write and read it: items of `u32 LE header length ‖ msgpack header ‖ payload`. Pure.

Written apart from the server's, so that each checks the other. A stream without its end is not whole.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import msgspec

from kvobj.client.kv_values import Name, NewChunk
from kvobj.errors import UnavailableError

STREAM_TYPE: Final = "application/vnd.kvobj.stream"
LENGTH_BYTES: Final = 4
HEADER_BYTES_MAX: Final = 64 * 1024

_LENGTH: Final = struct.Struct("<I")


class ItemHeader(msgspec.Struct, frozen=True):
    """What stands before an item's bytes; the last one has `end` and counts the items."""

    i: int = 0
    layer: int | None = None
    size_bytes: int = 0
    digest: bytes | None = None
    status: int = 0
    end: bool = False
    items: int = 0


_decode = msgspec.msgpack.Decoder(ItemHeader).decode


def header_length(raw: bytes) -> int:
    """How long the next header is. `UnavailableError` for what no stream of ours has."""
    (length,) = _LENGTH.unpack(raw)
    if not 0 < length <= HEADER_BYTES_MAX:
        raise UnavailableError("the stream of chunks is broken", header_bytes=length)
    return int(length)


def parse_header(raw: bytes) -> ItemHeader:
    """One header. `UnavailableError` for what is none."""
    try:
        header = _decode(raw)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnavailableError("the stream of chunks is broken", reason=str(error)) from error
    if header.size_bytes < 0:
        raise UnavailableError("the stream of chunks is broken", size_bytes=header.size_bytes)
    return header


def chunk_stream(namespace: str, chunks: Sequence[NewChunk]) -> list[bytes | memoryview]:
    """Chunks to put, as buffers that make one body; the chunks' own bytes are not copied."""
    buffers: list[bytes | memoryview] = []
    for index, chunk in enumerate(chunks):
        data = memoryview(chunk.data).cast("B")
        header: dict[str, object] = {"i": index, "id": chunk.id, "namespace": namespace, "size_bytes": len(data)}
        optional: dict[str, Name | int | None] = {
            "parent": chunk.parent,
            "tokens": chunk.tokens,
            "digest": chunk.digest,
        }
        header |= {name: value for name, value in optional.items() if value is not None}
        buffers += (_framed(header), data)
    buffers.append(_framed({"end": True, "items": len(chunks)}))
    return buffers


def _framed(header: dict[str, object]) -> bytes:
    encoded = msgspec.msgpack.encode(header)
    return _LENGTH.pack(len(encoded)) + encoded
