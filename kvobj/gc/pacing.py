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
# Of what is condemned and claimed fewer and larger ones: a chunk of one takes the writer a third of what one of a recall does, and
# beside others a batch's flushes, turns on threads and cold caches take as long as some hundred chunks.
CLAIMS_PER_SECOND: Final = 2
# So many at most, for the sake of who waits meanwhile: two milliseconds of the event loop at a time.
CLAIM_MAX: Final = 1250
CLAIM_IDLE: Final = 2000
# Of blobs to reap: its two changes each wait for a claim, so with the blobs of two claims the reaper keeps up. nvme deletes as
# many in one commit.
REAP_MAX: Final = 4000
# Where the database has no room to remove more at once: so few rows, or fewer yet.
FEW: Final = 50
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
        return max(1, min(CLAIM_MAX, self._chunks_per_second // CLAIMS_PER_SECOND))

    async def after(self, chunks: int, *, seconds: float) -> None:
        """Yield after a batch of so many chunks that took so many seconds; as long as the rate asks, unless the store is idle."""
        wait = 0.0 if self.is_idle else chunks / self._chunks_per_second - seconds
        await self._sleep(max(0.0, wait))


class Portions:
    """How many rows to remove at once where the database may lack room for many: a removal writes pages anew before it gives any
    back, so that in a nearly full one only few fit. Event-loop-only."""

    __slots__ = ("_limit", "_most")

    def __init__(self, limit: int = CLAIM_IDLE) -> None:
        self._limit = self._most = limit

    def of(self, limit: int) -> int:
        """How many to remove of so many."""
        return min(limit, self._most)

    def removed(self, count: int) -> None:
        """So many were removed at once: if these were as many as might be, the next may be more."""
        if count >= self._most:
            self._most = min(2 * self._most, self._most + FEW, self._limit)

    def refused(self, count: int) -> bool:
        """There was no room to remove so many. Whether fewer may fit."""
        self._most = max(1, min(FEW, count // 2))
        return count > 1
