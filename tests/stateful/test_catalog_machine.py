"""The LMDB catalog of a node with a remote against the reference, verb by verb, over restarts and power losses."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from typing import TypeVar

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvobj.catalog.encoding import CATALOG_TABLES, REMOTE_TABLES
from kvobj.catalog.lmdb import LmdbCatalog
from kvobj.catalog.log_entries import BucketRemoved, GoneBuckets, RowRemoved, decode_entry
from kvobj.catalog.memory import MemoryCatalog
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.remote_protocol import QueueReason
from kvobj.catalog.rows import (
    BlobRef,
    BucketKind,
    BucketRow,
    CommitMode,
    Durability,
    ObjectRow,
    PartRow,
    UploadRow,
    WriteCondition,
)
from kvobj.catalog.setting_rows import BucketUpdate, RemoteRule
from kvobj.clock import SystemClock
from kvobj.database import Database
from kvobj.errors import KvobjError
from kvobj.ids import make_blob_id
from kvobj.record_log import RecordLog

T = TypeVar("T")

STEM = "s" * 480
KEYS = st.sampled_from(["a", "a/", "a/b", "a/c", "ab", "b", "é/x", STEM, STEM + "a", STEM + "a/b", STEM * 2 + "z"])
LEADS = st.sampled_from(["", "a", "a/", "é", STEM, STEM + "a", "zz"])
DELIMITERS = st.sampled_from(["", "/", "b", "s"])
BUCKETS = st.sampled_from(["one", "two"])
DURABILITIES = st.sampled_from([Durability.MEMORY, Durability.LOCAL])
CLASSES = st.sampled_from([Durability.MEMORY, Durability.LOCAL, Durability.LOCAL, Durability.SHARED])
BETTER = st.sampled_from([Durability.LOCAL, Durability.SHARED, Durability.SHARED])
SIZES = st.sampled_from([0, 1, 7])
UPLOADS = st.sampled_from(["u1", "u2"])
CONDITIONS = st.sampled_from(
    [None, None, None, WriteCondition(if_none_match="*"), WriteCondition(if_match="*"), WriteCondition(if_match="t1")]
)
EPOCHS = st.sampled_from([1, 1, 1, 1, 2])


def plain(value: object) -> object:
    """A value without the numbers that drivers draw as they like."""
    if isinstance(value, ObjectRow):
        return msgspec.structs.replace(value, sequence=0)
    if isinstance(value, msgspec.Struct):
        return (type(value).__name__, [plain(each) for each in msgspec.structs.astuple(value)])
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


class CatalogMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="kvobj-machine-", dir="/dev/shm"))
        self.runner = asyncio.Runner()
        self.model = MemoryCatalog(has_remote=True)
        # What those who are told by the outbox know: every subject as it was told of last.
        self.known: dict[tuple[str, ...], ObjectRow | BucketRow] = {}
        self.gone_ms = 0
        self.boots = count(1)
        self.boot = next(self.boots)
        self.sequence = count(1)
        self.open()
        self.same(lambda catalog: catalog.open_epoch(1))
        for name in ("one", "two"):
            self.add_bucket(BucketRow(name, BucketKind.ORDINARY, "main", 1, Durability.LOCAL))

    def add_bucket(self, row: BucketRow) -> None:
        self.same(lambda catalog: catalog.create_bucket(row))

    def open(self) -> None:
        self.database = Database.open(
            durable=self.directory / "durable",
            volatile=self.directory / "volatile",
            tables=[*CATALOG_TABLES, *REMOTE_TABLES],
            map_bytes=1 << 26,
            volatile_map_bytes=1 << 26,
            record_log=RecordLog.open(self.directory / "log", rotate_bytes=4096),
            sync=False,
            boot_id=str(self.boot),
            outbox=SystemClock(),
        )
        self.catalog = self.runner.run(LmdbCatalog.open(self.database))

    def close(self) -> None:
        self.runner.run(self.catalog.aclose())
        self.runner.run(self.database.aclose())

    def teardown(self) -> None:
        self.close()
        self.runner.close()
        shutil.rmtree(self.directory)

    def outcome(self, catalog: Catalog, verb: Callable[[Catalog], Awaitable[T]]) -> T | type[KvobjError]:
        async def run() -> T:
            return await verb(catalog)

        try:
            return self.runner.run(run())
        except KvobjError as error:
            return type(error)

    def same(self, verb: Callable[[Catalog], Awaitable[object]]) -> None:
        expected = self.outcome(self.model, verb)
        assert plain(self.outcome(self.catalog, verb)) == plain(expected)

    def blobs(self, size_bytes: int, epoch: int) -> tuple[BlobRef, ...]:
        if not size_bytes:
            return ()
        return (BlobRef(bytes(make_blob_id(epoch, next(self.sequence))), size_bytes, size_bytes + 512, None),)

    @rule(name=BUCKETS)
    def create_bucket(self, name: str) -> None:
        self.add_bucket(BucketRow(name, BucketKind.KV, "main", 2, Durability.MEMORY))

    @rule(name=BUCKETS)
    def delete_bucket(self, name: str) -> None:
        self.same(lambda catalog: catalog.delete_bucket(name))

    @rule(
        bucket=BUCKETS,
        key=KEYS,
        size_bytes=SIZES,
        durability=CLASSES,
        mode=st.sampled_from(CommitMode),
        condition=CONDITIONS,
        epoch=EPOCHS,
        to_remote=st.booleans(),
    )
    def commit(  # noqa: PLR0917 - Hypothesis passes them by name
        self,
        bucket: str,
        key: str,
        size_bytes: int,
        durability: Durability,
        mode: CommitMode,
        condition: WriteCondition | None,
        epoch: int,
        to_remote: bool,  # noqa: FBT001
    ) -> None:
        blobs = self.blobs(size_bytes, epoch)
        row = ObjectRow(bucket, key, blobs, size_bytes, f"t{size_bytes}", 1, "main", durability)
        self.same(lambda catalog: catalog.commit(row, mode=mode, condition=condition, now_ms=5, to_remote=to_remote))

    def names(self) -> list[tuple[str, str]]:
        return sorted(
            {(row.bucket, row.key) for row in [*self.model._durable.values(), *self.model._volatile.values()]}
        )

    @precondition(lambda self: self.names())
    @rule(data=st.data(), durability=BETTER)
    def raise_one(self, data: st.DataObject, durability: Durability) -> None:
        bucket, key = data.draw(st.sampled_from(self.names()))
        self.raise_rows(bucket, [key], durability)

    @precondition(lambda self: self.names())
    @rule(data=st.data(), is_lost=st.booleans())
    def remove_one(self, data: st.DataObject, is_lost: bool) -> None:  # noqa: FBT001
        bucket, key = data.draw(st.sampled_from(self.names()))

        async def verb(catalog: Catalog) -> object:
            if is_lost:
                await catalog.drop_rows([row for row in await catalog.lookup(bucket, [key]) if row is not None])
                return None
            return await catalog.delete(bucket, [key], now_ms=6)

        self.same(verb)

    @rule(name=BUCKETS, remote=st.sampled_from(RemoteRule))
    def set_rule(self, name: str, remote: RemoteRule) -> None:
        self.same(lambda catalog: catalog.update_bucket(name, BucketUpdate(remote=remote)))

    @precondition(lambda self: self.names())
    @rule(bucket=BUCKETS, keys=st.lists(KEYS, max_size=4, unique=True))
    def queue_for_the_remote(self, bucket: str, keys: list[str]) -> None:
        async def verb(catalog: Catalog) -> list[bool]:
            rows = [row for row in await catalog.lookup(bucket, keys) if row is not None]
            return await catalog.remote_queue.add(rows, QueueReason.REUSED, now_ms=7)

        self.same(verb)

    @precondition(lambda self: self.model.remote_queue.entries())
    @rule(every=st.integers(1, 3))
    def give_up_uploads(self, every: int) -> None:
        async def verb(catalog: Catalog) -> None:
            positions = [entry.position for entry in catalog.remote_queue.entries()]
            await catalog.remote_queue.remove(positions[::every])

        self.same(verb)

    @precondition(lambda self: self.names())
    @rule(bucket=BUCKETS, keys=st.lists(KEYS, max_size=4), condition=CONDITIONS)
    def delete(self, bucket: str, keys: list[str], condition: WriteCondition | None) -> None:
        conditions = [condition] * len(keys)
        self.same(lambda catalog: catalog.delete(bucket, keys, conditions=conditions, now_ms=6))

    @precondition(lambda self: self.names())
    @rule(bucket=BUCKETS, keys=st.lists(KEYS, max_size=4, unique=True), durability=BETTER)
    def raise_durability(self, bucket: str, keys: list[str], durability: Durability) -> None:
        self.raise_rows(bucket, keys, durability)

    def raise_rows(self, bucket: str, keys: list[str], durability: Durability) -> None:
        async def verb(catalog: Catalog) -> list[bool]:
            rows = [row for row in await catalog.lookup(bucket, keys) if row is not None]
            return await catalog.raise_durability([msgspec.structs.replace(row, durability=durability) for row in rows])

        self.same(verb)

    @precondition(lambda self: self.names())
    @rule(bucket=BUCKETS, keys=st.lists(KEYS, max_size=3, unique=True))
    def drop_rows(self, bucket: str, keys: list[str]) -> None:
        async def verb(catalog: Catalog) -> None:
            await catalog.drop_rows([row for row in await catalog.lookup(bucket, keys) if row is not None])

        self.same(verb)

    @rule(bucket=BUCKETS, key=KEYS, upload_id=UPLOADS, durability=DURABILITIES)
    def create_upload(self, bucket: str, key: str, upload_id: str, durability: Durability) -> None:
        name = f"{upload_id}-{next(self.sequence)}"
        row = UploadRow(bucket, key, name, 1, "main", durability)
        self.same(lambda catalog: catalog.create_upload(row))

    def uploads(self) -> list[UploadRow]:
        return sorted(self.model._uploads.values(), key=lambda row: row.upload_id)

    @precondition(lambda self: self.uploads())
    @rule(data=st.data(), number=st.integers(1, 3), size_bytes=SIZES, epoch=EPOCHS)
    def put_part(self, data: st.DataObject, number: int, size_bytes: int, epoch: int) -> None:
        upload = data.draw(st.sampled_from(self.uploads()))
        part = PartRow(upload.upload_id, number, self.blobs(size_bytes, epoch), size_bytes, "p", 1)
        self.same(lambda catalog: catalog.put_part(upload.bucket, upload.key, part, now_ms=5))
        self.same(lambda catalog: catalog.parts(upload.bucket, upload.key, upload.upload_id))

    @precondition(lambda self: self.uploads())
    @rule(data=st.data(), durability=DURABILITIES, mode=st.sampled_from(CommitMode), condition=CONDITIONS)
    def complete_upload(
        self, data: st.DataObject, durability: Durability, mode: CommitMode, condition: WriteCondition | None
    ) -> None:
        upload = data.draw(st.sampled_from(self.uploads()))
        parts = [part for part in self.model._parts_of(upload.upload_id) if part.number != 2]
        blobs = tuple(blob for part in parts for blob in part.blobs)
        size_bytes = sum(part.size_bytes for part in parts)
        row = ObjectRow(upload.bucket, upload.key, blobs, size_bytes, "m", 1, "main", durability)
        self.same(
            lambda catalog: catalog.commit(row, mode=mode, condition=condition, upload_id=upload.upload_id, now_ms=5)
        )

    @precondition(lambda self: self.uploads())
    @rule(data=st.data())
    def abort_upload(self, data: st.DataObject) -> None:
        upload = data.draw(st.sampled_from(self.uploads()))
        self.same(lambda catalog: catalog.abort_upload(upload.bucket, upload.key, upload.upload_id, now_ms=5))

    @rule(bucket=BUCKETS, lead=LEADS, delimiter=DELIMITERS, after=st.one_of(LEADS, KEYS), limit=st.integers(0, 5))
    def list_objects(self, bucket: str, lead: str, delimiter: str, after: str, limit: int) -> None:
        self.same(
            lambda catalog: catalog.list_objects(bucket, key_prefix=lead, delimiter=delimiter, after=after, limit=limit)
        )

    @rule(bucket=BUCKETS, lead=LEADS, delimiter=DELIMITERS, after=st.one_of(LEADS, KEYS), limit=st.integers(0, 5))
    def list_uploads(self, bucket: str, lead: str, delimiter: str, after: str, limit: int) -> None:
        self.same(
            lambda catalog: catalog.list_uploads(
                bucket, key_prefix=lead, delimiter=delimiter, after=(after, "u1"), limit=limit
            )
        )

    @rule(data=st.data())
    def reap(self, data: st.DataObject) -> None:
        known = sorted({entry.blob_id for entry in self.runner.run(self.model.due(now_ms=10, limit=10**6))})
        chosen = set(data.draw(st.lists(st.sampled_from(known)))) if known else set()

        async def verb(catalog: Catalog) -> None:
            due = await catalog.due(now_ms=10, limit=10**6)
            await catalog.reap([entry for entry in due if entry.blob_id in chosen])

        self.same(verb)

    @rule()
    def restart(self) -> None:
        self.close()
        self.open()

    @rule()
    def lose_power(self) -> None:
        self.close()
        self.boot = next(self.boots)
        self.model.lose_power()
        self.open()

    @rule()
    def compact(self) -> None:
        self.runner.run(self.catalog.compact_log())

    @invariant()
    def the_same_waits_for_the_remote(self) -> None:
        async def waiting(catalog: Catalog) -> object:
            entries = catalog.remote_queue.entries(limit=10**6)
            assert catalog.remote_queue.totals.objects == len(entries)
            return [
                (entry.bucket, entry.key, entry.blob_id, entry.size_bytes, entry.since_ms, entry.reason)
                for entry in entries
            ]

        self.same(waiting)
        self.same(_size_of)

    @invariant()
    def what_is_told_is_what_is_shared(self) -> None:
        """Whoever keeps the last that was told of each subject, in whatever order, knows the shared rows and the buckets."""
        outbox = self.catalog.outbox
        for entry in outbox.entries(limit=10**6):
            told = decode_entry(entry.content)
            match told:
                case ObjectRow():
                    self.known[told.bucket, told.key] = told
                case RowRemoved():
                    self.known.pop((told.bucket, told.key), None)
                case BucketRow():
                    self.known[(told.name,)] = told
                case BucketRemoved():
                    self.known.pop((told.name,), None)
                case GoneBuckets():
                    self.gone_ms = max(self.gone_ms, told.made_ms)
                case _:
                    raise AssertionError(f"nobody changed that: {told}")
        self.runner.run(outbox.discard(outbox.position))
        rows = [row for row in self.model._durable.values() if row.durability is Durability.SHARED]
        expected: dict[tuple[str, ...], object] = {(row.bucket, row.key): plain(row) for row in rows}
        expected.update({(name,): plain(row) for name, row in self.model._buckets.items()})
        assert {place: plain(row) for place, row in self.known.items()} == expected
        assert self.gone_ms == (self.model._gone_ms or 0)

    @invariant()
    def both_hold_the_same(self) -> None:
        async def rows(catalog: Catalog) -> object:
            return [row async for row in catalog.scan_objects()], [
                row async for row in catalog.scan_objects(volatile_only=True)
            ]

        async def queue(catalog: Catalog) -> object:
            entries = await catalog.due(now_ms=10, limit=10**6)
            return sorted((entry.blob_id, entry.key, entry.not_before_ms, entry.volatile) for entry in entries)

        self.same(rows)
        self.same(queue)
        self.same(lambda catalog: catalog.bucket_usage("one"))
        self.same(lambda catalog: catalog.bucket_usage("two"))


async def _size_of(catalog: Catalog) -> object:
    return catalog.remote_queue.totals


CatalogMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
TestCatalogMachine = CatalogMachine.TestCase
