"""Transfers that the kernel carries out by itself while the event loop goes on: no thread, and no hand-over to one and back.

Linux native AIO on descriptors that were opened with O_DIRECT, told of by an eventfd that the loop watches. Nothing here waits:
what the kernel could not begin without waiting, and what finds no free slot, is refused and left to the caller's threads. So the
loop is held up by the bare submission alone, 25 to 50 µs. Event loop only.

The kernel moves the bytes whatever becomes of who asked: a transfer's memory and descriptor must stay until its `on_done` was
called, which cancelling does not bring about. `close` is for a queue without transfers. One that still has some is only looked at
no more (`abandon`): nobody is told of them, so that who asked never gives their extents back, and context and eventfd end with the
process.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from enum import IntEnum
from typing import Final, Protocol, Self

from kvobj.buffers import address_of
from kvobj.native import library
from kvobj.tiers.nvme.record import RECORD_BYTES

# So many transfers are a few requests each, less than a device takes before who submits has to wait.
SLOTS: Final = 16

# Not on this file system or kernel, whatever is asked next.
_NEVER: Final = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})
# These need not be about the medium, either, and the thread that tries again knows. Of a write that flushes itself they may be the
# flush's, and then trying again would hide that bytes were lost.
_PERHAPS: Final = frozenset({errno.EINTR, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT})

# Both keep the interpreter's lock: they are short, and who gives it up may wait for other threads' Python to get it back.
_CONTEXT, _NUMBER, _POINTER, _SIZE = ctypes.c_uint64, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64
_BEGIN: Final = ctypes.PYFUNCTYPE(
    _NUMBER, _CONTEXT, _NUMBER, _NUMBER, _NUMBER, _POINTER, _SIZE, _POINTER, _SIZE, ctypes.c_int64, _SIZE
)
_REAP: Final = ctypes.PYFUNCTYPE(_NUMBER, _CONTEXT, _NUMBER, _POINTER, _NUMBER)


class Kind(IntEnum):
    """What a transfer does, as disk_queue.c numbers it. DURABLY: flushed as if by fdatasync before it is done."""

    READ = 0
    WRITE = 1
    WRITE_DURABLY = 2
    FLUSH = 3


class Slot:
    """The place of one transfer in the queue, with a record page of its own that may go in front of the bytes."""

    __slots__ = ("index", "on_done", "page", "page_address", "view")

    def __init__(self, index: int, page: memoryview) -> None:
        self.index = index
        self.page = page
        self.page_address = address_of(page)
        self.view: memoryview | None = None
        self.on_done: Callable[[int], None] | None = None


class TransferQueue(Protocol):
    """What the tier asks of the kernel; the seam for tests of media that fail. Event loop only."""

    def take(self) -> Slot | None:
        """A free slot, or None. It is the caller's until `begin`, or `give_back`."""
        ...

    def give_back(self, slot: Slot) -> None:
        """The slot is not needed: free again."""
        ...

    def begin(
        self,
        slot: Slot,
        kind: Kind,
        descriptor: int,
        on_done: Callable[[int], None],
        *,
        view: memoryview | None = None,
        offset: int = 0,
        with_page: bool = False,
    ) -> int:
        """Begin a transfer at `offset`, of the slot's page first if so said, then of `view`: all multiples of 4096. The error's
        number where the kernel refuses it: then nothing was begun and the slot is free. Else 0, and the slot is free again after
        `on_done`, which is given the bytes moved, or the error's negated number, with the slot's page still as it was; it must
        not raise."""
        ...

    def close(self) -> None:
        """Give all back; nothing may be under way. Idempotent."""
        ...

    def abandon(self) -> None:
        """Look at outcomes no more; what is under way goes on. Idempotent."""
        ...


def is_for_threads(kind: Kind, result: int, wanted: int) -> bool:
    """Whether a thread shall do the transfer of `wanted` bytes instead, all of it: it was refused, or the kernel stopped short. Its
    errors are then those of the medium. Not for flushes: whatever is told of one that was begun is the flush's own, and final."""
    return (
        is_refused_now(result, wanted) or is_unknown(result) or (kind is not Kind.WRITE_DURABLY and -result in _PERHAPS)
    )


def is_refused_now(result: int, wanted: int) -> bool:
    """Whether the kernel would have had to wait for this transfer, of this place or at this time."""
    return result == -errno.EAGAIN or 0 <= result < wanted


def is_unknown(result: int) -> bool:
    """Whether the kernel has no such transfers of this file at all."""
    return -result in _NEVER


def why_no_queue() -> str:
    """The likely reason that `KernelQueue.open` found none, for people."""
    if _native() is None:
        return "no native library that has the kernel's queue"
    return "io_setup was refused (fs.aio-max-nr used up, or forbidden here)"


class KernelQueue:
    """See `TransferQueue`. Made by `open`."""

    def __init__(self, native: ctypes.CDLL, context: int, event: int) -> None:
        self._native = native
        self._submit = _BEGIN(("kvobj_disk_queue_begin", native))
        self._take_outcomes = _REAP(("kvobj_disk_queue_reap", native))
        self._context = context
        self._event = event
        self._pages = memoryview(mmap.mmap(-1, SLOTS * RECORD_BYTES))
        pages = (self._pages[at : at + RECORD_BYTES] for at in range(0, SLOTS * RECORD_BYTES, RECORD_BYTES))
        self._slots = [Slot(index, page) for index, page in enumerate(pages)]
        self._free = self._slots[:]
        self._outcomes = (ctypes.c_int64 * (2 * SLOTS))()
        self._outcomes_address = ctypes.addressof(self._outcomes)
        self._is_watched = True
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(event, self._reap)

    @classmethod
    def open(cls) -> Self | None:
        """A queue for the running loop, or None where there is none to be had: no native library, no such system call, none
        allowed (containers), none left (`fs.aio-max-nr`)."""
        native = _native()
        if native is None:
            return None
        context = ctypes.c_uint64()
        if native.kvobj_disk_queue_open(SLOTS, ctypes.byref(context)):
            return None
        try:
            event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError:
            native.kvobj_disk_queue_close(context.value)
            return None
        return cls(native, context.value, event)

    def take(self) -> Slot | None:
        """See `TransferQueue.take`."""
        return self._free.pop() if self._free and self._is_watched else None

    def give_back(self, slot: Slot) -> None:
        """See `TransferQueue.give_back`."""
        self._free.append(slot)

    def begin(
        self,
        slot: Slot,
        kind: Kind,
        descriptor: int,
        on_done: Callable[[int], None],
        *,
        view: memoryview | None = None,
        offset: int = 0,
        with_page: bool = False,
    ) -> int:
        """See `TransferQueue.begin`."""
        slot.view = view
        slot.on_done = on_done
        error: int = -self._submit(
            self._context,
            self._event,
            kind,
            descriptor,
            slot.page_address,
            RECORD_BYTES if with_page else 0,
            0 if view is None else address_of(view),
            0 if view is None else len(view),
            offset,
            slot.index,
        )
        if error:
            slot.view = slot.on_done = None
            self._free.append(slot)
        return error

    def close(self) -> None:
        """See `TransferQueue.close`."""
        if not self._is_watched:
            return
        self.abandon()
        self._native.kvobj_disk_queue_close(self._context)
        os.close(self._event)

    def abandon(self) -> None:
        """See `TransferQueue.abandon`."""
        if self._is_watched:
            self._is_watched = False
            self._loop.remove_reader(self._event)

    def _reap(self) -> None:
        count = self._take_outcomes(self._context, self._event, self._outcomes_address, SLOTS)
        outcomes = self._outcomes
        for at in range(0, 2 * count, 2):
            self._end(self._slots[outcomes[at]], outcomes[at + 1])

    def _end(self, slot: Slot, result: int) -> None:
        on_done = slot.on_done
        slot.view = slot.on_done = None
        try:
            if on_done is not None:
                on_done(result)
        except Exception as error:  # noqa: BLE001 - others' outcomes were taken along, and nobody tells of them again
            self._loop.call_exception_handler({"message": "outcome of a transfer", "exception": error})
        finally:
            self._free.append(slot)


def _native() -> ctypes.CDLL | None:
    """The native library, if there is one that has these functions, with what those take and give that may wait declared."""
    native = library()
    if native is None or not hasattr(native, "kvobj_disk_queue_begin") or not hasattr(os, "eventfd"):
        return None
    native.kvobj_disk_queue_open.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_uint64)]
    native.kvobj_disk_queue_close.argtypes = [ctypes.c_uint64]
    native.kvobj_disk_queue_close.restype = None
    return native
