"""The reference driver of the catalog: plain dicts, every verb read off the protocol's text, nothing clever.

It says what the other drivers must answer (contract suite, state machine) and serves tests. Guarantees the protocol within one
process and keeps nothing. Rows of class `memory` lie in a dict of their own over the durable ones, so that `lose_power` can do what
power loss does. Every verb runs without a pause: nothing interleaves.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from itertools import count

import msgspec

from kvobj.catalog.rows import (
    BlobRef,
    BucketRow,
    BucketUsage,
    CommitMode,
    CommitOutcome,
    DeleteOutcome,
    Durability,
    ListPage,
    ObjectRow,
    ObjectState,
    PartRow,
    QueueEntry,
    UploadPage,
    UploadRow,
    UserRow,
    WriteCondition,
)
from kvobj.errors import (
    BucketExistsError,
    BucketNotEmptyError,
    FencedError,
    ImmutableChunkError,
    KvobjError,
    NoSuchBucketError,
    NoSuchKeyError,
    NoSuchUploadError,
    NoSuchUserError,
    PreconditionFailedError,
    UserExistsError,
)
from kvobj.ids import BlobId

_Name = tuple[str, bytes]
"""Bucket and key, the key as bytes, which sort as S3 does."""


class MemoryCatalog:
    """See the module's text and `protocol.Catalog`."""

    def __init__(self) -> None:
        self._epoch: int | None = None
        self._users: dict[str, UserRow] = {}
        self._buckets: dict[str, BucketRow] = {}
        self._durable: dict[_Name, ObjectRow] = {}
        self._volatile: dict[_Name, ObjectRow] = {}
        self._uploads: dict[tuple[str, bytes, str], UploadRow] = {}
        self._parts: dict[tuple[str, int], PartRow] = {}
        self._queue: dict[int, QueueEntry] = {}
        self._numbers = count(1)

    def lose_power(self) -> None:
        """Forget what is of class `memory` and was not written down."""
        self._volatile.clear()
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
        await self.put_user(user)

    async def put_user(self, user: UserRow) -> None:
        """See `Catalog.put_user`."""
        for other in self._users.values():
            if other.id != user.id and other.access_key == user.access_key:
                raise UserExistsError("a user with this access key exists", id=other.id)
        self._users[user.id] = user

    async def remove_user(self, user_id: str) -> None:
        """See `Catalog.remove_user`."""
        if self._users.pop(user_id, None) is None:
            raise NoSuchUserError("no such user", id=user_id)

    async def create_bucket(self, bucket: BucketRow) -> None:
        """See `Catalog.create_bucket`."""
        existing = self._buckets.get(bucket.name)
        if existing is not None:
            raise BucketExistsError("the bucket exists", bucket=bucket.name, existing=existing)
        self._buckets[bucket.name] = bucket

    async def bucket(self, name: str) -> BucketRow | None:
        """See `Catalog.bucket`."""
        return self._buckets.get(name)

    async def buckets(self) -> tuple[BucketRow, ...]:
        """See `Catalog.buckets`."""
        return tuple(self._buckets[name] for name in sorted(self._buckets, key=str.encode))

    async def delete_bucket(self, name: str) -> None:
        """See `Catalog.delete_bucket`."""
        self._require_bucket(name)
        if self._live_names(name) or any(place[0] == name for place in self._uploads):
            raise BucketNotEmptyError("the bucket is not empty", bucket=name)
        del self._buckets[name]

    async def bucket_usage(self, name: str) -> BucketUsage:
        """See `Catalog.bucket_usage`."""
        self._require_bucket(name)
        rows = [self._existing(live) for live in self._live_names(name)]
        return BucketUsage(len(rows), sum(row.size_bytes for row in rows))

    # -- objects -------------------------------------------------------------------------------------------------

    async def lookup(self, bucket: str, keys: Sequence[str]) -> list[ObjectRow | None]:
        """See `Catalog.lookup`."""
        return [self._live((bucket, key.encode())) for key in keys]

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
        name = (row.bucket, row.key.encode())
        upload = None if upload_id is None else self._uploads.get((*name, upload_id))
        parts = () if upload is None else self._parts_of(upload.upload_id)
        live = self._live(name)
        is_memory = row.durability is Durability.MEMORY
        error = self._refusal(row, parts, mode=mode, condition=condition, upload_id=upload_id)
        if error is not None:
            self._enqueue(row.blobs, self._named(name, parts), name, is_memory, now_ms)
            raise error
        if upload is not None:
            self._forget_upload(upload)
            is_memory = upload.durability is Durability.MEMORY
        if live is not None and mode is CommitMode.FIRST_WRITER_WINS:
            spare = [*_blobs(parts), *row.blobs]
            self._enqueue(spare, self._named(name), name, is_memory, now_ms)
            return CommitOutcome(live, existed=True)
        stored = msgspec.structs.replace(row, sequence=next(self._numbers), state=ObjectState.LIVE)
        self._store(name, stored, now_ms)
        if upload is not None:
            self._enqueue(_blobs(parts), self._named(name), name, is_memory, now_ms)
        return CommitOutcome(stored, existed=False)

    async def delete(
        self, bucket: str, keys: Sequence[str], *, conditions: Sequence[WriteCondition | None] = (), now_ms: int
    ) -> list[DeleteOutcome]:
        """See `Catalog.delete`."""
        self._require_bucket(bucket)
        outcomes = []
        for key, condition in zip(keys, conditions or [None] * len(keys), strict=True):
            name = (bucket, key.encode())
            live = self._live(name)
            if live is not None and _condition_error(live, condition) is not None:
                outcomes.append(DeleteOutcome(key, None, precondition_failed=True))
                continue
            self._remove(name, now_ms)
            outcomes.append(DeleteOutcome(key, live))
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
            common = _common_prefix(row.key, key_prefix, delimiter)
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

    async def raise_durability(self, rows: Sequence[ObjectRow]) -> list[bool]:
        """See `Catalog.raise_durability`."""
        results = []
        for row in rows:
            name = (row.bucket, row.key.encode())
            live = self._live(name)
            is_same = live is not None and _same_blobs(live, row)
            results.append(is_same)
            if live is not None and is_same:
                self._store(name, msgspec.structs.replace(row, sequence=live.sequence), 0)
        return results

    async def drop_rows(self, rows: Sequence[ObjectRow]) -> None:
        """See `Catalog.drop_rows`."""
        for row in rows:
            name = (row.bucket, row.key.encode())
            live = self._live(name)
            if live is not None and _same_blobs(live, row):
                self._remove(name, 0)

    async def scan_objects(self, *, volatile_only: bool = False) -> AsyncIterator[ObjectRow]:
        """See `Catalog.scan_objects`."""
        for name in sorted(self._volatile if volatile_only else {**self._durable, **self._volatile}):
            yield self._existing(name)

    # -- multipart uploads ---------------------------------------------------------------------------------------

    async def create_upload(self, upload: UploadRow) -> None:
        """See `Catalog.create_upload`."""
        self._require_bucket(upload.bucket)
        self._uploads[upload.bucket, upload.key.encode(), upload.upload_id] = upload

    async def upload(self, bucket: str, key: str, upload_id: str) -> UploadRow | None:
        """See `Catalog.upload`."""
        return self._uploads.get((bucket, key.encode(), upload_id))

    async def put_part(self, bucket: str, key: str, part: PartRow, *, now_ms: int) -> None:
        """See `Catalog.put_part`."""
        name = (bucket, key.encode())
        upload = self._uploads.get((*name, part.upload_id))
        is_memory = upload is not None and upload.durability is Durability.MEMORY
        error: KvobjError | None = self._fenced(part.blobs, ())
        if upload is None:
            error = NoSuchUploadError("no such upload", bucket=bucket, key=key, upload_id=part.upload_id)
        if error is not None:
            self._enqueue(part.blobs, set(), name, is_memory, now_ms)
            raise error
        before = self._parts.get((part.upload_id, part.number))
        self._parts[part.upload_id, part.number] = part
        if before is not None:
            self._enqueue(before.blobs, {blob.blob_id for blob in part.blobs}, name, is_memory, now_ms)

    async def parts(self, bucket: str, key: str, upload_id: str) -> tuple[PartRow, ...]:
        """See `Catalog.parts`."""
        return self._parts_of(self._require_upload(bucket, key, upload_id).upload_id)

    async def abort_upload(self, bucket: str, key: str, upload_id: str, *, now_ms: int) -> None:
        """See `Catalog.abort_upload`."""
        upload = self._require_upload(bucket, key, upload_id)
        is_memory = upload.durability is Durability.MEMORY
        self._enqueue(_blobs(self._parts_of(upload_id)), set(), (bucket, key.encode()), is_memory, now_ms)
        self._forget_upload(upload)

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
        self._require_bucket(bucket)
        rows: list[UploadRow] = []
        prefixes: list[str] = []
        last = None
        behind = (after[0].encode(), after[1])
        for place in sorted(place for place in self._uploads if place[0] == bucket):
            row = self._uploads[place]
            if not row.key.startswith(key_prefix) or (place[1], place[2]) <= behind:
                continue
            common = _common_prefix(row.key, key_prefix, delimiter)
            if common is not None and (common == after[0] or common in prefixes):
                continue
            if len(rows) + len(prefixes) >= limit:
                return UploadPage(tuple(rows), tuple(prefixes), last)
            if common is None:
                rows.append(row)
            else:
                prefixes.append(common)
            last = (row.key, row.upload_id) if common is None else (common, "")
        return UploadPage(tuple(rows), tuple(prefixes), None)

    async def scan_parts(self) -> AsyncIterator[PartRow]:
        """See `Catalog.scan_parts`."""
        for part in list(self._parts.values()):
            yield part

    async def scan_named_blobs(self) -> AsyncIterator[bytes]:
        """See `Catalog.scan_named_blobs`."""
        rows = [row.blobs for row in (*self._volatile.values(), *self._durable.values())]
        parts = [part.blobs for part in self._parts.values()]
        for blob_id in [blob.blob_id for blobs in (*rows, *parts) for blob in blobs]:
            yield blob_id
        for entry in list(self._queue.values()):
            yield entry.blob_id

    # -- the delete queue ----------------------------------------------------------------------------------------

    async def queue_blobs(self, blob_ids: Sequence[bytes], *, now_ms: int) -> None:
        """See `Catalog.queue_blobs`."""
        for blob_id in blob_ids:
            self._append(QueueEntry(blob_id, now_ms, "", ""))

    async def due(self, *, now_ms: int, limit: int = 1000) -> list[QueueEntry]:
        """See `Catalog.due`."""
        return [entry for _, entry in sorted(self._queue.items()) if entry.not_before_ms <= now_ms][:limit]

    async def reap(self, entries: Sequence[QueueEntry]) -> None:
        """See `Catalog.reap`."""
        for entry in entries:
            self._queue.pop(entry.position, None)

    async def aclose(self) -> None:
        """See `Catalog.aclose`."""

    # -- what the verbs are made of --------------------------------------------------------------------------------

    def _live(self, name: _Name) -> ObjectRow | None:
        return self._volatile.get(name, self._durable.get(name))

    def _existing(self, name: _Name) -> ObjectRow:
        return self._volatile[name] if name in self._volatile else self._durable[name]

    def _live_names(self, bucket: str) -> list[_Name]:
        return sorted(name for name in {**self._durable, **self._volatile} if name[0] == bucket)

    def _named(self, name: _Name, parts: Iterable[PartRow] = ()) -> set[bytes]:
        """Blobs that rows of this name or the given parts name."""
        rows = [row for row in (self._volatile.get(name), self._durable.get(name)) if row is not None]
        return {blob.blob_id for blob in _blobs([*rows, *parts])}

    def _store(self, name: _Name, row: ObjectRow, now_ms: int) -> None:
        """Put a row in its place and queue what it replaced there; a durable row takes the volatile one's place too."""
        volatile, durable = self._volatile.get(name), self._durable.get(name)
        if row.durability is Durability.MEMORY:
            self._volatile[name] = row
            durable = None
        else:
            self._durable[name] = row
            self._volatile.pop(name, None)
        self._enqueue(_blobs([durable] if durable else []), self._named(name), name, False, now_ms)  # noqa: FBT003
        self._enqueue(_blobs([volatile] if volatile else []), self._named(name), name, True, now_ms)  # noqa: FBT003

    def _remove(self, name: _Name, now_ms: int) -> None:
        volatile, durable = self._volatile.pop(name, None), self._durable.pop(name, None)
        self._enqueue(_blobs([durable] if durable else []), set(), name, False, now_ms)  # noqa: FBT003
        self._enqueue(_blobs([volatile] if volatile else []), set(), name, True, now_ms)  # noqa: FBT003

    def _refusal(
        self,
        row: ObjectRow,
        parts: Sequence[PartRow],
        *,
        mode: CommitMode,
        condition: WriteCondition | None,
        upload_id: str | None,
    ) -> KvobjError | None:
        name = (row.bucket, row.key.encode())
        live = self._live(name)
        if row.bucket not in self._buckets:
            return NoSuchBucketError("no such bucket", bucket=row.bucket)
        if upload_id is not None and (*name, upload_id) not in self._uploads:
            return NoSuchUploadError("no such upload", bucket=row.bucket, key=row.key, upload_id=upload_id)
        error = self._fenced(row.blobs, parts) or _condition_error(live, condition)
        if error is not None or live is None or mode is not CommitMode.FIRST_WRITER_WINS:
            return error
        if live.size_bytes != row.size_bytes:
            return ImmutableChunkError("another chunk is live", size_bytes=live.size_bytes, key=live.key)
        return None

    def _fenced(self, blobs: Iterable[BlobRef], parts: Sequence[PartRow]) -> FencedError | None:
        known = {blob.blob_id for blob in _blobs(parts)}
        for blob in blobs:
            if blob.blob_id not in known and BlobId(blob.blob_id).epoch != self._epoch:
                return FencedError("the session epoch of a blob is not alive")
        return None

    def _enqueue(self, blobs: Iterable[BlobRef], kept: set[bytes], name: _Name, volatile: bool, now_ms: int) -> None:  # noqa: FBT001
        for blob_id in dict.fromkeys(blob.blob_id for blob in blobs):
            if blob_id not in kept:
                self._append(QueueEntry(blob_id, now_ms, name[0], name[1].decode(), volatile=volatile))

    def _append(self, entry: QueueEntry) -> None:
        position = next(self._numbers)
        self._queue[position] = msgspec.structs.replace(entry, position=position)

    def _parts_of(self, upload_id: str) -> tuple[PartRow, ...]:
        return tuple(self._parts[place] for place in sorted(self._parts) if place[0] == upload_id)

    def _forget_upload(self, upload: UploadRow) -> None:
        del self._uploads[upload.bucket, upload.key.encode(), upload.upload_id]
        for part in self._parts_of(upload.upload_id):
            del self._parts[upload.upload_id, part.number]

    def _require_bucket(self, name: str) -> None:
        if name not in self._buckets:
            raise NoSuchBucketError("no such bucket", bucket=name)

    def _require_upload(self, bucket: str, key: str, upload_id: str) -> UploadRow:
        upload = self._uploads.get((bucket, key.encode(), upload_id))
        if upload is None:
            raise NoSuchUploadError("no such upload", bucket=bucket, key=key, upload_id=upload_id)
        return upload


def _blobs(rows: Iterable[ObjectRow | PartRow]) -> list[BlobRef]:
    return [blob for row in rows for blob in row.blobs]


def _same_blobs(one: ObjectRow, other: ObjectRow) -> bool:
    if not one.blobs and not other.blobs:
        return one.sequence == other.sequence
    return [blob.blob_id for blob in one.blobs] == [blob.blob_id for blob in other.blobs]


def _common_prefix(key: str, key_prefix: str, delimiter: str) -> str | None:
    if not delimiter or delimiter not in key[len(key_prefix) :]:
        return None
    return key[: key.index(delimiter, len(key_prefix)) + len(delimiter)]


def _condition_error(live: ObjectRow | None, condition: WriteCondition | None) -> KvobjError | None:
    if condition is None:
        return None
    if live is not None and condition.if_none_match in {"*", live.etag}:
        return PreconditionFailedError("the object exists", etag=live.etag)
    if condition.if_match is not None and live is None:
        return NoSuchKeyError("no object to match")
    if condition.if_match is not None and live is not None and condition.if_match not in {"*", live.etag}:
        return PreconditionFailedError("the object has another etag", etag=live.etag)
    return None
