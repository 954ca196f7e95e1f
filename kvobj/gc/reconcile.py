"""Reconcile, one half: rows whose blobs no tier holds. The other half, blobs that no row names, is the sweep's.

Page by page, beside everything else. A row is judged by what the tiers say before it is read a second time: blob ids are never
reused, so one that names the same blobs still, and whose blobs were missing, has lost them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import ObjectRow
from kvobj.clock import Clock
from kvobj.errors import NoSuchBucketError
from kvobj.gc.lost import LostObjects
from kvobj.ids import BlobId
from kvobj.tiers.protocol import Tier

PAGE_ROWS: Final = 256
# After each page it rests so many times as long as it worked.
REST_FACTOR: Final = 4.0


class Reconcile:
    """`tiers` is all of them, fast before slow, as one. Event-loop-only."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        tiers: Tier,
        lost: LostObjects,
        clock: Clock,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._catalog = catalog
        self._tiers = tiers
        self._lost = lost
        self._clock = clock
        self._sleep = sleep
        self.checked_rows = 0
        self.lost_rows = 0

    async def run(self) -> int:
        """One pass over all rows; how many have lost their bytes. Ends with the error of a tier that does not answer."""
        found = 0
        for bucket in await self._catalog.buckets():
            after: str | None = ""
            try:
                while after is not None:
                    started = self._clock.monotonic()
                    page = await self._catalog.list_objects(bucket.name, after=after, limit=PAGE_ROWS)
                    found += await self._check(page.rows)
                    after = page.next_after
                    await self._sleep((self._clock.monotonic() - started) * REST_FACTOR)
            except NoSuchBucketError:  # deleted since it was listed
                continue
        self.lost_rows += found
        return found

    async def _check(self, rows: tuple[ObjectRow, ...]) -> int:
        blob_ids = [BlobId(blob_id) for row in rows for blob_id in row.blob_ids]
        missing = set(await self._tiers.missing(blob_ids)) if blob_ids else set()
        found = 0
        for row in rows:
            is_lost = any(blob.blob_id in missing for blob in row.blobs)
            # Of a chunk with a lossy copy either will do: the copy is what lasts, and its bytes may be in memory yet.
            if is_lost and (row.lossy is None or row.lossy.blob_id in missing):
                found += await self._lost.note(row, "no tier holds it")
        self.checked_rows += len(rows)
        return found
