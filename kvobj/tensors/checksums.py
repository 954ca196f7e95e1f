"""CRC-32C (RFC 3720, Castagnoli) where the server's checksums may not be installed: of the kernel library, or a byte at a time."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Final

from kvobj.tensors.kernels.host_memory import address_of
from kvobj.tensors.kernels.load import cpu_library

_POLYNOMIAL: Final = 0x82F63B78


def crc32c(view: memoryview, previous: int = 0) -> int:
    """CRC-32C of `view`, going on from `previous`, the value for the bytes before it. Without the kernel library 0.1 µs a byte."""
    native = _native()
    if native is not None:
        return native(address_of(view), view.nbytes, previous)
    return crc32c_by_table(view, previous)


def crc32c_by_table(view: memoryview, previous: int = 0) -> int:
    """The same, by the definition: what the library is held against, and what remains without it."""
    table = _table()
    value = previous ^ 0xFFFF_FFFF
    for byte in view.cast("B") if view.nbytes else b"":
        value = table[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFF_FFFF


@cache
def _table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return tuple(table)


@cache
def _native() -> Callable[[int, int, int], int] | None:
    library = cpu_library()
    if library is None:
        return None
    try:
        function = library.kv_crc32c
    except AttributeError:
        return None
    function.restype = ctypes.c_uint32
    function.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32)

    def native(address: int, size_bytes: int, previous: int) -> int:
        value: int = function(address, size_bytes, previous)
        return value

    return native
