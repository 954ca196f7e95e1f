"""What of the blobs that are read from the remote is worth a place in nvme; `tiers.cascade.Admission`.

A blob is somebody's only as long as a live row names it, and it is put under that row's names. Whether it is worth its room is the
collector's to say, which is told when it is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import ObjectRow
from kvobj.ids import BlobId
from kvobj.tiers.protocol import BlobNames


class CopiesHome(Protocol):
    """Who gives the home tier's room away (`Collector`)."""

    async def admits_copy(self, row: ObjectRow, frame_bytes: int) -> bool:
        """Whether a copy of a blob of the row should be made there."""
        ...

    async def copied(self, row: ObjectRow) -> None:
        """There is one now."""
        ...


class Promotions:
    """See the module's text. `names_of` is what the remote calls a blob, None where the node does not know. Nothing is promoted
    before `connect`. Event-loop-only."""

    def __init__(self, catalog: Catalog, names_of: Callable[[BlobId], BlobNames | None]) -> None:
        self._catalog = catalog
        self._names_of = names_of
        self._home: CopiesHome | None = None

    def connect(self, home: CopiesHome) -> None:
        """From now on this one decides."""
        self._home = home

    async def admit(self, blob_id: BlobId, frame_bytes: int) -> BlobNames | None:
        """See `Admission.admit`."""
        row = await self._row_of(blob_id)
        if row is None or self._home is None or not await self._home.admits_copy(row, frame_bytes):
            return None
        return BlobNames(row.bucket, row.key)

    async def promoted(self, blob_id: BlobId) -> None:
        """See `Admission.promoted`."""
        row = await self._row_of(blob_id)
        if row is not None and self._home is not None:
            await self._home.copied(row)

    async def _row_of(self, blob_id: BlobId) -> ObjectRow | None:
        """The live row that names the blob."""
        names = self._names_of(blob_id)
        if names is None:
            return None
        (row,) = await self._catalog.lookup(names.bucket, [names.key])
        return row if row is not None and bytes(blob_id) in row.blob_ids else None
