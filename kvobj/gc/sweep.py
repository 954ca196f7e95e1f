"""The sweep: finds what no row names and no queue entry promises to delete.

Leftovers come from writers that died between a tier's put and the commit. A blob is one if its id was in a tier before the
rows were read, belongs to no write in progress, and no row, part or queue entry names it: ids are never reused, so what is
a leftover once stays one. That, and its opposite (`reconcile`: rows whose blobs are gone), is done at the start and then at long
intervals, on the remote too where there is one; at every short one, uploads that nobody goes on with are ended (the parts of
chunks that never became whole too), history is trimmed and the record log compacted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from kvobj.background import BackgroundWorker
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import BucketKind, BucketRow
from kvobj.clock import Clock
from kvobj.errors import KvobjError, NoSuchBucketError, NoSuchUploadError
from kvobj.gc.reaper import Reaper
from kvobj.gc.reconcile import Reconcile
from kvobj.gc.remote_sweep import RemoteSweep
from kvobj.gc.wall_ages import WallAges
from kvobj.ids import BlobId
from kvobj.tiers.protocol import Tier

# Ids looked at in one pass over the rows: 16 bytes each and Python's overhead make about 100 MB.
PASS_IDS: Final = 1_000_000
QUEUE_STEP: Final = 1000
TRIM_STEP: Final = 1000
RETRY_SECONDS: Final = 600.0
# An upload to an ordinary bucket may be resumed for days; S3 itself never ends one without a lifecycle rule.
ORDINARY_UPLOAD_TTL_SECONDS: Final = 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What one sweep found and did."""

    leftover_blobs: int
    ended_uploads: int
    lost_rows: int = 0


class Sweep(BackgroundWorker):
    """Runs at the start and then at every interval. Event-loop-only."""

    worker_name = "sweep"

    def __init__(
        self,
        *,
        catalog: Catalog,
        tiers: tuple[Tier, ...],
        reaper: Reaper,
        being_written: Callable[[BlobId], bool],
        clock: Clock,
        upload_ttl_seconds: float,
        interval_seconds: float,
        compact: Callable[[], Awaitable[None]],
        log: logging.Logger,
        reconcile: Reconcile | None = None,
        reconcile_interval_seconds: float = 6 * 3600.0,
        history_retention_seconds: float = 24 * 3600.0,
        remote: RemoteSweep | None = None,
    ) -> None:
        super().__init__()
        self._remote = remote
        self._catalog = catalog
        self._tiers = tiers
        self._reaper = reaper
        self._being_written = being_written
        self._clock = clock
        self._ages = WallAges(clock)
        self._upload_ttl_seconds = upload_ttl_seconds
        self._interval_seconds = interval_seconds
        self._compact = compact
        self._log = log
        self._reconcile = reconcile
        self._reconcile_interval_seconds = reconcile_interval_seconds
        self._history_retention_seconds = history_retention_seconds
        self.leftover_blobs = 0

    async def _run(self) -> None:
        compare_at = self._clock.monotonic()
        while True:
            try:
                is_time = self._clock.monotonic() >= compare_at
                if is_time:  # should it fail: a pass over everything is not to be repeated at every sweep
                    compare_at = self._clock.monotonic() + min(RETRY_SECONDS, self._reconcile_interval_seconds)
                await self.sweep(leftovers=is_time)
                if is_time:
                    compare_at = self._clock.monotonic() + self._reconcile_interval_seconds
                await self._trim_history()
                await self._compact()
            except KvobjError as error:
                self._log.warning("sweep failed, will retry: %s", error)
            await asyncio.sleep(self._interval_seconds)

    async def sweep(self, *, leftovers: bool = True) -> SweepReport:
        """One sweep. `leftovers` compares the tiers with the catalog, both ways, which costs a pass over both; the rest is
        cheap."""
        found = lost = 0
        if leftovers:
            for tier in self._tiers:
                found += await self._sweep_tier(tier)
            if self._remote is not None:
                await self._remote.run()
            if self._reconcile is not None:
                lost = await self._reconcile.run()
        ended = await self._end_uploads()
        self.leftover_blobs += found
        if found or ended or lost:
            self._log.info("sweep: %d leftover blobs, %d uploads ended, %d rows without bytes", found, ended, lost)
            self._reaper.kick()
        return SweepReport(leftover_blobs=found, ended_uploads=ended, lost_rows=lost)

    async def _trim_history(self) -> None:
        now_ms = self._ages.now_ms(self._history_retention_seconds)
        retention_ms = int(self._history_retention_seconds * 1000)
        trimmed = TRIM_STEP
        while trimmed == TRIM_STEP:
            trimmed = await self._catalog.history.trim(now_ms=now_ms, retention_ms=retention_ms, limit=TRIM_STEP)
            await asyncio.sleep(0)

    async def _sweep_tier(self, tier: Tier) -> int:
        found = 0
        async for candidates in self._passes(tier):
            leftovers = await self._unnamed(candidates)
            for start in range(0, len(leftovers), QUEUE_STEP):
                await self._catalog.queue_blobs(leftovers[start : start + QUEUE_STEP], now_ms=self._clock.now_ms())
            found += len(leftovers)
        return found

    async def _passes(self, tier: Tier) -> AsyncIterator[set[bytes]]:
        candidates: set[bytes] = set()
        async for blob_id in tier.scan():
            if not self._being_written(blob_id):
                candidates.add(blob_id)
            if len(candidates) == PASS_IDS:
                yield candidates
                candidates = set()
        if candidates:
            yield candidates

    async def _unnamed(self, candidates: set[bytes]) -> list[bytes]:
        async for blob_id in self._catalog.scan_named_blobs():
            candidates.discard(blob_id)
        return sorted(candidates)

    async def _end_uploads(self) -> int:
        ended = 0
        for bucket in await self._catalog.buckets():
            ttl_seconds = self._upload_ttl_seconds if bucket.kind is BucketKind.KV else ORDINARY_UPLOAD_TTL_SECONDS
            cutoff_ms = self._ages.cutoff_ms(ttl_seconds)
            after = ("", "")
            while True:
                try:
                    page = await self._catalog.list_uploads(bucket.name, after=after, groups=True)
                except NoSuchBucketError:
                    break
                for upload in page.rows:
                    if upload.initiated_ms < cutoff_ms:
                        ended += await self._end_if_idle(bucket, upload.key, upload.upload_id, cutoff_ms)
                if page.next_after is None:
                    break
                after = page.next_after
        return ended

    async def _end_if_idle(self, bucket: BucketRow, key: str, upload_id: str, cutoff_ms: int) -> int:
        try:
            parts = await self._catalog.parts(bucket.name, key, upload_id)
            if any(part.modified_ms >= cutoff_ms for part in parts):
                return 0
            await self._catalog.abort_upload(
                bucket.name, key, upload_id, made_ms=bucket.created_ms, now_ms=self._clock.now_ms()
            )
        except NoSuchUploadError:
            return 0
        return 1
