"""HTTP/1.1 as the fault proxy needs it: heads with their bytes as they came, bodies piece by piece as they are on the wire."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from typing import Final

PIECE_BYTES: Final = 256 * 1024
HEAD_LIMIT_BYTES: Final = 256 * 1024
_RESET: Final = struct.pack("ii", 1, 0)
_INTERIM: Final = range(100, 200)


class Head:
    """The head of a request or a reply, its bytes as they came."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        first, *lines = raw[:-4].decode("latin-1").split("\r\n")
        self.words = first.split(" ", 2)
        pairs = (line.partition(":") for line in lines)
        self.fields = {name.strip().lower(): value.strip() for name, _, value in pairs}

    @property
    def is_chunked(self) -> bool:
        return self.fields.get("transfer-encoding", "").lower() == "chunked"

    @property
    def length(self) -> int:
        return int(self.fields.get("content-length", "0"))

    @property
    def is_last(self) -> bool:
        return self.fields.get("connection", "").lower() == "close"

    def replaced(self, name: str, value: str | None) -> Head:
        """With another value of a field, or without it."""
        first, *lines = self.raw[:-4].decode("latin-1").split("\r\n")
        kept = [line for line in lines if line.partition(":")[0].strip().lower() != name]
        kept += [] if value is None else [f"{name}: {value}"]
        return Head("\r\n".join([first, *kept, "", ""]).encode("latin-1"))


async def read_head(reader: asyncio.StreamReader) -> Head | None:
    """The next head; None where the connection ends before one begins."""
    try:
        return Head(await reader.readuntil(b"\r\n\r\n"))
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return None


async def read_reply_head(reader: asyncio.StreamReader) -> Head | None:
    while (head := await read_head(reader)) is not None and int(head.words[1]) in _INTERIM:
        pass
    return head


async def pieces(reader: asyncio.StreamReader, head: Head, *, until_close: bool = False) -> AsyncIterator[bytes]:
    """A body as it is on the wire, piece by piece. IncompleteReadError where it ends early."""
    if head.is_chunked:
        while True:
            line = await reader.readuntil(b"\r\n")
            size = int(line.partition(b";")[0], 16)
            yield line
            async for piece in _exactly(reader, size + 2):
                yield piece
            if not size:
                return
    elif until_close and "content-length" not in head.fields:
        while piece := await reader.read(PIECE_BYTES):
            yield piece
    else:
        async for piece in _exactly(reader, head.length):
            yield piece


async def _exactly(reader: asyncio.StreamReader, length: int) -> AsyncIterator[bytes]:
    left = length
    while left:
        piece = await reader.read(min(left, PIECE_BYTES))
        if not piece:
            raise asyncio.IncompleteReadError(b"", left)
        left -= len(piece)
        yield piece


async def nothing() -> AsyncIterator[bytes]:
    return
    yield b""


async def joined(head: bytes, body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The head, together with the body's first piece: two sends of a small reply would cost a delayed acknowledgement."""
    async for piece in body:
        yield head + piece
        head = b""
    if head:
        yield head


def flipped(piece: bytes, offset: int) -> bytes:
    changed = bytearray(piece)
    changed[offset] ^= 1
    return bytes(changed)


def no_delay(writer: asyncio.StreamWriter) -> None:
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def reset(writer: asyncio.StreamWriter) -> None:
    """Close with a TCP reset, what is unsent with it."""
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
