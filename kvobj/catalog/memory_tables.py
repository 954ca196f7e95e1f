"""The dicts of the reference driver, and how rows change in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count

import msgspec

from kvobj.catalog.lease_protocol import LeaseLimits
from kvobj.catalog.log_entries import GoneBuckets, LogEntry
from kvobj.catalog.memory_history import MemoryHistory
from kvobj.catalog.memory_leases import MemoryLeases
from kvobj.catalog.memory_remote import MemoryOutbox, MemoryRemoteQueue
from kvobj.catalog.rows import (
    BucketKind,
    BucketRow,
    ChunkName,
    Durability,
    ObjectRow,
    ObjectState,
    PartRow,
    QueueEntry,
    WriteCondition,
    is_same_namespace,
)
from kvobj.errors import KvobjError, NoSuchBucketError, NoSuchKeyError, PreconditionFailedError

Name = tuple[str, bytes]
"""Bucket and key, the key as bytes, which sort as S3 does."""


class MemoryTables:
    """See the module's text. `_marks` are those of policy: (not before, chunk) by (bucket, key), in the order of condemning."""

    def __init__(self, limits: LeaseLimits, *, has_remote: bool = False) -> None:
        self._buckets: dict[str, BucketRow] = {}
        self._born: dict[str, int] = {}
        self._gone_ms: int | None = None
        self._durable: dict[Name, ObjectRow] = {}
        self._volatile: dict[Name, ObjectRow] = {}
        self._queue: dict[int, QueueEntry] = {}
        self._numbers = count(1)
        self._marks: dict[tuple[str, str], tuple[int, ChunkName]] = {}
        self._history = MemoryHistory(self._numbers.__next__, born=self._born_at)
        self._leases = MemoryLeases(
            has_bucket=self._buckets.__contains__,
            live=lambda bucket, key: self._live((bucket, key.encode())),
            stored=lambda bucket, key: self._top((bucket, key.encode())),
            forget_marks=self._forget_marks,
            limits=limits,
        )
        self._outbox = MemoryOutbox(self._told_state, has_remote=has_remote)
        self._remote_queue = MemoryRemoteQueue(
            lambda bucket, key: self._live((bucket, key.encode())), self._numbers.__next__, has_remote=has_remote
        )

    def _told_state(self) -> Iterable[LogEntry]:
        """What a snapshot for the remote tells; who keeps users and namespaces adds them."""
        yield from self._buckets.values()
        yield from (row for row in self._durable.values() if row.durability is Durability.SHARED)
        if self._gone_ms is not None:
            yield GoneBuckets(self._gone_ms)

    def _born_at(self, bucket: str) -> int | None:
        return self._born.get(bucket) if bucket in self._buckets else None

    def _forget_marks(self, names: Sequence[tuple[str, str]]) -> None:
        for name in names:
            self._marks.pop(name, None)

    def _top(self, name: Name) -> ObjectRow | None:
        return self._volatile.get(name, self._durable.get(name))

    def _live(self, name: Name) -> ObjectRow | None:
        row = self._top(name)
        return row if row is not None and row.state is ObjectState.LIVE else None

    def _children(self, name: Name) -> list[Name]:
        """Names of rows in any state whose parent this is."""
        key = name[1].decode()
        rows = {**self._durable, **self._volatile}
        return [place for place, row in rows.items() if place[0] == name[0] and row.parent == key]

    def _change(
        self, name: Name, volatile: ObjectRow | None, durable: ObjectRow | None, *, now_ms: int, is_lost: bool = False
    ) -> None:
        """Make the rows of a name these, and queue what they do not name any more. `is_lost`: no pin can want the bytes."""
        before = ((self._durable.pop(name, None), False), (self._volatile.pop(name, None), True))
        self._outbox.publish_row(before[0][0], durable)
        self._remote_queue.overtaken(before[0][0], durable)
        if durable is not None:
            self._durable[name] = durable
        if volatile is not None:
            self._volatile[name] = volatile
        kept = self._named(name)
        may_be_pinned = self._buckets[name[0]].kind is BucketKind.KV and not is_lost
        for row, is_volatile in before:
            if row is not None and row.blobs:
                first = row.blobs[0].blob_id
                waits_for = first if may_be_pinned and self._leases.holds_blob(first) else b""
                self._enqueue(row.blob_ids, kept, name, volatile=is_volatile, now_ms=now_ms, waits_for=waits_for)
                kept.update(row.blob_ids)

    def _named(self, name: Name, parts: Iterable[PartRow] = ()) -> set[bytes]:
        """Blobs that rows of this name or the given parts name."""
        rows = [row for row in (self._volatile.get(name), self._durable.get(name)) if row is not None]
        return set(blob_ids_of([*rows, *parts]))

    def _enqueue(
        self,
        blob_ids: Iterable[bytes],
        kept: set[bytes],
        name: Name,
        *,
        volatile: bool,
        now_ms: int,
        waits_for: bytes = b"",
    ) -> None:
        for blob_id in dict.fromkeys(blob_ids):
            if blob_id not in kept:
                self._append(
                    QueueEntry(
                        blob_id,
                        now_ms,
                        name[0],
                        name[1].decode(),
                        volatile=volatile,
                        pinned=bool(waits_for),
                        pinned_blob=waits_for,
                    )
                )

    def _append(self, entry: QueueEntry) -> None:
        position = next(self._numbers)
        self._queue[position] = msgspec.structs.replace(entry, position=position)

    def _require_bucket(self, name: str, made_ms: int | None = None) -> None:
        if name not in self._buckets or made_ms not in (None, self._buckets[name].created_ms):
            raise NoSuchBucketError("no such bucket", bucket=name)


def blob_ids_of(rows: Iterable[ObjectRow | PartRow]) -> list[bytes]:
    """All blobs that rows name, in order."""
    return [blob_id for row in rows for blob_id in row.blob_ids]


def is_put_again(live: ObjectRow, row: ObjectRow) -> bool:
    """Whether a chunk that only has to last in a lossy copy is put again."""
    same = live.size_bytes == row.size_bytes and live.parent == row.parent and live.tokens == row.tokens
    return same and live.lossy is not None and row.lossy is None and is_same_namespace(live.namespace, row.namespace)


def same_blobs(one: ObjectRow, other: ObjectRow) -> bool:
    """Whether both name the same blobs; of empty objects, whether they are one commit's."""
    if not one.blobs and not other.blobs:
        return one.sequence == other.sequence
    return [blob.blob_id for blob in one.blobs] == [blob.blob_id for blob in other.blobs]


def condition_error(live: ObjectRow | None, condition: WriteCondition | None) -> KvobjError | None:
    """What a write condition says about the live row."""
    if condition is None:
        return None
    if live is not None and condition.if_none_match in {"*", live.etag}:
        return PreconditionFailedError("the object exists", etag=live.etag)
    if condition.if_match is not None and live is None:
        return NoSuchKeyError("no object to match")
    if condition.if_match is not None and live is not None and condition.if_match not in {"*", live.etag}:
        return PreconditionFailedError("the object has another etag", etag=live.etag)
    if not condition.describes(live):
        return PreconditionFailedError("the object is another")
    return None
