"""The reaper: frees the blobs that the delete queue names, once nobody on this node reads them.

An entry is forgotten only after every tier has deleted its blob, so a crash anywhere repeats work and loses none: blob ids are
never reused, so deleting one twice can harm nothing (`gc-protocol` §2.3).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from kvobj.catalog.protocol import Catalog
from kvobj.clock import Clock
from kvobj.errors import KvobjError
from kvobj.ids import BlobId
from kvobj.tiers.in_use import BlobsInUse
from kvobj.tiers.protocol import Tier

BATCH_ENTRIES: Final = 1000


class Reaper:
    """One worker over the catalog's delete queue. Event-loop-only."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        tiers: Tier,
        in_use: BlobsInUse,
        clock: Clock,
        interval_seconds: float,
        on_freed: Callable[[], None],
        log: logging.Logger,
    ) -> None:
        self._catalog = catalog
        self._tiers = tiers
        self._in_use = in_use
        self._clock = clock
        self._interval_seconds = interval_seconds
        self._on_freed = on_freed
        self._log = log
        self._kicked = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self.reaped_blobs = 0
        self.failures = 0

    def kick(self) -> None:
        """Something was removed: reap soon instead of at the next interval."""
        self._kicked.set()

    def start(self) -> None:
        """Begin to work in the background."""
        self._task = asyncio.create_task(self._run(), name="reaper")

    async def aclose(self) -> None:
        """Stop after the step in progress."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    async def _run(self) -> None:
        while True:
            self._kicked.clear()
            try:
                while await self.reap_batch():
                    pass
            except KvobjError as error:
                self.failures += 1
                self._log.warning("reaping failed, will retry: %s", error)
            try:
                async with asyncio.timeout(self._interval_seconds):
                    await self._kicked.wait()
            except TimeoutError:
                continue

    async def reap_batch(self) -> int:
        """Reap up to a thousand due entries whose blobs nobody reads; the number reaped."""
        async with self._one_at_a_time:
            entries = await self._catalog.due(now_ms=self._clock.now_ms(), limit=BATCH_ENTRIES)
            free = [entry for entry in entries if BlobId(entry.blob_id) not in self._in_use]
            if not free:
                return 0
            await self._tiers.delete([BlobId(entry.blob_id) for entry in free])
            await self._catalog.reap(free)
        self.reaped_blobs += len(free)
        self._on_freed()
        return len(free)
