"""Memory of its own for a chunk's bytes, outside the arena: it becomes resident as they come, and goes when it is given back."""

from __future__ import annotations

import asyncio
import mmap
from contextlib import suppress
from typing import Final

from kvobj.codec.checksums import blake3_digest
from kvobj.errors import DigestMismatchError

_DIGESTED_INLINE_BYTES: Final = 64 * 1024


def new_memory(size_bytes: int) -> memoryview:
    """To be given back."""
    return memoryview(mmap.mmap(-1, size_bytes)) if size_bytes else memoryview(b"")


def give_back(memory: memoryview) -> None:
    """Once no exchange fills it. Errors that live on have frames that refer to it: it must not live on with them."""
    with suppress(BufferError):  # it is being hashed: then it goes after that
        memory.release()


async def check_digest(data: memoryview, digest: bytes, *, key: str) -> None:
    """`DigestMismatchError` unless the bytes have it."""
    is_small = len(data) <= _DIGESTED_INLINE_BYTES
    if (blake3_digest(data) if is_small else await asyncio.to_thread(blake3_digest, data)) != digest:
        raise DigestMismatchError("the upstream's bytes do not have the digest that it told", key=key)
