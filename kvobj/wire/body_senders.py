"""Threads that send long bodies. Who is alone has no use for them: there the event loop, which nobody else waits for, saves the
hand-over and the way back."""

from __future__ import annotations

import asyncio
import ctypes
from typing import Final

from kvobj.wire.body_threads import BodyThreads, Direction, native_threads

SENT_BYTES_MIN: Final = 512 * 1024
"""From here on a body is worth the two hops."""
ALONE_BYTES_MAX: Final = 2 * 1024 * 1024
"""Up to here a body is sent by the event loop where nobody else is there who could wait for that: with one connection, 1 MiB, 0.97
of a bare socket so, 0.77 by a thread. With four it is 0.71 and 0.81."""
_TURNS_ALONE: Final = 16
"""Of four connections one has two or three turns in a row now and then."""


class BodySenders(BodyThreads):
    """The threads, and who should rather do without. Event loop only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, native: ctypes.CDLL, *, threads: int) -> None:
        super().__init__(loop, native, Direction.SEND, threads=threads)
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
        return self.in_turn > _TURNS_ALONE and size_bytes <= ALONE_BYTES_MAX and self.is_idle


def make_senders(loop: asyncio.AbstractEventLoop, *, threads: int) -> BodySenders | None:
    """Senders for this event loop; None where there is no native library that has them."""
    native = native_threads() if threads else None
    return None if native is None else BodySenders(loop, native, threads=threads)
