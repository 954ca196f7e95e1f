"""What the parts of the LMDB catalog share: the database, the tables, the marks, and the two ways to run a change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from kvobj.catalog.catalog_rows import CatalogRows
from kvobj.catalog.flight_keys import bucket_key
from kvobj.catalog.followed import followed, on_success
from kvobj.catalog.marks import Marks
from kvobj.catalog.numbers import NumberLine
from kvobj.catalog.object_changes import NeedsDurableError
from kvobj.catalog.unfinished import UnfinishedBytes
from kvobj.database import Database, WriteView

T = TypeVar("T")

INLINE_ROWS: Final = 64
"""Up to here a read is cheaper on the event loop than a hop to a thread and back (60 µs)."""


class LmdbBase:
    """See the module's text. Used on the event loop that the database was opened on."""

    def __init__(self, database: Database, numbers: NumberLine) -> None:
        self._database = database
        self._numbers = numbers
        self._tables = CatalogRows.over(numbers.allocate, has_remote=database.has_outbox)
        self._objects = self._tables.objects
        self._uploads = self._tables.uploads
        self._marks = Marks()
        self.unfinished = UnfinishedBytes()
        self._readers = ThreadPoolExecutor(1, "catalog-read")

    async def _on_thread(self, read: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._readers, read, *arguments)

    async def _write_fast(
        self,
        change: Callable[..., Callable[[WriteView], T]],
        keys: Collection[bytes],
        *,
        shared: Collection[bytes] = (),
        bucket: str | None = None,
        synced: bool = True,
        then: Callable[[T], None] | None = None,
    ) -> T:
        """Try inline; where the change meets something durable, or a key is in flight, hand it to the durable writer.

        `keys` are held there, `shared` ones and the bucket's are only waited for. `synced=False`: the change makes nothing
        durable go or come unless it meets something durable. `then` is called with the outcome, before who waits here goes on and
        also where they have been cancelled.
        """
        database = self._database
        waits_for = [*shared, bucket_key(bucket)] if bucket is not None else shared
        if database.is_in_flight(keys) or database.is_in_flight(waits_for):
            return await self._write(change(durable=True), keys, synced=synced, then=then)
        try:
            outcome = database.write_volatile(change(durable=False))
        except NeedsDurableError:
            return await self._write(change(durable=True), keys, then=then)
        if then is not None:
            then(outcome)
        return outcome

    async def _write(
        self,
        change: Callable[[WriteView], T],
        keys: Collection[bytes],
        *,
        synced: bool = True,
        then: Callable[[T], None] | None = None,
    ) -> T:
        """`Database.write`, and `then` as of `_write_fast`."""
        if then is None:
            return await self._database.write(change, keys, synced=synced)
        return await followed(self._database.submit(change, keys, synced=synced), on_success(then))
