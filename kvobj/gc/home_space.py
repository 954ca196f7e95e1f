"""Room in the home tier: above its high watermark the least recently used chunks of KV buckets are removed.

Chunks are a cache's content: policy may remove them at any time, as DELETE would. Objects of ordinary buckets are never
removed here. Knows names and sizes, asks the catalog to hide rows and the reaper to free their blobs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Final

from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import BucketKind, Durability, ObjectRow, WriteCondition
from kvobj.clock import Clock
from kvobj.errors import KvobjError, NoSuchBucketError
from kvobj.gc.reaper import Reaper
from kvobj.ids import BlobId
from kvobj.policy import EvictionPolicy
from kvobj.tiers.protocol import Tier

VICTIMS_PER_STEP: Final = 500
# Removing goes on to this share of the watermark, so that a full store does not collect at every PUT.
LOW_SHARE: Final = 0.95


class HomeSpace:
    """Follows which KV objects lie in the home tier, and removes the coldest when room is short. Event-loop-only."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        home: Tier,
        reaper: Reaper,
        policy: EvictionPolicy,
        clock: Clock,
        high_watermark: float,
        log: logging.Logger,
    ) -> None:
        self._catalog = catalog
        self._home = home
        self._reaper = reaper
        self._policy = policy
        self._clock = clock
        self._high_watermark = high_watermark
        self._log = log
        # First blob id → bucket, key and ETag. The ETag of a chunk is its blob's, so a removal with If-Match cannot hit a chunk
        # that was stored under the key since.
        self._names: dict[bytes, tuple[str, str, str]] = {}
        self._one_at_a_time = asyncio.Lock()
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.removed_objects = 0

    async def written(self, row: ObjectRow) -> None:
        """An object has reached the home tier. Only those of KV buckets may ever be removed for room."""
        if row.durability is Durability.MEMORY or not row.blobs:
            return
        bucket = await self._catalog.bucket(row.bucket)
        if bucket is None or bucket.kind is not BucketKind.KV:
            return
        blob_id = BlobId(row.blobs[0].blob_id)
        self._names[blob_id] = (row.bucket, row.key, row.etag)
        self._policy.insert(blob_id, row.size_bytes)
        self._wanted.set()

    def touched(self, row: ObjectRow) -> None:
        """An object was read."""
        if row.blobs:
            blob_id = row.blobs[0].blob_id
            if blob_id in self._names:
                self._policy.touch(BlobId(blob_id))

    def removed(self, rows: Iterable[ObjectRow]) -> None:
        """Objects were hidden by somebody else."""
        for row in rows:
            if row.blobs and self._names.pop(row.blobs[0].blob_id, None) is not None:
                self._policy.discard(BlobId(row.blobs[0].blob_id))

    async def load(self) -> None:
        """Follow what the catalog holds already; oldest commit first, for want of better knowledge."""
        kinds = {bucket.name: bucket.kind for bucket in await self._catalog.buckets()}
        found: list[tuple[int, bytes, str, str, str, int]] = []
        async for row in self._catalog.scan_objects():
            if row.durability is not Durability.MEMORY and kinds.get(row.bucket) is BucketKind.KV and row.blobs:
                found.append((row.sequence, row.blobs[0].blob_id, row.bucket, row.key, row.etag, row.size_bytes))
                if len(found) % 1000 == 0:
                    await asyncio.sleep(0)
        found.sort()
        for number, (_, raw_id, bucket, key, etag, size_bytes) in enumerate(found):
            if number % 1000 == 0:
                await asyncio.sleep(0)
            if raw_id not in self._names:
                self._names[raw_id] = (bucket, key, etag)
                self._policy.insert(BlobId(raw_id), size_bytes)
        self._wanted.set()

    def start(self) -> None:
        """Begin to keep the home tier under its watermark."""
        self._task = asyncio.create_task(self._run(), name="home-space")

    async def aclose(self) -> None:
        """Stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    async def _run(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            try:
                await self.make_room(0)
            except KvobjError as error:
                self._log.warning("could not make room in the home tier: %s", error)

    async def make_room(self, needed_bytes: int) -> int:
        """Remove objects until `needed_bytes` fit under the watermark; bytes removed (0: nothing could be)."""
        async with self._one_at_a_time:
            usage = await self._home.usage()
            limit = self._high_watermark * usage.capacity_bytes
            excess = usage.used_bytes + needed_bytes - limit
            if needed_bytes:
                # The tier refused: whatever its accounts say, this much has to go.
                excess = max(excess, needed_bytes)
            if excess <= 0:
                return 0
            return await self._remove(int(excess + (1 - LOW_SHARE) * limit))

    async def _remove(self, wanted_bytes: int) -> int:
        removed_bytes = 0
        while removed_bytes < wanted_bytes:
            victims = self._policy.victims(wanted_bytes - removed_bytes, lambda _: True)[:VICTIMS_PER_STEP]
            if not victims:
                break
            by_bucket: dict[str, dict[str, str]] = {}
            for blob_id in victims:
                self._policy.discard(blob_id)
                bucket, key, etag = self._names.pop(blob_id)
                by_bucket.setdefault(bucket, {})[key] = etag
            for bucket, etags in by_bucket.items():
                removed_bytes += await self._hide(bucket, etags)
            while await self._reaper.reap_batch():
                pass
        return removed_bytes

    async def _hide(self, bucket: str, etags: dict[str, str]) -> int:
        conditions = [WriteCondition(if_match=etag) for etag in etags.values()]
        try:
            outcomes = await self._catalog.delete(
                bucket, list(etags), conditions=conditions, now_ms=self._clock.now_ms()
            )
        except NoSuchBucketError:
            return 0
        gone = [outcome.removed for outcome in outcomes if outcome.removed is not None]
        self.removed_objects += len(gone)
        return sum(row.size_bytes for row in gone)
