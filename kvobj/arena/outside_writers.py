"""Room that other processes fill, and whether one of an earlier life of the arena still could.

A trusted writer on this host fills room through a mapping of its own (docs/same-host.md). One that stands still in the middle of
that (a debugger, a frozen cgroup) may outlive the server, and goes on whenever it is woken: no look beforehand can stop it, so the
room that it was given must not be anybody else's in the next life. Two things tell of it, and both outlive a server that is killed.
The pages of such room are noted in a file beside the regions. And who may write to a region has a read lock on one byte of it,
whose number is the life in which it was shown: a lock of the open file description, which the mapping keeps, so that the kernel
ends it with the last descriptor and mapping, whoever has them (fcntl(2), "Open file description locks").
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvobj.arena.extent import ALIGNMENT

NOTES_FILE: Final = "given-outside"
_NOTED: Final = b"\1"
_FLOCK: Final = struct.Struct("@hhqqi4x")
"""`struct flock` of 64-bit Linux: type, whence, start, length, pid (0 for locks of a description)."""


def mark_writer(descriptor: int, life: int) -> None:
    """Whoever gets this descriptor of a region, open for reading and writing, may write in this life of the arena. OSError."""
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, life, 1, 0))


def has_earlier_writer(path: Path, life: int) -> bool:
    """Whether a process that was shown the region in an earlier life could still write to it. True where nobody can tell."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, life, 0)
        told = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked)
        return bool(_FLOCK.unpack(told)[0] != fcntl.F_UNLCK)
    except OSError:
        return True
    finally:
        os.close(descriptor)


class GivenOutside:
    """Which pages of the arena were given to writers outside, a byte a page, in a file that the next life reads. Event-loop-only.

    Made when there is something to note. Places and lengths are absolute offsets in the arena, and bytes.
    """

    def __init__(self, directory: Path, capacity_bytes: int) -> None:
        self._path = directory / NOTES_FILE
        self._pages = capacity_bytes // ALIGNMENT
        self._notes: mmap.mmap | None = None

    def read(self) -> None:
        """Go on with the notes of an earlier life, where there are any. OSError."""
        if self._path.exists() and self._path.stat().st_size == self._pages:
            self._open()

    def note(self, start: int, length: int) -> None:
        """Somebody outside is about to be given this part of an extent. OSError where it cannot be noted."""
        notes = self._notes or self._open()
        first, end = _pages(start, length)
        notes[first:end] = _NOTED * (end - first)

    def has(self, start: int, length: int) -> bool:
        """Whether any page of an extent is noted."""
        notes = self._notes
        return notes is not None and notes.find(_NOTED, *_pages(start, length)) >= 0

    def clear(self, start: int, length: int) -> None:
        """These pages are nobody's any more."""
        notes = self._notes
        if notes is not None:
            first, end = _pages(start, length)
            notes[first:end] = bytes(end - first)

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The noted parts of a span of whole pages, ascending."""
        notes = self._notes
        if notes is None:
            return
        page, end = start // ALIGNMENT, stop // ALIGNMENT
        while (page := notes.find(_NOTED, page, end)) >= 0:
            after = notes.find(b"\0", page, end)
            after = end if after < 0 else after
            yield page * ALIGNMENT, after * ALIGNMENT
            page = after

    def close(self) -> None:
        """Keep the notes for the next life. Idempotent."""
        notes, self._notes = self._notes, None
        if notes is not None:
            notes.close()

    def _open(self) -> mmap.mmap:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(descriptor).st_size != self._pages:
                os.ftruncate(descriptor, 0)  # of another size: of an arena that was made anew
            # Or a full file system would end the process at the first write. It has this size only once all of it is there.
            os.posix_fallocate(descriptor, 0, self._pages)
            self._notes = mmap.mmap(descriptor, self._pages)
        finally:
            os.close(descriptor)
        return self._notes


def _pages(start: int, length: int) -> tuple[int, int]:
    return start // ALIGNMENT, -(-(start + length) // ALIGNMENT)
