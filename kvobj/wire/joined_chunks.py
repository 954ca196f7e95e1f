"""The framing of many chunks, taken out of the memory that they were received into, in one native call.

Chunks of `Transfer-Encoding: chunked` and unsigned ones of aws-chunked bodies are framed alike. Only what is plainly right is
taken out; the rest, and everything that is wrong, stays for the caller, who knows his grammar and its errors and does it all
himself where there is no native library.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Final

from kvobj.buffers import address_of
from kvobj.native import library

NO_LIMIT: Final = 2**64 - 1

Sift = Callable[[int], tuple[int, bool]]
"""What takes framing out of a buffer while it fills. It is told how many bytes lie there, and answers how many it leaves, the rest
moved up, and whether more is to come behind them."""


class JoinedChunks(ctypes.Structure):
    """`joining` in joined_chunks.c. How far the bytes were looked at, how many bytes of data lie in front of them, what is still to
    come of the present chunk, its size, and how many chunks have begun."""

    _fields_ = (
        ("at", ctypes.c_uint64),
        ("filled", ctypes.c_uint64),
        ("chunk_left", ctypes.c_uint64),
        ("chunk_bytes", ctypes.c_uint64),
        ("chunks", ctypes.c_uint64),
    )
    at: int
    filled: int
    chunk_left: int
    chunk_bytes: int
    chunks: int


JoinChunks = Callable[[memoryview, JoinedChunks, int, int], JoinedChunks]


@cache
def native_joiner() -> JoinChunks | None:
    """`join(window, joined, limit, minimum)`, which goes on from `joined` and returns it; None where there is no library.

    In the window (bytes, not empty, writable) data follows at `at`, of a chunk that has begun. It stops in front of framing that is
    cut off or malformed, and of a chunk that is empty, goes beyond `limit` bytes of further data in all, or follows on one
    smaller than `minimum`. What lies between `filled` and `at` has no meaning afterwards. 2 µs and 0.1 µs a chunk.
    """
    native = library()
    function = getattr(native, "kvobj_join_chunks", None)  # absent in a library that was built from an older source
    if function is None:
        return None
    size = ctypes.c_uint64
    function.argtypes = [ctypes.c_void_p, size, size, size, ctypes.POINTER(JoinedChunks)]
    function.restype = None

    def join(window: memoryview, joined: JoinedChunks, limit: int, minimum: int) -> JoinedChunks:
        function(address_of(window), len(window), limit, minimum, ctypes.byref(joined))
        return joined

    return join


def is_cut_off(rest: bytes, bytes_max: int) -> bool:
    """Whether what was left behind a chunk's data may still become the framing in front of the next chunk: no line but the first,
    which ends the data, is whole yet, and it has fewer than `bytes_max` bytes."""
    return len(rest) < bytes_max and rest.find(b"\r\n", 2) < 0
