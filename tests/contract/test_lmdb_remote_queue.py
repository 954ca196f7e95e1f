"""The LMDB driver passes the contract of a node with a remote, and keeps queue and outbox over crashes, power losses, rebuilds."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from catalog_contract import BUCKET, EPOCH, prepared, put, row
from chain_contract import KV, chunk, put_chain, with_chunks
from fakes import ManualClock
from remote_contract import RemoteContract, namespace, shared, told, told_of

from kvobj.catalog.claim_scan import MANY
from kvobj.catalog.encoding import CATALOG_TABLES, REMOTE_QUEUE, REMOTE_QUEUE_BYTES, REMOTE_QUEUE_ROWS, REMOTE_TABLES
from kvobj.catalog.lmdb import LmdbCatalog
from kvobj.catalog.log_entries import LogEntry, decode_entry, encode_entry
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rebuild import rebuild_catalog, rebuild_from_entries
from kvobj.catalog.remote_protocol import QueueReason
from kvobj.catalog.rows import BucketKind, BucketRow, ChunkName, CommitMode, Durability, ObjectRow, UserRow
from kvobj.catalog.setting_rows import RemoteRule
from kvobj.database import Database
from kvobj.database.outbox import ENTRY_BYTES
from kvobj.database.table import META
from kvobj.errors import CorruptionError
from kvobj.record_log import RecordLog


class Place:
    """A catalog's directories, opened as often as a test likes, with an outbox or without."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.clock = ManualClock()
        self.log: RecordLog | None = None
        self.database: Database | None = None

    def database_of(self, *, remote: bool, boot_id: str = "boot", rebuild: bool = False) -> Database:
        self.log = RecordLog.open(self.directory / "log", rotate_bytes=64 * 1024)
        self.database = Database.open(
            durable=self.directory / "durable",
            volatile=self.directory / "volatile",
            tables=[*CATALOG_TABLES, *(REMOTE_TABLES if remote else ())],
            map_bytes=1 << 26,
            volatile_map_bytes=1 << 26,
            record_log=self.log,
            sync=False,
            boot_id=boot_id,
            rebuild=rebuild,
            outbox=self.clock if remote else None,
        )
        return self.database

    async def open(self, *, remote: bool = True, boot_id: str = "boot") -> LmdbCatalog:
        return await LmdbCatalog.open(self.database_of(remote=remote, boot_id=boot_id))

    async def close(self, catalog: LmdbCatalog | None = None) -> None:
        if catalog is not None:
            await catalog.aclose()
        assert self.database is not None
        await self.database.aclose()

    async def reopen(self, catalog: LmdbCatalog, *, remote: bool = True, boot_id: str = "boot") -> LmdbCatalog:
        await self.close(catalog)
        return await self.open(remote=remote, boot_id=boot_id)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


class TestLmdbRemote(RemoteContract):
    @pytest.fixture
    async def catalog(self, place: Place) -> AsyncIterator[Catalog]:
        catalog = await place.open()
        yield await with_chunks(await prepared(catalog))
        await place.close(catalog)


@pytest.fixture
async def catalog(place: Place) -> AsyncIterator[LmdbCatalog]:
    catalog = await place.open()
    await prepared(catalog)
    yield catalog
    await place.close(catalog)


async def queue(catalog: Catalog, key: str, number: int) -> ObjectRow:
    return (await catalog.commit(row(key, number), mode=CommitMode.REPLACE, now_ms=5, to_remote=True)).row


@pytest.mark.parametrize("boot_id", ["boot", "another"])
async def test_queue_and_outbox_survive_a_restart_and_a_power_loss(place: Place, boot_id: str) -> None:
    catalog = await place.open()
    await prepared(catalog)
    place.clock.advance(5)
    await queue(catalog, "a", 1)
    stored = await queue(catalog, "b", 2)
    await put(catalog, shared(row("c", 3)))
    before = catalog.remote_queue.entries(), catalog.remote_queue.totals, catalog.outbox.entries()
    assert [entry.since_ms for entry in before[2]][-1] == place.clock.now_ms()
    position = catalog.outbox.position
    catalog = await place.reopen(catalog, boot_id=boot_id)
    assert (catalog.remote_queue.entries(), catalog.remote_queue.totals, catalog.outbox.entries()) == before
    assert catalog.outbox.position == position
    await catalog.open_epoch(EPOCH)
    await catalog.raise_durability([shared(stored)])
    assert [entry.key for entry in catalog.remote_queue.entries()] == ["a"]
    assert catalog.outbox.position == position + 1
    await place.close(catalog)


async def test_positions_go_on_after_the_outbox_was_emptied_and_the_store_restarted(place: Place) -> None:
    catalog = await prepared(await place.open())
    assert isinstance(catalog, LmdbCatalog)
    await catalog.outbox.discard(catalog.outbox.position)
    position = catalog.outbox.position
    catalog = await place.reopen(catalog)
    assert (catalog.outbox.position, catalog.outbox.pending) == (position, 0)
    await put(catalog, shared(row("k", 1)))
    assert [entry.position for entry in catalog.outbox.entries()] == [position + 1]
    await place.close(catalog)


async def test_what_the_outbox_takes_is_counted_over_restarts_and_taken_over_from_a_version_that_did_not(
    place: Place,
) -> None:
    catalog = await prepared(await place.open())
    assert isinstance(catalog, LmdbCatalog)
    for number in range(1, 4):
        await put(catalog, shared(row(f"k{number}", number)))
    counted = sum(len(entry.content) + ENTRY_BYTES for entry in catalog.outbox.entries())
    assert catalog.outbox.size_bytes == counted
    catalog = await place.reopen(catalog)
    assert catalog.outbox.size_bytes == counted
    assert place.database is not None
    await place.database.write(lambda view: view.delete(META, b"outbox_bytes"))
    catalog = await place.reopen(catalog, boot_id="another")
    assert catalog.outbox.size_bytes == counted
    first = catalog.outbox.entries(limit=1)[0]
    await catalog.outbox.discard(first.position)
    assert catalog.outbox.size_bytes == counted - len(first.content) - ENTRY_BYTES
    await place.close(catalog)


async def test_of_what_waits_at_a_start_nobody_knows_the_bucket_and_of_what_was_told_nothing_is_left(
    place: Place,
) -> None:
    catalog = await prepared(await place.open())
    assert isinstance(catalog, LmdbCatalog)
    await put(catalog, shared(row("k", 1)))
    position = catalog.outbox.position
    catalog = await place.reopen(catalog)
    assert (catalog.outbox.removals_of(BUCKET), catalog.outbox.removals_of("another")) == (position, position)
    await catalog.outbox.discard(position)
    catalog = await place.reopen(catalog)
    assert catalog.outbox.removals_of(BUCKET) == 0
    await catalog.delete(BUCKET, ["k"], now_ms=5)
    assert (catalog.outbox.removals_of(BUCKET), catalog.outbox.removals_of("another")) == (position + 1, 0)
    await place.close(catalog)


async def test_a_database_without_an_outbox_queues_and_tells_nothing(place: Place) -> None:
    catalog = await place.open(remote=False)
    await prepared(catalog)
    await catalog.create_bucket(
        BucketRow("ruled", BucketKind.ORDINARY, "main", 1, Durability.LOCAL, remote=RemoteRule.ALWAYS)
    )
    stored = await put(catalog, row("k", 1, bucket="ruled"))
    await put(catalog, shared(row("s", 2)))
    assert await catalog.remote_queue.add([stored], QueueReason.REUSED) == [False]
    assert catalog.remote_queue.find(stored) is None
    assert (catalog.remote_queue.entries(), catalog.remote_queue.totals.objects) == ([], 0)
    assert (catalog.outbox.entries(), catalog.outbox.position, catalog.outbox.pending) == ([], 0, 0)
    assert not catalog.outbox.snapshot_due
    await place.close(catalog)


async def test_changes_that_were_made_without_the_outbox_make_a_snapshot_due(place: Place) -> None:
    catalog = await place.open()
    await prepared(catalog)
    await put(catalog, shared(row("k", 1)))
    await catalog.outbox.snapshot_told()
    position = catalog.outbox.position
    catalog = await place.reopen(catalog, remote=False)
    await put(catalog, row("local", 2))
    catalog = await place.reopen(catalog)
    assert not catalog.outbox.snapshot_due
    catalog = await place.reopen(catalog, remote=False)
    await catalog.delete(BUCKET, ["k"], now_ms=5)
    catalog = await place.reopen(catalog)
    assert catalog.outbox.snapshot_due
    assert catalog.outbox.position == position
    assert told_of(catalog, "k") != []
    await place.close(catalog)


async def test_chunks_that_a_claim_takes_with_many_leave_the_queue(place: Place) -> None:
    """What the remote is to be told of a row needs all of it, which claims of many read only where there is a remote."""
    catalog = await place.open()
    await with_chunks(await prepared(catalog))
    keys = [f"{number:08}" for number in range(2 * MANY)]
    above = ["", *keys]
    rows = [chunk(key, at, above[at - 1], durability=Durability.LOCAL) for at, key in enumerate(keys, 1)]
    for each in rows:
        await catalog.commit(each, mode=CommitMode.FIRST_WRITER_WINS, now_ms=5)
    assert all(await catalog.remote_queue.add(rows, QueueReason.ALWAYS, now_ms=5))
    stays, goes = rows[:4], [ChunkName(KV, each.key, each.blobs[0].blob_id) for each in reversed(rows[4:])]
    assert all(await catalog.condemn(goes, not_before_boot_ms=0))
    assert (await catalog.claim(now_boot_ms=0, now_ms=9)).chunks == tuple(goes)
    assert [entry.key for entry in catalog.remote_queue.entries()] == [each.key for each in stays]
    assert catalog.remote_queue.totals.size_bytes == sum(each.size_bytes for each in stays)
    await place.close(catalog)


async def test_a_crash_leaves_rows_and_entries_together(place: Place) -> None:
    """Whatever was committed when the process ends (here: the environment as it is on the disk in the middle of many commits)."""
    catalog = await place.open()
    await prepared(catalog)
    tasks = [asyncio.create_task(queue(catalog, f"k{number}", number)) for number in range(1, 300)]
    raised = 0
    while raised < 100:
        await asyncio.sleep(0)
        rows = [entry.key for entry in catalog.remote_queue.entries(limit=10)]
        found = [each for each in await catalog.lookup(BUCKET, rows) if each is not None]
        raised += sum(await catalog.raise_durability([shared(each) for each in found]))
    copy = place.directory / "copy"
    assert place.database is not None
    await asyncio.get_running_loop().run_in_executor(None, _copy, place.database, copy)
    await asyncio.gather(*tasks)
    await place.close(catalog)
    (copy / "data.mdb").replace(place.directory / "durable" / "data.mdb")
    catalog = await place.open(boot_id="another")
    entries = catalog.remote_queue.entries()
    local = {each.key async for each in catalog.scan_objects() if each.durability is Durability.LOCAL}
    assert {entry.key for entry in entries} == local
    everything = [each async for each in catalog.scan_objects() if each.durability is Durability.SHARED]
    assert {each.key for each in everything} == {each.key for each in told(catalog) if isinstance(each, ObjectRow)}
    assert len(everything) >= 100
    await place.close(catalog)


def _copy(database: Database, directory: Path) -> None:
    """A snapshot of the durable environment, as a crash leaves one."""
    directory.mkdir()
    database._durable.lmdb.copy(str(directory))


async def test_a_snapshot_has_not_ended_before_what_it_tells_is_flushed(place: Place) -> None:
    catalog = await prepared(await place.open())
    assert isinstance(catalog, LmdbCatalog)
    assert place.database is not None
    begun, may_end = threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        may_end.wait(10)

    place.database._writer._sync = True
    place.database._durable.flush = slow  # type: ignore[method-assign]

    async def read() -> set[bytes]:
        return {content async for content in catalog.outbox.snapshot()}

    commit = asyncio.create_task(put(catalog, shared(row("k", 1))))
    await asyncio.get_running_loop().run_in_executor(None, begun.wait, 10)
    reading = asyncio.create_task(read())
    done, _ = await asyncio.wait([reading, commit], timeout=0.05)
    assert not done
    may_end.set()
    stored = await commit
    assert encode_entry(stored) in await reading
    await place.close(catalog)


async def test_a_page_of_the_outbox_is_bounded_in_bytes(catalog: LmdbCatalog) -> None:
    await catalog.outbox.discard(catalog.outbox.position)
    large = {"x": "y" * 3_000_000}
    for number in range(1, 6):
        await put(catalog, shared(msgspec.structs.replace(row(f"k{number}", number), metadata=large)))
    pages, after = [], 0
    while page := catalog.outbox.entries(after):
        pages.append(len(page))
        after = page[-1].position
    assert pages == [3, 2]
    await catalog.outbox.discard(after)
    assert catalog.outbox.pending == 0


async def test_totals_and_index_are_what_the_entries_say(catalog: LmdbCatalog, place: Place) -> None:
    rows = [await queue(catalog, f"k{number % 40}", number) for number in range(1, 100)]
    await catalog.raise_durability([shared(each) for each in rows[80:]])
    await catalog.remote_queue.remove([entry.position for entry in catalog.remote_queue.entries()[::2]])
    entries = catalog.remote_queue.entries()
    totals = catalog.remote_queue.totals
    assert (totals.objects, totals.size_bytes) == (len(entries), sum(entry.size_bytes for entry in entries))
    assert place.database is not None
    with place.database.read() as view:
        assert view.count(REMOTE_QUEUE) == view.count(REMOTE_QUEUE_ROWS) == len(entries) > 0
    await catalog.remote_queue.remove([entry.position for entry in entries])
    with place.database.read() as view:
        assert [view.count(table) for table in (REMOTE_QUEUE, REMOTE_QUEUE_ROWS, REMOTE_QUEUE_BYTES)] == [0, 0, 0]


async def test_a_rebuild_from_the_log_goes_on_above_every_position_that_was_told(place: Place) -> None:
    catalog = await place.open()
    await prepared(catalog)
    for number in range(1, 30):
        await put(catalog, shared(row(f"k{number}", number)))
    assert await catalog.compact_log()
    await put(catalog, shared(row("late", 50)))
    await catalog.outbox.discard(catalog.outbox.position)
    await catalog.outbox.snapshot_told()
    position = catalog.outbox.position
    await place.close(catalog)
    database = place.database_of(remote=True, rebuild=True)
    assert place.log is not None
    await rebuild_catalog(place.log, database)
    await database.finish_rebuild(place.log)
    place.log.close()
    await place.close()
    catalog = await place.open()
    assert (catalog.outbox.position, catalog.outbox.pending, catalog.outbox.snapshot_due) == (position, 0, True)
    rows = [each async for each in catalog.scan_objects()]
    assert len(rows) == 30
    assert {each.durability for each in rows} == {Durability.SHARED}
    await catalog.open_epoch(EPOCH)
    await put(catalog, shared(row("new", 60)))
    assert [entry.position for entry in catalog.outbox.entries()] == [position + 1]
    await place.close(catalog)


async def test_a_log_that_was_compacted_alone_still_knows_the_position(place: Place) -> None:
    catalog = await place.open()
    await prepared(catalog)
    await put(catalog, shared(row("k", 1)))
    position = catalog.outbox.position
    assert await catalog.compact_log()
    await place.close(catalog)
    database = place.database_of(remote=False, rebuild=True)
    assert place.log is not None
    await rebuild_catalog(place.log, database)
    await database.finish_rebuild(place.log)
    place.log.close()
    await place.close()
    catalog = await place.open()
    assert catalog.outbox.position == position
    await place.close(catalog)


async def state_of(catalog: Catalog) -> object:
    return (
        await catalog.users(),
        await catalog.buckets(),
        [each async for each in catalog.scan_objects(with_hidden=True)],
        [await catalog.bucket_usage(bucket.name) for bucket in await catalog.buckets()],
        await catalog.namespaces.page(KV),
    )


async def fill(catalog: Catalog) -> None:
    """Nothing but what a remote has."""
    await with_chunks(await prepared(catalog))
    await catalog.add_user(UserRow("main", "Main", "AK", "secret", is_root=True))
    await catalog.namespaces.declare(namespace(KV, "ns"))
    await put_chain(catalog, "abcdef", [Durability.SHARED])
    await put(catalog, shared(row("empty", size_bytes=0)))
    for number in range(20, 60):
        await put(catalog, shared(row(f"{'long' * (number % 7) * 40}{number}", number)))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("backwards", [False, True])
async def test_a_catalog_is_made_from_entries_alone(tmp_path: Path, *, asynchronous: bool, backwards: bool) -> None:
    place, other = Place(tmp_path / "one"), Place(tmp_path / "other")
    catalog = await place.open()
    await fill(catalog)
    contents = [content async for content in catalog.outbox.snapshot()]
    before = await state_of(catalog)
    await place.close(catalog)
    entries: list[LogEntry] = [entry for content in contents if (entry := decode_entry(content)) is not None]
    if backwards:
        rows = [entry for entry in entries if isinstance(entry, ObjectRow)]
        entries = [*(entry for entry in entries if not isinstance(entry, ObjectRow)), *reversed(rows)]

    async def stream() -> AsyncIterator[LogEntry]:
        for entry in entries:
            yield entry

    database = other.database_of(remote=True, rebuild=True)
    assert other.log is not None
    given = stream() if asynchronous else entries
    assert await rebuild_from_entries(given, database, next_position=1000) == len(entries)
    await database.finish_rebuild(other.log, log_is_whole=False)
    other.log.close()
    await other.close()
    catalog = await other.open()
    assert await state_of(catalog) == before
    assert (catalog.outbox.position, catalog.outbox.snapshot_due) == (999, True)
    assert await catalog.drop_orphans(now_ms=5) == 0
    assert catalog.log_needs_compaction()
    await catalog.open_epoch(EPOCH)
    later = await put(catalog, chunk("g", 99, "f"))
    assert later.depth == 6
    highest = max(each.sequence for each in entries if isinstance(each, ObjectRow))
    assert later.sequence > highest
    await other.close(catalog)


@pytest.mark.parametrize("told_by", ["a snapshot", "what was published"])
async def test_a_bucket_is_told_from_one_before_it_over_a_rebuild_from_entries(tmp_path: Path, told_by: str) -> None:
    place, other = Place(tmp_path / "one"), Place(tmp_path / "other")
    catalog = await place.open()
    gone = BucketRow("gone", BucketKind.KV, "main", 70, Durability.LOCAL)
    await catalog.create_bucket(gone)
    await catalog.delete_bucket("gone")
    if told_by == "a snapshot":
        contents = [content async for content in catalog.outbox.snapshot()]
    else:  # the last word on each subject
        contents = [entry.content for entry in catalog.outbox.entries()][1:]
    await place.close(catalog)
    entries = [entry for content in contents if (entry := decode_entry(content)) is not None]
    assert gone not in entries
    database = other.database_of(remote=True, rebuild=True)
    assert other.log is not None
    await rebuild_from_entries(entries, database, next_position=1000)
    await database.finish_rebuild(other.log, log_is_whole=False)
    other.log.close()
    await other.close()
    catalog = await other.open()
    await catalog.create_bucket(gone)
    anew = await catalog.bucket("gone")
    assert anew is not None
    assert anew.created_ms > gone.created_ms
    await other.close(catalog)


async def test_chunks_whose_ancestors_never_came_are_found_as_orphans(tmp_path: Path) -> None:
    place = Place(tmp_path)
    database = place.database_of(remote=True, rebuild=True)
    bucket = BucketRow(KV, BucketKind.KV, "main", 1, Durability.SHARED)
    rows = [
        msgspec.structs.replace(shared(chunk(key, number, parent)), sequence=number, depth=number)
        for number, (key, parent) in enumerate([("c", "b"), ("d", "c"), ("x", "")], 1)
    ]
    await rebuild_from_entries([bucket, *rows], database)
    assert place.log is not None
    await database.finish_rebuild(place.log, log_is_whole=False)
    place.log.close()
    await place.close()
    catalog = await place.open()
    assert await catalog.drop_orphans(now_ms=5) == 2
    assert [each.key async for each in catalog.scan_objects()] == ["x"]
    await place.close(catalog)


async def test_an_unfinished_rebuild_from_entries_is_refused(tmp_path: Path) -> None:
    place = Place(tmp_path)
    database = place.database_of(remote=True, rebuild=True)
    await rebuild_from_entries([BucketRow("b", BucketKind.KV, "main", 1, Durability.SHARED)], database)
    await place.close()
    with pytest.raises(CorruptionError):
        await place.open()


def test_rows_of_buckets_from_before_there_was_a_rule_are_read() -> None:
    new = BucketRow("b", BucketKind.KV, "main", 1, Durability.SHARED)
    old = msgspec.msgpack.encode(list(msgspec.structs.astuple(new))[:-1])
    assert msgspec.msgpack.decode(old, type=BucketRow).remote is RemoteRule.NEVER
