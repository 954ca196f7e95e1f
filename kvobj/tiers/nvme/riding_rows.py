"""Directory rows that go with the next commit of the database instead of one of their own.

For blobs that nobody asks for before a durable change names them, such as the catalog's: that change is then committed with
the row or behind it, and not without it. Until then this is where the row is found. Event loop only.

Rows of segments alone: hundreds of them have room where anything has. Small blobs, which lie in the database themselves, could fill
it, and nothing is committed, removals neither, while what rides does not fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvobj.database import Database, Rider, WriteView
from kvobj.ids import BlobId
from kvobj.tiers.nvme.directory import BLOBS, Place


@dataclass(frozen=True, slots=True)
class RidingRow:
    """Where the blob lies."""

    place: Place
    rider: Rider


class RidingRows:
    """Rows by blob id, each until the commit that takes it along."""

    __slots__ = ("_allowed", "_database", "_rows")

    def __init__(self, database: Database) -> None:
        self._database = database
        self._allowed: set[BlobId] = set()
        self._rows: dict[BlobId, RidingRow] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, blob_id: BlobId) -> bool:
        return blob_id in self._rows

    def get(self, blob_id: BlobId) -> RidingRow | None:
        """The blob's row, if it is still on its way."""
        return self._rows.get(blob_id)

    @contextmanager
    def allowed(self, blob_id: BlobId) -> Iterator[None]:
        """See `NvmeTier.riding`."""
        self._allowed.add(blob_id)
        try:
            yield
        finally:
            self._allowed.discard(blob_id)

    def takes(self, blob_id: BlobId) -> bool:
        """Whether the blob's row may be added now."""
        return blob_id in self._allowed and self._database.takes_riders

    def may_ride(self, blob_id: BlobId) -> bool:
        """Whether who puts the blob needs no committed row."""
        return blob_id in self._allowed

    def add(self, blob_id: BlobId, place: Place) -> None:
        """Send the row on its way. Errors as of `Database.ride`."""

        def change(view: WriteView) -> None:
            if view.get(BLOBS, blob_id) is None:
                view.put(BLOBS, blob_id, place.encode(), headroom=True)

        def settled() -> None:
            del self._rows[blob_id]

        self._rows[blob_id] = RidingRow(place, self._database.ride(change, settled=settled))

    def withdraw(self, blob_id: BlobId) -> Place | None:
        """Take the blob's row back, so that no directory ever had it: its room is the caller's to free. None where it has none, or
        one that is being committed."""
        row = self._rows.get(blob_id)
        if row is None or not self._database.withdraw(row.rider):
            return None
        del self._rows[blob_id]
        return row.place

    async def land(self) -> None:
        """Return once all rows that ride now are in the directory. Errors as of `Database.write`."""
        if self._rows:
            await self._database.land()
