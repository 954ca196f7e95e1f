"""The CRCs of S3 in the native library, at the speed of memory where the CPU multiplies without carries.

GB/s on one core of AMD EPYC servers, of bytes in the cache and of 32 MiB out of it, by the widest vectors that the CPU multiplies:
of 64 bytes (AVX-512) 57 and 29, CRC-32; of 32 bytes (Zen 3) 25 and 11; of 16 bytes (Zen 3, too) 12 and 8. CRC-32C, for which
another part of the CPU works at the same time, 31 and 13 by 32 bytes, 27 and 12 by 16.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import cache
from typing import Final, Literal

from kvobj.buffers import address_of
from kvobj.native import library

CrcName = Literal["crc32", "crc32c", "crc64nvme"]
Crc = Callable[[memoryview, int], int]
"""`crc(view, previous)`: of the view, going on from `previous`, that of the bytes before it."""

_CHECKS: Final[Mapping[CrcName, int]] = {"crc32": 0xCBF43926, "crc32c": 0xE3069283, "crc64nvme": 0xAE8B14860A799888}
"""Of the nine characters `123456789`."""
_SIZES: Final = (18, 66, 131, 258, 259, 300, 1024, 5000, 300_000)
"""That take every way through the vectors."""
_RESULTS: Final = {"crc32": ctypes.c_uint32, "crc32c": ctypes.c_uint32, "crc64nvme": ctypes.c_uint64}


@cache
def native_crc(name: CrcName) -> Crc | None:
    """That CRC without the interpreter's lock; None where there is no library, no instruction for it, or it is not right here."""
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

    return crc if _is_right(native, name, crc) else None


def _is_right(native: ctypes.CDLL, name: CrcName, crc: Crc) -> bool:
    """Whether it makes the published check value, and by the CPU's widest vectors what it makes by the narrowest: once a process,
    0.3 ms. A kernel that is wrong on a CPU which nobody here had must not be what bodies are refused by."""
    result, check = _RESULTS[name], _CHECKS[name]
    narrow = native.kvobj_crc_of_width
    narrow.argtypes = [ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64]
    narrow.restype = ctypes.c_uint64
    sample = memoryview(bytes(range(1, 252)) * 1200)
    return crc(memoryview(b"123456789"), 0) == check and all(
        crc(piece := sample[3:size], size)
        == result(narrow(list(_RESULTS).index(name), 16, address_of(piece), piece.nbytes, size)).value
        for size in _SIZES
    )
