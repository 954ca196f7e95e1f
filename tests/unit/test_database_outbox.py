"""The outbox of the database: what changes publish stands in order, once, and under positions that are never used again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import pytest
from fakes import ManualClock
from hypothesis import given, settings
from hypothesis import strategies as st
from module_paths import ModulePaths

from kvobj.database import Database, Table, WriteView
from kvobj.database.outbox import (
    begin_above,
    close_gap,
    forget_entries,
    has_gap,
    marked_position,
    position_mark,
    stored_entries,
)
from kvobj.errors import ConflictError, CorruptionError
from kvobj.record_log import RecordLog

ROWS = Table("rows", volatile=False)
VOLATILE = Table("volatile", volatile=True)


def opened(path: Path, clock: ManualClock | None = None, *, rebuild: bool = False) -> Database:
    return Database.open(
        durable=path / "durable",
        volatile=path / "volatile",
        tables=[ROWS, VOLATILE],
        map_bytes=1 << 24,
        volatile_map_bytes=1 << 24,
        record_log=RecordLog.open(path / "log", rotate_bytes=1 << 20),
        sync=False,
        boot_id="boot",
        rebuild=rebuild,
        outbox=clock,
    )


class Telling:
    """A change that puts a row and publishes; where it is told to, it fails behind that."""

    def __init__(self, *contents: bytes, error: Exception | None = None) -> None:
        self.contents = contents
        self.error = error

    def __call__(self, view: WriteView) -> None:
        for content in self.contents:
            view.log(b"\x01" + content)
            view.publish(content)
        if self.error is not None:
            raise self.error
        for content in self.contents:
            view.put(ROWS, content, b"1")


def entries(database: Database, after: int = 0) -> list[tuple[int, int, bytes]]:
    with database.read() as view:
        return list(stored_entries(view, after=after, upto=database.published))


def rows(database: Database) -> set[bytes]:
    with database.read() as view:
        return {key for key, _ in view.range(ROWS)}


async def test_what_is_published_bears_a_position_and_the_time(tmp_path: Path) -> None:
    clock = ManualClock()
    database = opened(tmp_path, clock)
    await database.write(Telling(b"a", b"b"))
    first = clock.now_ms()
    clock.advance(2)
    await database.write(Telling(b"c"), synced=False)
    assert entries(database) == [(1, first, b"a"), (2, first, b"b"), (3, first + 2000, b"c")]
    assert entries(database, after=2) == [(3, first + 2000, b"c")]
    assert database.published == 3
    await database.aclose()


async def test_a_change_that_fails_publishes_nothing_and_its_neighbours_do(tmp_path: Path) -> None:
    database = opened(tmp_path, ManualClock())
    changes = [
        Telling(b"a"),
        Telling(b"refused", error=ConflictError("no")),
        Telling(b"b"),
        Telling(b"broken", error=ZeroDivisionError()),
        Telling(b"c", b"d"),
    ]
    outcomes = await asyncio.gather(*(database.write(change) for change in changes), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [
        type(None),
        ConflictError,
        type(None),
        ZeroDivisionError,
        type(None),
    ]
    assert [(position, content) for position, _, content in entries(database)] == [
        (1, b"a"),
        (2, b"b"),
        (3, b"c"),
        (4, b"d"),
    ]
    assert rows(database) == {b"a", b"b", b"c", b"d"}
    await database.aclose()


async def test_positions_are_not_used_again_after_entries_were_forgotten(tmp_path: Path) -> None:
    database = opened(tmp_path, ManualClock())
    await database.write(Telling(b"a", b"b"))
    await database.write(lambda view: forget_entries(view, [1, 2, 99]))
    await database.aclose()
    database = opened(tmp_path, ManualClock())
    assert (database.published, entries(database)) == (2, [])
    await database.write(Telling(b"c"))
    assert [position for position, _, _ in entries(database)] == [3]
    await database.aclose()


async def test_a_volatile_change_cannot_publish(tmp_path: Path) -> None:
    database = opened(tmp_path, ManualClock())
    with pytest.raises(RuntimeError, match="no outbox"):
        database.write_volatile(lambda view: view.publish(b"x"))
    await database.aclose()


async def test_a_gap_stands_from_the_first_change_that_was_not_published_until_it_is_closed(tmp_path: Path) -> None:
    def gap(database: Database) -> bool:
        with database.read() as view:
            return has_gap(view)

    database = opened(tmp_path)
    await database.write(Telling(b"before"))
    assert (gap(database), database.published) == (False, 0)
    await database.aclose()
    database = opened(tmp_path, ManualClock())
    assert gap(database)
    await database.write(close_gap)
    await database.write(Telling(b"told"))
    await database.aclose()
    database = opened(tmp_path)
    await database.write(lambda view: view.put(ROWS, b"quiet", b"1"))
    assert not gap(database)
    await database.write(Telling(b"untold"))
    assert gap(database)
    await database.aclose()
    database = opened(tmp_path, ManualClock())
    assert (gap(database), database.published) == (True, 1)
    await database.aclose()


async def test_the_record_log_knows_how_far_positions_have_come(tmp_path: Path) -> None:
    database = opened(tmp_path, ManualClock())
    await database.write(Telling(b"a", b"b"))
    await database.write(lambda view: view.log(b"\x01x"))
    await database.write(Telling(b"c"))
    await database.aclose()
    log = RecordLog.open(tmp_path / "log", rotate_bytes=1 << 20)
    assert [marked_position(content) for content in log.replay()] == [None, None, 3, None, None, 4]
    log.close()
    database = opened(tmp_path, ManualClock())
    assert await database.compact_log([lambda _: [b"\x01snapshot"]])
    await database.aclose()
    log = RecordLog.open(tmp_path / "log", rotate_bytes=1 << 20)
    assert max(position for content in log.replay() if (position := marked_position(content)) is not None) == 4
    log.close()


async def test_a_rebuild_publishes_nothing_and_goes_on_where_it_is_told(tmp_path: Path) -> None:
    database = opened(tmp_path, ManualClock(), rebuild=True)
    await database.write(Telling(b"a"))
    await database.write(lambda view: begin_above(view, 500))
    log = RecordLog.open(tmp_path / "log", rotate_bytes=1 << 20)
    await database.finish_rebuild(log, log_is_whole=False)
    log.close()
    await database.aclose()
    database = opened(tmp_path, ManualClock())
    assert (entries(database), database.published, database.log_snapshot_due) == ([], 499, True)
    await database.write(Telling(b"b"))
    assert [(position, content) for position, _, content in entries(database)] == [(500, b"b")]
    await database.aclose()


@pytest.mark.parametrize("entry", [b"\x80", b"\x80" + bytes(7), b"\x80" + bytes(9)])
def test_a_malformed_mark_is_damage(entry: bytes) -> None:
    with pytest.raises(CorruptionError):
        marked_position(entry)


@pytest.mark.parametrize("entry", [b"", b"\x01abc", b"\x40" + bytes(8), b"\x81" + bytes(8)])
def test_entries_of_others_are_no_marks(entry: bytes) -> None:
    assert marked_position(entry) is None


@settings(max_examples=30)
@given(
    st.lists(
        st.one_of(
            st.lists(st.binary(min_size=1, max_size=4), min_size=1, max_size=3),
            st.sampled_from(["reopen", "forget", "without"]),
        ),
        max_size=12,
    )
)
async def test_however_it_goes_each_publication_stands_once_under_a_new_position(
    module_paths: ModulePaths, steps: list[list[bytes] | str]
) -> None:
    path = module_paths.mktemp("outbox")
    database = opened(path, ManualClock())
    told: list[bytes] = []
    seen: list[int] = []
    try:
        for step in steps:
            if isinstance(step, list):
                await database.write(Telling(*step))
                told += step
            elif step == "forget":
                seen += await _forget(database)
            else:
                await database.aclose()
                if step == "without":
                    database = opened(path)
                    await database.write(lambda view: view.put(ROWS, b"x", b"1"))
                    await database.aclose()
                database = opened(path, ManualClock())
        with database.read() as view:
            contents = [content for _, _, content in stored_entries(view, after=0, upto=database.published)]
            mark = list(position_mark(view))
        assert contents == told[len(told) - len(contents) :]
        seen += await _forget(database)
        assert seen == list(range(1, len(told) + 1))
        assert marked_position(mark[0]) == len(told) + 1
    finally:
        await database.aclose()


async def _forget(database: Database) -> Iterable[int]:
    positions = [position for position, _, _ in entries(database)]
    await database.write(lambda view: forget_entries(view, positions))
    return positions
