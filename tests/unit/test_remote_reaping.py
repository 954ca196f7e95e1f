"""The delete queue of a node with a remote: a remote that does not answer holds up nothing but its own blobs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from itertools import count
from pathlib import Path

import pytest
from fakes import ManualClock
from gc_world import LOG, GcWorld, SizedRemote, SizedTier, open_catalog

from kvobj.catalog.encoding import DELETE_QUEUE
from kvobj.catalog.lmdb import LmdbCatalog
from kvobj.catalog.queue_batches import BATCH_BLOBS, encode_batches
from kvobj.catalog.rows import ObjectRow
from kvobj.errors import StoreFullError
from kvobj.gc.reaper import BATCH_ENTRIES, PASSED_OVER_SECONDS, Reaper
from kvobj.gc.remote_reaping import FIRST_PAUSE_SECONDS, RemoteReaping
from kvobj.ids import BlobId, make_blob_id
from kvobj.tiers.layered_home import LayeredHome
from kvobj.tiers.nvme import tier as nvme_tier
from kvobj.tiers.remote.bucket import DELETE_BATCH


class ReapingWorld(GcWorld):
    """A world whose reaper deletes from the remote too."""

    def begin(self, remote: SizedRemote) -> None:
        layered = LayeredHome(self.home, _AsTier(remote), blobs=remote)
        self.knows_all = True
        self.remote_reaping = RemoteReaping(
            remote,
            catalog=self.catalog,
            tiers=layered,
            local=(self.home,),
            is_told=self.is_told,
            clock=self.clock,
            log=LOG,
        )
        self.reaper = Reaper(
            catalog=self.catalog,
            tiers=layered,
            in_use=self.in_use,
            clock=self.clock,
            interval_seconds=10,
            on_freed=lambda: None,
            log=LOG,
            remote=self.remote_reaping,
        )

    async def is_told(self) -> bool:
        return self.knows_all

    async def reap(self) -> None:
        """Everything that can be done now."""
        while await self.reaper.reap_batch():
            await self.remote_reaping.done()
            await asyncio.sleep(0)

    async def queued(self) -> int:
        return len(await self.catalog.due(now_ms=1 << 62, limit=100_000))

    async def remove(self, row: ObjectRow) -> None:
        await self.catalog.delete(row.bucket, [row.key], now_ms=self.clock.now_ms())


class _AsTier(SizedTier):
    """The remote's sizes behind the protocol of a tier."""

    def __init__(self, remote: SizedRemote) -> None:
        super().__init__(1 << 40, name="remote")
        self.delete = remote.delete  # type: ignore[method-assign] # what is deleted is deleted there


@pytest.fixture(params=["memory", "lmdb"])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ReapingWorld]:
    clock = ManualClock()
    async with open_catalog(request.param, tmp_path, clock) as catalog:
        remote = SizedRemote()
        world = ReapingWorld(catalog, clock, remote=remote, capacity_bytes=1 << 30)
        world.begin(remote)
        await world.open()
        yield world


def remote_of(world: GcWorld) -> SizedRemote:
    assert world.remote is not None
    return world.remote


async def test_blobs_go_from_here_and_from_the_remote(world: ReapingWorld) -> None:
    rows = [await world.share(await world.put(f"o{number}", bucket="objects")) for number in range(3)]
    local = await world.put("l", bucket="objects")
    for row in (*rows, local):
        await world.remove(row)
    await world.reap()
    assert (await world.queued(), world.home.sizes, remote_of(world).sizes) == (0, {}, {})
    assert world.reaper.reaped_blobs == 4


async def test_while_the_remote_is_away_its_blobs_leave_this_node_and_wait_and_all_others_go(
    world: ReapingWorld,
) -> None:
    remote_of(world).is_available = False
    shared = [await world.put(f"s{number}", bucket="objects") for number in range(3)]
    for row in shared:
        await world.remove(await world.share(row))
    local = [await world.put(f"l{number}", bucket="objects") for number in range(3)]
    for row in local:
        await world.remove(row)
    await world.reap()
    assert world.home.sizes == {}
    assert len(remote_of(world).sizes) == 3
    assert await world.queued() == 3
    remote_of(world).is_available = True
    await world.reap()
    assert (await world.queued(), remote_of(world).sizes) == (0, {})


async def test_no_blob_goes_from_the_remote_before_it_was_told_that_its_row_is_gone(world: ReapingWorld) -> None:
    row = await world.share(await world.put("o", bucket="objects"))
    world.knows_all = False
    await world.remove(row)
    await world.reap()
    assert world.home.sizes == {}
    assert len(remote_of(world).sizes) == await world.queued() == world.reaper.remote_failures == 1
    world.knows_all = True
    await world.reap()
    assert len(remote_of(world).sizes) == 1, "a pause is kept"
    world.clock.advance(FIRST_PAUSE_SECONDS)
    await world.reap()
    assert (await world.queued(), remote_of(world).sizes) == (0, {})


async def test_more_entries_than_a_batch_that_the_remote_holds_up_do_not_hide_what_is_behind_them(
    world: ReapingWorld,
) -> None:
    remote = remote_of(world)
    blob_ids = [make_blob_id(9, number) for number in range(BATCH_ENTRIES + 200)]
    remote.sizes = dict.fromkeys(blob_ids, 1)
    remote.is_available = False
    await world.catalog.queue_blobs([bytes(blob_id) for blob_id in blob_ids], now_ms=world.clock.now_ms())
    await world.remove(await world.put("behind", bucket="objects"))
    await world.reap()
    assert world.home.sizes == {}
    assert await world.queued() == len(blob_ids)
    assert world.reaper.reaped_blobs == 1


async def test_a_delete_that_fails_is_tried_again_after_growing_pauses(world: ReapingWorld) -> None:
    remote = remote_of(world)
    row = await world.share(await world.put("o", bucket="objects"))
    await world.remove(row)
    asked: list[float] = []

    async def fail(blob_ids: object) -> None:
        asked.append(world.clock.monotonic())
        remote.is_available = False
        try:
            await SizedRemote.delete(remote, list(remote.sizes))
        finally:
            remote.is_available = True
        del blob_ids

    world.remote_reaping._tiers._remote.delete = fail  # type: ignore[attr-defined]
    for _ in range(3):
        await world.reap()
    assert len(asked) == 1
    assert world.reaper.remote_failures == 1
    world.clock.advance(FIRST_PAUSE_SECONDS)
    await world.reap()
    assert len(asked) == 2
    world.clock.advance(FIRST_PAUSE_SECONDS)
    await world.reap()
    assert len(asked) == 2  # twice as long now
    assert world.reaper.remote_lag_seconds >= 2
    world.remote_reaping._tiers._remote.delete = remote.delete  # type: ignore[attr-defined]
    world.clock.advance(FIRST_PAUSE_SECONDS)
    await world.reap()
    assert (await world.queued(), world.reaper.remote_lag_seconds) == (0, 0)


async def test_what_was_passed_over_for_a_reader_is_seen_again_though_the_remote_stays_away(
    world: ReapingWorld,
) -> None:
    remote_of(world).is_available = False
    read = await world.put("read", bucket="objects")
    world.in_use.hold([read.blobs[0].blob_id])
    await world.remove(read)
    await world.remove(await world.share(await world.put("s", bucket="objects")))
    await world.reap()
    assert await world.queued() == 2
    world.in_use.release([read.blobs[0].blob_id])
    world.clock.advance(PASSED_OVER_SECONDS)
    await world.reap()
    assert await world.queued() == 1
    assert world.home.sizes == {}


# -- entries of many blobs ---------------------------------------------------------------------------------------------


@pytest.fixture
async def batched(tmp_path: Path) -> AsyncIterator[ReapingWorld]:
    """A world whose catalog stores many blobs an entry."""
    clock = ManualClock()
    async with open_catalog("lmdb", tmp_path, clock) as catalog:
        remote = SizedRemote()
        world = ReapingWorld(catalog, clock, remote=remote, capacity_bytes=1 << 30)
        world.begin(remote)
        await world.open()
        yield world


async def queue_together(world: ReapingWorld, blob_ids: Sequence[BlobId], *, entry_blobs: int) -> None:
    """Queue blobs as claims do, so many an entry."""
    assert isinstance(world.catalog, LmdbCatalog)
    allocate = count(1000).__next__
    items = [
        item
        for start in range(0, len(blob_ids), entry_blobs)
        for item in encode_batches(blob_ids[start : start + entry_blobs], allocate, now_ms=world.clock.now_ms())
    ]
    await world.catalog._database.write(lambda view: view.put_many(DELETE_QUEUE, items))


async def test_others_have_their_turn_after_each_batch_that_the_remote_holds_up(batched: ReapingWorld) -> None:
    """Its few entries are read on the loop, and nothing of this node is left to delete."""
    blob_ids = [make_blob_id(9, number) for number in range(2000)]
    remote_of(batched).sizes = dict.fromkeys(blob_ids, 1)
    remote_of(batched).is_available = False
    await queue_together(batched, blob_ids, entry_blobs=BATCH_BLOBS)
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(count_turns())
    passed = 0
    while reaped := await batched.reaper.reap_batch():
        passed += reaped
        assert turns, "the loop was held up"
        turns = 0
    beside.cancel()
    assert passed == await batched.queued() == len(blob_ids)


async def test_no_batch_is_of_more_blobs_than_a_tier_deletes_at_once(batched: ReapingWorld) -> None:
    blob_ids = [make_blob_id(9, number) for number in range(2000)]
    await queue_together(batched, blob_ids, entry_blobs=BATCH_BLOBS - 1)
    reaped: list[int] = []
    while some := await batched.reaper.reap_batch():
        reaped.append(some)
    assert sum(reaped) == len(blob_ids)
    assert max(reaped) <= min(nvme_tier._DELETED_AT_ONCE, DELETE_BATCH)


class NarrowTier(SizedTier):
    """A tier whose directory has no room for the removal of more than `most` at once."""

    most = 0

    async def delete(self, blob_ids: Sequence[BlobId]) -> None:
        if len(blob_ids) > self.most:
            raise StoreFullError("no room in the database")
        await super().delete(blob_ids)


async def test_where_there_is_no_room_to_forget_many_blobs_they_go_in_small_portions(tmp_path: Path) -> None:
    clock = ManualClock()
    async with open_catalog("lmdb", tmp_path, clock) as catalog:
        world = ReapingWorld(catalog, clock, remote=SizedRemote(), capacity_bytes=1 << 30)
        world.home = home = NarrowTier(1 << 30)
        world.begin(remote_of(world))
        await world.open()
        blob_ids = [make_blob_id(9, number) for number in range(3000)]
        home.sizes = dict.fromkeys(blob_ids, 1)
        await queue_together(world, blob_ids, entry_blobs=BATCH_BLOBS)
        home.most = 2 * BATCH_BLOBS
        reaped = [await world.reaper.reap_batch()]
        home.most = 0
        with pytest.raises(StoreFullError):
            await world.reaper.reap_batch()
        assert await world.queued() == len(home.sizes) == len(blob_ids) - reaped[0]
        home.most = BATCH_ENTRIES + BATCH_BLOBS
        while some := await world.reaper.reap_batch():
            reaped.append(some)
        assert 0 < reaped[0] <= BATCH_BLOBS
        assert max(reaped) > 2 * BATCH_BLOBS
        assert sum(reaped) == world.reaper.reaped_blobs == len(blob_ids)
        assert not home.sizes
        assert not await world.queued()
