"""The delete queue as it is stored: entries of many blobs, and those of one that older versions wrote."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path

import msgspec
import pytest

from kvobj.catalog.encoding import CATALOG_TABLES, DELETE_QUEUE, decode_queue_entry, number_key
from kvobj.catalog.lmdb import LmdbCatalog
from kvobj.catalog.queue_batches import BATCH_BLOBS, blobs_of, encode_batches, entries_of
from kvobj.catalog.rows import QueueEntry
from kvobj.database import Database, WriteView
from kvobj.ids import make_blob_id

IDS = [bytes(make_blob_id(7, number)) for number in range(1, 2 * BATCH_BLOBS + 52)]


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    opened = Database.open(
        durable=tmp_path / "durable",
        volatile=tmp_path / "volatile",
        tables=CATALOG_TABLES,
        map_bytes=1 << 26,
        volatile_map_bytes=1 << 26,
        sync=False,
        boot_id="boot",
    )
    yield opened
    await opened.aclose()


def test_what_is_queued_together_takes_an_entry_for_many_and_each_blob_is_in_one() -> None:
    items = encode_batches(IDS, count(5).__next__, now_ms=9)
    stored = [decode_queue_entry(value) for _, value in items]
    assert [key for key, _ in items] == [number_key(position) for position in (5, 6, 7)]
    assert [each.together for each in stored] == [BATCH_BLOBS, BATCH_BLOBS, 51]
    assert [blob_id for each in stored for blob_id in blobs_of(each)] == IDS
    entries = entries_of(stored[1])
    assert [(each.blob_id, each.position, each.not_before_ms) for each in entries] == [
        (blob_id, 6, 9) for blob_id in IDS[BATCH_BLOBS : 2 * BATCH_BLOBS]
    ]


def test_one_blob_is_queued_as_it_always_was() -> None:
    ((_, value),) = encode_batches(IDS[:1], count(5).__next__, now_ms=9)
    assert decode_queue_entry(value) == QueueEntry(IDS[0], 9, "", "", 5)


async def test_entries_of_older_versions_are_given_and_reaped_among_the_others(database: Database) -> None:
    old = [[blob_id, 3, "b", "k", position, False, False, b""] for position, blob_id in enumerate(IDS[:3], 1)]

    def change(view: WriteView) -> None:
        view.put_many(DELETE_QUEUE, [(number_key(at), msgspec.msgpack.encode(each)) for at, each in enumerate(old, 1)])
        view.put_many(DELETE_QUEUE, encode_batches(IDS[3:], count(10).__next__, now_ms=4))

    await database.write(change)
    catalog = await LmdbCatalog.open(database)
    entries = await catalog.due(now_ms=4, limit=1000)
    assert [entry.blob_id for entry in entries] == IDS
    assert {blob_id async for blob_id in catalog.scan_named_blobs()} == set(IDS)
    await catalog.reap(entries[1:-1])
    assert await catalog.due(now_ms=4) == [entries[0], entries[-1]]
    await catalog.reap(entries)
    with database.read() as view:
        assert view.is_empty(DELETE_QUEUE)
    await catalog.aclose()
