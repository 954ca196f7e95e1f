"""A read transaction that does not end keeps the database's freed pages from being used: it is noticed, named, and survived."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fakes import ManualClock

from kvobj.database import Database, ReaderWatch, Table, WriteView
from kvobj.errors import StoreFullError

ROWS = Table("rows", volatile=False)
FAST_ROWS = Table("fast_rows", volatile=True)
MIB = 1024 * 1024
ROUNDS_TO_FILL = 100
LOG = logging.getLogger("kvobj-test")
READER = """
import sys, lmdb
environment = lmdb.open(sys.argv[1], max_dbs=4, readonly=True, lock=True)
transaction = environment.begin()
print("reading", flush=True)
sys.stdin.readline()
"""


def opened(path: Path) -> Database:
    return Database.open(
        durable=path / "durable",
        volatile=path / "volatile",
        tables=(ROWS, FAST_ROWS),
        map_bytes=8 * MIB,
        volatile_map_bytes=8 * MIB,
        sync=False,
        boot_id="boot",
    )


@contextmanager
def another_reader(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """A process with an open read transaction."""
    command = [sys.executable, "-c", READER, str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "reading\n"
            yield process
        finally:
            process.kill()


async def overwrite(database: Database, table: Table, rounds: int = 20) -> None:
    """Half a MiB of rows, written over and over."""
    for number in range(rounds):

        def change(view: WriteView, number: int = number) -> None:
            for row in range(128):
                view.put(table, b"%d" % row, bytes([number % 256]) * 3000)

        await database.write(change)


def file_bytes(path: Path) -> int:
    return (path / "data.mdb").stat().st_size


def pass_seconds(clock: ManualClock, watch: ReaderWatch, seconds: float) -> None:
    """Looks go on while nothing is written."""
    clock.advance(seconds)
    watch.look()


@pytest.mark.parametrize("table", [ROWS, FAST_ROWS])
async def test_what_a_killed_process_read_is_freed_at_the_next_look(tmp_path: Path, table: Table) -> None:
    database = opened(tmp_path)
    directory = tmp_path / ("volatile" if table.volatile else "durable")
    watch = database.watch_readers(clock=ManualClock(), log=LOG)
    await overwrite(database, table)
    before = file_bytes(directory)
    with another_reader(directory) as process:
        process.kill()
        process.wait()

    watch.look()
    await overwrite(database, table)

    assert watch.dead_readers == 1
    assert file_bytes(directory) <= 1.05 * before
    assert watch.notes() == ()
    await database.aclose()


@pytest.mark.parametrize("table", [ROWS, FAST_ROWS])
async def test_a_reader_that_stays_is_named_and_leaves_room_for_deletes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, table: Table
) -> None:
    clock = ManualClock()
    database = opened(tmp_path)
    directory = tmp_path / ("volatile" if table.volatile else "durable")
    watch = database.watch_readers(clock=clock, log=LOG)
    await overwrite(database, table)
    with another_reader(directory) as process, caplog.at_level(logging.WARNING):
        await overwrite(database, table, 1)
        watch.look()
        pass_seconds(clock, watch, 10)
        assert watch.oldest_seconds == 10
        assert watch.notes() == ()
        pass_seconds(clock, watch, 20)
        pass_seconds(clock, watch, 10)
        assert [str(process.pid) in note and str(directory) in note for note in watch.notes()] == [True]
        assert [record.message for record in caplog.records] == list(watch.notes()), "it is said once"

        with pytest.raises(StoreFullError):
            await overwrite(database, table, ROUNDS_TO_FILL)
        assert file_bytes(directory) < 8 * MIB, "before LMDB itself has no page left"
        await remove_all(database, table)

    watch.look()
    assert watch.notes() == ()
    assert watch.oldest_seconds == 0
    await overwrite(database, table)
    await database.aclose()


async def remove_all(database: Database, table: Table) -> None:
    def change(view: WriteView) -> None:
        for row in range(128):
            assert view.delete(table, b"%d" % row)

    await database.write(change)


async def test_a_snapshot_of_this_process_that_is_not_ended_is_named_too(tmp_path: Path) -> None:
    clock = ManualClock()
    database = opened(tmp_path)
    watch = database.watch_readers(clock=clock, log=LOG)
    with database.read():
        await overwrite(database, ROWS, 1)
        watch.look()
        pass_seconds(clock, watch, 30)
        assert [note.endswith("this process") for note in watch.notes()] == [True]
    watch.look()
    assert watch.notes() == ()
    await database.aclose()


async def test_readers_of_the_newest_state_are_none_that_stay(tmp_path: Path) -> None:
    clock = ManualClock()
    database = opened(tmp_path)
    watch = database.watch_readers(clock=clock, log=LOG)
    await overwrite(database, ROWS, 1)
    with database.read():
        watch.look()
        pass_seconds(clock, watch, 3600)
        assert watch.notes() == ()
        assert watch.oldest_seconds == 0
    await database.aclose()
