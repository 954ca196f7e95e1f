"""The CRCs of S3 in the native library, at the speed of memory where the CPU multiplies without carries.

GB/s on one core of AMD EPYC servers, of bytes in the cache and of 32 MiB out of it, by the widest vectors that the CPU multiplies:
of 64 bytes (AVX-512) 57 and 29, CRC-32; of 32 bytes (Zen 3) 25 and 11; of 16 bytes (Zen 3, too) 12 and 8. CRC-32C, for which
another part of the CPU works at the same time, 31 and 13 by 32 bytes, 27 and 12 by 16.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Final, Literal

from kvobj.buffers import address_of
from kvobj.native import library

CrcName = Literal["crc32", "crc32c", "crc64nvme"]
Crc = Callable[[memoryview, int], int]
"""`crc(view, previous)`: of the view, going on from `previous`, that of the bytes before it."""

_RESULTS: Final = {"crc32": ctypes.c_uint32, "crc32c": ctypes.c_uint32, "crc64nvme": ctypes.c_uint64}


@cache
def native_crc(name: CrcName) -> Crc | None:
    """That CRC without the interpreter's lock; None where there is no library, or no instruction for it."""
    native = library()
    width = getattr(native, "kvobj_crc_width", None)  # absent in a library that was built from an older source
    if native is None or width is None or not width():
        return None
    result = _RESULTS[name]
    function = native[f"kvobj_{name}"]
    function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, result]
    function.restype = result

    def crc(view: memoryview, previous: int) -> int:
        return int(function(address_of(view), view.nbytes, previous))

    return crc
