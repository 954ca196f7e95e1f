"""Threads that receive long bodies straight into their memory. Who is alone has no use for them: there the event loop, which nobody
else waits for, saves the hand-over and the way back."""

from __future__ import annotations

import asyncio
import ctypes
from typing import Final

from kvobj.wire.body_threads import BodyThreads, Direction, native_threads

RECEIVED_BYTES_MIN: Final = 512 * 1024
"""From here on what is left of a body is worth the two hops, as of senders. On 16 cores, four connections, GB/s received with
threads and without: bodies of 32 MiB 10 to 13 and 3 to 5, of 8 MiB 6 to 12 and 3.5, of 1 MiB 1.7 to 2.6 and 1.4 (two runs of each
in turn)."""
_TOLD_BYTES: Final = 2 * 1024 * 1024
"""As often as this its owner, who hashes and hands on what has come, is told of a body that still comes."""
_TURNS_ALONE: Final = 16
"""As of senders: of four connections one has two or three turns in a row now and then."""


class BodyReceivers(BodyThreads):
    """The threads, and who should rather do without. Event loop only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, native: ctypes.CDLL, *, threads: int) -> None:
        super().__init__(loop, native, Direction.RECEIVE, threads=threads, told_bytes=_TOLD_BYTES)
        self._latest: object | None = None
        self._in_turn = _TURNS_ALONE

    def is_alone(self, who: object) -> bool:
        """Note that `who` has a long body coming; whether nobody else has had one since its last sixteen, so that nobody waits for
        the event loop while that receives it."""
        if self._latest is not who:
            if self._latest is not None:
                self._in_turn = 0
            self._latest = who
        self._in_turn += 1
        return self._in_turn > _TURNS_ALONE and self.is_idle


def make_receivers(loop: asyncio.AbstractEventLoop, *, threads: int) -> BodyReceivers | None:
    """Receivers for this event loop; None where there is no native library that has them."""
    native = native_threads() if threads else None
    return None if native is None else BodyReceivers(loop, native, threads=threads)
