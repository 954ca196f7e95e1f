"""Threads that move long bodies between sockets and memory, so that one event loop is not all there is to copy them.

Each is a native thread without the interpreter's lock: it fills the socket, or the memory from it, and waits for it until the body
is through. There is a fixed number of them and none is ever queued for: who finds no free one, and whose client turns out to be
slow, goes on by the event loop, as all do where there is no native library. Event loop only.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Final

from kvobj.buffers import address_of
from kvobj.native import library

# A thread is for who moves at least 40 MB/s: others are better waited for by the event loop, which can wait for thousands.
_PATIENCE_MS: Final = 50
_PATIENCE_BYTES: Final = 2 * 1024 * 1024
_STATE_ENDED: Final = 4  # body_threads.c


class Direction(IntEnum):
    """What a set of threads does, as body_threads.c numbers it."""

    SEND = 0
    RECEIVE = 1


class MoveOutcome(IntEnum):
    """How a moving ended by itself. SLOW: the client is, and the rest is its owner's. FAILED: the connection is gone, or its other
    side sends no more."""

    WHOLE = 0
    SLOW = 1
    FAILED = 2


class _Mover(ctypes.Structure):
    """The front of `mover_t` in body_threads.c."""

    _fields_ = (("state", ctypes.c_int32), ("outcome", ctypes.c_int32), ("moved", ctypes.c_uint64))


class _Part(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("address", ctypes.c_void_p), ("size_bytes", ctypes.c_size_t))


class Moving:
    """One body on its way. `end` must be called, while the socket is open: from then on the memory is the caller's again."""

    __slots__ = ("_index", "_memory", "_moved", "_mover", "_on_moved", "_size_bytes", "_threads", "ended")

    def __init__(
        self,
        threads: BodyThreads,
        index: int,
        memory: object,
        size_bytes: int,
        on_moved: Callable[[], None] | None = None,
    ) -> None:
        """`memory`: whatever keeps the bytes where they are."""
        self._threads = threads
        self._index = index
        self._mover = threads.at(index)
        self._memory: object | None = memory
        self._size_bytes = size_bytes
        self._moved = 0
        self._on_moved = on_moved
        self.ended: asyncio.Future[MoveOutcome | None] = threads.loop.create_future()
        """Done when it has ended by itself. Its owner may end the wait by it, too."""

    @property
    def moved(self) -> int:
        """Bytes that are through."""
        return self._moved if self._memory is None else int(self._mover.moved)

    @property
    def left(self) -> int:
        """Bytes that are not through yet; 0 once it was ended."""
        return 0 if self._memory is None else self._size_bytes - int(self._mover.moved)

    def end(self) -> int:
        """Stop it if it still goes on; how many bytes are through. Idempotent."""
        if self._memory is not None:
            self._moved = self._threads.end(self._index)
            self._memory = None
        return self._moved

    def look(self) -> None:
        """See whether it has ended, and tell of what has moved."""
        if self._mover.state == _STATE_ENDED and not self.ended.done():
            self.ended.set_result(MoveOutcome(self._mover.outcome))
        if self._on_moved is not None:
            self._on_moved()


class BodyThreads:
    """Up to `threads` bodies at once in one direction, on one event loop; the threads are made for the first. `close` ends what
    still goes on. `told_bytes`: after each so many of a body its `on_moved` is called, and once it has ended (0: then only)."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        native: ctypes.CDLL,
        direction: Direction,
        *,
        threads: int,
        told_bytes: int = 0,
    ) -> None:
        self.loop = loop
        self._native = native
        self._direction = direction
        self._threads = threads
        self._told_bytes = told_bytes
        self._event = -1
        self._all: int | None = None
        self._movers: list[_Mover] = []
        self._movings: dict[int, Moving] = {}

    @property
    def is_idle(self) -> bool:
        """Whether no body is on its way."""
        return not self._movings

    def begin(
        self, descriptor: int, view: memoryview, *, low_water: int = 0, on_moved: Callable[[], None] | None = None
    ) -> Moving | None:
        """Move the whole view (not empty) to or from a non-blocking socket; None where no thread is free. Nobody else may use that
        direction of the socket, or write to the memory, meanwhile. `low_water`: what the socket's SO_RCVLOWAT is, if it is more
        than one: it is lowered as less is left."""
        if self._all is None and not self._open():
            return None
        index = self._native.kvobj_mover_begin(self._all, descriptor, address_of(view), len(view), low_water)
        return None if index < 0 else self._begun(index, view, len(view), on_moved)

    def begin_parts(self, descriptor: int, parts: Sequence[bytes | memoryview]) -> Moving | None:
        """`begin` of several views, of which some may be empty and not all are, to be sent one after the other."""
        if self._all is None and not self._open():
            return None
        table = (_Part * len(parts))()
        size_bytes = 0
        for entry, part in zip(table, parts, strict=True):
            entry.address, entry.size_bytes = address_of(part), len(part)
            size_bytes += len(part)
        index = self._native.kvobj_mover_begin_parts(self._all, descriptor, table, size_bytes)
        return None if index < 0 else self._begun(index, (table, parts), size_bytes, None)

    def _begun(self, index: int, memory: object, size_bytes: int, on_moved: Callable[[], None] | None) -> Moving:
        moving = self._movings[index] = Moving(self, index, memory, size_bytes, on_moved)
        return moving

    def at(self, index: int) -> _Mover:
        """What the thread tells of itself."""
        return self._movers[index]

    def end(self, index: int) -> int:
        """See `Moving.end`."""
        del self._movings[index]
        return int(self._native.kvobj_mover_end(self._all, index))

    def _look(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._event)
        for moving in list(self._movings.values()):
            moving.look()

    def _open(self) -> bool:
        """Make the threads, once; False where there are none."""
        if not self._threads:
            return False
        try:
            event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError:
            return False  # no descriptor is left; the next one asks again
        native = self._native
        movers = native.kvobj_movers_open(
            self._threads, event, self._direction, _PATIENCE_MS, _PATIENCE_BYTES, self._told_bytes
        )
        self._threads = 0
        if not movers:
            os.close(event)
            return False
        self._event, self._all = event, movers
        count = native.kvobj_movers_count(movers)
        self._movers = [_Mover.from_address(native.kvobj_mover_at(movers, index)) for index in range(count)]
        self.loop.add_reader(event, self._look)
        return True

    def close(self) -> None:
        """End movings and threads; waits up to the patience for one that still looks at a socket. Idempotent."""
        self._threads = 0
        if self._all is None:
            return
        for moving in list(self._movings.values()):
            moving.end()
        self.loop.remove_reader(self._event)
        self._movers.clear()
        movers, self._all = self._all, None
        self._native.kvobj_movers_close(movers)
        os.close(self._event)


def native_threads() -> ctypes.CDLL | None:
    """The native library, if there is one that has these threads."""
    native = library()
    if native is None or not hasattr(os, "eventfd") or not _declare(native):
        return None
    return native


def _declare(native: ctypes.CDLL) -> bool:
    """Say what the functions take and give; False for a library that was built from an older source."""
    begin, begin_parts = (getattr(native, f"kvobj_mover_{name}", None) for name in ("begin", "begin_parts"))
    if begin is None or begin_parts is None:
        return False
    pointer, size = ctypes.c_void_p, ctypes.c_uint64
    native.kvobj_movers_open.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int, size, size]
    native.kvobj_movers_open.restype = pointer
    native.kvobj_movers_count.argtypes = [pointer]
    native.kvobj_mover_at.argtypes = [pointer, ctypes.c_int]
    native.kvobj_mover_at.restype = pointer
    begin.argtypes = [pointer, ctypes.c_int, pointer, size, ctypes.c_int]
    begin_parts.argtypes = [pointer, ctypes.c_int, pointer, size]
    native.kvobj_mover_end.argtypes = [pointer, ctypes.c_int]
    native.kvobj_mover_end.restype = size
    native.kvobj_movers_close.argtypes = [pointer]
    native.kvobj_movers_close.restype = None
    return True
