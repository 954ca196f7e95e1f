"""System calls on segment files, as an argument, so that tests can make the n-th one fail, stop short or lie.

`Disk` is the seam; `SystemDisk` is the kernel. `read_fully` and `write_fully` finish what the kernel stopped short, and turn a
file that is too short into an error. All calls but `transfer_queue` block and release the GIL: they belong on the tier's threads.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from kvobj.tiers.nvme.kernel_queue import KernelQueue, TransferQueue


class Disk(Protocol):
    """What the nvme tier asks of a file system. Errors are OSError, as from the kernel."""

    def open(self, path: Path, flags: int) -> int:
        """Open or create (mode 0600) a file and return its descriptor."""
        ...

    def close(self, descriptor: int) -> None:
        """Close it."""
        ...

    def allocate(self, descriptor: int, size_bytes: int) -> None:
        """Make sure that `[0, size_bytes)` has room on the disk, and that the file is that long."""
        ...

    def available_bytes(self, directory: Path) -> int:
        """Room that a process without privileges can still take in the file system of `directory`."""
        ...

    def write(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """One pwritev; returns the bytes written."""
        ...

    def read(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """One preadv; returns the bytes read, 0 at the end of the file."""
        ...

    def flush(self, descriptor: int) -> None:
        """Make what was written durable (fdatasync). After an OSError it must not be tried again: the pages may be
        marked clean although they never arrived (see "fsyncgate")."""
        ...

    def flush_names(self, directory: Path) -> None:
        """Make the directory's entries durable."""
        ...

    def transfer_queue(self) -> TransferQueue | None:
        """A new queue for transfers without threads, of the running event loop, on whose thread this is called; None where
        threads must do them all. The caller closes it."""
        ...


class SystemDisk:
    """The kernel's file systems."""

    def open(self, path: Path, flags: int) -> int:
        """See `Disk.open`."""
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def close(self, descriptor: int) -> None:
        """See `Disk.close`."""
        os.close(descriptor)

    def allocate(self, descriptor: int, size_bytes: int) -> None:
        """See `Disk.allocate`."""
        os.posix_fallocate(descriptor, 0, size_bytes)
        os.fsync(descriptor)

    def available_bytes(self, directory: Path) -> int:
        """See `Disk.available_bytes`."""
        state = os.statvfs(directory)
        return state.f_bavail * state.f_frsize

    def write(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See `Disk.write`."""
        return os.pwritev(descriptor, buffers, offset)

    def read(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See `Disk.read`."""
        return os.preadv(descriptor, buffers, offset)

    def flush(self, descriptor: int) -> None:
        """See `Disk.flush`."""
        os.fdatasync(descriptor)

    def flush_names(self, directory: Path) -> None:
        """See `Disk.flush_names`."""
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def transfer_queue(self) -> TransferQueue | None:
        """See `Disk.transfer_queue`."""
        return KernelQueue.open()


def write_fully(disk: Disk, descriptor: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Write all the buffers one behind the other at `offset`. OSError (EIO) where the medium takes nothing more."""
    left = list(buffers)
    while left:
        written = disk.write(descriptor, left, offset)
        if written <= 0:
            raise OSError(errno.EIO, "the medium takes no more bytes")
        offset += written
        left = _behind(left, written)


def read_fully(disk: Disk, descriptor: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Fill all the buffers one behind the other from `offset`. OSError (EIO) where the file ends before they are full."""
    left = list(buffers)
    while left:
        count = disk.read(descriptor, left, offset)
        if count <= 0:
            raise OSError(errno.EIO, "the file ends early")
        offset += count
        left = _behind(left, count)


def _behind(buffers: list[memoryview], done: int) -> list[memoryview]:
    """The buffers without their first `done` bytes."""
    while buffers and done >= len(buffers[0]):
        done -= len(buffers[0])
        buffers = buffers[1:]
    return [buffers[0][done:], *buffers[1:]] if buffers and done else buffers
