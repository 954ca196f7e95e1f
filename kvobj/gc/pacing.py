"""Collection yields to whoever is being served: beside other work it keeps a rate, alone it takes what it can get."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from kvobj.clock import Clock

BATCH_MAX: Final = 500
# Where nobody waits for the writer: each batch is flushed once, whatever its size.
BATCH_IDLE: Final = 1000
# Of the rate's chunks so many batches are made a second: small ones, since a batch holds up the catalog's writer.
BATCHES_PER_SECOND: Final = 20
# Of claims fewer and larger ones: a chunk of one takes the writer a third of what one of a recall does, and beside others its flush
# and its turns on threads take longer than some hundred chunks.
CLAIMS_PER_SECOND: Final = 4
CLAIM_IDLE: Final = 2000
# The store counts as idle when nobody asked it anything for so long.
IDLE_SECONDS: Final = 0.5


class Pace:
    """Tells how large a batch may be, and waits after it. Event-loop-only."""

    def __init__(
        self, clock: Clock, *, chunks_per_second: int, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._clock = clock
        self._chunks_per_second = chunks_per_second
        self._sleep = sleep
        self._last_request = float("-inf")

    def note_request(self) -> float:
        """Somebody is being served. The clock's monotonic time."""
        self._last_request = now = self._clock.monotonic()
        return now

    @property
    def is_idle(self) -> bool:
        """Whether nobody asked the store anything for a while."""
        return self._clock.monotonic() - self._last_request >= IDLE_SECONDS

    @property
    def batch(self) -> int:
        """How many chunks to take at once."""
        if self.is_idle:
            return BATCH_IDLE
        return max(1, min(BATCH_MAX, self._chunks_per_second // BATCHES_PER_SECOND))

    @property
    def claim_batch(self) -> int:
        """How many chunks to condemn and claim at once."""
        if self.is_idle:
            return CLAIM_IDLE
        return max(1, min(BATCH_MAX, self._chunks_per_second // CLAIMS_PER_SECOND))

    async def after(self, chunks: int, *, seconds: float) -> None:
        """Yield after a batch of so many chunks that took so many seconds; as long as the rate asks, unless the store is idle."""
        wait = 0.0 if self.is_idle else chunks / self._chunks_per_second - seconds
        await self._sleep(max(0.0, wait))
