"""The reference driver of the catalog: plain dicts, every verb read off the protocol's text, nothing clever.

It says what the other drivers must answer (contract suite, state machine) and serves tests. Guarantees the protocol within one
process and keeps nothing. Rows of class `memory` lie in a dict of their own over the durable ones, so that `lose_power` can do what
power loss does. Every verb runs without a pause: nothing interleaves.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence

import msgspec

from kvobj.catalog import chain_rows
from kvobj.catalog.catalog_rows import made_after
from kvobj.catalog.history_protocol import History
from kvobj.catalog.lease_protocol import LeaseLimits, Leases
from kvobj.catalog.log_entries import BucketRemoved, GoneBuckets, LogEntry, UserRemoved
from kvobj.catalog.memory_namespaces import MemoryNamespaces
from kvobj.catalog.memory_tables import Name, blob_ids_of, condition_error, is_put_again, same_blobs
from kvobj.catalog.memory_uploads import MemoryUploads, common_prefix
from kvobj.catalog.namespace_changes import no_such_namespace
from kvobj.catalog.namespace_protocol import Namespaces, NamespaceUsage
from kvobj.catalog.remote_protocol import Outbox, RemoteQueue
from kvobj.catalog.rows import (
    DEFAULT_NAMESPACES,
    BucketKind,
    BucketRow,
    BucketUsage,
    CommitMode,
    CommitOutcome,
    Durability,
    ListPage,
    NamespaceQuota,
    ObjectRow,
    ObjectState,
    PartRow,
    QueueEntry,
    UserRow,
    WriteCondition,
    is_same_namespace,
)
from kvobj.catalog.setting_rows import BucketUpdate, ObjectUpdate, changes_of
from kvobj.database import WriteView
from kvobj.errors import (
    BatchTooLargeError,
    BucketExistsError,
    BucketNotEmptyError,
    ImmutableChunkError,
    InvalidRequestError,
    KvobjError,
    LayoutMismatchError,
    NoSuchBucketError,
    NoSuchUploadError,
    NoSuchUserError,
    ParentNotFoundError,
    QuotaExceededError,
    UserExistsError,
)

_HIDDEN_MAX = 1000
_PENDING_MAX = 1000
_PARTS_MAX = 10_000
_CHAIN_ROWS_MAX = 1000


class MemoryCatalog(MemoryUploads):
    """See the module's text and `protocol.Catalog`."""

    def __init__(self, limits: LeaseLimits | None = None, *, has_remote: bool = False) -> None:
        super().__init__(limits if limits is not None else LeaseLimits(), has_remote=has_remote)
        self._users: dict[str, UserRow] = {}
        # Rows of a batch whose event is still to be written; None outside of one.
        self._untold: list[ObjectRow] | None = None
        self._namespaces = MemoryNamespaces(
            self._require_bucket, self._namespace_usage, self._outbox.publish, self._outbox.require_room
        )

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

    def _told_state(self) -> Iterable[LogEntry]:
        yield from self._users.values()
        yield from self._namespaces.rows()
        yield from super()._told_state()

    def lose_power(self, *, now_boot_ms: int = 0) -> None:
        """Forget what is of class `memory` and was not written down, marks, sessions and pins; quiet time may begin."""
        self._volatile.clear()
        self._marks.clear()
        self._leases.lose_power(now_boot_ms=now_boot_ms)
        self._history.lose_power()
        lost = [name for name, upload in self._uploads.items() if upload.durability is Durability.MEMORY]
        for name in lost:
            self._forget_upload(self._uploads[name])
        self._queue = {position: entry for position, entry in self._queue.items() if not entry.volatile}

    async def open_epoch(self, epoch: int) -> None:
        """See `Catalog.open_epoch`."""
        self._epoch = epoch

    # -- users and buckets ---------------------------------------------------------------------------------------

    async def users(self) -> tuple[UserRow, ...]:
        """See `Catalog.users`."""
        return tuple(self._users[user_id] for user_id in sorted(self._users, key=str.encode))

    async def add_user(self, user: UserRow) -> None:
        """See `Catalog.add_user`."""
        if user.id in self._users:
            raise UserExistsError("a user with this id exists", id=user.id)
        self._outbox.require_room()
        await self.put_user(user)

    async def put_user(self, user: UserRow) -> None:
        """See `Catalog.put_user`."""
        for other in self._users.values():
            if other.id != user.id and other.access_key == user.access_key:
                raise UserExistsError("a user with this access key exists", id=other.id)
        if self._users.get(user.id) != user:
            self._users[user.id] = user
            self._outbox.publish(user)

    async def remove_user(self, user_id: str) -> None:
        """See `Catalog.remove_user`."""
        if self._users.pop(user_id, None) is None:
            raise NoSuchUserError("no such user", id=user_id)
        self._outbox.publish(UserRemoved(user_id))

    async def create_bucket(self, bucket: BucketRow) -> None:
        """See `Catalog.create_bucket`."""
        existing = self._buckets.get(bucket.name)
        if existing is not None:
            raise BucketExistsError("the bucket exists", bucket=bucket.name, existing=existing)
        self._outbox.require_room()
        made = self._buckets[bucket.name] = made_after(bucket, self._gone_ms)
        self._born[bucket.name] = next(self._numbers)
        self._outbox.publish(made)

    async def bucket(self, name: str) -> BucketRow | None:
        """See `Catalog.bucket`."""
        return self._buckets.get(name)

    async def buckets(self) -> tuple[BucketRow, ...]:
        """See `Catalog.buckets`."""
        return tuple(self._buckets[name] for name in sorted(self._buckets, key=str.encode))

    async def update_bucket(self, name: str, update: BucketUpdate, *, made_ms: int | None = None) -> BucketRow:
        """See `Catalog.update_bucket`."""
        self._require_bucket(name)
        if self._is_anew(name, made_ms):
            raise NoSuchBucketError("no such bucket", bucket=name)
        self._outbox.require_room()
        row = self._buckets[name] = msgspec.structs.replace(self._buckets[name], **changes_of(update))
        self._outbox.publish(row)
        return row

    async def delete_bucket(self, name: str, *, made_ms: int | None = None) -> None:
        """See `Catalog.delete_bucket`."""
        self._require_bucket(name, made_ms)
        uploads = [upload for upload in self._uploads.values() if upload.bucket == name]
        parts = sum(len(self._parts_of(upload.upload_id)) for upload in uploads)
        if self._live_names(name) or len(uploads) > _PENDING_MAX or parts > _PARTS_MAX:
            raise BucketNotEmptyError("the bucket is not empty", bucket=name)
        hidden = [place for place in {**self._durable, **self._volatile} if place[0] == name]
        if len(hidden) > _HIDDEN_MAX:
            raise BucketNotEmptyError("the bucket is not empty", bucket=name)
        for place in hidden:
            self._change(place, None, None, now_ms=0)
        for upload in uploads:
            await self.abort_upload(name, upload.key, upload.upload_id, now_ms=0)
        self._namespaces.forget_bucket(name)
        made_ms = self._buckets.pop(name).created_ms
        self._gone_ms = made_ms if self._gone_ms is None else max(self._gone_ms, made_ms)
        self._outbox.publish(GoneBuckets(self._gone_ms))
        self._outbox.publish(BucketRemoved(name))

    async def bucket_usage(self, name: str) -> BucketUsage:
        """See `Catalog.bucket_usage`."""
        self._require_bucket(name)
        rows = [self._existing(live) for live in self._live_names(name)]
        return BucketUsage(len(rows), sum(row.size_bytes for row in rows))

    # -- objects -------------------------------------------------------------------------------------------------

    async def lookup(self, bucket: str, keys: Sequence[str], *, rescue: bool = False) -> list[ObjectRow | None]:
        """See `Catalog.lookup`."""
        if rescue:
            self._forget_marks([(bucket, key) for key in keys])
        return [self._live((bucket, key.encode())) for key in keys]

    async def lookup_hidden(self, bucket: str, key: str) -> ObjectRow | None:
        """See `Catalog.lookup_hidden`."""
        row = self._top((bucket, key.encode()))
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
        name = (row.bucket, row.key.encode())
        upload = None if upload_id is None else self._uploads.get((*name, upload_id))
        parts = () if upload is None else self._parts_of(upload.upload_id)
        live = self._live(name)
        is_memory = row.durability is Durability.MEMORY
        self._forget_marks([(row.bucket, row.key), (row.bucket, row.parent or "")])
        error = self._refusal(
            row,
            parts,
            mode=mode,
            condition=condition,
            upload_id=upload_id,
            quota=quota,
            parent_tokens=parent_tokens,
            made_ms=made_ms,
            namespace_root=namespace_root,
        )
        if error is not None:
            self._enqueue(row.blob_ids, self._named(name, parts), name, volatile=is_memory, now_ms=now_ms)
            raise error
        if upload is not None:
            self._forget_upload(upload)
            is_memory = upload.durability is Durability.MEMORY
        if live is not None and not _replaces(live, row, mode, condition):
            spare = [*blob_ids_of(parts), *row.blob_ids]
            self._enqueue(spare, self._named(name), name, volatile=is_memory, now_ms=now_ms)
            return CommitOutcome(live, existed=True)
        parent = self._live((row.bucket, row.parent.encode())) if row.parent else None
        stored = chain_rows.placed(row, parent, sequence=next(self._numbers))
        if stored.durability is Durability.MEMORY:
            self._change(name, stored, self._durable.get(name) if live is not None else None, now_ms=now_ms)
        else:
            self._change(name, None, stored, now_ms=now_ms)
            self._remote_queue.put_by_rule(self._buckets[row.bucket], stored, now_ms, asked=to_remote)
        if self._buckets[row.bucket].kind is BucketKind.KV and self._untold is None:
            self._history.stored([stored], now_ms=now_ms, volatile=name in self._volatile)
        elif self._untold is not None:
            self._untold.append(stored)
        if upload is not None:
            self._enqueue(blob_ids_of(parts), self._named(name), name, volatile=is_memory, now_ms=now_ms)
        return CommitOutcome(stored, existed=False)

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
        """See `Catalog.commit_at_once`: there is no database."""
        del row, mode, condition, quota, parent_tokens, made_ms, namespace_root, now_ms, beside
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
        if len(rows) > _CHAIN_ROWS_MAX:
            raise BatchTooLargeError("too many chunks in one commit", limit=_CHAIN_ROWS_MAX)
        if len({row.bucket for row in rows}) > 1:
            raise InvalidRequestError("one commit is of one bucket")
        outcomes: list[CommitOutcome | KvobjError] = []
        self._untold = []
        for row in rows:
            try:
                outcome = await self.commit(
                    row,
                    mode=CommitMode.FIRST_WRITER_WINS,
                    quota=quota,
                    parent_tokens=parent_tokens,
                    made_ms=made_ms,
                    namespace_root=namespace_root,
                    now_ms=now_ms,
                    to_remote=to_remote,
                )
                outcomes.append(outcome)
            except KvobjError as error:
                outcomes.append(error)
        stored, self._untold = self._untold, None
        if rows and rows[0].bucket in self._buckets and self._buckets[rows[0].bucket].kind is BucketKind.KV:
            for volatile in (True, False):
                told = [row for row in stored if (row.durability is Durability.MEMORY) is volatile]
                self._history.stored(told, now_ms=now_ms, volatile=volatile)
        return outcomes

    async def list_objects(
        self, bucket: str, *, key_prefix: str = "", delimiter: str = "", after: str = "", limit: int = 1000
    ) -> ListPage:
        """See `Catalog.list_objects`."""
        self._require_bucket(bucket)
        rows: list[ObjectRow] = []
        prefixes: list[str] = []
        last = None
        for name in self._live_names(bucket):
            row = self._existing(name)
            if not row.key.startswith(key_prefix) or name[1] <= after.encode():
                continue
            common = common_prefix(row.key, key_prefix, delimiter)
            if common is not None and (common == after or common in prefixes):
                continue
            if len(rows) + len(prefixes) >= limit:
                return ListPage(tuple(rows), tuple(prefixes), last)
            if common is None:
                rows.append(row)
            else:
                prefixes.append(common)
            last = row.key if common is None else common
        return ListPage(tuple(rows), tuple(prefixes), None)

    async def update_object(
        self, bucket: str, key: str, update: ObjectUpdate, *, sequence: int | None = None
    ) -> ObjectRow | None:
        """See `Catalog.update_object`."""
        self._require_bucket(bucket)
        name = (bucket, key.encode())
        live = self._live(name)
        if live is None or sequence not in (None, live.sequence):
            return None
        if live.durability is Durability.SHARED:
            self._outbox.require_room()
        row = msgspec.structs.replace(live, **changes_of(update))
        if name in self._volatile:
            self._volatile[name] = row
        else:
            self._outbox.publish_row(self._durable[name], row)
            self._durable[name] = row
        return row

    async def raise_durability(self, rows: Sequence[ObjectRow]) -> list[bool]:
        """See `Catalog.raise_durability`."""
        results = []
        for row in rows:
            name = (row.bucket, row.key.encode())
            top = self._top(name)
            is_same = top is not None and same_blobs(top, row)
            if top is not None and Durability.SHARED in (top.durability, row.durability):
                is_same = is_same and top.blob_ids == row.blob_ids
            results.append(is_same)
            if top is not None and is_same:
                raised = _raised(top, row)
                self._change(name, None, raised, now_ms=0)
                bucket = self._buckets[row.bucket]
                if bucket.kind is BucketKind.KV:
                    self._history.made_durable(raised)
                if raised.durability is Durability.SHARED:
                    self._remote_queue.raised(raised)
                elif top.durability is Durability.MEMORY and raised.state is ObjectState.LIVE:
                    self._remote_queue.put_by_rule(bucket, raised, raised.modified_ms)
        return results

    async def scan_objects(self, *, volatile_only: bool = False, with_hidden: bool = False) -> AsyncIterator[ObjectRow]:
        """See `Catalog.scan_objects`."""
        for name in sorted(self._volatile if volatile_only else {**self._durable, **self._volatile}):
            row = self._existing(name)
            if with_hidden or row.state is ObjectState.LIVE:
                yield row

    async def scan_named_blobs(self) -> AsyncIterator[bytes]:
        """See `Catalog.scan_named_blobs`."""
        rows = [*self._volatile.values(), *self._durable.values()]
        for blob_id in [*blob_ids_of(rows), *blob_ids_of(self._parts.values())]:
            yield blob_id
        for entry in list(self._queue.values()):
            yield entry.blob_id

    # -- the delete queue ----------------------------------------------------------------------------------------

    async def queue_blobs(self, blob_ids: Sequence[bytes], *, now_ms: int, pinned_by: bytes = b"") -> None:
        """See `Catalog.queue_blobs`."""
        for blob_id in blob_ids:
            holder = pinned_by or blob_id
            waits_for = holder if self._leases.holds_blob(holder) else b""
            self._append(QueueEntry(blob_id, now_ms, "", "", pinned=bool(waits_for), pinned_blob=waits_for))

    async def due(self, *, now_ms: int, limit: int = 1000, after: int = 0) -> list[QueueEntry]:
        """See `Catalog.due`."""
        queue = sorted(self._queue.items())
        due = [entry for position, entry in queue if position > after and entry.not_before_ms <= now_ms]
        return [entry for entry in due if not self._is_waiting(entry)][:limit]

    async def reap(self, entries: Sequence[QueueEntry]) -> None:
        """See `Catalog.reap`."""
        for entry in entries:
            self._queue.pop(entry.position, None)

    async def aclose(self) -> None:
        """See `Catalog.aclose`."""

    # -- what the verbs are made of --------------------------------------------------------------------------------

    def _existing(self, name: Name) -> ObjectRow:
        return self._volatile[name] if name in self._volatile else self._durable[name]

    def _live_names(self, bucket: str) -> list[Name]:
        names = sorted(name for name in {**self._durable, **self._volatile} if name[0] == bucket)
        return [name for name in names if self._live(name) is not None]

    def _namespace_usage(self, bucket: str, namespace: str) -> NamespaceUsage:
        rows = [self._existing(name) for name in self._live_names(bucket)]
        sizes = [row.size_bytes for row in rows if row.namespace == namespace]
        return NamespaceUsage(len(sizes), sum(sizes))

    def _is_waiting(self, entry: QueueEntry) -> bool:
        return entry.pinned and self._leases.holds_blob(entry.pinned_blob)

    def _refusal(
        self,
        row: ObjectRow,
        parts: Sequence[PartRow],
        *,
        mode: CommitMode,
        condition: WriteCondition | None,
        upload_id: str | None,
        quota: NamespaceQuota | None,
        parent_tokens: int,
        made_ms: int | None,
        namespace_root: bytes,
    ) -> KvobjError | None:
        name = (row.bucket, row.key.encode())
        live = self._live(name)
        bucket = self._buckets.get(row.bucket)
        if bucket is None or self._is_anew(row.bucket, made_ms):
            return NoSuchBucketError("no such bucket", bucket=row.bucket)
        if namespace_root and not self._namespaces.is_meant(row.bucket, row.namespace, namespace_root):
            return no_such_namespace(row.bucket, row.namespace)
        if upload_id is not None and (*name, upload_id) not in self._uploads:
            return NoSuchUploadError("no such upload", bucket=row.bucket, key=row.key, upload_id=upload_id)
        error = self._fenced(row.blobs, parts) or condition_error(live, condition)
        if row.parent is not None and self._buckets[row.bucket].kind is BucketKind.ORDINARY:
            error = InvalidRequestError("only KV buckets have chains", bucket=row.bucket)
        if error is not None:
            return error
        if live is not None and not _replaces(live, row, mode, condition):
            differs = live.size_bytes != row.size_bytes
            return ImmutableChunkError("another chunk is live", size_bytes=live.size_bytes) if differs else None
        if live is not None and mode is CommitMode.FIRST_WRITER_WINS and not is_put_again(live, row):
            error = self._part_of_chain(live, row)
        if row.parent:
            error = error or self._unfit_parent(row, self._live((row.bucket, row.parent.encode())), parent_tokens)
        return error if quota is None else error or self._over_quota(row, live, quota)

    @staticmethod
    def _unfit_parent(row: ObjectRow, parent: ObjectRow | None, parent_tokens: int) -> KvobjError | None:
        if parent is None or (not is_same_namespace(parent.namespace, row.namespace)):
            return ParentNotFoundError("the parent is not live", parent=row.parent, key=row.key)
        if parent.tokens < parent_tokens:
            return LayoutMismatchError("nothing follows on a partial chunk", differs=("parent",))
        return None

    def _part_of_chain(self, live: ObjectRow, row: ObjectRow) -> KvobjError | None:
        if live.parent != row.parent or self._children((live.bucket, live.key.encode())):
            return ImmutableChunkError("the chunk is part of a chain", key=live.key)
        return None

    def _over_quota(self, row: ObjectRow, live: ObjectRow | None, quota: NamespaceQuota) -> KvobjError | None:
        usage = self._namespace_usage(row.bucket, row.namespace)
        replaced = [] if live is None or live.namespace != row.namespace else [live]
        if quota.chunks is not None and usage.chunks + 1 - len(replaced) > quota.chunks:
            return QuotaExceededError("the namespace holds as many chunks as it may", chunks=quota.chunks)
        size_bytes = usage.size_bytes + row.size_bytes - sum(each.size_bytes for each in replaced)
        if quota.size_bytes is not None and size_bytes > quota.size_bytes:
            return QuotaExceededError("the namespace holds as many bytes as it may", size_bytes=quota.size_bytes)
        return None


def _raised(top: ObjectRow, row: ObjectRow) -> ObjectRow:
    """The row under its better class. What comes with an upload of what is written down is nothing but the class."""
    if row.durability is Durability.SHARED and top.durability is not Durability.MEMORY:
        return msgspec.structs.replace(top, durability=Durability.SHARED)
    changed = {field: getattr(row, field) for field in ("blobs", "durability", "digest", "checksums", "lossy")}
    if top.durability is Durability.SHARED:
        changed["durability"] = Durability.SHARED
    return msgspec.structs.replace(top, **changed)


def _replaces(live: ObjectRow, row: ObjectRow, mode: CommitMode, condition: WriteCondition | None) -> bool:
    if mode is CommitMode.REPLACE or is_put_again(live, row):
        return True
    is_own = DEFAULT_NAMESPACES.issuperset((live.namespace, row.namespace))
    return condition is not None and condition.if_match is not None and is_own
