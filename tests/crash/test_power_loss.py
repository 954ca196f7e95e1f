"""Loss of power at any moment: whatever part of what was not flushed yet is on the disk, the catalog opens, is consistent, and
holds what was acknowledged; so does the record log alone.

A catalog's writes and flushes are recorded (`power_loss_writer`, `recorded_writes`); states of the disk are made and opened.
`KVOBJ_FAULT_CYCLES` sets how many (times 200; 3: 600 states).
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from catalog_consistency import assert_consistent
from module_paths import ModulePaths
from power_loss_writer import BUCKET, CHAINS, LENGTH, Change, changes, key_of, opened
from recorded_writes import PAGE_BYTES, Flush, Recording, Write, strace_command

from kvobj.catalog.lmdb import LmdbCatalog
from kvobj.catalog.log_entries import RowRemoved, decode_entry
from kvobj.catalog.rebuild import rebuild_catalog
from kvobj.catalog.rows import Durability, ObjectRow
from kvobj.database import Database
from kvobj.database.outbox import marked_position, position_mark
from kvobj.errors import CorruptionError
from kvobj.record_log import RecordLog

CYCLES = int(os.environ.get("KVOBJ_FAULT_CYCLES", "3"))
SEED = int(os.environ.get("KVOBJ_CRASH_SEED", "20240229"))
STATES = 200 * CYCLES
STEPS = 40
KEYS = [key_of(chain, depth) for chain in range(CHAINS) for depth in range(LENGTH)]
NOT_TORN_BYTES = 512


@pytest.fixture(scope="module")
def recording(module_paths: ModulePaths) -> Recording:
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    directory = module_paths.mktemp("recorded")
    trace, store = directory / "trace", directory / "store"
    store.mkdir()
    script = Path(__file__).with_name("power_loss_writer.py")
    command = strace_command(trace, [sys.executable, str(script), str(store), str(SEED), str(STEPS)])
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            files = [store / "durable" / "data.mdb", *(store / "log").iterdir()]
            recording = Recording({str(path): path.read_bytes() for path in files})
            process.stdin.write("go\n")
            process.stdin.flush()
            while process.stdout.readline() != "end\n":
                assert process.poll() is None
            recording.read(trace, since="ready")
        finally:
            process.kill()
    shutil.rmtree(store)
    return recording


class Expected:
    """What may be under each key when so much had been said: the blob of the last acknowledged change, or of one under way."""

    def __init__(self, said: list[str]) -> None:
        by_number = {change.number: change for step in changes(SEED, STEPS) for change in step}
        self._known: dict[str, bytes | None] = dict.fromkeys(KEYS)
        self._may_be: dict[str, bytes | None] = {}
        self.told = 0
        for line in said:
            word, _, number = line.partition(" ")
            if word == "told":
                self.told = int(number)
            if word in {"begin", "done"}:
                self._take(by_number[int(number)], is_done=word == "done")

    def _take(self, change: Change, *, is_done: bool) -> None:
        if is_done:
            self._known.update(change.blobs)
            for key in change.blobs:
                del self._may_be[key]
        else:
            self._may_be.update(change.blobs)

    def wrong(self, found: dict[str, bytes | None]) -> dict[str, bytes | None]:
        """What should not be."""
        return {
            key: blob
            for key, blob in found.items()
            if blob != self._known[key] and (key not in self._may_be or blob != self._may_be[key])
        }


def laid_out(files: dict[str, bytes], directory: Path) -> Path:
    """The files of a state, below a new directory."""
    shutil.rmtree(directory, ignore_errors=True)
    for path, data in files.items():
        place = directory / Path(path).parent.name / Path(path).name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
    return directory


async def blobs_in(catalog: LmdbCatalog) -> dict[str, bytes | None]:
    rows = await catalog.lookup(BUCKET, KEYS)
    return {key: row.blobs[0].blob_id if row is not None else None for key, row in zip(KEYS, rows, strict=True)}


def assert_told_apart(catalog: LmdbCatalog, rows: list[ObjectRow], told: int) -> None:
    """What waits for the remote are the LOCAL rows of chains that were queued; what the outbox says last of a row is what the row
    is; and no position that anybody was told is given out again."""
    local = {row.key for row in rows if row.durability is Durability.LOCAL and int(row.key[:2]) % 2 == 1}
    entries = catalog.remote_queue.entries(limit=10**6)
    assert {row.key for row in rows for entry in entries if entry.is_of(row)} == local
    assert catalog.outbox.position >= told
    by_key = {row.key: row for row in rows if row.durability is Durability.SHARED}
    last = {}
    for entry in catalog.outbox.entries(limit=10**6):
        content = decode_entry(entry.content)
        if isinstance(content, ObjectRow | RowRemoved):
            last[content.key] = content
    for key, content in last.items():
        assert by_key.get(key) == (content if isinstance(content, ObjectRow) else None)


async def found_after_a_start(directory: Path, *, told: int = 0) -> dict[str, bytes | None]:
    """What a start in another boot finds. It checks the tables, and that the catalog goes on."""
    database = opened(directory, sync=False, boot_id="after")
    try:
        catalog = await LmdbCatalog.open(database, now_boot_ms=0)
        try:
            assert_told_apart(catalog, [row async for row in catalog.scan_objects(with_hidden=True)], told)
            await catalog.drop_orphans(now_ms=1)
            assert_consistent(database)
            found = await blobs_in(catalog)
            await catalog.delete(BUCKET, [key_of(chain, 0) for chain in range(CHAINS)], now_ms=1)
            assert_consistent(database)
            return found
        finally:
            await catalog.aclose()
    finally:
        await database.aclose()


async def found_in_the_log(directory: Path, *, told: int = 0) -> dict[str, bytes | None]:
    """What a rebuild from the record log alone finds."""
    log = RecordLog.open(directory / "log", rotate_bytes=1 << 18)
    database = opened(directory, sync=False, boot_id="after", rebuild=True)
    try:
        await rebuild_catalog(log, database)
        await database.finish_rebuild(log)
        assert max(_next_positions(database), default=1) > told
        catalog = await LmdbCatalog.open(database, now_boot_ms=0)
        try:
            assert_consistent(database)
            return await blobs_in(catalog)
        finally:
            await catalog.aclose()
    finally:
        await database.aclose()


def _next_positions(database: Database) -> list[int]:
    with database.read() as view:
        return [position for mark in position_mark(view) if (position := marked_position(mark)) is not None]


async def test_after_a_loss_of_power_the_catalog_opens_and_holds_what_was_acknowledged(
    recording: Recording, shm_path: Path
) -> None:
    kinds: dict[str, int] = {}
    for upto, how, files in recording.states(random.Random(SEED), STATES):
        expected = Expected(recording.said(upto))
        found = await found_after_a_start(laid_out(files, shm_path / "state"), told=expected.told)
        assert not expected.wrong(found), f"{how} of what was written before event {upto} and not flushed"
        kinds[how] = kinds.get(how, 0) + 1
    assert len(kinds) == 7
    print(f"power loss: {sum(kinds.values())} states of the disk opened: {kinds}")  # noqa: T201 - for `make faults`


async def test_after_a_loss_of_power_the_record_log_alone_holds_what_was_acknowledged(
    recording: Recording, shm_path: Path
) -> None:
    for upto, how, files in recording.states(random.Random(SEED + 1), STATES // 10):
        expected = Expected(recording.said(upto))
        found = await found_in_the_log(laid_out(files, shm_path / "state"), told=expected.told)
        assert not expected.wrong(found), f"{how} of what was written before event {upto} and not flushed"


async def test_without_the_flushes_of_the_log_it_would_lack_something(recording: Recording, shm_path: Path) -> None:
    """The same writes, as if no flush had ever been asked for."""
    unflushed = without_flushes(recording)
    for upto, _, files in unflushed.states(random.Random(SEED), STATES):
        try:
            found = await found_in_the_log(laid_out(files, shm_path / "state"))
        except CorruptionError:  # something behind a hole
            return
        if Expected(unflushed.said(upto)).wrong(found):
            return
    pytest.fail("nothing was missing: the test would not notice a missing flush")


def test_without_the_flushes_of_the_catalog_it_would_not_open(recording: Recording, shm_path: Path) -> None:
    """The newest meta pages, and none of the pages that they speak of: in a process of its own, which may die of it."""
    unflushed = without_flushes(recording)
    state = unflushed.state(len(unflushed.events), "meta", random.Random(SEED))
    script = "import asyncio, sys, pathlib, test_power_loss as t; asyncio.run(t.found_after_a_start(pathlib.Path(sys.argv[1])))"
    done = subprocess.run(
        [sys.executable, "-c", script, str(laid_out(state, shm_path / "state"))],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert "ModuleNotFoundError" not in done.stderr


def without_flushes(recording: Recording) -> Recording:
    return Recording(recording.base, [event for event in recording.events if not isinstance(event, Flush)])


def test_meta_pages_are_written_in_one_sector(recording: Recording) -> None:
    """What the states rely on: the write that makes a transaction the newest cannot be torn."""
    metas = [each for each in writes_of(recording, ".mdb") if each.offset < 2 * PAGE_BYTES]
    assert metas
    for each in metas:
        assert each.offset // NOT_TORN_BYTES == (each.offset + len(each.data) - 1) // NOT_TORN_BYTES


def writes_of(recording: Recording, ending: str) -> Iterator[Write]:
    return (event for event in recording.events if isinstance(event, Write) and event.path.endswith(ending))
