"""How many multipart uploads a bucket may have in progress: each is a row and may hold parts until it is given up.

S3 knows no such bound. The rows are counted when a bucket is asked for the first time and again only when what is known says that
the bound is reached: uploads that were begun here are added meanwhile, ended ones are not taken off.
"""

from __future__ import annotations

import asyncio
from typing import Final

from kvobj.api.errors import S3Error
from kvobj.catalog.protocol import Catalog

_PAGE: Final = 1000
_BUCKETS_MAX: Final = 10_000


class UploadBound:
    """At most so many uploads in progress in each bucket, and as many more as are being begun in the moment of a count.

    Event-loop-only; one for all requests, the only one that begins uploads.
    """

    __slots__ = ("_at_most", "_catalog", "_counting")

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._at_most: dict[str, int] = {}
        self._counting = asyncio.Lock()

    async def admit(self, bucket: str, *, limit: int) -> None:
        """Count one more upload of a bucket that exists. Raises `S3Error` TooManyUploads."""
        if self._at_most.get(bucket, limit) >= limit:
            async with self._counting:
                await self._recount(bucket, limit)
        self._at_most[bucket] += 1

    async def _recount(self, bucket: str, limit: int) -> None:
        if self._at_most.get(bucket, limit) < limit:
            return  # somebody else has counted meanwhile
        count = await self._count(bucket, limit)
        if count >= limit:
            raise S3Error("TooManyUploads", Limit=limit)
        if len(self._at_most) >= _BUCKETS_MAX:
            self._at_most.clear()
        self._at_most[bucket] = count

    async def _count(self, bucket: str, limit: int) -> int:
        count = 0
        after = ("", "")
        while count < limit:
            page = await self._catalog.list_uploads(bucket, after=after, limit=_PAGE)
            count += len(page.rows)
            if page.next_after is None:
                break
            after = page.next_after
        return count
