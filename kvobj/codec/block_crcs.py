"""The CRC-32C of each block of a body that is filled from the front.

In one native call for all that has come, which gives the interpreter's lock back once, where the library and the CPU have it; else
block by block. Both give the same values.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

from kvobj.buffers import address_of
from kvobj.codec.checksums import crc32c
from kvobj.codec.frame import BLOCK_PLAIN_BYTES
from kvobj.codec.native_crcs import native_crc
from kvobj.native import library


class BlockCrcs:
    """Give it every byte once, in order; `values` has the whole blocks' and, after `finish`, the last one's. One thread at a time
    uses it."""

    __slots__ = ("_before", "_crc", "values")

    def __init__(self) -> None:
        self.values: list[int] = []
        self._before = 0
        self._crc = 0

    def update(self, piece: memoryview) -> None:
        """The bytes that follow."""
        if not piece:
            return
        crcs = (native_crcs() or crcs_one_by_one)(piece, self._before, self._crc)
        self._before = (self._before + len(piece)) % BLOCK_PLAIN_BYTES
        self._crc = crcs.pop() if self._before else 0
        self.values += crcs

    def finish(self) -> None:
        """There are no more bytes."""
        if self._before:
            self.values.append(self._crc)
            self._before = 0


def crcs_one_by_one(piece: memoryview, before: int, previous: int) -> list[int]:
    """Of each block that the piece (not empty) touches. The first began `before` bytes earlier, with the CRC `previous` of those;
    the last may be unfinished."""
    crcs: list[int] = []
    start, stop = 0, BLOCK_PLAIN_BYTES - before
    while start < len(piece):
        crcs.append(crc32c(piece[start:stop], previous))
        start, stop, previous = stop, stop + BLOCK_PLAIN_BYTES, 0
    return crcs


@cache
def native_crcs() -> Callable[[memoryview, int, int], list[int]] | None:
    """As `crcs_one_by_one`, without the interpreter's lock; None where there is no library, or no instruction for it, or the CRC
    is not right here."""
    native = library()
    has = getattr(native, "kvobj_has_block_crcs", None)  # absent in a library that was built from an older source
    if native is None or has is None or not has() or native_crc("crc32c") is None:
        return None
    function = native.kvobj_block_crcs
    size = ctypes.c_uint64
    function.argtypes = [ctypes.c_void_p, size, size, ctypes.c_uint32, size, ctypes.c_void_p]
    function.restype = size

    def at_once(piece: memoryview, before: int, previous: int) -> list[int]:
        crcs = (ctypes.c_uint32 * (len(piece) // BLOCK_PLAIN_BYTES + 2))()
        count = function(address_of(piece), len(piece), before, previous, BLOCK_PLAIN_BYTES, crcs)
        return crcs[:count]

    return at_once
