"""Bytes of many requests under one bound: who needs more than is left waits its turn, up to a deadline.

For work that holds what it has while it asks for more: were it not counted whole before it begins, two such could wait for each
other's rest.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import Final

from kvobj.errors import BusyError, EntityTooLargeError

ASIDE_SHARE: Final = 2
"""What is set aside keeps nobody out up to this share of what may be inside, one part in so many."""


class ByteGate:
    """At most `limit_bytes` inside at a time, first come first served. Event-loop-only.

    Who may never go out can be set aside: it keeps nobody out then. That is bounded, since what it holds is held all the same: what
    is set aside beyond `ASIDE_SHARE` counts as inside.
    """

    __slots__ = ("_aside_bytes", "_aside_bytes_max", "_free_bytes", "_waiting", "limit_bytes", "wait_seconds")

    def __init__(self, *, limit_bytes: int, wait_seconds: float) -> None:
        self.limit_bytes = limit_bytes
        self.wait_seconds = wait_seconds
        self._free_bytes = limit_bytes
        self._aside_bytes = 0
        self._aside_bytes_max = limit_bytes // ASIDE_SHARE
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def enter(self, size_bytes: int) -> None:
        """Go in with so many bytes; matched by one `leave`. `EntityTooLargeError` (never any room), `BusyError` (not in time)."""
        if size_bytes > self.limit_bytes:
            raise EntityTooLargeError("the batch is too large", size_bytes=size_bytes, limit_bytes=self.limit_bytes)
        if not self._waiting and size_bytes <= self._room_bytes:
            self._free_bytes -= size_bytes
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size_bytes, turn))
        try:
            async with asyncio.timeout(self.wait_seconds):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self._free_bytes += size_bytes  # let in and given up in the same moment
            else:
                with suppress(ValueError):  # passed over already
                    self._waiting.remove((size_bytes, turn))
            self._let_in()
            if isinstance(error, TimeoutError):
                raise BusyError("too many bytes are on their way in", size_bytes=size_bytes) from error
            raise

    def leave(self, size_bytes: int) -> None:
        """Go out with what one went in with."""
        self._free_bytes += size_bytes
        self._let_in()

    def set_aside(self, size_bytes: int) -> None:
        """Who went in with so many bytes may stay for ever; matched by one `leave_aside`, in place of `leave`."""
        self._aside_bytes += size_bytes
        self.leave(size_bytes)

    def leave_aside(self, size_bytes: int) -> None:
        """Go out after all."""
        self._aside_bytes -= size_bytes
        self._let_in()

    @property
    def _room_bytes(self) -> int:
        return self._free_bytes - max(0, self._aside_bytes - self._aside_bytes_max)

    def _let_in(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._room_bytes:
            size_bytes, turn = self._waiting.popleft()
            if turn.done():
                continue
            self._free_bytes -= size_bytes
            turn.set_result(None)
