"""One region: a file in shared memory, fully allocated, mapped shared, and populated piece by piece.

`create` leaves no hole when it returns (posix_fallocate): touching the mapping cannot end in SIGBUS; `populate` makes page faults
happen here and not under a request. Both block and are called on a thread. Mapping alone is quick and done anywhere.
Measured on tmpfs with 4 KiB pages: allocate 0.1 s/GiB, populate fresh 0.4 to 2.6 s/GiB, populate existing 0.05 to 0.1 s/GiB. With
huge pages, which are asked for one by one since few systems give them to shared memory unasked: all of it fresh 0.06 s/GiB (memory
that the host of a virtual machine has to find first: 2 s), existing 1 ms/GiB, for other processes, too.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from pathlib import Path
from typing import Final

from kvobj.buffers import address_of
from kvobj.errors import StoreFullError, TierUnavailableError
from kvobj.shared_maps import HUGE_PAGE_BYTES, map_shared

_MADV_HUGEPAGE: Final = 14
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14
_MADV_COLLAPSE: Final = 25  # Linux 6.1
_PAGE_BYTES: Final = 4096
_HUGE_SECONDS_MAX: Final = 1.0
"""What huge pages of one region may take where the kernel has to make them first: 0.02 to 0.7 s for 256 MiB here."""
# One system call populates this much: it holds the mapping lock meanwhile (24 ms at worst for 4 MiB of fresh pages here).
_CALL_BYTES: Final = 4 * 1024 * 1024


class Region:
    """A mapped region file of `size_bytes`. `room` is a writable view of all of it, None until mapped."""

    __slots__ = ("_address", "path", "room", "size_bytes")

    def __init__(self, path: Path, size_bytes: int) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self.room: memoryview | None = None
        self._address = 0

    def create(self, *, huge_pages: bool = False) -> None:
        """Make the file if need be and back every byte of it, a new one by huge pages where there are any. Safe to repeat. Blocks.

        `StoreFullError` where there is no room; the file is then as it was, or gone if this call made it.
        """
        existed = self.path.exists()
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if huge_pages and not existed:
                _back_hugely(descriptor, self.size_bytes)
            os.posix_fallocate(descriptor, 0, self.size_bytes)
        except OSError as error:
            if not existed:
                self.path.unlink(missing_ok=True)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StoreFullError(
                    "no room for an arena region", path=str(self.path), size_bytes=self.size_bytes
                ) from error
            raise TierUnavailableError("arena region cannot be allocated", path=str(self.path)) from error
        finally:
            os.close(descriptor)

    def map(self, *, huge_pages: bool) -> None:
        """Map the file, which must have its full size. Quick: no page is touched."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self.room = map_shared(descriptor, self.size_bytes, is_writable=True)
        finally:
            os.close(descriptor)
        self._address = address_of(self.room)
        if huge_pages:
            # Advice: where the kernel gives no huge pages for shared memory, it is refused or ignored.
            _madvise(self._address, self.size_bytes, _MADV_HUGEPAGE)

    def populate(self, start: int, stop: int, *, fresh: bool) -> None:
        """Fault `[start, stop)` in, writable. Blocks without the GIL. Contents stay as they are.

        Where the kernel lacks the call, pages are touched instead: written if `fresh` (nobody else may use them then), read
        if not, since writing back what was read would race with whoever fills them.
        """
        for begin in range(start, stop, _CALL_BYTES):
            length = min(_CALL_BYTES, stop - begin)
            if _madvise(self._address + begin, length, _MADV_POPULATE_WRITE) != 0:
                self._touch(begin, begin + length, fresh=fresh)

    def wipe(self) -> None:
        """Make all of it zeros, without the GIL: 30 ms for 256 MiB. Nobody else may use any of it."""
        ctypes.memset(self._address, 0, self.size_bytes)

    def uses_huge_pages(self) -> bool:
        """Whether the kernel maps any of this region by huge pages. Reads /proc/self/smaps: milliseconds, on a thread."""
        begins = f"{self._address:x}-"
        try:
            with open("/proc/self/smaps", encoding="ascii", errors="replace") as maps:  # noqa: PTH123 - a stream of lines
                inside = False
                for line in maps:
                    if line.startswith(begins):
                        inside = True
                    elif inside and line.startswith(("ShmemPmdMapped:", "FilePmdMapped:")) and int(line.split()[1]):
                        return True
                    elif inside and line.startswith("VmFlags:"):
                        return False
        except OSError:
            return False
        return False

    def drop(self) -> None:
        """Forget the mapping. It goes when the last view of it goes: closing it under a reader would be a crash."""
        self.room = None

    def _touch(self, start: int, stop: int, *, fresh: bool) -> None:
        room = self.room
        if room is None:
            return
        pages = room[start:stop:_PAGE_BYTES]
        if fresh:
            pages[:] = bytes(len(pages))
        else:
            bytes(pages)


def _back_hugely(descriptor: int, size_bytes: int) -> None:
    """Back an empty file by huge pages, as far as that goes. Whatever the system's settings are: they are about memory that did not
    ask. Refused by older kernels, other file systems, and where memory is too much in pieces."""
    os.ftruncate(descriptor, size_bytes)
    memory = map_shared(descriptor, size_bytes, is_writable=True)
    address = address_of(memory)
    deadline = time.monotonic() + _HUGE_SECONDS_MAX
    for start in range(0, size_bytes - HUGE_PAGE_BYTES + 1, HUGE_PAGE_BYTES):
        # A place with nothing in it is not taken for one to be put together.
        refused = _madvise(address + start, _PAGE_BYTES, _MADV_POPULATE_WRITE)
        refused = refused or _madvise(address + start, HUGE_PAGE_BYTES, _MADV_COLLAPSE)
        if refused or time.monotonic() > deadline:
            return


def _madvise(address: int, length: int, advice: int) -> int:
    """Call madvise through ctypes, which lets go of the GIL; mmap.madvise keeps it, and would stop the event loop meanwhile."""
    return int(_libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), ctypes.c_int(advice)))


_libc: Final = ctypes.CDLL(None, use_errno=True)
