"""What the sweep has looked for on the remote: blobs there that nothing names, and uploads that nobody goes on with.

The remote's own part (`remote.leftovers`) lists; here is told what is named. A listed blob's name says whose it was, so nearly
all are found with one look-up of a row; only for what is left over then everything that names blobs is read through.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol

from kvobj.catalog.protocol import Catalog
from kvobj.errors import KvobjError
from kvobj.ids import BlobId
from kvobj.tiers.protocol import BlobNames

IsNamed = Callable[[Sequence[BlobId]], Awaitable[set[BlobId]]]


class RemoteLeftovers(Protocol):
    """Finds and removes (`remote.leftovers.Leftovers`)."""

    async def sweep(
        self,
        is_named: IsNamed,
        is_mine_in_flight: Callable[[BlobId], bool],
        *,
        epochs: Sequence[int] | None = None,
        is_putting: Callable[[BlobId], bool] | None = None,
    ) -> object:
        """Remove what nothing names of these session epochs, of all where there are none given."""
        ...


class RemoteSweep:
    """See the module's text. `names_of` is what the remote calls a blob, None where the node does not know; `knows_nothing`:
    whether that is so of all, as after a rebuild: then the first pass is over everything too, since passes note what they see.
    `being_written` is true of what this process has on the remote, or on its way there, and may yet name; `is_putting` of what it
    is putting at this moment.
    Event-loop-only."""

    def __init__(
        self,
        leftovers: RemoteLeftovers,
        *,
        catalog: Catalog,
        names_of: Callable[[BlobId], BlobNames | None],
        being_written: Callable[[BlobId], bool],
        is_putting: Callable[[BlobId], bool],
        earlier_epochs: Sequence[int],
        knows_nothing: Callable[[], bool],
        log: logging.Logger,
    ) -> None:
        self._leftovers = leftovers
        self._catalog = catalog
        self._names_of = names_of
        self._being_written = being_written
        self._is_putting = is_putting
        self._earlier_epochs = tuple(earlier_epochs)
        self._knows_nothing = knows_nothing
        self._log = log
        self._is_first = True
        self.last: object = None
        """What the last pass that came to its end has counted."""

    async def run(self) -> None:
        """One pass: at first what an earlier process of this node may have left, from then on over everything. A remote that does
        not answer is told in the log: the rest of a sweep needs none."""
        epochs = self._earlier_epochs if self._is_first and not self._knows_nothing() else None
        try:
            self.last = await self._leftovers.sweep(
                self.is_named, self._being_written, epochs=epochs, is_putting=self._is_putting
            )
            self._is_first = False
        except KvobjError as error:
            self._log.warning("the remote could not be swept, will retry: %s", error)

    async def is_named(self, blob_ids: Sequence[BlobId]) -> set[BlobId]:
        """Those of the blobs that a row, a part or an entry of the delete queue names."""
        named: set[BlobId] = set()
        by_bucket: dict[str, dict[str, list[BlobId]]] = {}
        for blob_id in blob_ids:
            names = self._names_of(blob_id)
            if names is not None:
                by_bucket.setdefault(names.bucket, {}).setdefault(names.key, []).append(blob_id)
        for bucket, by_key in by_bucket.items():
            rows = await self._catalog.lookup(bucket, list(by_key))
            for row in rows:
                if row is not None:
                    held = set(row.blob_ids)
                    named.update(blob_id for blob_id in by_key[row.key] if bytes(blob_id) in held)
        rest = set(blob_ids) - named
        if rest:
            named.update(await self._named_anywhere(rest))
        return named

    async def _named_anywhere(self, blob_ids: set[BlobId]) -> set[BlobId]:
        wanted = {bytes(blob_id): blob_id for blob_id in blob_ids}
        scan: AsyncIterator[bytes] = self._catalog.scan_named_blobs()
        return {wanted[raw_id] async for raw_id in scan if raw_id in wanted}
