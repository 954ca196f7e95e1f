"""The worker that uploads what is queued: order, retries, what it drops, and who waits for it. Over the reference catalog."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import pytest
from catalog_contract import BUCKET, EPOCH, prepared, row
from fakes import ManualClock

from kvobj.catalog.memory import MemoryCatalog
from kvobj.catalog.remote_protocol import QueueReason
from kvobj.catalog.rows import CommitMode, Durability, LossyCopy, ObjectRow
from kvobj.errors import FrameCorruptError, KvobjError, StoreFullError, TierUnavailableError
from kvobj.ids import make_blob_id
from kvobj.store.remote_room import QueueRoom
from kvobj.store.remote_uploads import RemoteUploads
from kvobj.tiers.in_use import BlobsInUse

LOG = logging.getLogger("test")


@dataclass
class Remote:
    """Where frames are sent, and the journal: as the test wants them. Without `gate` nothing waits."""

    sent: list[str] = field(default_factory=list)
    fails: dict[str, list[KvobjError]] = field(default_factory=dict)
    gate: asyncio.Event | None = None
    at_once: int = 0
    most_at_once: int = 0
    is_available: bool = True
    refusal: str = ""
    tells: bool = True
    on_sent: Callable[[ObjectRow], Awaitable[None]] | None = None

    async def put(self, row: ObjectRow) -> int:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            if self.gate is not None:
                await self.gate.wait()
            await asyncio.sleep(0)
            failures = self.fails.get(row.key)
            if failures:
                raise failures.pop(0)
            self.sent.append(row.key)
            if self.on_sent is not None:
                await self.on_sent(row)
            return row.size_bytes
        finally:
            self.at_once -= 1

    async def put_all(self, row: ObjectRow) -> int:
        return await self.put(row)

    async def settled(self, position: int, *, timeout_seconds: float) -> bool:
        del position, timeout_seconds
        return self.tells

    async def flush(self, *, timeout_seconds: float) -> bool:
        return await self.settled(0, timeout_seconds=timeout_seconds)


@dataclass
class World:
    catalog: MemoryCatalog
    remote: Remote
    uploads: RemoteUploads
    sound: bool = False

    async def add(self, key: str, sequence: int, *, size_bytes: int = 10) -> ObjectRow:
        """A row of class LOCAL that is queued."""
        outcome = await self.catalog.commit(
            row(key, sequence, size_bytes=size_bytes), mode=CommitMode.REPLACE, now_ms=1, to_remote=True
        )
        return outcome.row

    async def live(self, key: str) -> ObjectRow | None:
        (found,) = await self.catalog.lookup(BUCKET, [key])
        return found

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110 - nobody tells of it
                await asyncio.sleep(0.001)

    def queued(self) -> list[str]:
        return [entry.key for entry in self.catalog.remote_queue.entries()]


@asynccontextmanager
async def opened(**limits: int) -> AsyncIterator[World]:
    catalog = MemoryCatalog(has_remote=True)
    await prepared(catalog)
    remote = Remote()

    async def has_sound_copy(_: ObjectRow) -> bool:
        return made.sound

    uploads = RemoteUploads(
        catalog=catalog,
        frames=remote,
        journal=remote,
        in_use=BlobsInUse(),
        clock=ManualClock(),
        log=LOG,
        bytes_at_once=limits.get("bytes_at_once", 1000),
        objects_at_once=limits.get("objects_at_once", 16),
        pause_max_seconds=0.02,
        refusal=lambda: remote.refusal,
        is_available=lambda: remote.is_available,
        has_sound_copy=has_sound_copy,
    )
    made = World(catalog, remote, uploads)
    try:
        yield made
    finally:
        await uploads.aclose()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with opened() as made:
        yield made


async def test_what_was_queued_before_the_start_goes_up_in_its_order() -> None:
    async with opened(objects_at_once=1) as world:
        for number in range(5):
            await world.add(f"k{number}", number + 1)
        world.uploads.start()
        await world.until(lambda: not world.queued())
        assert world.remote.sent == [f"k{number}" for number in range(5)]
        live = await world.live("k3")
        assert live is not None
        assert live.durability is Durability.SHARED
        assert (world.uploads.uploaded_objects, world.uploads.uploaded_bytes) == (5, 50)


async def test_what_somebody_waits_for_goes_before_the_others() -> None:
    async with opened(objects_at_once=1) as world:
        world.remote.gate = asyncio.Event()
        rows = [await world.add(f"k{number}", number + 1) for number in range(5)]
        world.uploads.start()
        await world.until(lambda: world.remote.at_once == 1)
        waiting = asyncio.create_task(world.uploads.wait_shared(rows[4], deadline_seconds=10))
        await asyncio.sleep(0)
        world.remote.gate.set()
        assert await waiting is Durability.SHARED
        await world.until(lambda: not world.queued())
        assert world.remote.sent == ["k0", "k4", "k1", "k2", "k3"]


async def test_while_much_is_read_only_what_somebody_waits_for_goes_at_once() -> None:
    async with opened() as world:
        world.uploads.pace.note_read(2**40)
        rows = [await world.add(f"k{number}", number + 1) for number in range(6)]
        now = asyncio.get_running_loop().time()
        world.uploads.pace.wait_seconds(now)
        world.uploads.pace.begun(2**40, now, queued_bytes=0, queued=0)
        world.uploads.pace.note_read(2**40)
        world.uploads.start()
        assert await world.uploads.wait_shared(rows[4], deadline_seconds=10) is Durability.SHARED
        assert world.remote.sent == ["k4"]
        await world.until(lambda: not world.queued())  # nobody reads any more
        assert sorted(world.remote.sent) == [f"k{number}" for number in range(6)]


async def test_uploads_at_once_are_bounded_by_number_and_by_bytes() -> None:
    async with opened(objects_at_once=3, bytes_at_once=1000) as world:
        for number in range(12):
            await world.add(f"k{number}", number + 1)
        world.uploads.start()
        await world.until(lambda: not world.queued())
        assert 1 < world.remote.most_at_once <= 3
    async with opened(bytes_at_once=25) as world:
        await world.add("large", 1, size_bytes=1000)
        for number in range(6):
            await world.add(f"k{number}", number + 2)
        world.uploads.start()
        await world.until(lambda: not world.queued())
        assert world.remote.most_at_once == 2


async def test_what_went_up_is_counted_in_full_though_many_go_at_once() -> None:
    async with opened(objects_at_once=8) as world:
        world.remote.gate = asyncio.Event()
        for number in range(8):
            await world.add(f"k{number}", number + 1)
        world.uploads.start()
        await world.until(lambda: world.remote.at_once == 8)
        world.remote.gate.set()
        await world.until(lambda: not world.queued())
        assert (world.uploads.uploaded_objects, world.uploads.uploaded_bytes) == (8, 80)


async def test_a_failure_is_tried_again_and_holds_up_nobody_else(world: World) -> None:
    world.remote.fails["bad"] = [TierUnavailableError("no"), TierUnavailableError("no")]
    await world.add("bad", 1)
    await world.add("good", 2)
    world.uploads.start()
    await world.until(lambda: not world.queued())
    assert world.remote.sent == ["good", "bad"]
    assert world.uploads.failures == 2
    assert not world.uploads.state


async def test_while_everything_fails_one_is_tried_at_a_time(world: World) -> None:
    for number in range(10):
        world.remote.fails[f"k{number}"] = [TierUnavailableError("away")]
        await world.add(f"k{number}", number + 1)
    world.remote.gate = asyncio.Event()
    world.uploads.start()
    await world.until(lambda: world.remote.at_once == 10)
    world.remote.gate.set()
    await world.until(lambda: world.remote.at_once == 0)
    world.remote.most_at_once = 0
    until_the_first_success: list[int] = []

    async def note(_: ObjectRow) -> None:
        until_the_first_success.append(world.remote.most_at_once)

    world.remote.on_sent = note
    assert "away" in world.uploads.state
    await world.until(lambda: not world.queued())
    assert until_the_first_success[0] == 1
    assert world.remote.most_at_once > 1


async def test_who_waits_is_told_at_once_that_the_remote_is_away(world: World) -> None:
    world.remote.is_available = False
    world.remote.fails["k"] = [TierUnavailableError("away")] * 100
    queued = await world.add("k", 1)
    world.uploads.start()
    assert await world.uploads.wait_shared(queued, deadline_seconds=10) is Durability.LOCAL
    assert world.queued() == ["k"]


async def test_a_full_remote_keeps_the_entry_and_says_so(world: World) -> None:
    world.remote.fails["k"] = [StoreFullError("full")]
    queued = await world.add("k", 1)
    world.uploads.start()
    assert await world.uploads.wait_shared(queued, deadline_seconds=10) is Durability.LOCAL
    assert world.uploads.state == "the remote is full"
    await world.until(lambda: not world.queued())
    assert not world.uploads.state


async def test_who_waits_longer_than_the_deadline_is_told_the_class_that_was_reached(world: World) -> None:
    world.remote.gate = asyncio.Event()
    queued = await world.add("k", 1)
    world.uploads.start()
    assert await world.uploads.wait_shared(queued, deadline_seconds=0.05) is Durability.LOCAL
    world.remote.gate.set()
    await world.until(lambda: not world.queued())


async def test_a_row_is_not_shared_before_the_remote_was_told_of_it(world: World) -> None:
    world.remote.tells = False
    queued = await world.add("k", 1)
    world.uploads.start()
    assert await world.uploads.wait_shared(queued, deadline_seconds=10) is Durability.LOCAL
    world.remote.tells = True
    live = await world.live("k")
    assert live is not None
    assert await world.uploads.wait_shared(live, deadline_seconds=10) is Durability.SHARED


async def test_an_entry_whose_object_is_gone_or_another_is_dropped(world: World) -> None:
    await world.add("gone", 1)
    await world.add("replaced", 2)
    await world.catalog.delete(BUCKET, ["gone"], now_ms=1)
    await world.add("replaced", 3)
    assert [entry.blob_id for entry in world.catalog.remote_queue.entries()] == [make_blob_id(EPOCH, 3)]
    world.uploads.start()
    await world.until(lambda: not world.queued())
    assert world.remote.sent == ["replaced"]
    assert world.uploads.dropped_entries == 0


async def test_an_object_that_is_deleted_while_it_goes_up_leaves_its_blobs_to_the_reaper(world: World) -> None:
    async def delete(sent: ObjectRow) -> None:
        await world.catalog.delete(BUCKET, [sent.key], now_ms=1)
        await world.catalog.reap(await world.catalog.due(now_ms=10**15))  # as if it had been at the remote before

    world.remote.on_sent = delete
    queued = await world.add("k", 1)
    world.uploads.start()
    assert await world.uploads.wait_shared(queued, deadline_seconds=10) is Durability.LOCAL
    due = await world.catalog.due(now_ms=10**15)
    assert [entry.blob_id for entry in due] == [make_blob_id(EPOCH, 1)]
    assert not world.queued()


async def test_a_lossy_copy_that_is_made_anew_meanwhile_is_uploaded_as_well(world: World) -> None:
    def copy(sequence: int) -> LossyCopy:
        return LossyCopy(make_blob_id(EPOCH, sequence), 10, 5, b"d" * 32, "eq:83/1", 0.1)

    async def demote(sent: ObjectRow) -> None:
        world.remote.on_sent = None
        coarser = msgspec.structs.replace(sent, lossy=copy(9))
        assert await world.catalog.raise_durability([coarser]) == [True]

    await world.catalog.commit(
        msgspec.structs.replace(row("k", 1), lossy=copy(8)), mode=CommitMode.REPLACE, now_ms=1, to_remote=True
    )
    world.remote.on_sent = demote
    world.uploads.start()
    await world.until(lambda: not world.queued())
    live = await world.live("k")
    assert live is not None
    assert live.lossy is not None
    assert (live.durability, live.lossy.blob_id) == (Durability.SHARED, make_blob_id(EPOCH, 9))
    assert world.remote.sent == ["k", "k"]


async def test_bytes_that_no_tier_has_sound_are_given_up_and_the_queue_goes_on(world: World) -> None:
    world.remote.fails["lost"] = [FrameCorruptError("flipped")]
    await world.add("lost", 1)
    await world.add("good", 2)
    world.uploads.start()
    await world.until(lambda: not world.queued())
    live = await world.live("lost")
    assert live is not None
    assert live.durability is Durability.LOCAL
    assert world.remote.sent == ["good"]


async def test_bytes_of_which_a_sound_copy_is_found_are_tried_again(world: World) -> None:
    world.remote.fails["k"] = [FrameCorruptError("flipped")]
    world.sound = True
    await world.add("k", 1)
    world.uploads.start()
    await world.until(lambda: not world.queued())
    assert world.remote.sent == ["k"]


async def test_a_fenced_store_uploads_nothing_and_tells_who_waits(world: World) -> None:
    world.remote.refusal = "another goes on with this store"
    queued = await world.add("k", 1)
    world.uploads.start()
    assert await world.uploads.wait_shared(queued, deadline_seconds=10) is Durability.LOCAL
    await world.until(lambda: world.uploads.state == "another goes on with this store")
    assert not world.remote.sent


async def test_what_gc_wants_room_of_is_uploaded_now_and_returned(world: World) -> None:
    rows = [(await world.catalog.commit(row(f"k{n}", n + 1), mode=CommitMode.REPLACE, now_ms=1)).row for n in range(3)]
    world.remote.fails["k1"] = [TierUnavailableError("no")] * 100
    world.uploads.start()
    shared = await world.uploads.upload_now(rows, timeout_seconds=0.3)
    assert [(each.key, each.durability) for each in shared] == [
        ("k0", Durability.SHARED),
        ("k2", Durability.SHARED),
    ]
    assert [entry.reason for entry in world.catalog.remote_queue.entries()] == [QueueReason.EVICTED]
    world.remote.is_available = False
    assert await world.uploads.upload_now(rows[1:2]) == []


async def test_a_flush_waits_for_all_that_is_queued_or_says_that_it_could_not(world: World) -> None:
    world.remote.gate = asyncio.Event()
    for number in range(5):
        await world.add(f"k{number}", number + 1)
    world.uploads.start()
    assert not await world.uploads.flush(timeout_seconds=0.05)
    world.remote.gate.set()
    assert await world.uploads.flush(timeout_seconds=10)
    assert not world.queued()


async def test_the_backlog_counts_what_waits_and_for_how_long(world: World) -> None:
    await world.add("k", 1, size_bytes=7)
    backlog = world.uploads.backlog
    assert (backlog.objects, backlog.size_bytes) == (1, 7)
    assert backlog.oldest_seconds > 0


async def test_room_in_the_queue_is_waited_for_up_to_a_deadline(world: World) -> None:
    room = QueueRoom(world.catalog.remote_queue, limit_bytes=100, wait_seconds=0.05, entry_bytes=0)
    await room.enter(500)  # nothing else waits: it could never go in otherwise
    with pytest.raises(KvobjError, match="waiting to be uploaded"):
        await room.enter(1)
    room.leave(500)
    await room.enter(60)
    room.leave(60)
    await world.add("k", 1, size_bytes=60)
    with pytest.raises(KvobjError, match="waiting to be uploaded"):
        await room.enter(60)
    entering = asyncio.create_task(room.enter(60))
    await asyncio.sleep(0)
    await world.catalog.remote_queue.remove([entry.position for entry in world.catalog.remote_queue.entries()])
    room.note()
    await entering


async def test_room_in_the_queue_is_taken_by_entries_however_small_their_objects(world: World) -> None:
    room = QueueRoom(world.catalog.remote_queue, limit_bytes=3 * 4096, wait_seconds=0.05)
    for number in range(2):
        await world.add(f"k{number}", number + 1, size_bytes=1)
    with pytest.raises(KvobjError, match="waiting to be uploaded"):
        await room.enter(1)
    await world.catalog.remote_queue.remove([world.catalog.remote_queue.entries()[0].position])
    await room.enter(1)
