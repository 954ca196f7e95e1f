"""What a node knows of the remote: rows, sums over them, and that both outlive the process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fakes_remote import open_database
from hypothesis import given
from hypothesis import strategies as st

from kvobj.database import Database
from kvobj.errors import CorruptionError
from kvobj.ids import BlobId, make_blob_id
from kvobj.tiers.coded_blobs import CodecUsage
from kvobj.tiers.remote.directory import RemoteCodings, RemoteDirectory, RemotePlace
from kvobj.tiers.remote.names import CodedNames, RemoteNames

NAMES = RemoteNames("store/")
CODED = RemotePlace(700, NAMES.name(CodedNames("b", "coded", "x3", 1000)))


def blob(sequence: int) -> BlobId:
    return make_blob_id(7, sequence)


def place(frame_bytes: int, key: str = "k") -> RemotePlace:
    return RemotePlace(frame_bytes, f"b/{key}")


@pytest.fixture
async def database(tmp_path: Path, shm_path: Path) -> AsyncIterator[Database]:
    database = open_database(tmp_path, shm_path)
    yield database
    await database.aclose()


@pytest.fixture
def directory(database: Database) -> RemoteDirectory:
    return RemoteDirectory(database)


@given(st.integers(0, 2**64 - 1), st.text(st.sampled_from("ab/%20.~-"), min_size=1, max_size=900))
def test_a_row_reads_back(frame_bytes: int, name: str) -> None:
    assert RemotePlace.decode(RemotePlace(frame_bytes, name).encode()) == RemotePlace(frame_bytes, name)


@pytest.mark.parametrize("row", [b"", b"1234567", bytes(8) + b"\xff"])
def test_what_is_no_row_is_said_to_be_none(row: bytes) -> None:
    with pytest.raises(CorruptionError):
        RemotePlace.decode(row)


async def test_what_is_noted_is_found_until_it_is_forgotten(directory: RemoteDirectory) -> None:
    assert directory.find(blob(1)) is None
    await directory.note(blob(1), place(100))
    await directory.note_many({blob(2): place(50), blob(3): CODED})
    assert directory.find(blob(1)) == place(100)
    assert directory.find_many([blob(3), blob(9), blob(2)]) == {blob(2): place(50), blob(3): CODED}
    await directory.forget([blob(1), blob(9), blob(1)])
    assert directory.find(blob(1)) is None
    assert directory.blob_ids() == [blob(2), blob(3)]


async def test_a_note_that_nobody_waits_for_any_more_does_not_come_behind_what_forgets_it(
    directory: RemoteDirectory,
) -> None:
    for n in range(1, 100):
        noting = asyncio.create_task(directory.note(blob(n), place(100)))
        await asyncio.sleep(0)
        noting.cancel()
        await directory.forget([blob(n)])
    assert directory.blob_ids() == []
    assert directory.totals == (0, 0)


async def test_sums_follow_what_is_noted(directory: RemoteDirectory) -> None:
    assert directory.totals == (0, 0)
    await directory.note_many({blob(1): place(100), blob(2): place(50), blob(3): CODED})
    assert directory.totals == (3, 850)
    assert directory.usage() == [CodecUsage("x3", 1, 1000, 700)]
    await directory.note(blob(1), place(60))
    await directory.note(blob(3), place(900))
    assert directory.totals == (3, 1010)
    assert directory.usage() == []
    await directory.forget([blob(1), blob(2), blob(3), blob(3)])
    assert directory.totals == (0, 0)


async def test_ids_come_in_pages_ascending(directory: RemoteDirectory) -> None:
    await directory.note_many({blob(n): place(n) for n in range(2500, 0, -1)})
    first = directory.blob_ids()
    assert first == [blob(n) for n in range(1, 1001)]
    assert directory.blob_ids(first[-1], limit=3) == [blob(1001), blob(1002), blob(1003)]
    assert directory.blob_ids(blob(2500)) == []
    await directory.forget([blob(n) for n in range(1, 2500)])
    assert directory.totals == (1, 2500)


async def test_what_decodes_is_told_how_a_blob_lies(directory: RemoteDirectory) -> None:
    await directory.note_many({blob(1): place(100), blob(3): CODED})
    codings = RemoteCodings(directory)
    assert codings.find(blob(1)) is None
    assert codings.find(blob(2)) is None
    coded = codings.find(blob(3))
    assert coded is not None
    assert (coded.codec, coded.plain_bytes, coded.frame_bytes) == ("x3", 1000, 700)


async def test_rows_and_sums_outlive_the_process(tmp_path: Path, shm_path: Path) -> None:
    database = open_database(tmp_path, shm_path)
    await RemoteDirectory(database).note_many({blob(1): place(100), blob(3): CODED})
    await database.aclose()
    database = open_database(tmp_path, shm_path)
    try:
        again = RemoteDirectory(database)
        assert again.find(blob(1)) == place(100)
        assert again.totals == (2, 800)
        assert again.usage() == [CodecUsage("x3", 1, 1000, 700)]
    finally:
        await database.aclose()
