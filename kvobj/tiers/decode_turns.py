"""How many coded blobs are held at a time while there is no room yet to decode them into.

Each needs a second extent beside the one that it lies in. Were as many held as there are readers, their coded frames would fill the
arena, and none of them would ever get the room that it waits for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from kvobj.errors import BusyError

AT_ONCE: Final = 4
"""As many as the pool decodes and as many again that are read meanwhile. A blob is an eighth of the arena at most (`store.split`):
what is held coded is half of it, and the rest is there to decode into."""
WAIT_SECONDS: Final = 5.0


class DecodeTurns:
    """Turns, first come first served, of all that decode into one arena. Event-loop-only."""

    __slots__ = ("_turns", "_wait_seconds")

    def __init__(self, *, at_once: int = AT_ONCE, wait_seconds: float = WAIT_SECONDS) -> None:
        self._turns = asyncio.Semaphore(at_once)
        self._wait_seconds = wait_seconds

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """For the time that a blob is held coded and decoded. `BusyError` where none came in time."""
        try:
            async with asyncio.timeout(self._wait_seconds):
                await self._turns.acquire()
        except TimeoutError as error:
            raise BusyError("too many blobs wait to be decoded") from error
        try:
            yield
        finally:
            self._turns.release()
