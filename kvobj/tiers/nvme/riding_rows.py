"""Directory rows that go with the next commit of the database instead of one of their own.

For blobs that nobody asks for before a durable change names them, such as the catalog's: that change is then committed with
the row or behind it, and not without it. Until then this is where the row is found. Event loop only.

Rows of segments alone: hundreds of them have room where anything has. Small blobs, which lie in the database themselves, could fill
it, and nothing is committed, removals neither, while what rides does not fit.
"""

from __future__ import annotations

from types import TracebackType
from typing import Final

from kvobj.database import Database, Rider, WriteView
from kvobj.ids import BlobId
from kvobj.tiers.nvme.directory import BLOBS, Place

# Those of the commit under way count, too.
_ROWS_MAX: Final = 256


class _Group:
    """Rows that are committed together, as one rider. They change no more once a commit has taken it along."""

    __slots__ = ("rider", "rows")

    rider: Rider

    def __init__(self) -> None:
        self.rows: dict[BlobId, Place] = {}

    def change(self, view: WriteView) -> None:
        """Enter those that the directory does not have."""
        held = view.get_many(BLOBS, list(self.rows))
        rows = zip(self.rows.items(), held, strict=True)
        view.put_many(BLOBS, [(blob_id, place.encode()) for (blob_id, place), row in rows if row is None])


class _Allowed:
    """See `RidingRows.allowed`."""

    __slots__ = ("_blob_id", "_blob_ids")

    def __init__(self, blob_ids: set[BlobId], blob_id: BlobId) -> None:
        self._blob_ids = blob_ids
        self._blob_id = blob_id

    def __enter__(self) -> None:
        self._blob_ids.add(self._blob_id)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._blob_ids.discard(self._blob_id)


class RidingRows:
    """Rows by blob id, each until the commit that takes it along."""

    __slots__ = ("_allowed", "_database", "_gathering", "_groups")

    def __init__(self, database: Database) -> None:
        self._database = database
        self._allowed: set[BlobId] = set()
        self._groups: dict[BlobId, _Group] = {}
        self._gathering: _Group | None = None

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, blob_id: BlobId) -> bool:
        return blob_id in self._groups

    def get(self, blob_id: BlobId) -> Place | None:
        """Where the blob lies, if its row is still on its way."""
        group = self._groups.get(blob_id)
        return None if group is None else group.rows[blob_id]

    def allowed(self, blob_id: BlobId) -> _Allowed:
        """See `NvmeTier.riding`."""
        return _Allowed(self._allowed, blob_id)

    def takes(self, blob_id: BlobId) -> bool:
        """Whether the blob's row may be added now."""
        return blob_id in self._allowed and len(self._groups) < _ROWS_MAX and self._database.takes_riders

    def may_ride(self, blob_id: BlobId) -> bool:
        """Whether who puts the blob needs no committed row."""
        return blob_id in self._allowed

    def add(self, blob_id: BlobId, place: Place) -> None:
        """Send the row on its way. Errors as of `Database.ride`."""
        group = self._gathering
        if group is None or not self._database.is_waiting(group.rider) or self._database.has_failed:
            group = self._new_group()
        group.rows[blob_id] = place
        self._groups[blob_id] = group

    def withdraw(self, blob_id: BlobId) -> Place | None:
        """Take the blob's row back, so that no directory ever had it: its room is the caller's to free. None where it has none, or
        one that is being committed."""
        group = self._groups.get(blob_id)
        if group is None or not self._database.is_waiting(group.rider):
            return None
        del self._groups[blob_id]
        place = group.rows.pop(blob_id)
        if not group.rows:
            self._database.withdraw(group.rider)
        return place

    async def land(self) -> None:
        """Return once all rows that ride now are in the directory. Errors as of `Database.write`."""
        if self._groups:
            await self._database.land()

    def _new_group(self) -> _Group:
        group = _Group()

        def settled() -> None:
            for blob_id in group.rows:
                del self._groups[blob_id]

        group.rider = self._database.ride(group.change, settled=settled)
        self._gathering = group
        return group
