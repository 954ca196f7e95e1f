"""Rows whose bytes no tier has any more: a chunk's is dropped, an ordinary object's stays for an operator to see."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import BucketKind, Durability, ObjectRow
from kvobj.clock import Clock
from kvobj.errors import TierUnavailableError, UnavailableError
from kvobj.ids import BlobId
from kvobj.store.placement import Placement
from kvobj.tiers.corrupt_blobs import CorruptBlobs


class LostRows:
    """Of one store. Event loop only."""

    __slots__ = ("_catalog", "_clock", "_corrupt", "_on_removed", "_placement")

    def __init__(
        self,
        *,
        catalog: Catalog,
        placement: Placement,
        corrupt: CorruptBlobs,
        clock: Clock,
        on_removed: Callable[[Sequence[ObjectRow]], None],
    ) -> None:
        """`on_removed` is told of rows that were dropped."""
        self._catalog = catalog
        self._placement = placement
        self._corrupt = corrupt
        self._clock = clock
        self._on_removed = on_removed

    async def refuse_if_away(self, row: ObjectRow) -> None:
        """What could not be read of an ordinary object of class `shared` is there all the same, unless a tier says that it is not:
        `TierUnavailableError` rather than an answer that would let the client take it for lost."""
        if row.durability is not Durability.SHARED:
            return
        bucket = await self._catalog.bucket(row.bucket)
        if bucket is None or bucket.kind is BucketKind.KV:
            return
        (current,) = await self._catalog.lookup(row.bucket, [row.key])
        if current is None or current.blob_ids != row.blob_ids:
            return  # replaced since it was looked up
        if not await self.are_missing([BlobId(blob.blob_id) for blob in row.blobs]):
            raise TierUnavailableError("the object is on the remote tier, which does not give it", key=row.key)

    async def forget_if_lost(self, row: ObjectRow) -> None:
        """Drop a chunk's row if its bytes are gone for good, so that the next PUT of the chunk stores it again.

        A medium that merely fails loses nothing; rows of ordinary buckets stay, for an operator to see.
        """
        bucket = await self._catalog.bucket(row.bucket)
        if bucket is None or bucket.kind is not BucketKind.KV:
            return
        (current,) = await self._catalog.lookup(row.bucket, [row.key])
        if current is None or current.blob_ids[len(current.blobs) :] != row.blob_ids[len(row.blobs) :]:
            return  # a lossy copy was made, or made anew, since the row was read
        if row.lossy is not None:
            # What was read may have been that copy or the bytes themselves: while either is there, the chunk is.
            if not await self._are_gone([row.lossy.blob_id]):
                return
            row = current
        if await self._are_gone([blob.blob_id for blob in row.blobs]):
            await self._catalog.drop_rows([row], now_ms=self._clock.now_ms())
            self._on_removed([row])

    async def _are_gone(self, blob_ids: Sequence[bytes]) -> bool:
        """Whether some of these blobs are nowhere, or nowhere sound."""
        ids = [BlobId(blob_id) for blob_id in blob_ids]
        return any(blob_id in self._corrupt for blob_id in ids) or await self.are_missing(ids)

    async def are_missing(self, blob_ids: list[BlobId]) -> bool:
        """Whether some of these blobs are nowhere, as far as the tiers say: one that does not answer has lost nothing."""
        try:
            return bool(await self._placement.read.missing(blob_ids))
        except UnavailableError:
            return False
