"""One segment file: preallocated, O_DIRECT where the file system has it, and flushed in groups.

A file appears under its name only once it has all its room and that is durable, so a crash leaves none that is too short. After
a failed write or flush the file is `failed` for as long as it is open: nothing new is put into it, reads go on. What lies where
is not known here (the directory knows).
"""

from __future__ import annotations

import errno
import mmap
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvobj.tiers.nvme.flush import GroupFlush
from kvobj.tiers.nvme.io import Disk, read_fully, write_fully
from kvobj.tiers.nvme.kernel_queue import is_refused_now, is_unknown
from kvobj.tiers.nvme.record import RECORD_BYTES

_REFUSED_MAX: Final = 4096
# After a refusal so many asks for the same place go to threads, and twice as many after each more. What was refused for the moment
# is soon asked for again; a place that spans two runs of blocks costs one transfer more in 65.
_SKIPPED_FIRST: Final = 2
_SKIPPED_MAX: Final = 64
_NAME: Final = re.compile(r"segment-(\d{6,})")


class SegmentFile:
    """An open segment. `create`, `open`, `write`, `read` and `close` block, and any thread may call them, as it may `fail` and
    `failed`. What is known of the kernel's queue (`queued`, `refused`, `may_queue`, `note_outcome`) is the event loop's."""

    __slots__ = (
        "_disk",
        "_failed",
        "descriptor",
        "direct",
        "flushes",
        "number",
        "path",
        "queued",
        "refused",
        "size_bytes",
    )

    def __init__(self, disk: Disk, path: Path, *, descriptor: int, direct: bool, number: int, size_bytes: int) -> None:
        self._disk = disk
        self.descriptor = descriptor
        self._failed = False
        self.path = path
        self.number = number
        self.size_bytes = size_bytes
        self.direct = direct
        self.queued = direct
        """Whether the kernel may be asked for transfers of this file without a thread; nobody asks any more once it said that it
        has no such thing here. Buffered I/O would be done within the asking."""
        self.refused: dict[tuple[int, bool], tuple[int, int, int]] = {}
        """What the kernel refused to do without a thread, by offset and whether it was a write: the length, how many asks are
        skipped after such a refusal, and how many of them are left. Event loop only."""
        self.flushes = GroupFlush(self._flush)

    @classmethod
    def create(cls, disk: Disk, directory: Path, *, number: int, size_bytes: int) -> SegmentFile:
        """Make segment `number` with all its room. OSError (ENOSPC included) leaves nothing behind."""
        path = directory / f"segment-{number:06d}"
        unfinished = path.with_suffix(".new")
        unfinished.unlink(missing_ok=True)
        try:
            descriptor, direct = _open(disk, unfinished, os.O_CREAT, allocated_bytes=size_bytes)
            try:
                unfinished.rename(path)
                disk.flush_names(directory)
            except OSError:
                disk.close(descriptor)
                raise
        except OSError:
            unfinished.unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            raise
        # Not zeroed ahead: the first pass over unwritten extents ran at 2.7 GB/s against 3.0 GB/s for later ones (ext4), less
        # than zeroing would cost.
        return cls(disk, path, descriptor=descriptor, direct=direct, number=number, size_bytes=size_bytes)

    @classmethod
    def open(cls, disk: Disk, path: Path) -> SegmentFile:
        """Open an existing segment, whose name gives its number. OSError where that cannot be done."""
        descriptor, direct = _open(disk, path, 0)
        return cls(
            disk,
            path,
            descriptor=descriptor,
            direct=direct,
            number=segment_number(path) or 0,
            size_bytes=path.stat().st_size // RECORD_BYTES * RECORD_BYTES,
        )

    @property
    def failed(self) -> bool:
        """Whether a write or flush failed: the medium may have lied about more than the one blob it was for."""
        return self._failed

    def may_queue(self, offset: int, length: int, *, writes: bool) -> bool:
        """Whether to ask the kernel for this transfer without a thread. A write that spans two runs of blocks it refuses each time,
        and only when it has done the first of them, and places of blobs come again; but most refusals are for the moment alone,
        so each place is asked for again after some asks. Each call counts as one. Event loop only."""
        if not self.refused:
            return self.queued
        refusal = self.refused.get((offset, writes))
        if refusal is None or length < refusal[0]:
            return self.queued
        refused_length, skipped, left = refusal
        if left:
            self.refused[offset, writes] = refused_length, skipped, left - 1
        return self.queued and not left

    def note_outcome(self, offset: int, length: int, result: int, *, writes: bool) -> None:
        """What the kernel told of a transfer without a thread, begun or not: its bytes, or the error's negated number. Other errors
        than its refusals say nothing about the next one. Event loop only."""
        if result == length and not self.refused:
            return
        place = offset, writes
        refusal = self.refused.get(place)
        if is_unknown(result):
            self.queued = False
        elif is_refused_now(result, length):
            self.refused.pop(place, None)
            if len(self.refused) >= _REFUSED_MAX:
                self.refused.clear()
            skipped = _SKIPPED_FIRST if refusal is None else min(2 * refusal[1], _SKIPPED_MAX)
            self.refused[place] = length, skipped, skipped
        elif refusal is not None and result >= refusal[0]:
            del self.refused[place]

    def fail(self) -> None:
        """A write or flush that was not done by this object failed."""
        self._failed = True

    def write(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Write aligned buffers behind each other at `offset`. An OSError other than lack of room fails the segment."""
        try:
            write_fully(self._disk, self.descriptor, buffers, offset)
        except OSError as error:
            if not is_out_of_room(error):
                self._failed = True
            raise

    def read(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Fill aligned buffers from `offset`. OSError where the medium fails or the file ends early."""
        read_fully(self._disk, self.descriptor, buffers, offset)

    def close(self) -> None:
        """Close the file; nobody may use it after."""
        self._disk.close(self.descriptor)

    def _flush(self) -> None:
        try:
            self._disk.flush(self.descriptor)
        except OSError:
            self._failed = True
            raise


def segment_number(path: Path) -> int | None:
    """The number in a segment's file name, None for any other file."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def segment_paths(directory: Path) -> list[Path]:
    """The segments in `directory`, by number. Files that a crash left unfinished are removed."""
    for unfinished in directory.glob("segment-*.new"):
        unfinished.unlink()
    numbered = [(number, path) for path in directory.iterdir() if (number := segment_number(path)) is not None]
    return [path for _, path in sorted(numbered)]


def is_out_of_room(error: OSError) -> bool:
    """Whether the file system refused for lack of room or quota."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def _open(disk: Disk, path: Path, flags: int, *, allocated_bytes: int = 0) -> tuple[int, bool]:
    """Open with O_DIRECT if the file system takes the flag and a transfer, else buffered. With `allocated_bytes` the file gets that
    much room first, and is written to: room for a single page of it would be a run of blocks of its own."""
    try:
        return _open_direct(disk, path, flags, allocated_bytes), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    descriptor = disk.open(path, os.O_RDWR | flags)
    try:
        if allocated_bytes:
            disk.allocate(descriptor, allocated_bytes)
    except OSError:
        disk.close(descriptor)
        raise
    return descriptor, False


def _open_direct(disk: Disk, path: Path, flags: int, allocated_bytes: int) -> int:
    """Open with O_DIRECT and try it. OSError leaves nothing open; EINVAL says that the file system has no such I/O, or has not the
    call that gives room: the C library then writes a byte a block instead, which direct I/O refuses."""
    descriptor = disk.open(path, os.O_RDWR | flags | os.O_DIRECT)
    page = mmap.mmap(-1, RECORD_BYTES)
    try:
        with memoryview(page) as view:
            # Some file systems accept the flag and refuse the first transfer. An existing segment's bytes are not ours to write.
            if allocated_bytes:
                disk.allocate(descriptor, allocated_bytes)
                disk.write(descriptor, [view], 0)
            else:
                disk.read(descriptor, [view], 0)
    except OSError:
        disk.close(descriptor)
        raise
    finally:
        page.close()
    return descriptor
