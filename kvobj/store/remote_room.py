"""How much may wait to be uploaded: whoever would add to a full queue waits for it to shrink, up to a deadline.

The queue itself counts what is in it; what is counted here is what is about to be added. Each object counts `ENTRY_BYTES` beside
its own bytes, so that small ones are bounded too: their entries, and those that an overwriting has left behind, are rows of the
catalog.
An object larger than the whole bound goes in when nothing else waits. Event-loop-only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from kvobj.catalog.remote_protocol import RemoteQueue
from kvobj.errors import BusyError

ENTRY_BYTES: Final = 4096


class QueueRoom:
    """At most `limit_bytes` of objects, each counted with `entry_bytes` more, in the queue and on their way into it."""

    def __init__(
        self, queue: RemoteQueue, *, limit_bytes: int, wait_seconds: float, entry_bytes: int = ENTRY_BYTES
    ) -> None:
        self.limit_bytes = limit_bytes
        self._entry_bytes = entry_bytes
        self._queue = queue
        self._wait_seconds = wait_seconds
        self._coming_bytes = 0
        self._shrunk = asyncio.Event()

    async def enter(self, size_bytes: int) -> None:
        """Wait until so much more may be queued; matched by one `leave`. `BusyError` at the deadline."""
        if not self._has_room(size_bytes):
            try:
                async with asyncio.timeout(self._wait_seconds):
                    while not self._has_room(size_bytes):
                        self._shrunk.clear()
                        await self._shrunk.wait()
            except TimeoutError as error:
                waiting = self._queue.totals.size_bytes
                raise BusyError("too much is waiting to be uploaded", queued_bytes=waiting) from error
        self._coming_bytes += size_bytes + self._entry_bytes

    def leave(self, size_bytes: int) -> None:
        """It is in the queue now, or will never be."""
        self._coming_bytes -= size_bytes + self._entry_bytes
        self._shrunk.set()

    def note(self) -> None:
        """The queue has become shorter."""
        self._shrunk.set()

    @asynccontextmanager
    async def of(self, size_bytes: int) -> AsyncIterator[None]:
        """`enter` and `leave` around a commit."""
        await self.enter(size_bytes)
        try:
            yield
        finally:
            self.leave(size_bytes)

    async def below(self, share: float) -> None:
        """Return once at most this share of the bound is taken. Without a deadline: for who has time."""
        while self._taken_bytes() > share * self.limit_bytes:
            self._shrunk.clear()
            await self._shrunk.wait()

    def _has_room(self, size_bytes: int) -> bool:
        taken = self._taken_bytes()
        return not taken or taken + size_bytes + self._entry_bytes <= self.limit_bytes

    def _taken_bytes(self) -> int:
        totals = self._queue.totals
        return totals.size_bytes + totals.objects * self._entry_bytes + self._coming_bytes
