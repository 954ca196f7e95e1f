"""The LMDB history passes the contract, never shows a number behind a reader, and owns up to what a restart took."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from history_contract import BUCKET, OTHER, HistoryContract, Teller, chunk, keys_told, told
from lmdb_teller import LmdbTeller

from kvobj.catalog.encoding import REMOVALS, REMOVALS_BY_TIME, encode_row, number_key
from kvobj.catalog.history_protocol import RemovalReason, RemovalRow
from kvobj.catalog.history_rows import removal_key, removed_events
from kvobj.database import WriteView


@pytest.fixture
async def lmdb(tmp_path: Path) -> AsyncIterator[LmdbTeller]:
    teller = LmdbTeller(tmp_path)
    await teller.open()
    await teller.make_bucket(BUCKET)
    await teller.make_bucket(OTHER)
    yield teller
    await teller.close()


class TestLmdbHistory(HistoryContract):
    @pytest.fixture
    async def teller(self, lmdb: LmdbTeller) -> Teller:
        return lmdb


async def test_a_reader_stops_below_what_a_durable_change_may_still_tell(lmdb: LmdbTeller) -> None:
    drawn, go_on = threading.Event(), threading.Event()

    def slow(view: WriteView) -> None:
        lmdb.store_in([chunk("first")], 5, False, view)  # noqa: FBT003
        drawn.set()
        assert go_on.wait(10)

    writing = asyncio.create_task(lmdb.database.write(slow))
    await asyncio.to_thread(drawn.wait, 10)
    await lmdb.stored([chunk("second")])
    before = await lmdb.history.read(BUCKET, after=0)
    waiting = asyncio.create_task(lmdb.history.wait(before.last, timeout_seconds=10))
    await asyncio.sleep(0)
    assert before.events == ()
    assert not waiting.done()
    go_on.set()
    await writing
    assert await waiting
    assert [event.keys for event in await told(lmdb, after=before.last)] == [("first",), ("second",)]


async def test_readers_miss_nothing_and_see_nothing_twice_while_both_writers_tell(lmdb: LmdbTeller) -> None:
    expected = set[str]()

    async def tell(writer: int) -> None:
        for number in range(150):
            key = f"w{writer}-{number}"
            expected.add(key)
            (row,) = await lmdb.stored([chunk(key)], volatile=writer % 2 == 0)
            if writer % 2 == 0 and number % 5 == 0:
                await lmdb.made_durable(row)
            await asyncio.sleep(0)

    seen: list[str] = []

    async def follow() -> None:
        after = 0
        while len(seen) < 600:
            page = await lmdb.history.read(BUCKET, after=after, limit=70)
            seen.extend(key for event in page.events for key in event.keys)
            after = page.last
            if not page.more and len(seen) < 600:
                assert await lmdb.history.wait(after, timeout_seconds=10)

    following = asyncio.create_task(follow())
    await asyncio.gather(*(tell(writer) for writer in range(4)))
    await asyncio.wait_for(following, 20)
    assert len(seen) == len(set(seen))
    assert set(seen) == expected


async def test_a_restart_in_the_same_boot_keeps_everything(lmdb: LmdbTeller) -> None:
    await lmdb.stored([chunk("a")])
    await lmdb.removed([chunk("b")], volatile=False)
    last = lmdb.history.last_sequence()
    await lmdb.reopen()
    page = await lmdb.history.read(BUCKET, after=0)
    assert [event.keys for event in page.events] == [("a",), ("b",)]
    assert page.first_kept == 0
    assert page.last > last
    assert await lmdb.history.why_removed(BUCKET, "b") is not None
    assert await lmdb.history.remembers_all(BUCKET)


async def test_power_loss_takes_volatile_events_and_the_next_start_says_so(lmdb: LmdbTeller) -> None:
    (row,) = await lmdb.stored([chunk("a")])
    await lmdb.made_durable(row)
    await lmdb.stored([chunk("b")])
    await lmdb.removed([chunk("c")], volatile=False)
    last = lmdb.history.last_sequence()
    await lmdb.reopen(boot_id="another")
    page = await lmdb.history.read(BUCKET, after=0)
    assert [event.keys for event in page.events] == [("a",), ("c",)]
    assert page.first_kept > last
    assert await lmdb.history.why_removed(BUCKET, "c") is None
    assert not await lmdb.history.remembers_all(BUCKET)
    await lmdb.reopen(boot_id="another")
    assert (await lmdb.history.read(BUCKET, after=0)).first_kept == page.first_kept


async def test_what_was_written_down_before_a_clean_stop_is_no_loss(lmdb: LmdbTeller) -> None:
    await lmdb.stored([chunk("a")])
    await lmdb.removed([chunk("a")])
    assert await lmdb.history.write_down()
    await lmdb.reopen(boot_id="another")
    page = await lmdb.history.read(BUCKET, after=0)
    assert len(page.events) == 2
    assert page.first_kept == 0
    await lmdb.stored([chunk("b")])
    await lmdb.reopen(boot_id="a third")  # the mark of the clean stop is used up
    assert (await lmdb.history.read(BUCKET, after=0)).first_kept > page.last
    assert await keys_told(lmdb) == [("a",), ("a",)]


async def test_more_than_may_be_written_down_is_a_loss(lmdb: LmdbTeller) -> None:
    for number in range(5):
        await lmdb.stored([chunk(f"k{number}")])
    assert not await lmdb.history.write_down(limit=-1)
    await lmdb.reopen(boot_id="another")
    assert (await lmdb.history.read(BUCKET, after=0)).first_kept > 0


async def test_retention_that_went_before_a_clean_stop_stays_told(lmdb: LmdbTeller) -> None:
    await lmdb.stored([chunk("a")], now_ms=1)
    await lmdb.history.trim(now_ms=1000, retention_ms=10)
    first_kept = (await lmdb.history.read(BUCKET, after=0)).first_kept
    await lmdb.history.write_down()
    await lmdb.reopen(boot_id="another")
    assert (await lmdb.history.read(BUCKET, after=0)).first_kept == first_kept > 0


async def test_entries_of_one_key_each_as_older_versions_made_them_are_forgotten_too(lmdb: LmdbTeller) -> None:
    (event,) = removed_events([chunk("a"), chunk("b")], lmdb.numbers.allocate, reason=RemovalReason.EVICTED, now_ms=1)

    def change(view: WriteView) -> None:
        for place, key in enumerate(event.keys):
            name = removal_key(BUCKET, key)
            view.put(REMOVALS, name, encode_row(RemovalRow(RemovalReason.EVICTED, 1, event.namespace, event.sequence)))
            time_key = number_key(event.sequence) + place.to_bytes(2, "big")
            view.put(REMOVALS_BY_TIME, time_key, (1).to_bytes(8, "big") + name)

    lmdb.database.write_volatile(change)
    assert await lmdb.history.why_removed(BUCKET, "b") is not None
    assert await lmdb.history.trim(now_ms=1000, retention_ms=10) == 2
    assert await lmdb.history.why_removed(BUCKET, "a") is None
    assert await lmdb.history.why_removed(BUCKET, "b") is None
    assert not await lmdb.history.remembers_all(BUCKET)
    with lmdb.database.read() as view:
        assert view.count(REMOVALS) == 0
