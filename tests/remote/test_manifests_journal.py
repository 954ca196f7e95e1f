"""The journal: what the catalog publishes comes to lie on the remote, in order, at once where somebody waits, whatever fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from fakes import ManualClock
from manifest_world import (
    WRAPPER,
    DictBucket,
    OutboxCatalog,
    SetLineage,
    bucket_row,
    folder_of,
    objects_of,
    put_shared,
    shared_rows,
    told,
)

from kvobj.catalog.lmdb import LmdbCatalog
from kvobj.catalog.rows import UserRow
from kvobj.manifests.compaction import Compaction
from kvobj.manifests.format import ManifestEntry, ManifestKind
from kvobj.manifests.journal import ManifestJournal
from kvobj.metrics import Metrics

LOG = logging.getLogger("test")
SECONDS = 10.0


@asynccontextmanager
async def journal_of(
    catalog: LmdbCatalog,
    bucket: DictBucket,
    *,
    lineage: SetLineage | None = None,
    epoch: int = 7,
    interval_seconds: float = 0.0,
    clock: ManualClock | None = None,
) -> AsyncIterator[ManifestJournal]:
    folder = folder_of(bucket, lineage=lineage or SetLineage(), epoch=epoch)
    compaction = Compaction(folder, catalog.outbox, WRAPPER)
    journal = ManifestJournal(
        outbox=catalog.outbox,
        folder=folder,
        compaction=compaction,
        sealer=WRAPPER,
        clock=clock or ManualClock(),
        log=LOG,
        metrics=Metrics(),
        interval_seconds=interval_seconds,
        retry_seconds=(0.001, 0.01),
        fence_poll_seconds=0.001,
    )
    journal.start()
    try:
        yield journal
    finally:
        await journal.aclose()


@pytest.fixture
async def catalog(tmp_path: Path) -> AsyncIterator[LmdbCatalog]:
    async with OutboxCatalog(tmp_path, ManualClock()) as catalog:
        await catalog.create_bucket(bucket_row("one"))
        yield catalog


def journals(bucket: DictBucket) -> list[str]:
    return sorted(key for key in bucket.objects if key.endswith(".journal"))


async def until(condition: Callable[[], bool], what: str) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110 - nobody tells of what it waits for
            await asyncio.sleep(0.001)
    assert condition(), what


async def test_what_is_settled_can_be_read_back_and_is_forgotten_here(catalog: LmdbCatalog) -> None:
    bucket = DictBucket()
    async with journal_of(catalog, bucket) as journal:
        for number in range(20):
            await put_shared(catalog, "one", f"key-{number % 15}", number)
        await catalog.delete("one", ["key-3"], now_ms=2)
        assert await journal.settled(catalog.outbox.position, timeout_seconds=SECONDS)
        assert objects_of(await told(bucket)) == await shared_rows(catalog)
        assert len(await shared_rows(catalog)) == 14
        await until(lambda: catalog.outbox.pending == 0, "the outbox is emptied")
        assert journal.lag.entries == 0
    assert journal.durable_position == catalog.outbox.position


async def test_a_store_begins_with_a_snapshot_before_anything_is_settled(catalog: LmdbCatalog) -> None:
    bucket = DictBucket()
    await catalog.put_user(UserRow("ann", "Ann", "access", "a-secret-key"))
    assert catalog.outbox.snapshot_due
    async with journal_of(catalog, bucket) as journal:
        assert await journal.flush(timeout_seconds=SECONDS)
    assert not catalog.outbox.snapshot_due
    found = await told(bucket)
    assert found["bucket", "one"] == bucket_row("one")
    assert found["user", "ann"] == UserRow("ann", "Ann", "access", "a-secret-key")
    assert not any(b"a-secret-key" in body for body in bucket.objects.values())


async def test_records_that_come_while_one_manifest_is_on_its_way_go_together(catalog: LmdbCatalog) -> None:
    bucket = DictBucket()
    async with journal_of(catalog, bucket) as journal:
        assert await journal.flush(timeout_seconds=SECONDS)
        bucket.gate = asyncio.Event()
        begun = bucket.puts
        await put_shared(catalog, "one", "first", 1)
        waiting = [asyncio.create_task(journal.flush(timeout_seconds=SECONDS))]
        await until(lambda: bucket.puts > begun, "the first manifest is on its way")
        for number in range(2, 12):
            await put_shared(catalog, "one", f"key-{number}", number)
            waiting.append(asyncio.create_task(journal.flush(timeout_seconds=SECONDS)))
        assert not any(task.done() for task in waiting)
        bucket.gate.set()
        assert all(await asyncio.gather(*waiting))
        assert bucket.puts - begun <= 3
    assert objects_of(await told(bucket)) == await shared_rows(catalog)


async def test_without_anybody_waiting_records_wait_for_the_interval(tmp_path: Path) -> None:
    bucket, clock = DictBucket(), ManualClock()
    async with (
        OutboxCatalog(tmp_path, clock) as catalog,
        journal_of(catalog, bucket, interval_seconds=3600.0, clock=clock) as journal,
    ):
        await journal.settled(0, timeout_seconds=SECONDS)
        await catalog.create_bucket(bucket_row("one"))
        await put_shared(catalog, "one", "key", 1)
        clock.advance(12.0)
        lag = journal.lag
        assert (lag.entries > 0, lag.oldest_seconds >= 12.0) == (True, True)
        assert journals(bucket) == []
        assert await journal.flush(timeout_seconds=SECONDS)
        assert len(journals(bucket)) >= 1


async def test_a_remote_that_is_away_is_waited_for_and_nothing_is_lost(catalog: LmdbCatalog) -> None:
    bucket = DictBucket(fail_puts=3)
    async with journal_of(catalog, bucket) as journal:
        assert await journal.flush(timeout_seconds=SECONDS)
        bucket.fail_puts = 10**9
        await put_shared(catalog, "one", "key", 1)
        assert not await journal.flush(timeout_seconds=0.05)
        assert journal.lag.failures > 0
        assert "the remote is away" in journal.lag.problem
        bucket.fail_puts = 0
        assert await journal.flush(timeout_seconds=SECONDS)
        assert journal.lag.problem == ""
    assert objects_of(await told(bucket)) == await shared_rows(catalog)


async def test_an_answer_that_was_lost_makes_no_second_manifest(catalog: LmdbCatalog) -> None:
    bucket = DictBucket()
    async with journal_of(catalog, bucket) as journal:
        assert await journal.flush(timeout_seconds=SECONDS)
        before = len(journals(bucket))
        bucket.lose_answers = 3
        await put_shared(catalog, "one", "key", 1)
        assert await journal.flush(timeout_seconds=SECONDS)
        assert bucket.lose_answers == 0
        assert len(journals(bucket)) == before + 1
    assert objects_of(await told(bucket)) == await shared_rows(catalog)


@pytest.mark.parametrize("after", ["nothing", "the manifest"])
async def test_a_crash_repeats_what_was_not_forgotten_yet_and_changes_nothing(tmp_path: Path, after: str) -> None:
    bucket = DictBucket()
    async with OutboxCatalog(tmp_path, ManualClock()) as catalog:
        await catalog.create_bucket(bucket_row("one"))
        async with journal_of(catalog, bucket) as journal:
            assert await journal.flush(timeout_seconds=SECONDS)
        await put_shared(catalog, "one", "kept", 1)
        await put_shared(catalog, "one", "deleted", 2)
        if after == "the manifest":
            # Written, but not discarded: what a kill between the two leaves.
            entries = catalog.outbox.entries()
            folder = folder_of(bucket, epoch=8)
            found = [ManifestEntry(each.position, each.content) for each in entries]
            name, body = await folder.encode(
                ManifestKind.JOURNAL, found, after=found[0].position - 1, last=found[-1].position
            )
            await folder.write(name, body)
        await catalog.delete("one", ["deleted"], now_ms=3)
    async with OutboxCatalog(tmp_path, ManualClock()) as catalog:
        async with journal_of(catalog, bucket, epoch=9) as journal:
            assert await journal.flush(timeout_seconds=SECONDS)
        assert set(objects_of(await told(bucket))) == {("object", "one", "kept")}
        assert objects_of(await told(bucket)) == await shared_rows(catalog)


async def test_a_fenced_node_writes_nothing_more_and_says_so(catalog: LmdbCatalog) -> None:
    bucket, lineage = DictBucket(), SetLineage()
    async with journal_of(catalog, bucket, lineage=lineage) as journal:
        assert await journal.flush(timeout_seconds=SECONDS)
        bucket.gate = asyncio.Event()
        await put_shared(catalog, "one", "key", 1)
        waiting = asyncio.create_task(journal.flush(timeout_seconds=SECONDS))
        await asyncio.sleep(0)
        lineage.is_fenced = True
        bucket.fail_puts = 10**9
        bucket.gate.set()
        assert not await waiting
        puts = bucket.puts
        await put_shared(catalog, "one", "other", 2)
        assert not await journal.flush(timeout_seconds=SECONDS)
        assert bucket.puts == puts
        # The place was somebody else's by mistake, and is ours again, empty: it begins with a snapshot.
        bucket.objects.clear()
        bucket.fail_puts = 0
        lineage.is_fenced = False
        assert await journal.flush(timeout_seconds=SECONDS)
    assert objects_of(await told(bucket)) == await shared_rows(catalog)
    assert len(await shared_rows(catalog)) == 2


async def test_nobody_is_told_that_it_is_settled_who_wrote_after_the_store_was_taken_over(catalog: LmdbCatalog) -> None:
    bucket, lineage = DictBucket(), SetLineage()
    async with journal_of(catalog, bucket, lineage=lineage) as journal:
        assert await journal.flush(timeout_seconds=SECONDS)
        lineage.taken_over = (
            True  # a rebuild elsewhere, which this node has not noticed: its manifest is written, and read by nobody
        )
        await put_shared(catalog, "one", "key", 1)
        assert not await journal.flush(timeout_seconds=SECONDS)
        assert lineage.is_fenced


async def test_one_look_at_the_lineage_is_enough_for_all_who_wait_and_for_who_comes_later(catalog: LmdbCatalog) -> None:
    bucket, lineage = DictBucket(), SetLineage()
    async with journal_of(catalog, bucket, lineage=lineage, interval_seconds=3600.0) as journal:
        assert await journal.flush(timeout_seconds=SECONDS)
        looks = lineage.looks
        await put_shared(catalog, "one", "key", 1)
        assert all(await asyncio.gather(*[journal.flush(timeout_seconds=SECONDS) for _ in range(8)]))
        assert await journal.flush(timeout_seconds=SECONDS)
        assert lineage.looks == looks + 1


async def test_what_was_written_while_nobody_waited_is_looked_at_when_somebody_does(catalog: LmdbCatalog) -> None:
    bucket, lineage = DictBucket(), SetLineage()
    async with journal_of(catalog, bucket, lineage=lineage) as journal:
        assert await journal.flush(timeout_seconds=SECONDS)
        await put_shared(catalog, "one", "key", 1)
        async with asyncio.timeout(SECONDS):
            while journal.durable_position < catalog.outbox.position:  # noqa: ASYNC110 - nothing tells of it: nobody waits
                await asyncio.sleep(0)
        looks = lineage.looks
        assert await journal.flush(timeout_seconds=SECONDS)
        assert lineage.looks == looks + 1


async def test_who_waits_when_the_node_stops_is_told_that_it_is_not_settled(catalog: LmdbCatalog) -> None:
    bucket = DictBucket()
    waiting: Awaitable[bool]
    async with journal_of(catalog, bucket) as journal:
        assert await journal.flush(timeout_seconds=SECONDS)
        bucket.gate = asyncio.Event()
        await put_shared(catalog, "one", "key", 1)
        waiting = asyncio.create_task(journal.flush(timeout_seconds=SECONDS))
        await asyncio.sleep(0)
    assert not await waiting
    assert catalog.outbox.pending > 0


async def test_nothing_is_written_before_the_store_has_claimed_its_place(catalog: LmdbCatalog) -> None:
    bucket, lineage = DictBucket(), SetLineage(0)
    async with journal_of(catalog, bucket, lineage=lineage) as journal:
        await put_shared(catalog, "one", "key", 1)
        assert not await journal.flush(timeout_seconds=0.03)
        assert bucket.objects == {}
        lineage.lineage = 4
        assert await journal.flush(timeout_seconds=SECONDS)
    assert all(key.startswith("store/manifests/00000004/") for key in bucket.objects)
    assert objects_of(await told(bucket, newest=4)) == await shared_rows(catalog)
