"""Makes a lost catalog anew from log entries, those of the record log or of the remote's manifests: equal listing, metadata and
digests; what was deleted stays deleted.

The database is one opened with `rebuild=True`; until `Database.finish_rebuild` it is refused by an ordinary open, so a crash in
between only means to start over. Rows of class `memory` that were not written down are not in the log and are gone.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Final

from kvobj.catalog.catalog_rows import note_gone, root_of
from kvobj.catalog.encoding import (
    BUCKETS,
    INCARNATION,
    INCARNATION_SHIFT,
    META,
    USERS,
    StoredBucket,
    encode_row,
    encode_stored_bucket,
    number_key,
)
from kvobj.catalog.lease_changes import mark_unknown
from kvobj.catalog.log_entries import (
    BucketRemoved,
    GoneBuckets,
    LogEntry,
    NamespaceRemoved,
    PartPut,
    RowRemoved,
    UploadRemoved,
    UserRemoved,
    decode_entry,
)
from kvobj.catalog.namespace_changes import drop_namespaces, replay_namespace
from kvobj.catalog.namespace_protocol import NamespaceRow
from kvobj.catalog.object_rows import NO_ROWS, ObjectRows, RowPair
from kvobj.catalog.rows import BucketRow, ObjectRow, UploadRow, UserRow
from kvobj.catalog.upload_rows import UploadRows
from kvobj.database import Database, WriteView
from kvobj.database.outbox import begin_above, marked_position
from kvobj.record_log import RecordLog

_BATCH: Final = 1000


@dataclass(slots=True)
class RebuildReport:
    """What was replayed: entries of the catalog's, entries of others, bytes of a torn tail."""

    entries: int = 0
    foreign_entries: int = 0
    torn_bytes: int = 0


class CatalogReplay:
    """Applies log entries to an empty database, in order."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._highest = 0
        self._objects = ObjectRows(self._numbers.__next__)
        self._uploads = UploadRows(self._numbers.__next__)

    def apply(self, view: WriteView, entry: LogEntry) -> None:
        """Apply one entry. Entries about buckets that are gone again are skipped."""
        match entry:
            case ObjectRow():
                self._highest = max(self._highest, entry.sequence)
                self._set_row(view, entry.bucket, entry.key, entry)
            case RowRemoved():
                self._set_row(view, entry.bucket, entry.key, None)
            case BucketRow():
                root = root_of(view, entry.name) or number_key(next(self._numbers))
                view.put(BUCKETS, entry.name.encode(), encode_stored_bucket(StoredBucket(root, entry)))
            case BucketRemoved():
                drop_namespaces(view, entry.name)
                view.delete(BUCKETS, entry.name.encode())
            case GoneBuckets():
                note_gone(view, entry.made_ms)
            case NamespaceRow() | NamespaceRemoved():
                replay_namespace(view, entry)
            case UserRow():
                view.put(USERS, entry.id.encode(), encode_row(entry))
            case UserRemoved():
                view.delete(USERS, entry.id.encode())
            case UploadRow() | PartPut() | UploadRemoved():
                self._apply_upload(view, entry)

    def finish(self, view: WriteView) -> None:
        """Let the next start count above every number in use, and wait for leases that nobody knows of any more."""
        highest = max(self._highest, next(self._numbers))
        view.put(META, INCARNATION, number_key(highest >> INCARNATION_SHIFT), headroom=True)
        mark_unknown(view)

    def _set_row(self, view: WriteView, bucket: str, key: str, row: ObjectRow | None) -> None:
        root = root_of(view, bucket)
        if root is None:
            return
        before = self._objects.pair(view, root, key.encode())
        after = NO_ROWS if row is None else RowPair(None, row)
        self._objects.change(view, root, key.encode(), before, after)

    def _apply_upload(self, view: WriteView, entry: UploadRow | PartPut | UploadRemoved) -> None:
        root = root_of(view, entry.bucket)
        if root is None:
            return
        if isinstance(entry, UploadRow):
            self._uploads.put(view, root, entry, volatile=False)
            return
        upload_id = entry.part.upload_id if isinstance(entry, PartPut) else entry.upload_id
        upload = self._uploads.find(view, root, entry.key.encode(), upload_id)
        if upload is None:
            return
        if isinstance(entry, PartPut):
            self._uploads.put_part(view, upload, entry.part)
        else:
            self._uploads.remove(view, root, upload, self._uploads.parts(view, upload))


async def rebuild_catalog(record_log: RecordLog, database: Database) -> RebuildReport:
    """Replay the log's catalog entries into a database opened with `rebuild=True`. The caller rebuilds what else lies in the
    database, then calls `Database.finish_rebuild`. Raises `CorruptionError` for damage in the middle of the log."""
    report = RebuildReport()
    replay = record_log.replay()
    target = _Target(database)
    next_position = None
    contents = iter(replay)
    while batch := list(islice(contents, _BATCH)):
        entries = [decode_entry(content) for content in batch]
        report.foreign_entries += entries.count(None)
        known = [entry for entry in entries if entry is not None]
        report.entries += len(known)
        for content in batch:
            # Positions ascend: the last mark is the highest.
            next_position = marked_position(content) or next_position
        await target.apply(known)
    await target.finish(next_position)
    report.torn_bytes = replay.torn_bytes
    return report


async def rebuild_from_entries(
    entries: Iterable[LogEntry] | AsyncIterable[LogEntry], database: Database, *, next_position: int | None = None
) -> int:
    """Make the catalog of a database opened with `rebuild=True` from entries that come from elsewhere; how many there were.

    Buckets come before what lies in them (what is in none is skipped); else the order is free where each subject is told of once,
    and of two entries about one the later counts. Rows keep their sequences, chunks may come before their parents
    (`Catalog.drop_orphans` takes those whose parents never came). `next_position`: where the outbox goes on, above all
    that was ever told. The caller then calls `Database.finish_rebuild(..., log_is_whole=False)`. ~1,000 entries are in memory.
    """
    target = _Target(database)
    count_all = 0
    batch: list[LogEntry] = []
    if isinstance(entries, AsyncIterable):
        async for entry in entries:
            batch.append(entry)
            if len(batch) == _BATCH:
                count_all += await target.apply(batch)
                batch = []
    else:
        rest = iter(entries)
        while batch := list(islice(rest, _BATCH)):
            count_all += await target.apply(batch)
    count_all += await target.apply(batch)
    await target.finish(next_position)
    return count_all


class _Target:
    """A database that a replay goes into, batch by batch, each of them one unsynced write."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._replay = CatalogReplay()

    async def apply(self, entries: Sequence[LogEntry]) -> int:
        if entries:
            await self._database.write(_Batch(self._replay, entries), synced=False)
        return len(entries)

    async def finish(self, next_position: int | None) -> None:
        def change(view: WriteView) -> None:
            self._replay.finish(view)
            if next_position is not None:
                begin_above(view, next_position)

        await self._database.write(change)


@dataclass(frozen=True, slots=True)
class _Batch:
    target: CatalogReplay
    entries: Sequence[LogEntry]

    def __call__(self, view: WriteView) -> None:
        for entry in self.entries:
            self.target.apply(view, entry)
