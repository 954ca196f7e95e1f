"""The catalog as a worker process has it: reads go to the environments themselves, all else to the store process.

As much of `catalog.protocol.Catalog` as the API uses; what only gc, write-behind and a start do is not here. What was acknowledged
to anybody is seen by every read begun afterwards, rows that are remembered included (`SharedWords`). Marks are the store process's:
a row that policy is just claiming is still seen here, until the claim is over. Event-loop-only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from kvobj.catalog.history_protocol import EventPage
from kvobj.catalog.lease_protocol import LeaseLimits
from kvobj.catalog.lmdb import LmdbCatalog
from kvobj.catalog.namespace_protocol import NamespaceRow, Namespaces, NamespaceUsage
from kvobj.catalog.numbers import NumberLine
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import (
    BucketRow,
    BucketUsage,
    ListPage,
    ObjectRow,
    PartRow,
    UploadPage,
    UploadRow,
    UserRow,
)
from kvobj.catalog.setting_rows import BucketUpdate, ObjectUpdate
from kvobj.database import ReadDatabase
from kvobj.workers.calls import StoreCalls
from kvobj.workers.shared_words import SharedWords


class WorkerCatalog:
    """See the module's text."""

    def __init__(self, database: ReadDatabase, calls: StoreCalls, words: SharedWords) -> None:
        self._calls = calls
        self._words = words
        self._reads = LmdbCatalog(database, NumberLine(1), LeaseLimits())
        self._settings = -1
        self.namespaces: Namespaces = cast("Namespaces", WorkerNamespaces(self))
        self.history = WorkerHistory(calls)

    def as_catalog(self) -> Catalog:
        """The same, for who needs no more of a catalog than the API does."""
        return cast("Catalog", self)

    def reads(self) -> LmdbCatalog:
        """The driver to read from, which remembers nothing that has changed since."""
        settings = self._words.settings
        if settings != self._settings:
            self._settings = settings
            self._reads.forget_settings()
        return self._reads

    # -- reads ---------------------------------------------------------------------------------------------------
    async def users(self) -> tuple[UserRow, ...]:
        """See `Catalog.users`."""
        return await self._reads.users()

    async def bucket(self, name: str) -> BucketRow | None:
        """See `Catalog.bucket`."""
        return await self.reads().bucket(name)

    async def buckets(self) -> tuple[BucketRow, ...]:
        """See `Catalog.buckets`."""
        return await self._reads.buckets()

    async def bucket_usage(self, name: str) -> BucketUsage:
        """See `Catalog.bucket_usage`."""
        return await self._reads.bucket_usage(name)

    async def lookup(self, bucket: str, keys: Sequence[str], *, rescue: bool = False) -> list[ObjectRow | None]:
        """See `Catalog.lookup`. A rescue is a call."""
        if rescue:
            return await self._calls.lookup(bucket, list(keys), rescue=True)
        return await self._reads.lookup(bucket, keys)

    async def lookup_hidden(self, bucket: str, key: str) -> ObjectRow | None:
        """See `Catalog.lookup_hidden`."""
        return await self._reads.lookup_hidden(bucket, key)

    async def list_objects(
        self, bucket: str, *, key_prefix: str = "", delimiter: str = "", after: str = "", limit: int = 1000
    ) -> ListPage:
        """See `Catalog.list_objects`."""
        return await self._reads.list_objects(
            bucket, key_prefix=key_prefix, delimiter=delimiter, after=after, limit=limit
        )

    async def upload(self, bucket: str, key: str, upload_id: str) -> UploadRow | None:
        """See `Catalog.upload`."""
        return await self._reads.upload(bucket, key, upload_id)

    async def parts(self, bucket: str, key: str, upload_id: str) -> tuple[PartRow, ...]:
        """See `Catalog.parts`."""
        return await self._reads.parts(bucket, key, upload_id)

    async def list_uploads(
        self,
        bucket: str,
        *,
        key_prefix: str = "",
        delimiter: str = "",
        after: tuple[str, str] = ("", ""),
        limit: int = 1000,
        groups: bool = False,
    ) -> UploadPage:
        """See `Catalog.list_uploads`."""
        return await self._reads.list_uploads(
            bucket, key_prefix=key_prefix, delimiter=delimiter, after=after, limit=limit, groups=groups
        )

    # -- changes -------------------------------------------------------------------------------------------------
    async def create_bucket(self, bucket: BucketRow) -> None:
        """See `Catalog.create_bucket`."""
        await self._calls.create_bucket(bucket)

    async def update_bucket(self, name: str, update: BucketUpdate, *, made_ms: int | None = None) -> BucketRow:
        """See `Catalog.update_bucket`."""
        return await self._calls.update_bucket(name, update, made_ms)

    async def delete_bucket(self, name: str, *, made_ms: int | None = None) -> None:
        """See `Catalog.delete_bucket`."""
        await self._calls.delete_bucket(name, made_ms)

    async def create_upload(self, upload: UploadRow, *, made_ms: int | None = None, limit: int | None = None) -> None:
        """See `Catalog.create_upload`. It is the store process that counts."""
        await self._calls.create_upload(upload, made_ms, limit)

    async def update_object(
        self, bucket: str, key: str, update: ObjectUpdate, *, sequence: int | None = None
    ) -> ObjectRow | None:
        """See `Catalog.update_object`."""
        return await self._calls.update_object(bucket, key, update, sequence)


class WorkerNamespaces:
    """As much of `Namespaces` as only reads."""

    __slots__ = ("_catalog",)

    def __init__(self, catalog: WorkerCatalog) -> None:
        self._catalog = catalog

    async def namespace(self, bucket: str, name: str) -> NamespaceRow | None:
        """See `Namespaces.namespace`."""
        return await self._catalog.reads().namespaces.namespace(bucket, name)

    async def page(self, bucket: str, *, after: str = "", limit: int = 1000) -> tuple[NamespaceRow, ...]:
        """See `Namespaces.page`."""
        return await self._catalog.reads().namespaces.page(bucket, after=after, limit=limit)

    async def usage(self, bucket: str, name: str) -> NamespaceUsage:
        """See `Namespaces.usage`."""
        return await self._catalog.reads().namespaces.usage(bucket, name)


class WorkerHistory:
    """As much of `History` as readers of events need. `freshen` comes before `last_sequence`."""

    __slots__ = ("_calls", "_last")

    def __init__(self, calls: StoreCalls) -> None:
        self._calls = calls
        self._last = 0

    async def freshen(self) -> None:
        """Ask how far the log has come."""
        self._last = max(self._last, await self._calls.last_event())

    def last_sequence(self) -> int:
        """See `History.last_sequence`; as of the last `freshen`."""
        return self._last

    async def read(self, bucket: str | None, *, after: int, limit: int = 1000) -> EventPage:
        """See `History.read`."""
        return await self._calls.read_events(bucket, after, limit)

    async def wait(self, after: int, *, timeout_seconds: float) -> bool:
        """See `History.wait`."""
        return await self._calls.wait_for_events(after, timeout_seconds)
