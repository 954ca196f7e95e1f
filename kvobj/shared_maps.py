"""Files of shared memory, mapped where huge pages fit: at an address that ends as the place in the file does.

Python's own `mmap` takes the address that it is given, which nearly always has the wrong end; the kernel then maps 4 KiB pages, and
the first look at 256 MiB takes 25 ms instead of 0.2, in every process that looks.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Final

from kvobj.buffers import address_of

HUGE_PAGE_BYTES: Final = 2 * 1024 * 1024
_MAP_FIXED: Final = 0x10  # Linux, as where shared memory is mapped at all
_FAILED: Final = ctypes.c_void_p(-1).value


def map_shared(descriptor: int, size_bytes: int, *, is_writable: bool) -> memoryview:
    """All of a file that has at least so many bytes, shared, read-only unless `is_writable`. It stays mapped for as long as a view
    of it lives; the descriptor is the caller's to close. OSError as of `mmap`. No page is touched."""
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
    if size_bytes < HUGE_PAGE_BYTES:
        return memoryview(mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED, protection))
    # Room with a margin, all of which goes with its last view; the file is laid over the part that begins where it should.
    room = mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, protection)
    base = address_of(room)
    start = -base % HUGE_PAGE_BYTES
    placed = _libc_mmap(base + start, size_bytes, protection, mmap.MAP_SHARED | _MAP_FIXED, descriptor, 0)
    if placed == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, "memory cannot be mapped")
    return memoryview(room)[start : start + size_bytes]


_libc_mmap: Final = ctypes.CFUNCTYPE(
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
    use_errno=True,
)(("mmap", ctypes.CDLL(None, use_errno=True)))
