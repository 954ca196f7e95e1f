"""The database: two environments, one order, and what a crash between them leaves."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvobj.database import Database, ReadView, Table, WriteView
from kvobj.errors import ConflictError, CorruptionError, StoreFullError, UnavailableError
from kvobj.record_log import RecordLog

DURABLE = Table("durable", volatile=False)
VOLATILE = Table("volatile", volatile=True)
COUNTS = Table("counts", volatile=False)
COUNTS_VOLATILE = Table("counts_volatile", volatile=True)
TABLES = (DURABLE, VOLATILE, COUNTS, COUNTS_VOLATILE)
MIB = 1024 * 1024
Change = Callable[[WriteView], None]


def opened(
    path: Path,
    *,
    boot_id: str = "boot",
    with_log: bool = True,
    map_bytes: int = 16 * MIB,
    volatile_map_bytes: int = 16 * MIB,
    sync: bool = False,
    store_id: bytes | None = None,
) -> Database:
    return Database.open(
        durable=path / "durable",
        volatile=path / "volatile",
        tables=TABLES,
        map_bytes=map_bytes,
        volatile_map_bytes=volatile_map_bytes,
        record_log=RecordLog.open(path / "log", rotate_bytes=MIB) if with_log else None,
        sync=sync,
        boot_id=boot_id,
        store_id=store_id,
    )


def putting(table: Table, key: bytes, value: bytes, *, entry: bytes | None = None, headroom: bool = False) -> Change:
    def change(view: WriteView) -> None:
        view.put(table, key, value, headroom=headroom)
        if entry is not None:
            view.log(entry)

    return change


def moving(key: bytes) -> Change:
    """From volatile to durable, as write-behind does."""

    def change(view: WriteView) -> None:
        value = view.get(VOLATILE, key)
        assert value is not None
        view.put(DURABLE, key, value)
        view.delete(VOLATILE, key)
        view.add(COUNTS_VOLATILE, b"n", [-1, -len(value)])
        view.add(COUNTS, b"n", [1, len(value)])
        view.log(key)

    return change


def value_of(database: Database, table: Table, key: bytes) -> bytes | None:
    with database.read() as view:
        return view.get(table, key)


def contents(database: Database, table: Table) -> dict[bytes, bytes]:
    with database.read() as view:
        return dict(view.range(table))


def entries(path: Path) -> list[bytes]:
    return list(RecordLog.open(path / "log").replay())


async def test_both_tables_survive_a_reopen_in_one_boot(tmp_path: Path) -> None:
    database = opened(tmp_path)
    assert database.volatile_fresh
    store_id = database.store_id
    database.write_volatile(putting(VOLATILE, b"v", b"1"))
    await database.write(putting(DURABLE, b"d", b"2", entry=b"e"))
    await database.aclose()
    await database.aclose()
    database = opened(tmp_path, store_id=store_id)
    assert not database.volatile_fresh
    assert value_of(database, VOLATILE, b"v") == b"1"
    assert value_of(database, DURABLE, b"d") == b"2"
    await database.aclose()
    assert entries(tmp_path) == [b"e"]


async def test_another_boot_wipes_the_volatile_environment(tmp_path: Path) -> None:
    database = opened(tmp_path)
    database.write_volatile(putting(VOLATILE, b"v", b"1"))
    await database.write(putting(DURABLE, b"d", b"2"))
    await database.aclose()
    database = opened(tmp_path, boot_id="another")
    assert database.volatile_fresh
    assert contents(database, VOLATILE) == {}
    assert value_of(database, DURABLE, b"d") == b"2"
    await database.aclose()


async def test_a_volatile_environment_of_another_store_is_wiped(tmp_path: Path) -> None:
    first = opened(tmp_path / "a")
    first.write_volatile(putting(VOLATILE, b"v", b"1"))
    await first.aclose()
    await opened(tmp_path / "b").aclose()
    shutil.rmtree(tmp_path / "b" / "volatile")
    shutil.copytree(tmp_path / "a" / "volatile", tmp_path / "b" / "volatile")
    second = opened(tmp_path / "b")
    assert second.volatile_fresh
    assert contents(second, VOLATILE) == {}
    await second.aclose()


async def test_a_damaged_volatile_environment_is_replaced(tmp_path: Path) -> None:
    await opened(tmp_path).aclose()
    (tmp_path / "volatile" / "data.mdb").write_bytes(b"rubbish" * 4096)
    database = opened(tmp_path)
    assert database.volatile_fresh
    await database.aclose()


async def test_a_durable_environment_of_another_store_is_refused(tmp_path: Path) -> None:
    await opened(tmp_path, store_id=b"one").aclose()
    with pytest.raises(CorruptionError):
        opened(tmp_path, store_id=b"two")


async def test_a_lost_environment_beside_a_log_is_refused(tmp_path: Path) -> None:
    database = opened(tmp_path)
    await database.write(putting(DURABLE, b"d", b"2", entry=b"e"))
    await database.aclose()
    shutil.rmtree(tmp_path / "durable")
    with pytest.raises(CorruptionError, match="rebuild"):
        opened(tmp_path)
    assert entries(tmp_path) == [b"e"]


async def test_files_are_private(tmp_path: Path) -> None:
    await opened(tmp_path).aclose()
    for name in ("durable", "volatile"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o700
        assert (tmp_path / name / "data.mdb").stat().st_mode & 0o777 == 0o600


async def test_ranges_are_ordered_both_ways(tmp_path: Path) -> None:
    database = opened(tmp_path)

    def change(view: WriteView) -> None:
        for table in (DURABLE, VOLATILE):
            for key in (b"b", b"a", b"d", b"c"):
                view.put(table, key, key)
            view.delete(table, b"c")
            assert [key for key, _ in view.range(table, b"b")] == [b"b", b"d"]
            assert [key for key, _ in view.range(table, reverse=True)] == [b"d", b"b", b"a"]
            assert not view.delete(table, b"c")
            view.put(table, b"c", b"c")

    await database.write(change)
    with database.read() as view:
        for table in (DURABLE, VOLATILE):
            assert [key for key, _ in view.range(table)] == [b"a", b"b", b"c", b"d"]
            assert [key for key, _ in view.range(table, b"b", b"d")] == [b"b", b"c"]
            assert [key for key, _ in view.range(table, b"aa", b"cc", reverse=True)] == [b"c", b"b"]
            assert [key for key, _ in view.range(table, b"x")] == []
            assert [key for key, _ in view.range(table, stop=b"b", reverse=True)] == [b"a"]
            assert view.count(table) == 4
    await database.aclose()


async def test_many_keys_are_read_as_one_by_one(tmp_path: Path) -> None:
    keys = [b"c", b"a", b"absent", b"a"]

    def read(view: ReadView) -> list[list[bytes | None]]:
        return [view.get_many(table, keys) for table in (VOLATILE, DURABLE)]

    def change(view: WriteView) -> list[list[bytes | None]]:
        view.put(VOLATILE, b"c", b"new")
        return read(view)

    database = opened(tmp_path)
    for table in (VOLATILE, DURABLE):
        await database.write(putting(table, b"a", table.name.encode()))
    before = [[None, b"volatile", None, b"volatile"], [None, b"durable", None, b"durable"]]
    with database.read() as view:
        assert read(view) == before
    after = [[b"new", b"volatile", None, b"volatile"], before[1]]
    assert await database.write(change) == after
    assert database.write_volatile(change) == after
    await database.aclose()


async def test_the_overlay_merges_with_what_lies_below(tmp_path: Path) -> None:
    database = opened(tmp_path)
    for key in (b"a", b"c", b"e"):
        database.write_volatile(putting(VOLATILE, key, b"below"))

    def change(view: WriteView) -> None:
        view.put(VOLATILE, b"b", b"above")
        view.put(VOLATILE, b"c", b"above")
        view.put(VOLATILE, b"f", b"above")
        view.delete(VOLATILE, b"a")
        expected = [(b"b", b"above"), (b"c", b"above"), (b"e", b"below"), (b"f", b"above")]
        assert list(view.range(VOLATILE)) == expected
        assert list(view.range(VOLATILE, reverse=True)) == expected[::-1]
        assert list(view.range(VOLATILE, b"c", b"f")) == expected[1:3]
        assert (view.get(VOLATILE, b"a"), view.get(VOLATILE, b"e")) == (None, b"below")

    await database.write(change)
    assert sorted(contents(database, VOLATILE)) == [b"b", b"c", b"e", b"f"]
    await database.aclose()


async def test_an_inline_change_that_raises_changes_nothing(tmp_path: Path) -> None:
    database = opened(tmp_path)

    def change(view: WriteView) -> None:
        view.put(VOLATILE, b"v", b"1")
        raise ConflictError("no")

    with pytest.raises(ConflictError):
        database.write_volatile(change)
    with pytest.raises(RuntimeError):
        database.write_volatile(putting(DURABLE, b"d", b"1"))
    assert contents(database, VOLATILE) == {}
    await database.aclose()


async def test_a_refused_change_leaves_its_group_alone(tmp_path: Path) -> None:
    database = opened(tmp_path)

    def refuse(view: WriteView) -> None:
        view.log(b"never")
        raise ConflictError("no")

    changes = [putting(DURABLE, b"%d" % number, b"x", entry=b"%d" % number) for number in range(3)]
    results = await asyncio.gather(
        *(database.write(change) for change in (changes[0], refuse, *changes[1:])), return_exceptions=True
    )
    assert [type(result) for result in results] == [type(None), ConflictError, type(None), type(None)]
    await database.aclose()
    assert entries(tmp_path) == [b"0", b"1", b"2"]


async def test_a_faulty_change_fails_alone(tmp_path: Path) -> None:
    database = opened(tmp_path)
    database.write_volatile(putting(VOLATILE, b"k", b"1"))
    database.write_volatile(lambda view: view.add(COUNTS_VOLATILE, b"n", [1, 1]))

    def break_down(view: WriteView) -> None:
        view.put(DURABLE, b"half", b"done")
        view.put(VOLATILE, b"half", b"done")
        view.log(b"half")
        raise ZeroDivisionError

    def follow(view: WriteView) -> None:
        assert view.get(VOLATILE, b"k") is None, "effects of changes before it are seen"
        view.put(DURABLE, b"after", b"1")

    results = await asyncio.gather(
        database.write(moving(b"k")), database.write(break_down), database.write(follow), return_exceptions=True
    )
    assert [type(result) for result in results] == [type(None), ZeroDivisionError, type(None)]
    assert sorted(contents(database, DURABLE)) == [b"after", b"k"]
    assert contents(database, VOLATILE) == {}
    with database.read() as view:
        assert view.counters(COUNTS_VOLATILE, b"n") == ()
        assert view.counters(COUNTS, b"n") == (1, 1)
    await database.aclose()
    assert entries(tmp_path) == [b"k"]


async def test_counters_add_up_over_both_writers(tmp_path: Path) -> None:
    database = opened(tmp_path)

    async def durable(number: int) -> None:
        await database.write(lambda view: view.add(COUNTS_VOLATILE, b"n", [1, number]))

    async def inline(number: int) -> None:
        for _ in range(5):
            database.write_volatile(lambda view: view.add(COUNTS_VOLATILE, b"n", [1, number]))
            await asyncio.sleep(0)

    await asyncio.gather(*(each(number) for number in range(1, 21) for each in (durable, inline)))
    with database.read() as view:
        assert view.counters(COUNTS_VOLATILE, b"n") == (120, 6 * 210)
    await database.write(lambda view: view.add(COUNTS_VOLATILE, b"n", [-120, -6 * 210]))
    assert contents(database, COUNTS_VOLATILE) == {}
    await database.aclose()


async def test_changes_of_a_key_keep_their_order(tmp_path: Path) -> None:
    database = opened(tmp_path)
    seen: list[str] = []

    def step(name: str) -> Change:
        def change(view: WriteView) -> None:
            seen.append(name)
            view.put(VOLATILE, b"k", name.encode())

        return change

    slow = asyncio.ensure_future(database.write(step("durable"), [b"k"]))
    await asyncio.sleep(0)
    waiting = asyncio.ensure_future(database.write_fast(step("waits"), [b"k"]))
    shared = asyncio.ensure_future(database.write_fast(step("waits too"), [b"other"], shared=[b"k"]))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError):
        database.write_volatile(step("never"), [b"k"])
    await database.write_fast(step("overtakes"), [b"free"])
    assert not slow.done()
    await asyncio.gather(slow, waiting, shared)
    assert [name for name in seen if name != "overtakes"] == ["durable", "waits", "waits too"]
    await database.write_fast(step("inline again"), [b"k"])
    assert value_of(database, VOLATILE, b"k") == b"inline again"
    await database.aclose()


async def test_a_cancelled_caller_leaves_a_whole_change(tmp_path: Path) -> None:
    database = opened(tmp_path)
    database.write_volatile(putting(VOLATILE, b"k", b"1"))
    task = asyncio.ensure_future(database.write(moving(b"k"), [b"k"]))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await database.write_fast(putting(VOLATILE, b"behind", b"1"), [b"k"])
    assert value_of(database, DURABLE, b"k") == b"1"
    assert value_of(database, VOLATILE, b"k") is None
    await database.aclose()


async def test_closing_finishes_what_was_accepted(tmp_path: Path) -> None:
    database = opened(tmp_path)
    tasks = [asyncio.ensure_future(database.write(putting(DURABLE, b"%d" % number, b"x"))) for number in range(2500)]
    await asyncio.sleep(0)
    await database.aclose()
    await asyncio.gather(*tasks)
    with pytest.raises(UnavailableError):
        await database.write(putting(DURABLE, b"late", b"x"))
    with pytest.raises(UnavailableError):
        database.write_volatile(putting(VOLATILE, b"late", b"x"))
    database = opened(tmp_path)
    assert len(contents(database, DURABLE)) == 2500
    await database.aclose()


async def test_effects_lost_in_a_crash_are_applied_at_the_next_open(tmp_path: Path) -> None:
    """The durable commit has happened, its volatile effects have not: as a kill between the two leaves it."""
    database = opened(tmp_path)
    database.write_volatile(putting(VOLATILE, b"k", b"1"))
    database.write_volatile(lambda view: view.add(COUNTS_VOLATILE, b"n", [1, 1]))
    await database.aclose()
    shutil.copytree(tmp_path / "volatile", tmp_path / "before")
    database = opened(tmp_path)
    await database.write(moving(b"k"))
    await database.aclose()
    shutil.rmtree(tmp_path / "volatile")
    (tmp_path / "before").rename(tmp_path / "volatile")
    for _ in range(2):
        database = opened(tmp_path)
        assert not database.volatile_fresh
        assert value_of(database, DURABLE, b"k") == b"1"
        assert value_of(database, VOLATILE, b"k") is None
        assert contents(database, COUNTS_VOLATILE) == {}
        await database.aclose()


async def test_effects_are_not_applied_to_another_boots_environment(tmp_path: Path) -> None:
    database = opened(tmp_path)
    database.write_volatile(putting(VOLATILE, b"k", b"1"))
    await database.write(moving(b"k"))
    await database.aclose()
    database = opened(tmp_path, boot_id="another")
    assert contents(database, COUNTS_VOLATILE) == {}
    database.write_volatile(putting(VOLATILE, b"k", b"2"))
    await database.write(moving(b"k"))
    await database.aclose()
    database = opened(tmp_path, boot_id="another")
    assert value_of(database, DURABLE, b"k") == b"2"
    await database.aclose()


async def test_a_log_longer_than_the_environment_is_cut(tmp_path: Path) -> None:
    """A kill between the log's append and the commit: nobody was told, so it has not happened."""
    database = opened(tmp_path)
    await database.write(putting(DURABLE, b"a", b"1", entry=b"a"))
    await database.aclose()
    shutil.copytree(tmp_path / "durable", tmp_path / "before")
    database = opened(tmp_path)
    await database.write(putting(DURABLE, b"b", b"1", entry=b"b"))
    await database.aclose()
    shutil.rmtree(tmp_path / "durable")
    (tmp_path / "before").rename(tmp_path / "durable")
    database = opened(tmp_path)
    assert not database.log_snapshot_due
    await database.write(putting(DURABLE, b"c", b"1", entry=b"c"))
    await database.aclose()
    assert entries(tmp_path) == [b"a", b"c"]


async def test_a_log_shorter_than_the_environment_makes_a_snapshot_due(tmp_path: Path) -> None:
    """Power loss took the log's tail, but not the commit."""
    database = opened(tmp_path)
    await database.write(putting(DURABLE, b"a", b"1", entry=b"a"))
    await database.aclose()
    shutil.copytree(tmp_path / "log", tmp_path / "before")
    database = opened(tmp_path)
    await database.write(putting(DURABLE, b"b", b"1", entry=b"b"))
    await database.aclose()
    shutil.rmtree(tmp_path / "log")
    (tmp_path / "before").rename(tmp_path / "log")
    for _ in range(2):
        database = opened(tmp_path)
        assert database.log_snapshot_due, "until a snapshot was written, restarts do not forget it"
        await database.write(putting(DURABLE, b"c", b"1", entry=b"c"))
        await database.aclose()
    database = opened(tmp_path)
    assert await database.compact_log([lambda view: [key for key, _ in view.range(DURABLE)]])
    assert not database.log_snapshot_due
    await database.aclose()
    assert entries(tmp_path) == [b"a", b"b", b"c"]


async def test_a_crash_within_a_compaction_loses_nothing(tmp_path: Path) -> None:
    database = opened(tmp_path)
    await database.write(putting(DURABLE, b"a", b"1", entry=b"a"))

    def explode(_: object) -> list[bytes]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await database.compact_log([explode])
    await database.write(putting(DURABLE, b"b", b"1", entry=b"b"))
    await database.aclose()
    database = opened(tmp_path)
    await database.write(putting(DURABLE, b"c", b"1", entry=b"c"))
    await database.aclose()
    assert entries(tmp_path) == [b"a", b"b", b"c"]


@pytest.mark.parametrize("table", [DURABLE, VOLATILE])
async def test_a_full_database_refuses_puts_and_takes_deletes(tmp_path: Path, table: Table) -> None:
    database = opened(tmp_path, map_bytes=2 * MIB, volatile_map_bytes=2 * MIB)

    async def fill() -> int:
        for number in range(10_000):
            try:
                if table.volatile:
                    database.write_volatile(putting(table, b"%05d" % number, b"x" * 1000))
                else:
                    await database.write(putting(table, b"%05d" % number, b"x" * 1000))
            except StoreFullError:
                return number
        raise AssertionError("never full")

    def delete(view: WriteView) -> None:
        for number in range(500):
            assert view.delete(table, b"%05d" % number)
        view.put(COUNTS_VOLATILE if table.volatile else COUNTS, b"queue", b"x", headroom=True)

    async def run(change: Change) -> None:
        if table.volatile:
            database.write_volatile(change)
        else:
            await database.write(change)

    count = await fill()
    assert 500 < count < 2000
    with pytest.raises(StoreFullError):
        await run(putting(table, b"more", b"x"))
    assert value_of(database, table, b"00000") is not None, "reads go on"
    await run(delete)
    await run(putting(table, b"more", b"x"))
    await run(putting(table, b"more", b"y"))
    await database.aclose()


async def test_a_change_too_big_for_the_map_fails_alone(tmp_path: Path) -> None:
    database = opened(tmp_path, map_bytes=2 * MIB, volatile_map_bytes=2 * MIB)
    results = await asyncio.gather(
        database.write(putting(DURABLE, b"a", b"1", entry=b"a")),
        database.write(putting(DURABLE, b"big", b"x" * 3 * MIB, entry=b"big")),
        database.write(putting(DURABLE, b"b", b"1", entry=b"b")),
        return_exceptions=True,
    )
    assert [type(result) for result in results] == [type(None), StoreFullError, type(None)]
    with pytest.raises(StoreFullError):
        database.write_volatile(putting(VOLATILE, b"big", b"x" * 3 * MIB))
    database.write_volatile(putting(VOLATILE, b"small", b"x"))
    assert sorted(contents(database, DURABLE)) == [b"a", b"b"]
    await database.aclose()
    assert entries(tmp_path) == [b"a", b"b"]


async def test_after_a_failed_flush_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = opened(tmp_path, sync=True)
    await database.write(putting(DURABLE, b"a", b"1", entry=b"a"))

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, f"flush of {descriptor}")

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(UnavailableError):
        await database.write(putting(DURABLE, b"b", b"1", entry=b"b"))
    monkeypatch.undo()
    with pytest.raises(UnavailableError):
        await database.write(putting(DURABLE, b"c", b"1", entry=b"c"))
    assert value_of(database, DURABLE, b"a") == b"1", "reads go on"
    with pytest.raises(UnavailableError):
        await database.aclose()


async def test_unsynced_writes_are_flushed_by_the_next_synced_one(tmp_path: Path) -> None:
    log = RecordLog.open(tmp_path / "log")
    database = Database.open(
        durable=tmp_path / "durable",
        volatile=tmp_path / "volatile",
        tables=TABLES,
        map_bytes=MIB * 16,
        volatile_map_bytes=MIB * 16,
        record_log=log,
    )
    await database.write(putting(DURABLE, b"a", b"1", entry=b"a"), synced=False)
    assert log.synced < log.end
    await database.write(putting(DURABLE, b"b", b"1"))
    assert log.synced == log.end
    await database.aclose()


async def test_readers_see_one_state(tmp_path: Path) -> None:
    database = opened(tmp_path)
    database.write_volatile(putting(VOLATILE, b"k", b"1"))
    with database.read() as view:
        await database.write(moving(b"k"))
        assert view.get(VOLATILE, b"k") == b"1"
        assert view.get(DURABLE, b"k") is None
    assert value_of(database, VOLATILE, b"k") is None
    await database.aclose()


async def test_keys_under_a_prefix_are_the_same_in_every_view(tmp_path: Path) -> None:
    """A snapshot, an inline change, and a durable change over what its group has done so far."""
    database = opened(tmp_path)
    seen: list[list[tuple[bytes, bytes]]] = []

    def look(view: ReadView) -> None:
        seen.extend(view.under(table, b"b") for table in (DURABLE, VOLATILE))
        seen.append(view.under(VOLATILE, b"b", limit=1))
        assert view.under(VOLATILE, b"b\xff") == view.under(DURABLE, b"\xff") == []

    def fill(view: WriteView) -> None:
        for key in (b"a", b"b", b"bb", b"c"):
            view.put(DURABLE, key, b"1")
            view.put(VOLATILE, key, b"1")
        view.put(VOLATILE, b"b0", b"0")
        view.delete(VOLATILE, b"b0")
        look(view)

    await database.write(fill)
    with database.read() as view:
        look(view)
    database.write_volatile(look)
    found = [(b"b", b"1"), (b"bb", b"1")]
    assert seen == [found, found, found[:1]] * 3
    await database.aclose()


async def test_many_at_once_are_the_same_as_one_by_one(tmp_path: Path) -> None:
    """In every view: a snapshot, an inline change, a durable change over what its group has done so far."""
    database = opened(tmp_path)

    def fill(table: Table) -> Change:
        def change(view: WriteView) -> None:
            view.put(table, b"a2", b"old")
            view.put_many(table, [(b"a1", b"1"), (b"a2", b"2"), (b"b1", b"3"), (b"b2", b"4"), (b"d", b"5")])
            assert look(view, table) == [[b"1", b"2"], [b"3", b"4"], [], [b"5"]]
            view.delete_many(table, [b"b1", b"absent", b"d"])
            assert look(view, table) == after
            view.put_many(table, [])
            view.delete_many(table, [])

        return change

    def look(view: ReadView, table: Table) -> list[list[bytes]]:
        assert [key for key, _ in view.range(table)] == sorted(key for key, _ in view.range(table))
        return view.values_under(table, [b"a", b"b", b"c", b"d"])

    after = [[b"1", b"2"], [b"4"], [], []]
    for table in (DURABLE, VOLATILE):
        await database.write(fill(table))
    database.write_volatile(fill(VOLATILE))
    with database.read() as view:
        assert [look(view, table) for table in (DURABLE, VOLATILE)] == [after, after]
    await database.aclose()


async def test_a_group_adds_to_a_durable_counter_what_all_its_changes_add(tmp_path: Path) -> None:
    database = opened(tmp_path)

    def one(view: WriteView) -> tuple[int, ...]:
        view.add(COUNTS, b"n", [1, 10])
        return view.counters(COUNTS, b"n")

    assert await asyncio.gather(*(database.write(one) for _ in range(3))) == [(1, 10), (2, 20), (3, 30)]
    assert await database.write(one) == (4, 40)
    await database.write(lambda view: view.add(COUNTS, b"n", [-4, -40]))
    with database.read() as view:
        assert view.count(COUNTS) == 0
    await database.aclose()


async def test_a_table_that_the_group_has_just_put_into_is_not_empty(tmp_path: Path) -> None:
    database = opened(tmp_path)

    def look(view: WriteView) -> list[bool]:
        return [view.is_empty(DURABLE), view.is_empty(VOLATILE)]

    with database.read() as view:
        assert view.is_empty(DURABLE)
        assert view.is_empty(VOLATILE)
    puts = [database.submit(putting(table, b"key", b"value")) for table in (DURABLE, VOLATILE)]
    # All three are one group: the volatile put is still to be applied.
    assert await database.submit(look) == [False, False]
    await asyncio.gather(*puts)
    with database.read() as view:
        assert not view.is_empty(VOLATILE)
    assert database.write_volatile(look) == [False, False]
    await database.aclose()
