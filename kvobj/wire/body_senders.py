"""Threads that send long bodies, so that one event loop is not all there is to copy into sockets.

Who is alone has no use for that: there the loop, which nobody else waits for, saves the hand-over and the way back.

A sender is a native thread without the interpreter's lock: it fills the socket and waits for it until the body has left. There is a
fixed number of them and none is ever queued for: who finds no free one, and whose client turns out to be slow, goes on by the
event loop, as all do where there is no native library. Event loop only.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from contextlib import suppress
from enum import IntEnum
from typing import Final

from kvobj.buffers import address_of
from kvobj.native import library

SENT_BYTES_MIN: Final = 512 * 1024
"""From here on a body is worth the two hops."""
# A thread is for who takes at least 40 MB/s: others are better waited for by the event loop, which can wait for thousands.
_PATIENCE_MS: Final = 50
_PATIENCE_BYTES: Final = 2 * 1024 * 1024
_STATE_ENDED: Final = 4  # body_senders.c
ALONE_BYTES_MAX: Final = 2 * 1024 * 1024
"""Up to here a body is sent by the event loop where nobody else is there who could wait for that: with one connection, 1 MiB, 0.97
of a bare socket so, 0.77 by a thread. With four it is 0.71 and 0.81."""
_TURNS_ALONE: Final = 16
"""Of four connections one has two or three turns in a row now and then."""


class SendOutcome(IntEnum):
    """How a sending ended by itself. SLOW: the client is, and the rest is its owner's. FAILED: the connection is gone."""

    WHOLE = 0
    SLOW = 1
    FAILED = 2


class _Sender(ctypes.Structure):
    """The front of `sender_t` in body_senders.c."""

    _fields_ = (("state", ctypes.c_int32), ("outcome", ctypes.c_int32), ("sent", ctypes.c_uint64))


class Sending:
    """One body on its way. `end` must be called, while the socket is open: from then on the memory is the caller's again."""

    __slots__ = ("_index", "_sender", "_senders", "_sent", "_view", "ended")

    def __init__(self, senders: BodySenders, index: int, view: memoryview) -> None:
        self._senders = senders
        self._index = index
        self._sender = senders.at(index)
        self._view: memoryview | None = view
        self._sent = 0
        self.ended: asyncio.Future[SendOutcome | None] = senders.loop.create_future()
        """Done when it has ended by itself. Its owner may end the wait by it, too."""

    @property
    def left(self) -> int:
        """Bytes that have not left yet; 0 once it was ended."""
        return 0 if self._view is None else len(self._view) - int(self._sender.sent)

    def end(self) -> int:
        """Stop it if it still goes on; how many bytes have left. Idempotent."""
        if self._view is not None:
            self._sent = self._senders.end(self._index)
            self._view = None
        return self._sent

    def look(self) -> None:
        """See whether it has ended."""
        if self._sender.state == _STATE_ENDED and not self.ended.done():
            self.ended.set_result(SendOutcome(self._sender.outcome))


class BodySenders:
    """Up to `threads` sendings at once, on one event loop; the threads are made for the first. `close` ends what still goes on."""

    def __init__(self, loop: asyncio.AbstractEventLoop, native: ctypes.CDLL, *, threads: int) -> None:
        self.loop = loop
        self._native = native
        self._threads = threads
        self._event = -1
        self._all: int | None = None
        self._senders: list[_Sender] = []
        self._sendings: dict[int, Sending] = {}
        self.latest: object | None = None
        """Who wrote last."""
        self.in_turn = 0
        """How many long bodies that were in turn."""

    def is_alone(self, who: object, size_bytes: int) -> bool:
        """Note that `who` has a long body to send; whether it does better to send that itself: it is not too long, and nobody else
        has written anything since its last sixteen, so that nobody waits for the event loop meanwhile."""
        if self.latest is not who:
            self.latest, self.in_turn = who, 0
        self.in_turn += 1
        return self.in_turn > _TURNS_ALONE and size_bytes <= ALONE_BYTES_MAX and not self._sendings

    def send(self, descriptor: int, view: memoryview) -> Sending | None:
        """Send the whole view (not empty) to a non-blocking socket; None where no thread is free. Nobody else may write to either
        meanwhile."""
        if self._all is None and not self._open():
            return None
        index = self._native.kvobj_sender_begin(self._all, descriptor, address_of(view), len(view))
        if index < 0:
            return None
        sending = self._sendings[index] = Sending(self, index, view)
        return sending

    def at(self, index: int) -> _Sender:
        """What the thread tells of itself."""
        return self._senders[index]

    def end(self, index: int) -> int:
        """See `Sending.end`."""
        del self._sendings[index]
        return int(self._native.kvobj_sender_end(self._all, index))

    def _look(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._event)
        for sending in self._sendings.values():
            sending.look()

    def _open(self) -> bool:
        """Make the threads, once; False where there are none."""
        if not self._threads:
            return False
        native, event = self._native, os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        senders = native.kvobj_senders_open(self._threads, event, _PATIENCE_MS, _PATIENCE_BYTES)
        self._threads = 0
        if not senders:
            os.close(event)
            return False
        self._event, self._all = event, senders
        count = native.kvobj_senders_count(senders)
        self._senders = [_Sender.from_address(native.kvobj_sender_at(senders, index)) for index in range(count)]
        self.loop.add_reader(event, self._look)
        return True

    def close(self) -> None:
        """End sendings and threads; waits up to the patience for one that still looks at a socket. Idempotent."""
        self._threads = 0
        if self._all is None:
            return
        for sending in list(self._sendings.values()):
            sending.end()
        self.loop.remove_reader(self._event)
        self._senders.clear()
        senders, self._all = self._all, None
        self._native.kvobj_senders_close(senders)
        os.close(self._event)


def make_senders(loop: asyncio.AbstractEventLoop, *, threads: int) -> BodySenders | None:
    """Senders for this event loop; None where there is no native library that has them."""
    native = library()
    if not threads or native is None or not hasattr(os, "eventfd") or not _declare(native):
        return None
    return BodySenders(loop, native, threads=threads)


def _declare(native: ctypes.CDLL) -> bool:
    """Say what the functions take and give; False for a library that was built from an older source."""
    begin = getattr(native, "kvobj_sender_begin", None)
    if begin is None:
        return False
    pointer, size = ctypes.c_void_p, ctypes.c_uint64
    native.kvobj_senders_open.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int, size]
    native.kvobj_senders_open.restype = pointer
    native.kvobj_senders_count.argtypes = [pointer]
    native.kvobj_sender_at.argtypes = [pointer, ctypes.c_int]
    native.kvobj_sender_at.restype = pointer
    begin.argtypes = [pointer, ctypes.c_int, pointer, size]
    native.kvobj_sender_end.argtypes = [pointer, ctypes.c_int]
    native.kvobj_sender_end.restype = size
    native.kvobj_senders_close.argtypes = [pointer]
    native.kvobj_senders_close.restype = None
    return True
