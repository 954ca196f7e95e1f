"""The LMDB driver passes the contract, and keeps over a restart, a power loss and a rebuild what it must."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from catalog_contract import (
    BUCKET,
    EPOCH,
    CatalogContract,
    found,
    listed,
    part,
    prepared,
    put,
    queued,
    row,
    upload,
)
from chain_contract import ChainContract, with_chunks
from remote_contract import namespace

from kvobj.catalog.encoding import CATALOG_TABLES, OBJECTS, OBJECTS_VOLATILE, USAGE, USAGE_VOLATILE
from kvobj.catalog.lmdb import LmdbCatalog
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rebuild import rebuild_catalog
from kvobj.catalog.rows import (
    BucketKind,
    BucketRow,
    BucketUsage,
    CommitMode,
    CommitOutcome,
    Durability,
    ObjectRow,
    UserRow,
    WriteCondition,
)
from kvobj.database import Database
from kvobj.errors import BucketNotEmptyError, CorruptionError, KvobjError, NoSuchUploadError
from kvobj.record_log import RecordLog


class Place:
    """A catalog's directories, opened as often as a test likes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log: RecordLog | None = None
        self.database: Database | None = None

    async def open(self, *, boot_id: str = "boot", rebuild: bool = False) -> LmdbCatalog:
        self.log = RecordLog.open(self.directory / "log", rotate_bytes=64 * 1024)
        self.database = Database.open(
            durable=self.directory / "durable",
            volatile=self.directory / "volatile",
            tables=CATALOG_TABLES,
            map_bytes=1 << 26,
            volatile_map_bytes=1 << 26,
            record_log=self.log,
            sync=False,
            boot_id=boot_id,
            rebuild=rebuild,
        )
        if rebuild:
            await rebuild_catalog(self.log, self.database)
            await self.database.finish_rebuild(self.log)
            self.log.close()
            await self.database.aclose()
            return await self.open(boot_id=boot_id)
        return await LmdbCatalog.open(self.database)

    async def close(self, catalog: LmdbCatalog) -> None:
        assert self.database is not None
        await catalog.aclose()
        await self.database.aclose()

    async def reopen(self, catalog: LmdbCatalog, *, boot_id: str = "boot") -> LmdbCatalog:
        await self.close(catalog)
        return await self.open(boot_id=boot_id)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


class TestLmdbCatalog(CatalogContract):
    @pytest.fixture
    async def catalog(self, place: Place) -> AsyncIterator[Catalog]:
        catalog = await place.open()
        yield await prepared(catalog)
        await place.close(catalog)


class TestLmdbChains(ChainContract):
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


async def test_everything_survives_a_restart_in_the_same_boot(place: Place) -> None:
    catalog = await place.open()
    await prepared(catalog)
    durable = await put(catalog, row("a", 1))
    volatile = await put(catalog, row("b" * 900, 2, durability=Durability.MEMORY))
    await catalog.create_upload(upload("u1", durability=Durability.MEMORY))
    await catalog.put_part(BUCKET, "k", part("u1", 1, 3), now_ms=5)
    catalog = await place.reopen(catalog)
    assert await found(catalog, "a") == durable
    assert await found(catalog, "b" * 900) == volatile
    assert await catalog.bucket_usage(BUCKET) == BucketUsage(2, 20)
    assert len(await catalog.parts(BUCKET, "k", "u1")) == 1
    later = await put(catalog, row("c", 4))
    assert later.sequence > max(durable.sequence, volatile.sequence)
    await place.close(catalog)


async def test_another_boot_drops_what_was_only_in_memory(place: Place) -> None:
    catalog = await place.open()
    await prepared(catalog)
    older = await put(catalog, row("k", 1, size_bytes=7))
    await put(catalog, row("k", 2, durability=Durability.MEMORY, size_bytes=9))
    await put(catalog, row("l", 3, durability=Durability.MEMORY))
    catalog = await place.reopen(catalog, boot_id="another")
    assert place.database is not None
    assert place.database.volatile_fresh
    assert await found(catalog, "k") == older
    assert await found(catalog, "l") is None
    assert await catalog.bucket_usage(BUCKET) == BucketUsage(1, 7)
    await place.close(catalog)


async def test_memory_commits_touch_no_durable_table(catalog: LmdbCatalog, place: Place) -> None:
    await put(catalog, row("k", 1, durability=Durability.MEMORY))
    assert place.database is not None
    with place.database.read() as view:
        assert (view.count(OBJECTS), view.count(OBJECTS_VOLATILE)) == (0, 1)
    await catalog.raise_durability([row("k", 1)])
    with place.database.read() as view:
        assert (view.count(OBJECTS), view.count(OBJECTS_VOLATILE)) == (1, 0)
        assert (view.count(USAGE), view.count(USAGE_VOLATILE)) == (1, 0)


async def test_deleted_long_keys_leave_no_entry_behind(catalog: LmdbCatalog, place: Place) -> None:
    keys = ["x" * 1024, "x" * 1000, "x" * 481, "x" * 480]
    for number, key in enumerate(keys, 1):
        await put(catalog, row(key, number))
        await put(catalog, row(key, number + 10, durability=Durability.MEMORY))
    await catalog.delete(BUCKET, keys, now_ms=5)
    assert place.database is not None
    with place.database.read() as view:
        assert (view.count(OBJECTS), view.count(OBJECTS_VOLATILE), view.count(USAGE)) == (0, 0, 0)


async def test_concurrent_writers_of_one_key_agree(catalog: LmdbCatalog) -> None:
    """Inline and durable commits, raises and deletes of one key, all at once: one row is left, all other blobs are queued."""
    numbers = range(1, 201)

    async def write(number: int) -> None:
        durability = Durability.MEMORY if number % 3 else Durability.LOCAL
        stored = await put(catalog, row("k" * 600, number, durability=durability))
        if number % 5 == 0:
            await catalog.raise_durability([row("k" * 600, number)])
        if number % 7 == 0:
            await catalog.delete(BUCKET, ["k" * 600], now_ms=5)
        assert stored.sequence

    await asyncio.gather(*(write(number) for number in numbers))
    await catalog.raise_durability([row("k" * 600, number) for number in numbers])
    live = await found(catalog, "k" * 600)
    kept = [] if live is None else [int.from_bytes(live.blobs[0].blob_id[8:], "big")]
    assert sorted(await queued(catalog) + kept) == list(numbers)
    usage = await catalog.bucket_usage(BUCKET)
    assert usage.objects == len(kept)


async def test_a_bucket_deleted_beside_commits_keeps_no_orphan(catalog: LmdbCatalog, place: Place) -> None:
    async def attempt(number: int) -> bool:
        try:
            if number % 4 == 0:
                await catalog.delete_bucket(BUCKET)
            else:
                await put(catalog, row(f"k{number}", number, durability=Durability.MEMORY))
                await catalog.delete(BUCKET, [f"k{number}"], now_ms=5)
        except (KvobjError, BucketNotEmptyError):
            return False
        return True

    await asyncio.gather(*(attempt(number) for number in range(1, 100)))
    assert place.database is not None
    with place.database.read() as view:
        assert (view.count(OBJECTS_VOLATILE), view.count(USAGE_VOLATILE)) == (0, 0)


async def fill_for_rebuild(catalog: LmdbCatalog) -> None:
    await catalog.add_user(UserRow("main", "Main", "AK", "secret", is_root=True))
    await catalog.add_user(UserRow("gone", "Gone", "AK2", "secret"))
    await catalog.remove_user("gone")
    await catalog.create_bucket(BucketRow("empty", BucketKind.KV, "main", 3, Durability.MEMORY))
    await catalog.create_bucket(BucketRow("deleted", BucketKind.KV, "main", 3, Durability.MEMORY))
    await put(catalog, row("k", 900, bucket="deleted"))
    await catalog.delete("deleted", ["k"], now_ms=5)
    await catalog.delete_bucket("deleted")
    for number in range(1, 400):
        await put(catalog, row(f"{'long' * (number % 7) * 40}{number}", number))
    await put(catalog, row("twice", 500, size_bytes=3))
    await put(catalog, row("twice", 501, size_bytes=4))
    await put(catalog, row("lazy", 502))
    await put(catalog, row("raised", 503, durability=Durability.MEMORY))
    await catalog.raise_durability([row("raised", 503)])
    await put(catalog, row("dropped", 504))
    await catalog.drop_rows([row("dropped", 504)])
    await put(catalog, row("deleted", 505))
    await catalog.delete(BUCKET, ["deleted", "1"], now_ms=5)
    await catalog.create_upload(upload("open"))
    await catalog.put_part(BUCKET, "k", part("open", 3, 600), now_ms=5)
    await catalog.create_upload(upload("aborted"))
    await catalog.abort_upload(BUCKET, "k", "aborted", now_ms=5)


async def state_of(catalog: LmdbCatalog) -> object:
    return (
        await catalog.users(),
        await catalog.buckets(),
        [each async for each in catalog.scan_objects()],
        await listed(catalog, limit=100),
        await catalog.bucket_usage(BUCKET),
        await catalog.parts(BUCKET, "k", "open"),
        (await catalog.list_uploads(BUCKET)).rows,
    )


@pytest.mark.parametrize("compactions", [0, 1, 2])
async def test_a_rebuild_from_the_log_is_equal(place: Place, compactions: int) -> None:
    catalog = await place.open()
    await prepared(catalog)
    await fill_for_rebuild(catalog)
    for _ in range(compactions):
        assert await catalog.compact_log()
        await put(catalog, row("after", 700))
    before = await state_of(catalog)
    await place.close(catalog)
    (place.directory / "durable" / "data.mdb").unlink()
    with pytest.raises(CorruptionError):
        await place.open()
    catalog = await place.open(rebuild=True)
    assert await state_of(catalog) == before
    stored = await catalog.lookup(BUCKET, ["twice"])
    await catalog.open_epoch(EPOCH)
    later = await put(catalog, row("twice", 800))
    assert stored[0] is not None
    assert later.sequence > stored[0].sequence
    await place.close(catalog)


@pytest.mark.parametrize("compactions", [0, 2])
@pytest.mark.parametrize("after", ["a restart", "another boot", "a rebuild"])
async def test_a_bucket_is_told_from_one_before_it_over(place: Place, after: str, compactions: int) -> None:
    catalog = await place.open()
    for name, made_ms in ((BUCKET, 70), ("another", 50)):
        await catalog.create_bucket(BucketRow(name, BucketKind.KV, "main", made_ms, Durability.LOCAL))
    for name in (BUCKET, "another"):
        await catalog.delete_bucket(name)
    for _ in range(compactions):
        assert await catalog.compact_log()
    await place.close(catalog)
    catalog = await place.open(boot_id="boot" if after == "a restart" else "another", rebuild=after == "a rebuild")
    await catalog.create_bucket(BucketRow(BUCKET, BucketKind.KV, "other", 70, Durability.LOCAL))
    anew = await catalog.bucket(BUCKET)
    assert anew is not None
    assert anew.created_ms > 70
    await place.close(catalog)


@pytest.mark.parametrize("durability", [Durability.MEMORY, Durability.LOCAL])
@pytest.mark.parametrize("declared_ms", [1, 2])
async def test_an_upload_of_an_older_version_is_of_the_namespace_that_it_was_begun_in(
    place: Place, declared_ms: int, durability: Durability
) -> None:
    """Older versions wrote its name down, and no root: at the start it is the one that stands, if that is as old."""
    catalog = await place.open()
    await prepared(catalog)
    declared = msgspec.structs.replace(namespace(BUCKET, "ns"), created_ms=declared_ms)
    await catalog.namespaces.declare(declared)
    older = msgspec.structs.replace(upload("u1", durability=durability), namespace="ns")
    of_default = msgspec.structs.replace(upload("u2", durability=durability), namespace="default")
    for each in (older, of_default):
        await catalog.create_upload(each)
        await catalog.put_part(BUCKET, "k", part(each.upload_id, 1, int(each.upload_id[1])), now_ms=5)
    catalog = await place.reopen(catalog)
    is_its = declared_ms <= older.initiated_ms
    named = msgspec.structs.replace(older, namespace_root=declared.root if is_its else b"")
    assert await catalog.upload(BUCKET, "k", "u1") == named
    assert await catalog.upload(BUCKET, "k", "u2") == of_default
    assert len(await catalog.parts(BUCKET, "k", "u1")) == 1
    if durability is Durability.LOCAL:
        await place.close(catalog)
        catalog = await place.open(rebuild=True)
        assert await catalog.upload(BUCKET, "k", "u1") == named
        await catalog.open_epoch(EPOCH)
    for root in (declared.root, b"n" * 32):
        if root != declared.root:
            await catalog.namespaces.remove(BUCKET, "ns")
            await catalog.namespaces.declare(msgspec.structs.replace(declared, root=root))
        given = catalog.put_part(BUCKET, "k", part("u1", 2, 3), namespace_root=root, now_ms=5)
        if is_its and root == declared.root:
            assert (await given).number == 2
        else:
            with pytest.raises(NoSuchUploadError):
                await given
    await place.close(catalog)


async def test_an_unfinished_rebuild_is_refused(place: Place) -> None:
    catalog = await place.open()
    await prepared(catalog)
    await place.close(catalog)
    log = RecordLog.open(place.directory / "log")
    database = Database.open(
        durable=place.directory / "durable",
        volatile=place.directory / "volatile",
        tables=CATALOG_TABLES,
        map_bytes=1 << 26,
        volatile_map_bytes=1 << 26,
        record_log=log,
        rebuild=True,
    )
    await rebuild_catalog(log, database)
    await database.aclose()
    with pytest.raises(CorruptionError):
        await place.open()
    catalog = await place.open(rebuild=True)
    assert await catalog.bucket(BUCKET) is not None
    await place.close(catalog)


async def test_commits_go_on_beside_a_compaction(place: Place) -> None:
    catalog = await place.open()
    await prepared(catalog)
    for number in range(1, 300):
        await put(catalog, row(f"k{number}", number))

    async def write() -> None:
        for number in range(300, 400):
            await put(catalog, row(f"k{number}", number))
            await catalog.delete(BUCKET, [f"k{number - 250}"], now_ms=5)

    _, compacted = await asyncio.gather(write(), catalog.compact_log())
    assert compacted
    before = await listed(catalog)
    await place.close(catalog)
    catalog = await place.open(rebuild=True)
    assert await listed(catalog) == before
    await place.close(catalog)


async def test_compaction_drops_what_the_snapshot_stands_for(catalog: LmdbCatalog, place: Place) -> None:
    assert place.log is not None
    for number in range(1, 500):
        await put(catalog, row("same", number))
    before = place.log.size_bytes
    assert not catalog.log_needs_compaction()
    await catalog.compact_log()
    assert place.log.size_bytes < before / 10


async def test_first_writer_wins_under_concurrency(catalog: LmdbCatalog) -> None:
    outcomes = await asyncio.gather(
        *(
            catalog.commit(
                row("k", number, durability=[Durability.MEMORY, Durability.LOCAL][number % 2]),
                mode=CommitMode.FIRST_WRITER_WINS,
                now_ms=5,
            )
            for number in range(1, 50)
        )
    )
    assert [outcome.existed for outcome in outcomes].count(False) == 1
    assert len({outcome.row.sequence for outcome in outcomes}) == 1
    assert len(await queued(catalog)) == 48


def at_once(catalog: LmdbCatalog, given: ObjectRow, **more: Any) -> CommitOutcome | None:  # noqa: ANN401 - what `commit` takes
    """Commit it together with a row of another table."""
    more.setdefault("mode", CommitMode.REPLACE)
    return catalog.commit_at_once(
        given, now_ms=5, beside=lambda view: view.put(USAGE_VOLATILE, b"beside", given.key.encode()), **more
    )


def beside(place: Place) -> bytes | None:
    assert place.database is not None
    with place.database.read() as view:
        return view.get(USAGE_VOLATILE, b"beside")


async def test_a_commit_at_once_is_one_with_what_is_beside_it(catalog: LmdbCatalog, place: Place) -> None:
    outcome = at_once(catalog, row("k", 1, durability=Durability.MEMORY))
    assert outcome is not None
    assert (outcome.existed, await found(catalog, "k"), beside(place)) == (False, outcome.row, b"k")
    assert await catalog.bucket_usage(BUCKET) == BucketUsage(1, 10)
    again = at_once(catalog, row("k", 2, durability=Durability.MEMORY))
    assert again is not None
    assert (await found(catalog, "k"), await queued(catalog)) == (again.row, [1])


async def test_a_commit_at_once_that_would_be_refused_does_nothing(catalog: LmdbCatalog, place: Place) -> None:
    live = await put(catalog, row("live", 1, durability=Durability.MEMORY))
    for given, more in (
        (row("live", 2, durability=Durability.MEMORY), {"mode": CommitMode.FIRST_WRITER_WINS}),
        (row("live", 2, durability=Durability.MEMORY), {"condition": WriteCondition(if_none_match="*")}),
        (row("k", 2, durability=Durability.MEMORY), {"condition": WriteCondition(if_match="*")}),
        (row("k", 2, durability=Durability.MEMORY, epoch=EPOCH - 1), {}),
        (row("k", 2, durability=Durability.MEMORY, bucket="nowhere"), {}),
    ):
        assert at_once(catalog, given, **more) is None
    assert (await found(catalog, "live"), await found(catalog, "k")) == (live, None)
    assert (await queued(catalog), beside(place)) == ([], None)


async def test_a_commit_at_once_gives_way_to_a_change_of_its_key_on_its_way(catalog: LmdbCatalog, place: Place) -> None:
    older = asyncio.create_task(catalog.commit(row("k", 1), mode=CommitMode.REPLACE, now_ms=5))
    await asyncio.sleep(0)
    assert at_once(catalog, row("k", 2, durability=Durability.MEMORY)) is None
    assert at_once(catalog, row("other", 3, durability=Durability.MEMORY)) is not None
    await older
    assert at_once(catalog, row("k", 2, durability=Durability.MEMORY)) is not None
    assert beside(place) == b"k"
