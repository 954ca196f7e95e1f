"""Rows looked up in LMDB's pages are those that LMDB gives; what is not as it is known there is left to it."""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path

import lmdb
import msgspec
import pytest
from damaged_pages import damaged_copies, ended, guarded

from kvobj import native
from kvobj.buffers import address_of
from kvobj.catalog.chunk_heads import matched_chunk
from kvobj.catalog.chunk_list import ChunkList, IdList, KeyList
from kvobj.catalog.chunk_records import ChunkRecords, find_records, scan_records
from kvobj.catalog.encoding import BUCKETS, OBJECTS, OBJECTS_VOLATILE, encode_row
from kvobj.catalog.matching import Run
from kvobj.catalog.object_rows import ObjectRows
from kvobj.catalog.rows import BlobRef, Durability, ObjectRow, ObjectState
from kvobj.catalog.run_reader import FoundRun, RunReader
from kvobj.database import Database, Snapshot, TablePages, WriteView
from kvobj.database.page_lookups import find_values_under
from kvobj.database.table_pages import MappedTables, mapping_in

pytestmark = pytest.mark.skipif(not native.status().is_loaded, reason="the native library is not built")

ROOT = bytes(7) + b"\1"
OBJECT_ROWS = ObjectRows(count().__next__)
PAGE_BYTES = 4096


def row_of(key: str, *, version: int = 0, state: ObjectState = ObjectState.LIVE, note: str = "") -> ObjectRow:
    return ObjectRow(
        bucket="kv",
        key=key,
        blobs=(BlobRef(version.to_bytes(16, "big"), 100, 612, b"d" * 32),),
        size_bytes=100 + version,
        etag="e",
        modified_ms=1,
        owner="main",
        durability=Durability.MEMORY,
        digest=b"d" * 32,
        state=state,
        metadata={"note": note} if note else {},
    )


def putting(rows: Sequence[ObjectRow], *, volatile: bool = False) -> Callable[[WriteView], None]:
    table = OBJECTS_VOLATILE if volatile else OBJECTS

    def change(view: WriteView) -> None:
        view.put_many(table, [(ROOT + row.key.encode(), encode_row(row)) for row in rows])

    return change


def removing(keys: Sequence[str]) -> Callable[[WriteView], None]:
    def change(view: WriteView) -> None:
        view.delete_many(OBJECTS, [ROOT + key.encode() for key in keys])

    return change


def putting_items(items: Sequence[tuple[bytes, bytes]]) -> Callable[[WriteView], None]:
    return lambda view: view.put_many(OBJECTS, items)


def removing_items(keys: Sequence[bytes]) -> Callable[[WriteView], None]:
    return lambda view: view.delete_many(OBJECTS, keys)


def as_ids(keys: Sequence[str]) -> IdList:
    return IdList(b"".join(map(bytes.fromhex, keys)))


def found(view: Snapshot, chunks: ChunkList) -> bytes | None:
    return find_records(OBJECT_ROWS.pages(view), ROOT, chunks, 0, len(chunks))


def as_lmdb_has_them(view: Snapshot, keys: Sequence[str]) -> bytes | None:
    places = [ROOT + key.encode() for key in keys]
    return scan_records([view.get(OBJECTS_VOLATILE, place) or view.get(OBJECTS, place) for place in places])


def open_at(directory: Path) -> Database:
    return Database.open(
        durable=directory / "durable",
        volatile=directory / "volatile",
        tables=(BUCKETS, OBJECTS, OBJECTS_VOLATILE),
        map_bytes=1 << 28,
        volatile_map_bytes=1 << 26,
        sync=False,
        boot_id="boot",
    )


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    opened = open_at(tmp_path)
    yield opened
    await opened.aclose()


@pytest.fixture
def chance() -> random.Random:
    return random.Random(7)


async def test_rows_found_are_those_that_lmdb_has_whatever_the_table_went_through(
    database: Database, chance: random.Random
) -> None:
    keys = [chance.randbytes(32).hex() for _ in range(6000)]
    stored: set[str] = set()
    for version in range(6):
        some = chance.sample(keys, 2500)
        await database.write(putting([row_of(key, version=version) for key in some]))
        gone = chance.sample(some, 700)
        await database.write(removing(gone))
        stored = stored.union(some).difference(gone)
        asked = chance.sample(sorted(stored), 1500)
        with database.read() as view:
            expected = as_lmdb_has_them(view, asked)
            assert expected is not None
            assert found(view, as_ids(asked)) == expected
            assert found(view, KeyList(asked)) == expected
            assert found(view, as_ids([*asked, gone[0]])) is None


async def test_a_volatile_row_is_found_in_place_of_the_durable_one(database: Database, chance: random.Random) -> None:
    keys = [chance.randbytes(32).hex() for _ in range(300)]
    await database.write(putting([row_of(key, version=1) for key in keys[:250]]))
    database.write_volatile(putting([row_of(key, version=2) for key in keys[200:]], volatile=True))
    with database.read() as view:
        records = found(view, as_ids(keys))
        assert records is not None
        assert records == as_lmdb_has_them(view, keys)
    blob_ids = [records[at : at + 16] for at in range(0, len(records), 72)]
    assert [int.from_bytes(each, "big") for each in blob_ids] == [1] * 200 + [2] * 100


async def test_a_snapshot_shows_the_rows_of_its_time_however_often_they_change_after_it(
    database: Database, chance: random.Random
) -> None:
    keys = [chance.randbytes(32).hex() for _ in range(3000)]
    await database.write(putting([row_of(key, version=1) for key in keys]))
    with database.read() as view:
        before = found(view, as_ids(keys))
        assert before is not None
        for version in range(2, 8):
            await database.write(putting([row_of(key, version=version) for key in keys]))
            await database.write(removing(chance.sample(keys, 500)))
        assert found(view, as_ids(keys)) == before
    with database.read() as view:
        assert found(view, as_ids(keys)) is None


async def test_keys_of_any_length_are_found(database: Database, chance: random.Random) -> None:
    keys = sorted({"k" * chance.randrange(1, 460) + chance.randbytes(8).hex() for _ in range(500)})
    await database.write(putting([row_of(key) for key in keys]))
    asked = chance.sample(keys, len(keys))
    with database.read() as view:
        records = found(view, KeyList(asked))
        assert records is not None
        assert records == as_lmdb_has_them(view, asked)
        assert found(view, KeyList([asked[0], "k" * 900])) is None
        assert found(view, KeyList([asked[0][:-1]])) is None
        assert found(view, KeyList([asked[0] + "x"])) is None
        assert found(view, KeyList([])) == b""


async def test_no_row_is_found_in_tables_without_any(database: Database) -> None:
    with database.read() as view:
        assert found(view, KeyList(["a"])) is None


@pytest.mark.parametrize(
    "odd",
    [
        row_of("odd", state=ObjectState.CONDEMNED),
        row_of("odd", note="n" * 3000),  # in pages of its own
        msgspec.structs.replace(row_of("odd"), blobs=()),
    ],
)
async def test_a_hidden_row_or_one_of_another_form_is_left_to_the_decoder(database: Database, odd: ObjectRow) -> None:
    await database.write(putting([row_of("a"), odd]))
    with database.read() as view:
        assert found(view, KeyList(["a"])) is not None
        assert found(view, KeyList(["a", "odd"])) is None


@pytest.mark.parametrize("cut", [1, 8, 20])
async def test_a_row_that_does_not_end_with_its_value_is_left_to_the_decoder(database: Database, cut: int) -> None:
    whole = encode_row(row_of("odd"))

    def change(view: WriteView, odd: bytes) -> None:
        view.put_many(OBJECTS, [(ROOT + b"a", encode_row(row_of("a"))), (ROOT + b"odd", odd)])

    for odd in (whole[:-cut], whole + bytes(cut)):
        await database.write(partial(change, odd=odd))
        with database.read() as view:
            assert found(view, KeyList(["a"])) is not None
            assert scan_records([odd]) is None
            assert found(view, KeyList(["a", "odd"])) is None
    await database.write(partial(change, odd=whole))
    with database.read() as view:
        assert found(view, KeyList(["a", "odd"])) == scan_records([encode_row(row_of("a")), whole])


async def test_looking_up_goes_on_until_the_database_closes_and_then_raises(
    tmp_path: Path, chance: random.Random
) -> None:
    keys = [chance.randbytes(32).hex() for _ in range(512)]
    chunks = as_ids(keys)
    for round_ in range(20):
        opened = open_at(tmp_path / str(round_))
        await opened.write(putting([row_of(key) for key in keys]))
        view = opened.read().__enter__()
        expected = as_lmdb_has_them(view, keys)
        looked = await asyncio.gather(
            look_up_until_closed(view, chunks, expected), opened.aclose(), look_up_until_closed(view, chunks, expected)
        )
        assert looked[0] > 0
        with pytest.raises(lmdb.Error):
            view.pages(OBJECTS)
        with pytest.raises(lmdb.Error):
            view.get(OBJECTS, ROOT + keys[0].encode())
        view.__exit__()


async def look_up_until_closed(view: Snapshot, chunks: ChunkList, expected: bytes | None) -> int:
    """How often the rows were found."""
    for times in count():
        try:
            assert found(view, chunks) == expected
        except lmdb.Error:
            return times
        await asyncio.sleep(0)
    raise AssertionError


async def test_damaged_pages_are_never_read_beyond_the_map(
    database: Database, chance: random.Random, tmp_path: Path
) -> None:
    keys = [chance.randbytes(32).hex() for _ in range(600)]
    await database.write(putting([row_of(key) for key in keys]))
    with database.read() as view:
        table = view.pages(OBJECTS)
        expected = found(view, as_ids(keys))
    assert table is not None

    def read_all() -> None:
        known = 0
        for damaged in damaged_copies(tmp_path / "durable" / "data.mdb", chance, 600):
            records = find_records([damaged(table)], ROOT, as_ids(keys), 0, len(keys))
            assert records is None or len(records) == len(expected or b"")
            known += records is not None
        assert 0 < known < 600

    assert ended(read_all) == 0


async def test_where_the_map_were_said_to_be_longer_damaged_pages_are_read_beyond_it(
    database: Database, chance: random.Random, tmp_path: Path
) -> None:
    # What shows that the tests of damaged pages see what they are for.
    keys = [chance.randbytes(32).hex() for _ in range(600)]
    await database.write(putting([row_of(key) for key in keys]))
    with database.read() as view:
        table = view.pages(OBJECTS)
    assert table is not None

    def read_all() -> None:
        for damaged in damaged_copies(tmp_path / "durable" / "data.mdb", chance, 600):
            longer = damaged(table)
            longer.pages = 1 << 28
            find_records([longer], ROOT, as_ids(keys), 0, len(keys))

    assert ended(read_all) == -signal.SIGSEGV


@pytest.mark.parametrize("at", [-1, 4096])
def test_what_lies_beside_a_guarded_copy_cannot_be_read(at: int) -> None:
    def read_beside() -> None:
        with guarded(4096) as copy:
            assert ctypes.string_at(address_of(copy), 4096) == bytes(4096)
            ctypes.string_at(address_of(copy) + at, 1)

    assert ended(read_beside) == -signal.SIGSEGV


def under(view: Snapshot, prefix: bytes) -> list[bytes]:
    found: list[bytes] = []
    for key, value in view.range(OBJECTS, prefix):
        if not key.startswith(prefix):
            break
        found.append(value)
    return found


def assert_finds_all_under(view: Snapshot, prefixes: Sequence[bytes]) -> list[bytes]:
    """The prefixes that LMDB was asked for."""
    table, asked = view.pages(OBJECTS), list[bytes]()
    assert table is not None

    def ask(prefix: bytes) -> list[bytes]:
        asked.append(prefix)
        return under(view, prefix)

    assert find_values_under(table, prefixes, ask) == [under(view, prefix) for prefix in prefixes]
    return asked


async def test_what_lies_under_a_prefix_is_what_lmdb_has_also_where_it_goes_on_in_another_leaf(
    database: Database, chance: random.Random
) -> None:
    prefixes = [chance.randbytes(chance.choice([2, 8, 24])) for _ in range(1500)]
    asked: list[bytes] = []
    for _ in range(3):
        items = [
            (prefix + chance.randbytes(16), chance.randbytes(40))
            for prefix in prefixes
            for _ in range(chance.choice([0, 1, 1, 1, 1, 2, 40]))
        ]
        await database.write(putting_items(items))
        with database.read() as view:
            asked += assert_finds_all_under(view, prefixes)
        # What came first in a leaf may be gone then, and the page above still names it.
        gone = [key for key, _ in chance.sample(items, len(items) // 2)]
        await database.write(removing_items(gone))
        with database.read() as view:
            asked += assert_finds_all_under(view, prefixes)
    assert asked, "nothing went on in another leaf"


async def test_lmdb_is_asked_only_for_what_may_go_on_in_another_leaf(database: Database, chance: random.Random) -> None:
    prefixes = [chance.randbytes(24) for _ in range(4000)]
    stored, absent = prefixes[:2000], prefixes[2000:]
    await database.write(putting_items([(prefix + bytes(16), bytes(100)) for prefix in stored]))
    with database.read() as view:
        asked = assert_finds_all_under(view, prefixes)
    assert not set(asked) & set(absent)
    assert len(asked) < len(stored) // 10  # the first of a leaf


async def test_damaged_pages_are_never_read_beyond_the_map_for_what_lies_under_prefixes(
    database: Database, chance: random.Random, tmp_path: Path
) -> None:
    keys = sorted(chance.randbytes(40) for _ in range(2000))
    await database.write(putting_items([(key, key) for key in keys]))
    with database.read() as view:
        table = view.pages(OBJECTS)
    assert table is not None

    def read_all() -> None:
        known = 0
        for damaged in damaged_copies(tmp_path / "durable" / "data.mdb", chance, 300):
            values = find_values_under(damaged(table), [key[:24] for key in keys], lambda _: [])
            assert values is None or len(values) == len(keys)
            known += values is not None
        assert 0 < known < 300

    assert ended(read_all) == 0


async def test_a_tree_of_another_depth_or_root_than_the_pages_tell_is_refused(
    database: Database, chance: random.Random
) -> None:
    keys = [chance.randbytes(32).hex() for _ in range(2000)]
    await database.write(putting([row_of(key) for key in keys]))
    with database.read() as view:
        table = view.pages(OBJECTS)
        assert table is not None
        for field, wrong in [
            ("depth", table.depth - 1),
            ("depth", table.depth + 1),
            ("root", 0),
            ("root", table.pages),
            ("pages", 1),
        ]:
            other = TablePages.from_buffer_copy(table)
            setattr(other, field, wrong)
            assert find_records([other], ROOT, as_ids(keys), 0, len(keys)) is None
        assert ctypes.sizeof(table) == 32


MAPPED = b"7f0000000000-7f0000010000 r--s 00000000 00:1c 77      /data/a b/data.mdb"
OTHERS = (
    b"7e0000000000-7e0000010000 r--p 00000000 00:00 0 \n7e1000000000-7e1000010000 rw-p 00000000 00:00 0    [heap]\n"
)


@pytest.mark.parametrize(
    ("line", "device", "is_found"),
    [
        (MAPPED, os.makedev(0, 0x1C), True),
        (MAPPED.replace(b"/data/a b", b"/mounted"), os.makedev(0, 0x1C), True),
        (MAPPED, os.makedev(0, 0x2F), True),  # as of btrfs
        (MAPPED.replace(b"/data/a b", b"/mounted"), os.makedev(0, 0x2F), False),
        (MAPPED + b" (deleted)", os.makedev(0, 0x2F), False),
        (MAPPED.replace(b" 77 ", b" 78 "), os.makedev(0, 0x1C), False),
        (MAPPED.replace(b"r--s", b"---s"), os.makedev(0, 0x1C), False),
        (MAPPED.replace(b"r--s", b"r--p"), os.makedev(0, 0x1C), False),
        (MAPPED.replace(b"s 00000000", b"s 00001000"), os.makedev(0, 0x1C), False),
        (MAPPED.replace(b"10000 r", b"0f000 r"), os.makedev(0, 0x1C), False),
    ],
)
def test_a_map_is_known_by_its_inode_and_by_its_device_or_its_path(line: bytes, device: int, *, is_found: bool) -> None:
    start = mapping_in(
        OTHERS + line + b"\n", path=Path("/data/a b/data.mdb"), device=device, inode=77, map_bytes=0x10000
    )
    assert start == (0x7F0000000000 if is_found else None)


async def test_rows_that_only_lmdb_can_find_are_scanned_as_all_others_are(
    database: Database, chance: random.Random
) -> None:
    keys = [chance.randbytes(32).hex() for _ in range(1200)]
    await database.write(lambda view: view.put(BUCKETS, b"kv", ROOT))
    await database.write(putting([row_of(key, note="n" * 3000 if key in keys[600:602] else "") for key in keys]))
    chunks = as_ids(keys)
    reader = RunReader(database, OBJECT_ROWS, lambda _: None, lambda *_: False)
    with ExitStack() as views:
        view = views.enter_context(database.read())
        assert found(view, chunks) is None
        records = await reader.rows(views, "kv", chunks, FoundRun(Run(matched=len(keys)), None, view))
        assert isinstance(records, ChunkRecords)
        assert records.raw == as_lmdb_has_them(view, keys)
        missing = as_ids([*keys, "ab" * 32])
        assert await reader.rows(views, "kv", missing, FoundRun(Run(matched=len(missing)), None, view)) is None


async def test_rows_of_a_form_that_only_the_decoder_knows_are_decoded_among_all_others(
    database: Database, chance: random.Random
) -> None:
    keys = [chance.randbytes(32).hex() for _ in range(1200)]
    rows = [row_of(key, version=number) for number, key in enumerate(keys)]
    rows[600] = msgspec.structs.replace(rows[600], blobs=())
    await database.write(lambda view: view.put(BUCKETS, b"kv", ROOT))
    await database.write(putting(rows))
    reader = RunReader(database, OBJECT_ROWS, lambda _: None, lambda *_: False)
    with ExitStack() as views:
        view = views.enter_context(database.read())
        chunks = await reader.rows(views, "kv", as_ids(keys), FoundRun(Run(matched=len(keys)), None, view))
    assert chunks is not None
    assert list(chunks) == [matched_chunk(row) for row in rows]


def test_pages_of_an_environment_whose_file_is_not_mapped_here_are_not_read(tmp_path: Path) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for directory in (here, elsewhere):
        with lmdb.open(str(directory), max_dbs=1) as environment:
            environment.open_db(b"table")
    with lmdb.open(str(here), max_dbs=1) as environment, environment.begin() as transaction:
        own = MappedTables(environment, here).table(transaction, "table")  # type: ignore[arg-type]
        assert own is not None
        assert own.depth == 0
        for directory in (elsewhere, tmp_path):
            assert MappedTables(environment, directory).table(transaction, "table") is None  # type: ignore[arg-type]


def test_tables_whose_keys_are_ordered_otherwise_are_not_read(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path), max_dbs=1) as environment:
        environment.open_db(b"table", dupsort=True)
        with environment.begin() as transaction:
            mapped = MappedTables(environment, tmp_path)
            assert mapped.table(transaction, "table") is None  # type: ignore[arg-type]
            assert mapped.table(transaction, "absent") is None  # type: ignore[arg-type]
