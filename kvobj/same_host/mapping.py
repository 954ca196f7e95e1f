"""Memory behind a descriptor as views, and copies out of and into it that do not hold the interpreter's lock.

A region is mapped once in a process, however many connections were handed it; the mapping goes with the last view of it. After a
restart of the server one that is written through is mapped anew: the old mapping tells the server that somebody may write still.
A forked child maps anew, too: pages that its parent had made ready are not ready there.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from typing import Final

from kvobj.buffers import address_of
from kvobj.errors import InvalidRequestError, UnavailableError
from kvobj.same_host.touching import toucher
from kvobj.shared_maps import map_shared

_MADV_POPULATE_READ: Final = 22  # Linux 5.14
UNLOCKED_BYTES: Final = 128 * 1024
"""From here on a copy lets other threads run; below, letting go of the lock costs more than the copy."""
_BLOCK_BYTES: Final = 2 * 1024 * 1024

_Identity = tuple[int, int, bool, int]


_libc: Final = ctypes.CDLL(None, use_errno=True)


def copy(target: memoryview, source: memoryview) -> None:
    """Copy `source` to the start of `target`, both contiguous bytes. The target is at least as long (ValueError)."""
    size_bytes = len(source)
    if len(target) < size_bytes:
        raise ValueError(f"{size_bytes} bytes do not fit into {len(target)}")
    if size_bytes < UNLOCKED_BYTES:
        target[:size_bytes] = source
        return
    if target.readonly:
        raise TypeError("cannot modify read-only memory")
    ctypes.memmove(address_of(target), address_of(source), size_bytes)


class Mapping:
    """The memory behind a descriptor, mapped whole. `room` is all of it, read-only unless `is_writable`. Thread-safe."""

    def __init__(self, descriptor: int, size_bytes: int, *, is_writable: bool) -> None:
        if size_bytes <= 0 or os.fstat(descriptor).st_size < size_bytes:
            # To touch what is past the end would be the end of this process.
            raise UnavailableError("a descriptor has less memory than was said", size_bytes=size_bytes)
        try:
            self.room = map_shared(descriptor, size_bytes, is_writable=is_writable)
        except OSError as error:
            raise UnavailableError("memory cannot be mapped", reason=str(error), size_bytes=size_bytes) from error
        self.size_bytes = size_bytes
        self._address = address_of(self.room)
        self._touched = bytearray(-(-size_bytes // _BLOCK_BYTES))

    def piece(self, offset: int, size_bytes: int) -> memoryview:
        """A part of it. `InvalidRequestError` for what is not within."""
        if offset < 0 or size_bytes < 0 or offset + size_bytes > self.size_bytes:
            raise InvalidRequestError("not within the mapped memory", offset=offset, size_bytes=size_bytes)
        return self.room[offset : offset + size_bytes]

    def address(self, offset: int) -> int:
        """Where the byte at `offset` is; good for as long as the caller holds the mapping."""
        return self._address + offset

    def is_touched(self, offset: int, size_bytes: int) -> bool:
        """Whether somebody has had all pages of a part mapped, or is about to."""
        return self._touched.find(0, offset // _BLOCK_BYTES, -(-(offset + size_bytes) // _BLOCK_BYTES)) < 0

    def touch(self, offset: int, size_bytes: int) -> None:
        """Have the pages of a part mapped before it is copied, once, in as few calls as can be: a fault for each 64 KiB takes
        longer. Any thread."""
        touched = self._touched
        block, end = offset // _BLOCK_BYTES, -(-(offset + size_bytes) // _BLOCK_BYTES)
        while (block := touched.find(0, block, end)) >= 0:
            stop = touched.find(1, block, end)
            stop = end if stop < 0 else stop
            touched[block:stop] = b"\1" * (stop - block)
            start = block * _BLOCK_BYTES
            # Advice: an older kernel refuses it, and the copy takes the faults.
            _libc.madvise(
                ctypes.c_void_p(self._address + start),
                ctypes.c_size_t(min(stop * _BLOCK_BYTES, self.size_bytes) - start),
                ctypes.c_int(_MADV_POPULATE_READ),
            )
            block = stop


class _Known:
    """The mappings of a process. The lock is held while one is made."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """In a forked child: the thread that had the lock is the parent's."""
        self.lock = threading.Lock()
        self.mappings: weakref.WeakValueDictionary[_Identity, Mapping] = weakref.WeakValueDictionary()


_known: Final = _Known()
os.register_at_fork(after_in_child=_known.forget)


def mapped(descriptor: int, size_bytes: int, *, is_writable: bool, life: int = 0) -> Mapping:
    """The mapping of what is behind a descriptor, which this process may have already (of the same `life`); the descriptor is the
    caller's to close. Its pages are made ready in the background."""
    told = os.fstat(descriptor)
    identity = (told.st_dev, told.st_ino, is_writable, life)
    with _known.lock:
        known = _known.mappings.get(identity)
        if known is None or known.size_bytes != size_bytes:
            known = Mapping(descriptor, size_bytes, is_writable=is_writable)
            _known.mappings[identity] = known
            toucher.add(known)
        return known
