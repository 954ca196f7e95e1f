"""The embedded driver of the catalog: rows in a `Database`, one change of it a verb.

Guarantees: what `protocol.Catalog` promises. Rows of class `memory` are committed inline on the event loop into the volatile
environment (~30 µs); all others go through group commit and the record log. Reads of up to 64 rows run inline, larger ones on a
thread of its own. Does not own the database: tiers keep their directories in it too.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count, islice
from typing import Final, TypeVar

from kvobj.catalog.bucket_changes import (
    AddUser,
    CreateBucket,
    DeleteBucket,
    OpenEpoch,
    RemoveUser,
    begin_incarnation,
)
from kvobj.catalog.encoding import (
    BUCKETS,
    DELETE_QUEUE,
    DELETE_QUEUE_VOLATILE,
    OBJECTS,
    OBJECTS_VOLATILE,
    PARTS,
    PARTS_VOLATILE,
    USERS,
    decode_object,
    decode_part,
    decode_queue_entry,
    decode_stored_bucket,
    decode_user,
    escaped,
    number_key,
    upload_key,
)
from kvobj.catalog.key_tree import STRIDE_BYTES, is_pointer
from kvobj.catalog.listing import list_page
from kvobj.catalog.object_changes import (
    CommitChange,
    DeleteChange,
    DropChange,
    NeedsDurableError,
    RaiseChange,
    Refusal,
    require_root,
    root_of,
)
from kvobj.catalog.object_rows import ObjectRows
from kvobj.catalog.rows import (
    BucketRow,
    BucketUsage,
    CommitMode,
    CommitOutcome,
    DeleteOutcome,
    Durability,
    ListPage,
    ObjectRow,
    PartRow,
    QueueEntry,
    UploadPage,
    UploadRow,
    UserRow,
    WriteCondition,
)
from kvobj.catalog.snapshot import snapshot_entries
from kvobj.catalog.upload_changes import AbortUpload, CreateUpload, PutPart
from kvobj.catalog.upload_rows import UploadRows
from kvobj.database import Database, SnapshotSource, Table, WriteView
from kvobj.errors import NoSuchUploadError

T = TypeVar("T")

_INLINE_ROWS: Final = 64
"""Up to here a read is cheaper on the event loop than a hop to a thread and back (60 µs)."""
_SCAN_ROWS: Final = 1000
_KNOWN_BUCKETS: Final = 1024
_LOG_SLACK_BYTES: Final = 256 * 1024 * 1024
_LOG_FACTOR: Final = 4


class LmdbCatalog:
    """See the module's text and `protocol.Catalog`. Used on the event loop that the database was opened on."""

    def __init__(self, database: Database, allocate: Callable[[], int]) -> None:
        self._database = database
        self._allocate = allocate
        self._objects = ObjectRows(allocate)
        self._uploads = UploadRows(allocate)
        self._readers = ThreadPoolExecutor(1, "catalog-read")
        # Every request asks for its bucket's row (10 µs a time). Rows never change, this process alone removes them, and it
        # forgets a row here before it tells anybody of the removal.
        self._buckets: dict[str, BucketRow] = {}

    @classmethod
    async def open(cls, database: Database) -> LmdbCatalog:
        """Start on a database that has `encoding.CATALOG_TABLES`: one synced transaction."""
        first = await database.write(begin_incarnation)
        return cls(database, count(first).__next__)

    async def open_epoch(self, epoch: int) -> None:
        """See `Catalog.open_epoch`."""
        await self._database.write(OpenEpoch(epoch))

    # -- users ---------------------------------------------------------------------------------------------------

    async def users(self) -> tuple[UserRow, ...]:
        """See `Catalog.users`."""
        with self._database.read() as view:
            return tuple(decode_user(value) for _, value in view.range(USERS))

    async def add_user(self, user: UserRow) -> None:
        """See `Catalog.add_user`."""
        await self._database.write(AddUser(user, may_replace=False))

    async def put_user(self, user: UserRow) -> None:
        """See `Catalog.put_user`."""
        await self._database.write(AddUser(user, may_replace=True))

    async def remove_user(self, user_id: str) -> None:
        """See `Catalog.remove_user`."""
        await self._database.write(RemoveUser(user_id))

    # -- buckets -------------------------------------------------------------------------------------------------

    async def create_bucket(self, bucket: BucketRow) -> None:
        """See `Catalog.create_bucket`."""
        await self._database.write(CreateBucket(bucket, self._allocate), [_bucket_key(bucket.name)])

    async def bucket(self, name: str) -> BucketRow | None:
        """See `Catalog.bucket`."""
        known = self._buckets.get(name)
        if known is not None or not name:
            return known
        with self._database.read() as view:
            value = view.get(BUCKETS, name.encode())
        if value is None:
            return None
        if len(self._buckets) == _KNOWN_BUCKETS:
            self._buckets.clear()
        row = self._buckets[name] = decode_stored_bucket(value).row
        return row

    async def buckets(self) -> tuple[BucketRow, ...]:
        """See `Catalog.buckets`."""
        with self._database.read() as view:
            return tuple(decode_stored_bucket(value).row for _, value in view.range(BUCKETS))

    async def delete_bucket(self, name: str) -> None:
        """See `Catalog.delete_bucket`."""
        try:
            await self._database.write(DeleteBucket(name, self._objects, self._uploads), [_bucket_key(name)])
        finally:
            self._buckets.pop(name, None)

    async def bucket_usage(self, name: str) -> BucketUsage:
        """See `Catalog.bucket_usage`."""
        with self._database.read() as view:
            return self._objects.usage(view, require_root(view, name))

    # -- objects -------------------------------------------------------------------------------------------------

    async def lookup(self, bucket: str, keys: Sequence[str]) -> list[ObjectRow | None]:
        """See `Catalog.lookup`."""
        if len(keys) > _INLINE_ROWS:
            return await self._on_thread(self._lookup, bucket, keys)
        return self._lookup(bucket, keys)

    def _lookup(self, bucket: str, keys: Sequence[str]) -> list[ObjectRow | None]:
        with self._database.read() as view:
            root = root_of(view, bucket)
            if root is None:
                return [None] * len(keys)
            return [self._objects.live(view, root, key.encode()) for key in keys]

    async def commit(
        self,
        row: ObjectRow,
        *,
        mode: CommitMode,
        condition: WriteCondition | None = None,
        upload_id: str | None = None,
        now_ms: int,
    ) -> CommitOutcome:
        """See `Catalog.commit`."""
        change = partial(CommitChange, self._objects, self._uploads, row, mode, condition, upload_id, now_ms)
        keys = [_object_key(row.bucket, row.key)]
        if upload_id is not None:
            keys.append(_upload_key(upload_id))
        if row.durability is Durability.MEMORY:
            outcome = await self._write_fast(change, keys, bucket=row.bucket)
        else:
            outcome = await self._database.write(change(durable=True), keys)
        if isinstance(outcome, Refusal):
            raise outcome.error
        return outcome

    async def delete(
        self, bucket: str, keys: Sequence[str], *, conditions: Sequence[WriteCondition | None] = (), now_ms: int
    ) -> list[DeleteOutcome]:
        """See `Catalog.delete`."""
        change = partial(DeleteChange, self._objects, bucket, keys, conditions, now_ms)
        return await self._write_fast(change, [_object_key(bucket, key) for key in keys], bucket=bucket)

    async def list_objects(
        self, bucket: str, *, key_prefix: str = "", delimiter: str = "", after: str = "", limit: int = 1000
    ) -> ListPage:
        """See `Catalog.list_objects`."""
        read = partial(self._list_objects, bucket, key_prefix.encode(), delimiter.encode(), after.encode(), limit)
        return await self._on_thread(read) if limit > _INLINE_ROWS else read()

    def _list_objects(self, bucket: str, key_prefix: bytes, delimiter: bytes, after: bytes, limit: int) -> ListPage:
        with self._database.read() as view:
            page = list_page(
                partial(self._objects.items, view, require_root(view, bucket)),
                key_prefix=key_prefix,
                delimiter=delimiter,
                after=after,
                start=after + b"\0" if after else b"",
                limit=limit,
            )
        next_after = None
        if page.has_more:
            next_after = (page.common_prefixes[-1] if page.ends_in_prefix else page.entries[-1][0]).decode()
        rows = tuple(decode_object(value) for _, value in page.entries)
        return ListPage(rows, tuple(prefix.decode() for prefix in page.common_prefixes), next_after)

    async def raise_durability(self, rows: Sequence[ObjectRow]) -> list[bool]:
        """See `Catalog.raise_durability`."""
        keys = [_object_key(row.bucket, row.key) for row in rows]
        return await self._database.write(RaiseChange(self._objects, rows), keys)

    async def drop_rows(self, rows: Sequence[ObjectRow]) -> None:
        """See `Catalog.drop_rows`."""
        keys = [_object_key(row.bucket, row.key) for row in rows]
        await self._write_fast(partial(DropChange, self._objects, rows), keys)

    async def scan_objects(self, *, volatile_only: bool = False) -> AsyncIterator[ObjectRow]:
        """See `Catalog.scan_objects`."""
        for bucket in await self.buckets():
            start: bytes | None = b""
            while start is not None:
                page, start = await self._on_thread(self._scan_page, bucket.name, start, volatile_only)
                for value in page:
                    yield decode_object(value)

    def _scan_page(self, bucket: str, start: bytes, volatile_only: bool) -> tuple[list[bytes], bytes | None]:  # noqa: FBT001 - runs on a thread, positionally
        with self._database.read() as view:
            root = root_of(view, bucket)
            if root is None:
                return [], None
            tree = self._objects.volatile if volatile_only else self._objects
            page = list(islice(tree.items(view, root, start), _SCAN_ROWS))
        following = page[-1][0] + b"\0" if len(page) == _SCAN_ROWS else None
        return [value for _, value in page], following

    # -- multipart uploads ---------------------------------------------------------------------------------------

    async def create_upload(self, upload: UploadRow) -> None:
        """See `Catalog.create_upload`."""
        change = CreateUpload(self._uploads, upload)
        keys = [_upload_key(upload.upload_id)]
        if upload.durability is Durability.MEMORY:
            await self._database.write_fast(change, keys, shared=[_bucket_key(upload.bucket)])
        else:
            await self._database.write(change, keys)

    async def upload(self, bucket: str, key: str, upload_id: str) -> UploadRow | None:
        """See `Catalog.upload`."""
        with self._database.read() as view:
            root = root_of(view, bucket)
            found = None if root is None else self._uploads.find(view, root, key.encode(), upload_id)
        return None if found is None else found.row

    async def put_part(self, bucket: str, key: str, part: PartRow, *, now_ms: int) -> None:
        """See `Catalog.put_part`."""
        change = partial(PutPart, self._objects, self._uploads, bucket, key, part, now_ms)
        outcome = await self._write_fast(change, [_upload_key(part.upload_id)], bucket=bucket)
        if isinstance(outcome, Refusal):
            raise outcome.error

    async def parts(self, bucket: str, key: str, upload_id: str) -> tuple[PartRow, ...]:
        """See `Catalog.parts`."""
        return await self._on_thread(self._parts, bucket, key, upload_id)

    def _parts(self, bucket: str, key: str, upload_id: str) -> tuple[PartRow, ...]:
        with self._database.read() as view:
            root = root_of(view, bucket)
            found = None if root is None else self._uploads.find(view, root, key.encode(), upload_id)
            if found is None:
                raise NoSuchUploadError("no such upload", bucket=bucket, key=key, upload_id=upload_id)
            return self._uploads.parts(view, found)

    async def abort_upload(self, bucket: str, key: str, upload_id: str, *, now_ms: int) -> None:
        """See `Catalog.abort_upload`."""
        change = partial(AbortUpload, self._objects, self._uploads, bucket, key, upload_id, now_ms)
        await self._write_fast(change, [_upload_key(upload_id)], bucket=bucket)

    async def list_uploads(
        self,
        bucket: str,
        *,
        key_prefix: str = "",
        delimiter: str = "",
        after: tuple[str, str] = ("", ""),
        limit: int = 1000,
    ) -> UploadPage:
        """See `Catalog.list_uploads`."""
        return await self._on_thread(self._list_uploads, bucket, key_prefix, delimiter, after, limit)

    def _list_uploads(
        self, bucket: str, key_prefix: str, delimiter: str, after: tuple[str, str], limit: int
    ) -> UploadPage:
        after_key = after[0].encode()
        with self._database.read() as view:
            page = list_page(
                partial(self._uploads.items, view, require_root(view, bucket)),
                key_prefix=key_prefix.encode(),
                delimiter=delimiter.encode(),
                after=after_key,
                start=upload_key(after_key, after[1]) + b"\0" if after_key else b"",
                limit=limit,
                encode=escaped,
            )
        next_after = None
        if page.has_more and page.ends_in_prefix:
            next_after = (page.common_prefixes[-1].decode(), "")
        elif page.has_more:
            last = page.entries[-1][1]
            next_after = (last.key, last.upload_id)
        prefixes = tuple(prefix.decode() for prefix in page.common_prefixes)
        return UploadPage(tuple(row for _, row in page.entries), prefixes, next_after)

    async def scan_parts(self) -> AsyncIterator[PartRow]:
        """See `Catalog.scan_parts`."""
        for table in (PARTS_VOLATILE, PARTS):
            start: bytes | None = b""
            while start is not None:
                with self._database.read() as view:
                    page = list(islice(view.range(table, start), _INLINE_ROWS))
                for _, value in page:
                    yield decode_part(value)
                start = page[-1][0] + b"\0" if len(page) == _INLINE_ROWS else None

    async def scan_named_blobs(self) -> AsyncIterator[bytes]:
        """See `Catalog.scan_named_blobs`."""
        tables: tuple[tuple[Table, Callable[[bytes, bytes], Iterable[bytes]]], ...] = (
            (OBJECTS_VOLATILE, _blobs_of_row),
            (OBJECTS, _blobs_of_row),
            (PARTS_VOLATILE, _blobs_of_part),
            (PARTS, _blobs_of_part),
            (DELETE_QUEUE_VOLATILE, _blob_of_queue_entry),
            (DELETE_QUEUE, _blob_of_queue_entry),
        )
        for table, blobs_in in tables:
            start: bytes | None = b""
            while start is not None:
                page, start = await self._on_thread(self._table_page, table, start, blobs_in)
                for blob_id in page:
                    yield blob_id

    def _table_page(
        self, table: Table, start: bytes, blobs_in: Callable[[bytes, bytes], Iterable[bytes]]
    ) -> tuple[list[bytes], bytes | None]:
        with self._database.read() as view:
            page = list(islice(view.range(table, start), _SCAN_ROWS))
        following = page[-1][0] + b"\0" if len(page) == _SCAN_ROWS else None
        return [blob_id for key, value in page for blob_id in blobs_in(key, value)], following

    # -- the delete queue ----------------------------------------------------------------------------------------

    async def queue_blobs(self, blob_ids: Sequence[bytes], *, now_ms: int) -> None:
        """See `Catalog.queue_blobs`."""

        def change(view: WriteView) -> None:
            self._objects.queue(view, blob_ids, bucket="", key="", volatile=False, now_ms=now_ms)

        await self._database.write(change, synced=False)

    async def due(self, *, now_ms: int, limit: int = 1000) -> list[QueueEntry]:
        """See `Catalog.due`."""
        return await self._on_thread(self._due, now_ms, limit)

    def _due(self, now_ms: int, limit: int) -> list[QueueEntry]:
        with self._database.read() as view:
            queues = heapq.merge(view.range(DELETE_QUEUE), view.range(DELETE_QUEUE_VOLATILE))
            entries = (decode_queue_entry(value) for _, value in queues)
            return list(islice((entry for entry in entries if entry.not_before_ms <= now_ms), limit))

    async def reap(self, entries: Sequence[QueueEntry]) -> None:
        """See `Catalog.reap`. Not synced: what power loss brings back is deleted once more, which does no harm."""
        for volatile in (True, False):
            places = [number_key(entry.position) for entry in entries if entry.volatile is volatile]
            table = DELETE_QUEUE_VOLATILE if volatile else DELETE_QUEUE

            def change(view: WriteView, places: list[bytes] = places, table: Table = table) -> None:
                for place in places:
                    view.delete(table, place)

            if places and volatile:
                self._database.write_volatile(change)
            elif places:
                await self._database.write(change, synced=False)

    # -- the record log and the end --------------------------------------------------------------------------------

    def log_needs_compaction(self) -> bool:
        """Whether the record log is more than four times the live estimate and 256 MiB, or lacks something."""
        durable_bytes, _ = self._database.used_bytes()
        limit_bytes = _LOG_FACTOR * durable_bytes + _LOG_SLACK_BYTES
        return self._database.log_bytes > limit_bytes or self._database.log_snapshot_due

    async def compact_log(self, also: Sequence[SnapshotSource] = ()) -> bool:
        """Replace the record log by a snapshot of the durable rows, and of what `also` (other users of the log) adds."""
        return await self._database.compact_log([snapshot_entries, *also])

    async def aclose(self) -> None:
        """See `Catalog.aclose`. The database stays open: it is its opener's."""
        self._readers.shutdown()

    async def _on_thread(self, read: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._readers, read, *arguments)

    async def _write_fast(
        self,
        change: Callable[..., Callable[[WriteView], T]],
        keys: Sequence[bytes],
        *,
        bucket: str | None = None,
        synced: bool = True,
    ) -> T:
        """Try inline; where the change meets something durable, hand it to the durable writer."""
        shared = () if bucket is None else (_bucket_key(bucket),)
        try:
            return await self._database.write_fast(change(durable=False), keys, shared=shared)
        except NeedsDurableError:
            return await self._database.write(change(durable=True), keys, synced=synced)


def _blobs_of_row(stored_key: bytes, value: bytes) -> Iterable[bytes]:
    return () if is_pointer(stored_key) else (blob.blob_id for blob in decode_object(value).blobs)


def _blobs_of_part(_: bytes, value: bytes) -> Iterable[bytes]:
    return (blob.blob_id for blob in decode_part(value).blobs)


def _blob_of_queue_entry(_: bytes, value: bytes) -> Iterable[bytes]:
    return (decode_queue_entry(value).blob_id,)


def _object_key(bucket: str, key: str) -> bytes:
    """Names what changes of an object must not race for: all keys with the same first stride share tree nodes."""
    return b"o" + bucket.encode() + b"\0" + key.encode()[:STRIDE_BYTES]


def _bucket_key(bucket: str) -> bytes:
    return b"b" + bucket.encode()


def _upload_key(upload_id: str) -> bytes:
    return b"u" + upload_id.encode()
