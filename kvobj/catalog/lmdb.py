"""The embedded driver of the catalog: rows in a `Database`, one change of it a verb.

Guarantees: what `protocol.Catalog` promises. Rows of class `memory` are committed inline on the event loop into the volatile
environment (~30 µs); all others go through group commit and the record log. Reads of up to 64 rows run inline, larger ones on a
thread of its own. Does not own the database: tiers keep their directories in it too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Final, Self

from kvobj.catalog.bucket_changes import (
    AddUser,
    CreateBucket,
    DeleteBucket,
    OpenEpoch,
    RemoveUser,
    UpdateBucket,
    begin_incarnation,
)
from kvobj.catalog.catalog_rows import require_root, root_of
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
)
from kvobj.catalog.flight_keys import bucket_key, reliance_key, removal_key, row_key, upload_key
from kvobj.catalog.followed import followed
from kvobj.catalog.history_protocol import History
from kvobj.catalog.key_tree import is_pointer
from kvobj.catalog.lease_protocol import LeaseLimits, Leases
from kvobj.catalog.listing import list_page
from kvobj.catalog.lmdb_base import INLINE_ROWS
from kvobj.catalog.lmdb_gc import LmdbGc
from kvobj.catalog.lmdb_history import DEFAULT_MAX_EVENTS, LmdbHistory
from kvobj.catalog.lmdb_leases import LmdbLeases
from kvobj.catalog.lmdb_namespaces import LmdbNamespaces
from kvobj.catalog.lmdb_remote import LmdbOutbox, LmdbRemoteQueue
from kvobj.catalog.lmdb_removals import LmdbRemovals
from kvobj.catalog.lmdb_uploads import LmdbUploads
from kvobj.catalog.namespace_protocol import Namespaces
from kvobj.catalog.numbers import NumberLine
from kvobj.catalog.object_changes import (
    CommitChainChange,
    CommitChange,
    NeedsDurableError,
    RaiseChange,
    Refusal,
    UpdateObject,
)
from kvobj.catalog.queue_batches import blobs_of
from kvobj.catalog.queue_watch import QueueWatch
from kvobj.catalog.remote_protocol import Outbox, RemoteQueue
from kvobj.catalog.rows import (
    BucketRow,
    BucketUsage,
    CommitMode,
    CommitOutcome,
    Durability,
    ListPage,
    NamespaceQuota,
    ObjectRow,
    ObjectState,
    UserRow,
    WriteCondition,
)
from kvobj.catalog.setting_rows import BucketUpdate, ObjectUpdate
from kvobj.catalog.snapshot import snapshot_entries
from kvobj.clock import SystemClock, boot_ms
from kvobj.database import Database, SnapshotSource, Table, WriteView
from kvobj.errors import BatchTooLargeError, ConflictError, InvalidRequestError, KvobjError

_SCAN_ROWS: Final = 1000
_CHAIN_ROWS_MAX: Final = 1000
_KNOWN_BUCKETS: Final = 1024
_LOG_SLACK_BYTES: Final = 256 * 1024 * 1024
_LOG_FACTOR: Final = 4


class LmdbCatalog(LmdbUploads, LmdbRemovals, LmdbGc):
    """See the module's text and `protocol.Catalog`. Used on the event loop that the database was opened on."""

    def __init__(self, database: Database, numbers: NumberLine, limits: LeaseLimits) -> None:
        super().__init__(database, numbers)
        # Every request asks for its bucket's row (10 µs a time). This process alone changes and removes them, and it forgets a
        # row here before it tells anybody of the change.
        self._buckets: dict[str, BucketRow] = {}
        self._roots: dict[str, bytes] = {}
        self._leases = LmdbLeases(
            database,
            self._objects,
            self._tables.guard,
            numbers.allocate,
            self._forget_marks,
            self._marks.is_claiming,
            limits,
        )
        self._history: LmdbHistory
        self._outbox = LmdbOutbox(database, self._objects, executor=self._readers)
        self._namespaces = LmdbNamespaces(
            database, on_changed=self._note_change, require_room=self._outbox.require_room
        )
        self._remote_queue = LmdbRemoteQueue(database, self._tables)
        self.on_settings_changed: Callable[[], None] = _nothing
        """Called when a bucket or a namespace has changed or gone, before who asked for that is told: for who remembers rows of
        them in another process."""

    @classmethod
    async def open(
        cls,
        database: Database,
        *,
        limits: LeaseLimits | None = None,
        max_events: int = DEFAULT_MAX_EVENTS,
        now_boot_ms: int | None = None,
    ) -> Self:
        """Start on a database that has `encoding.CATALOG_TABLES`: one or two synced transactions.

        `now_boot_ms` (default: the machine's clock) tells how long sessions were not heard of.
        """
        first = await database.write(begin_incarnation)
        numbers = NumberLine.of(database, first)
        catalog = cls(database, numbers, limits if limits is not None else LeaseLimits())
        now = boot_ms(SystemClock()) if now_boot_ms is None else now_boot_ms
        await catalog._leases.open(now_boot_ms=now)
        await catalog._name_uploads()
        catalog._count_unfinished()
        QueueWatch(database, catalog._objects, catalog._tell_queued)
        catalog._history = await LmdbHistory.open(
            database, catalog._tables.history, numbers, executor=catalog._readers, max_events=max_events
        )
        return catalog

    @property
    def leases(self) -> Leases:
        """See `Catalog.leases`."""
        return self._leases

    @property
    def namespaces(self) -> Namespaces:
        """See `Catalog.namespaces`."""
        return self._namespaces

    @property
    def history(self) -> History:
        """See `Catalog.history`."""
        return self._history

    @property
    def outbox(self) -> Outbox:
        """See `Catalog.outbox`."""
        return self._outbox

    @property
    def remote_queue(self) -> RemoteQueue:
        """See `Catalog.remote_queue`."""
        return self._remote_queue

    def _tell_queued(self) -> None:
        self.on_queued()

    def _note_change(self) -> None:
        self.on_settings_changed()

    def forget_settings(self) -> None:
        """Read rows of buckets and namespaces anew from here on: another process has changed one."""
        self._buckets.clear()
        self._roots.clear()
        self._namespaces.forget_all()

    def _forget_marks(self, names: Sequence[tuple[str, str]]) -> None:
        for bucket, key in names:
            self._marks.forget(bucket, (key,))

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
        self._outbox.require_room()
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
        if await self.bucket(bucket.name) is None:
            self._outbox.require_room()
        await self._database.write(CreateBucket(bucket, self._numbers.allocate), [bucket_key(bucket.name)])

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
            self._roots.clear()
        stored = decode_stored_bucket(value)
        self._buckets[name], self._roots[name] = stored.row, stored.root
        return stored.row

    async def buckets(self) -> tuple[BucketRow, ...]:
        """See `Catalog.buckets`."""
        with self._database.read() as view:
            return tuple(decode_stored_bucket(value).row for _, value in view.range(BUCKETS))

    async def update_bucket(self, name: str, update: BucketUpdate, *, made_ms: int | None = None) -> BucketRow:
        """See `Catalog.update_bucket`."""
        self._outbox.require_room()

        def over(_: asyncio.Future[BucketRow]) -> None:
            self._buckets.pop(name, None)
            self.on_settings_changed()

        change = UpdateBucket(name, update, made_ms)
        return await followed(self._database.submit(change, [bucket_key(name)]), over)

    async def delete_bucket(self, name: str, *, made_ms: int | None = None) -> None:
        """See `Catalog.delete_bucket`."""

        def over(change: asyncio.Future[None]) -> None:
            if not change.cancelled() and change.exception() is None:
                self.unfinished.bucket_ended(name)
            self._buckets.pop(name, None)
            self._roots.pop(name, None)
            self._namespaces.forget_bucket(name)
            self.on_settings_changed()

        change = DeleteBucket(name, self._tables, made_ms)
        await followed(self._database.submit(change, [bucket_key(name)]), over)

    async def bucket_usage(self, name: str) -> BucketUsage:
        """See `Catalog.bucket_usage`."""
        with self._database.read() as view:
            return self._objects.usage(view, require_root(view, name))

    # -- objects -------------------------------------------------------------------------------------------------

    async def lookup(self, bucket: str, keys: Sequence[str], *, rescue: bool = False) -> list[ObjectRow | None]:
        """See `Catalog.lookup`."""
        marks = self._marks
        if rescue:
            marks.forget(bucket, keys)
        claiming = marks.absent(bucket, keys)
        if len(keys) > INLINE_ROWS:
            rows = await self._on_thread(self._lookup, bucket, keys)
            claiming |= marks.absent(bucket, keys)
        elif len(keys) == 1 and bucket in self._roots:
            rows = [self._objects.live_once(self._database.read(), self._roots[bucket], keys[0].encode())]
        else:
            rows = self._lookup(bucket, keys)
        if claiming:
            return [None if key in claiming else row for key, row in zip(keys, rows, strict=True)]
        return rows

    def rescue(self, bucket: str, key: str) -> bool:
        """What `lookup` with `rescue` does about the marks of a row that somebody else has looked up; False where the row is being
        claimed, so that it is absent. ~0.3 µs."""
        self._marks.forget(bucket, (key,))
        return not self._marks.is_claiming(bucket, key)

    def _lookup(self, bucket: str, keys: Sequence[str]) -> list[ObjectRow | None]:
        with self._database.read() as view:
            root = self._roots.get(bucket) or root_of(view, bucket)
            if root is None:
                return [None] * len(keys)
            return [self._objects.live(view, root, key.encode()) for key in keys]

    async def lookup_hidden(self, bucket: str, key: str) -> ObjectRow | None:
        """See `Catalog.lookup_hidden`."""
        with self._database.read() as view:
            root = root_of(view, bucket)
            row = None if root is None else self._objects.any(view, root, key.encode())
        return row if row is not None and row.state is ObjectState.CONDEMNED else None

    async def commit(
        self,
        row: ObjectRow,
        *,
        mode: CommitMode,
        condition: WriteCondition | None = None,
        upload_id: str | None = None,
        quota: NamespaceQuota | None = None,
        parent_tokens: int = 0,
        made_ms: int | None = None,
        namespace_root: bytes = b"",
        now_ms: int,
        to_remote: bool = False,
    ) -> CommitOutcome:
        """See `Catalog.commit`."""
        change = partial(
            CommitChange,
            self._tables,
            row,
            mode,
            condition,
            upload_id,
            quota,
            now_ms,
            parent_tokens=parent_tokens,
            made_ms=made_ms,
            namespace_root=namespace_root,
            to_remote=to_remote,
        )
        self._marks.forget(row.bucket, (row.key, row.parent) if row.parent else (row.key,))
        in_memory = row.durability is Durability.MEMORY
        outcome: CommitOutcome | Refusal | None = None
        then: Callable[[CommitOutcome | Refusal], None] | None = None
        if upload_id is not None:
            then = partial(self._note_ended, upload_id)
        if in_memory and self._database.is_idle:
            with suppress(NeedsDurableError):
                outcome = self._database.write_volatile(change(durable=False))
            if outcome is not None and then is not None:
                then(outcome)
        if outcome is None:
            keys, shared = _commit_keys(row, condition, upload_id)
            if in_memory:
                synced = upload_id is not None
                outcome = await self._write_fast(
                    change, keys, shared=shared, bucket=row.bucket, synced=synced, then=then
                )
            else:
                outcome = await self._write(change(durable=True), keys, then=then)
        if isinstance(outcome, Refusal):
            raise outcome.error
        return outcome

    def _note_ended(self, upload_id: str, outcome: CommitOutcome | Refusal) -> None:
        if not isinstance(outcome, Refusal):
            self.unfinished.ended(upload_id)

    def commit_at_once(
        self,
        row: ObjectRow,
        *,
        mode: CommitMode,
        condition: WriteCondition | None = None,
        quota: NamespaceQuota | None = None,
        parent_tokens: int = 0,
        made_ms: int | None = None,
        namespace_root: bytes = b"",
        now_ms: int,
        beside: Callable[[WriteView], None],
    ) -> CommitOutcome | None:
        """See `Catalog.commit_at_once`."""
        database = self._database
        if not database.is_idle:
            keys, shared = _commit_keys(row, condition, None)
            if database.is_in_flight([*keys, *shared, bucket_key(row.bucket)]):
                return None
        change = CommitChange(
            self._tables,
            row,
            mode,
            condition,
            None,
            quota,
            now_ms,
            durable=False,
            parent_tokens=parent_tokens,
            made_ms=made_ms,
            namespace_root=namespace_root,
            keeps_live=True,
        )

        def both(view: WriteView) -> CommitOutcome:
            beside(view)
            outcome = change(view)
            if isinstance(outcome, Refusal):
                raise outcome.error
            if outcome.existed:
                raise ConflictError("another row stands")
            return outcome

        self._marks.forget(row.bucket, (row.key, row.parent) if row.parent else (row.key,))
        try:
            return database.write_volatile(both)
        except KvobjError:
            return None

    async def commit_chain(
        self,
        rows: Sequence[ObjectRow],
        *,
        quota: NamespaceQuota | None = None,
        parent_tokens: int = 0,
        made_ms: int | None = None,
        namespace_root: bytes = b"",
        now_ms: int,
        to_remote: bool = False,
    ) -> list[CommitOutcome | KvobjError]:
        """See `Catalog.commit_chain`."""
        if not rows:
            return []
        if len(rows) > _CHAIN_ROWS_MAX:
            raise BatchTooLargeError("too many chunks in one commit", limit=_CHAIN_ROWS_MAX)
        bucket = rows[0].bucket
        if any(row.bucket != bucket for row in rows):
            raise InvalidRequestError("one commit is of one bucket")
        given = {row.key for row in rows}
        parents = {row.parent for row in rows if row.parent} - given
        self._marks.forget(bucket, [*given, *parents])
        change = partial(
            CommitChainChange,
            self._tables,
            rows,
            quota,
            now_ms,
            parent_tokens=parent_tokens,
            made_ms=made_ms,
            namespace_root=namespace_root,
            to_remote=to_remote,
        )
        in_memory = all(row.durability is Durability.MEMORY for row in rows)
        is_inline = in_memory and len(rows) <= INLINE_ROWS
        if is_inline and self._database.is_idle:
            with suppress(NeedsDurableError):
                return self._database.write_volatile(change(durable=False))
        keys = [row_key(bucket, key) for key in given] + [reliance_key(bucket, parent) for parent in parents]
        if is_inline:
            shared = [removal_key(bucket, key) for key in (*parents, *given)]
            return await self._write_fast(change, keys, shared=shared, bucket=bucket, synced=False)
        return await self._database.write(change(durable=True), keys, synced=not in_memory)

    async def list_objects(
        self, bucket: str, *, key_prefix: str = "", delimiter: str = "", after: str = "", limit: int = 1000
    ) -> ListPage:
        """See `Catalog.list_objects`."""
        read = partial(self._list_objects, bucket, key_prefix.encode(), delimiter.encode(), after.encode(), limit)
        return await self._on_thread(read) if limit > INLINE_ROWS else read()

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

    async def update_object(
        self, bucket: str, key: str, update: ObjectUpdate, *, sequence: int | None = None
    ) -> ObjectRow | None:
        """See `Catalog.update_object`."""
        if self._outbox.is_full and any(_is_told(row) for row in self._lookup(bucket, [key])):
            self._outbox.require_room()
        change = UpdateObject(self._tables, bucket, key, update, sequence)
        return await self._database.write(change, [row_key(bucket, key)])

    async def raise_durability(self, rows: Sequence[ObjectRow]) -> list[bool]:
        """See `Catalog.raise_durability`."""
        keys = [row_key(row.bucket, row.key) for row in rows]
        return await self._database.write(RaiseChange(self._tables, rows), keys)

    async def scan_objects(self, *, volatile_only: bool = False, with_hidden: bool = False) -> AsyncIterator[ObjectRow]:
        """See `Catalog.scan_objects`."""
        for bucket in await self.buckets():
            start: bytes | None = b""
            while start is not None:
                page, start = await self._on_thread(self._scan_page, bucket.name, start, volatile_only)
                for value in page:
                    row = decode_object(value)
                    if with_hidden or row.state is ObjectState.LIVE:
                        yield row

    def _scan_page(self, bucket: str, start: bytes, volatile_only: bool) -> tuple[list[bytes], bytes | None]:  # noqa: FBT001 - runs on a thread, positionally
        with self._database.read() as view:
            root = root_of(view, bucket)
            if root is None:
                return [], None
            items = self._objects.volatile.items if volatile_only else self._objects.all_items
            page = list(islice(items(view, root, start), _SCAN_ROWS))
        following = page[-1][0] + b"\0" if len(page) == _SCAN_ROWS else None
        return [value for _, value in page], following

    async def scan_named_blobs(self) -> AsyncIterator[bytes]:
        """See `Catalog.scan_named_blobs`."""
        tables: tuple[tuple[Table, Callable[[bytes, bytes], Iterable[bytes]]], ...] = (
            # In the order in which a blob goes from one to the next, so that none slips through between two pages.
            (PARTS_VOLATILE, _blobs_of_part),
            (PARTS, _blobs_of_part),
            (OBJECTS_VOLATILE, _blobs_of_row),
            (OBJECTS, _blobs_of_row),
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
        self._leases.close()


def _is_told(row: ObjectRow | None) -> bool:
    return row is not None and row.durability is Durability.SHARED


def _commit_keys(
    row: ObjectRow, condition: WriteCondition | None, upload_id: str | None
) -> tuple[list[bytes], list[bytes]]:
    """What a commit holds, and what it only waits for."""
    bucket = row.bucket
    keys, shared = [row_key(bucket, row.key)], []
    if row.parent:
        keys.append(reliance_key(bucket, row.parent))
        shared.append(removal_key(bucket, row.parent))
    if condition is not None and condition.if_match is not None:
        # It may take the blobs from under a pin that is on its way.
        keys.append(removal_key(bucket, row.key))
        shared.append(reliance_key(bucket, row.key))
    if upload_id is not None:
        keys.append(upload_key(upload_id))
    return keys, shared


def _blobs_of_row(stored_key: bytes, value: bytes) -> Iterable[bytes]:
    return () if is_pointer(stored_key) else decode_object(value).blob_ids


def _blobs_of_part(_: bytes, value: bytes) -> Iterable[bytes]:
    return (blob.blob_id for blob in decode_part(value).blobs)


def _blob_of_queue_entry(_: bytes, value: bytes) -> Iterable[bytes]:
    return blobs_of(decode_queue_entry(value))


def _nothing() -> None:
    """Nobody else remembers rows."""
