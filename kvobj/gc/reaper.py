"""The reaper: frees the blobs that the delete queue names, once nobody on this node reads them.

An entry is forgotten only after every tier has deleted its blob, so a crash anywhere repeats work and loses none: blob ids are
never reused, so deleting one twice can harm nothing (`gc-protocol` §2.3). Where there is a remote tier, entries whose blobs it has
are its own worker's (`remote_reaping`): they are passed over here, so that a remote that does not answer holds up nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from kvobj.background import BackgroundWorker
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.queue_batches import BATCH_BLOBS
from kvobj.catalog.rows import QueueEntry
from kvobj.clock import Clock
from kvobj.errors import KvobjError, StoreFullError
from kvobj.gc.pacing import REAP_MAX, Pace, Portions
from kvobj.gc.remote_reaping import RemoteReaping
from kvobj.ids import BlobId
from kvobj.tiers.in_use import BlobsInUse
from kvobj.tiers.protocol import Tier

# With the blobs that the last entry may bring in excess, as many as the remote deletes in one request.
BATCH_ENTRIES: Final = 1001 - BATCH_BLOBS
# Beside other work the reaper goes this much faster than the collector: what clients delete must not pile up behind it.
PACE_FACTOR: Final = 4
# Entries that the remote holds up are looked at again after so long, whatever it does.
PASSED_OVER_SECONDS: Final = 60.0
# Entries are due from the moment when they are queued; the wall clock may have stepped back since then.
_ANY_TIME_MS: Final = (1 << 63) - 1


class Reaper(BackgroundWorker):
    """One worker over the catalog's delete queue. Event-loop-only."""

    worker_name = "reaper"

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
        pace: Pace | None = None,
        remote: RemoteReaping | None = None,
    ) -> None:
        super().__init__()
        self._catalog = catalog
        self._tiers = tiers
        self._in_use = in_use
        self._clock = clock
        self._interval_seconds = interval_seconds
        self._on_freed = on_freed
        self._log = log
        self._pace = pace
        self._remote = remote
        if remote is not None:
            remote.on_reaped = self._note_reaped
        # Behind this position of the queue nothing was passed over yet.
        self._after = 0
        self._from_start_at = float("-inf")
        self._kicked = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()
        self._portions = Portions(REAP_MAX)
        self._waiting_since_ms: int | None = None
        self.reaped_blobs = 0
        self.failures = 0

    @property
    def lag_seconds(self) -> float:
        """How long the oldest entry that could not be reaped yet has been due (readers, failures), when last looked."""
        return self._since(self._waiting_since_ms)

    @property
    def remote_lag_seconds(self) -> float:
        """How long the oldest entry has been due that the remote has failed to delete; 0 while it does as it is told."""
        return 0.0 if self._remote is None else self._since(self._remote.waiting_since_ms)

    @property
    def remote_failures(self) -> int:
        """How often the remote failed to delete a batch."""
        return 0 if self._remote is None else self._remote.failures

    def _since(self, since_ms: int | None) -> float:
        return 0.0 if since_ms is None else max(0.0, (self._clock.now_ms() - since_ms) / 1000)

    def _note_reaped(self, blobs: int) -> None:
        self.reaped_blobs += blobs
        self._on_freed()
        self.kick()

    async def aclose(self) -> None:
        """See `BackgroundWorker.aclose`."""
        await super().aclose()
        if self._remote is not None:
            await self._remote.aclose()

    def kick(self) -> None:
        """Something was removed: reap soon instead of at the next interval."""
        self._kicked.set()

    async def _run(self) -> None:
        while True:
            self._kicked.clear()
            try:
                await self._reap_all()
            except KvobjError as error:
                self.failures += 1
                self._log.warning("reaping failed, will retry: %s", error)
            try:
                async with asyncio.timeout(self._interval_seconds):
                    await self._kicked.wait()
            except TimeoutError:
                continue

    async def _reap_all(self) -> None:
        while True:
            started = self._clock.monotonic()
            reaped = await self.reap_batch(self._batch())
            if not reaped:
                return
            if self._pace is not None:
                await self._pace.after(reaped // PACE_FACTOR, seconds=self._clock.monotonic() - started)

    def _batch(self) -> int:
        if self._pace is None:
            return BATCH_ENTRIES
        most = REAP_MAX - BATCH_BLOBS + 1 if self._remote is None else BATCH_ENTRIES
        return min(most, self._pace.claim_batch * 2)

    async def reap_batch(self, limit: int = BATCH_ENTRIES) -> int:
        """Reap about `limit` due entries (see `Catalog.due`) whose blobs nobody reads; the number reaped, or left to the remote's
        worker. 0: that was all. Otherwise others had their turn meanwhile. `StoreFullError` where the database has no room even
        for forgetting one."""
        async with self._one_at_a_time:
            while True:
                some = self._portions.of(limit)
                try:
                    reaped, passed = await self._reap(some)
                except StoreFullError:
                    self._from_start_at = float("-inf")  # these entries are still there
                    if not self._portions.refused(some):
                        raise
                    continue
                self._portions.removed(reaped)
                break
        if reaped or passed:
            self.reaped_blobs += reaped
            self._on_freed()
        if passed:
            # Perhaps nothing was waited for: who goes on until all is reaped would hold up the loop for a whole queue.
            await asyncio.sleep(0)
        return reaped + passed

    async def _reap(self, limit: int) -> tuple[int, int]:
        """See `reap_batch`: how many were reaped, and how many left to the remote's worker. One at a time."""
        entries = await self._due(limit)
        named = [(entry, BlobId(entry.blob_id)) for entry in entries]
        in_use = [entry for entry, blob_id in named if blob_id in self._in_use] if len(self._in_use) else []
        self._waiting_since_ms = min((entry.not_before_ms for entry in in_use), default=None)
        if in_use:
            named = [(entry, blob_id) for entry, blob_id in named if blob_id not in self._in_use]
        if not named:
            return 0, 0
        passed = 0
        if self._remote is not None:
            held = self._remote.held([blob_id for _, blob_id in named])
            if held:
                passed = len(held)
                await self._remote.take([entry for entry, blob_id in named if blob_id in held])
                named = [(entry, blob_id) for entry, blob_id in named if blob_id not in held]
        if named:
            await self._tiers.delete([blob_id for _, blob_id in named])
            await self._catalog.reap([entry for entry, _ in named])
        return len(named), passed

    async def _due(self, limit: int) -> list[QueueEntry]:
        """The next entries: of all of them, or, while those in front are held up by the remote, behind these."""
        if self._remote is None:
            return await self._catalog.due(now_ms=_ANY_TIME_MS, limit=limit)
        now = self._clock.monotonic()
        if self._remote.is_ready or now >= self._from_start_at:
            self._after, self._from_start_at = 0, now + PASSED_OVER_SECONDS
        entries = await self._catalog.due(now_ms=_ANY_TIME_MS, limit=limit, after=self._after)
        if entries:
            self._after = entries[-1].position
        return entries
