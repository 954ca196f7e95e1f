import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tier_contract import NAMES, MakeFrame, RawRead, TierContract, blob, plain_of, put_plain

from kvobj.arena import Arena, Extent, PinnedFrame
from kvobj.database import Database, WriteView
from kvobj.errors import BusyError
from kvobj.ids import BlobId, sequence_of
from kvobj.metrics import Metrics
from kvobj.policy import LruPolicy
from kvobj.tiers.dram import _ROW, DRAM_BLOBS, DramTier

KIB = 1024
MIB = 1024 * KIB


def open_database(path: Path) -> Database:
    return Database.open(
        durable=path / "durable",
        volatile=path / "volatile",
        tables=[DRAM_BLOBS],
        map_bytes=64 * MIB,
        volatile_map_bytes=64 * MIB,
        sync=False,
    )


@pytest.fixture
async def database(shm_path: Path) -> AsyncIterator[Database]:
    database = open_database(shm_path)
    yield database
    await database.aclose()


class TestDramTier(TierContract):
    @pytest.fixture
    async def tier(self, arena: Arena, database: Database) -> AsyncIterator[DramTier]:
        tier = DramTier(arena, database, LruPolicy(), metrics=Metrics())
        yield tier
        await tier.aclose()

    @pytest.fixture
    def raw_read(self, arena: Arena, database: Database) -> RawRead:
        async def read(blob_id: BlobId) -> bytes | None:
            with database.read() as view:
                row = view.get(DRAM_BLOBS, blob_id)
            if row is None:
                return None
            region, offset, _, _, frame_bytes, _ = _ROW.unpack(row)
            with (arena.directory / f"region-{region:04}").open("rb") as file:
                file.seek(offset)
                return file.read(frame_bytes)

        return read

    async def test_others_run_while_a_scan_goes_on(self, tier: DramTier, make_frame: MakeFrame) -> None:
        await put_plain(tier, make_frame, blob(1), plain_of(1, 100_000))
        ran: list[BlobId] = []
        asyncio.get_running_loop().call_soon(ran.append, blob(1))
        assert [each async for each in tier.scan()] == ran == [blob(1)]


class Memory:
    """An arena, a database and a tier in one directory, which can be opened again as the next process would."""

    def __init__(self, path: Path, capacity_bytes: int) -> None:
        self.path = path
        self.capacity_bytes = capacity_bytes
        self.stack = AsyncExitStack()

    async def start(self, *, boot_id: str = "boot", high_watermark: float = 1.0) -> None:
        self.stack = AsyncExitStack()
        self.database = open_database(self.path)
        self.stack.push_async_callback(self.database.aclose)
        self.arena = await Arena.open(
            self.path / "arena",
            capacity_bytes=self.capacity_bytes,
            region_bytes=MIB,
            store_id=b"store",
            boot_id=boot_id,
        )
        self.stack.push_async_callback(self.arena.aclose, remove=False)
        self.tier = DramTier(self.arena, self.database, LruPolicy(), metrics=Metrics(), high_watermark=high_watermark)
        self.stack.push_async_callback(self.tier.aclose)
        await self.arena.populate()

    async def stop(self) -> None:
        """As if killed: nothing is said to anybody. (Closing what this process holds changes no file.)"""
        await self.stack.aclose()

    async def put(self, sequence: int, size_bytes: int, *, dirty: bool = False, sealed: bool = True) -> None:
        pin = await self.arena.reserve(size_bytes, timeout_seconds=0.05)
        frame = PinnedFrame(pin, frame_bytes=size_bytes)
        frame.writable[:] = bytes([sequence % 251]) * size_bytes
        if sealed:
            await self.tier.put(blob(sequence), frame, NAMES, dirty=dirty)
        else:
            await self.tier.put_unsealed(blob(sequence), frame, NAMES, dirty=dirty)
        frame.release()

    async def held(self) -> list[int]:
        """Sequences held, each with its right bytes."""
        found = []
        async for blob_id in self.tier.scan():
            frame = await self.tier.get(blob_id)
            assert frame is not None
            assert bytes(frame.view) == bytes([sequence_of(blob_id) % 251]) * frame.size
            frame.release()
            found.append(sequence_of(blob_id))
        return found


Start = Callable[..., Awaitable[Memory]]


@pytest.fixture
async def start(shm_path: Path) -> AsyncIterator[Start]:
    started: list[Memory] = []

    async def make(capacity_bytes: int = 2 * MIB, *, high_watermark: float = 1.0) -> Memory:
        memory = Memory(shm_path / str(len(started)), capacity_bytes)
        memory.path.mkdir()
        started.append(memory)
        await memory.start(high_watermark=high_watermark)
        return memory

    yield make
    for memory in started:
        await memory.stop()


class TestPutWithin:
    async def test_a_put_within_somebody_elses_commit_is_adopted_with_it(self, start: Start) -> None:
        memory = await start()
        pin = await memory.arena.reserve(5000, timeout_seconds=0.05)
        pin.view[:5000] = b"\x07" * 5000

        def commit(change: Callable[[WriteView], None]) -> str:
            memory.database.write_volatile(change)
            return "done"

        done = memory.tier.put_within(blob(7), pin, 5000, commit, sealed=True)
        assert (done, memory.tier.dirty_bytes, memory.tier.dirty()) == ("done", 8192, [blob(7)])
        assert await memory.held() == [7]
        await memory.stop()
        await memory.start()
        assert await memory.held() == [7]

    async def test_what_is_not_committed_is_not_held(self, start: Start) -> None:
        memory = await start()
        pin = await memory.arena.reserve(5000, timeout_seconds=0.05)
        assert memory.tier.put_within(blob(7), pin, 5000, lambda _: None, sealed=True) is None

        def fails(_change: object) -> None:
            raise BusyError("not now")

        with pytest.raises(BusyError):
            memory.tier.put_within(blob(7), pin, 5000, fails, sealed=True)
        pin.release()
        assert await memory.held() == []
        assert memory.arena.usage().reserved_bytes == 0


class TestEviction:
    async def test_the_least_recently_used_goes_when_room_is_needed(self, start: Start) -> None:
        memory = await start(MIB)
        for sequence in range(4):
            await memory.put(sequence, 256 * KIB)
        frame = await memory.tier.get(blob(0))
        assert frame is not None
        frame.release()
        await memory.put(4, 256 * KIB)
        assert await memory.held() == [0, 2, 3, 4]

    async def test_a_large_blob_finds_room_among_many_small_ones(self, start: Start) -> None:
        memory = await start(2 * MIB)
        order = [(number * 7) % 128 for number in range(128)]
        for sequence in range(128):
            await memory.put(sequence, 16 * KIB)
        for sequence in order:
            frame = await memory.tier.get(blob(sequence))
            assert frame is not None
            frame.release()
        await memory.put(1000, 512 * KIB)
        held = await memory.held()
        assert 1000 in held
        assert len(held) >= 1 + 128 - 2 * 32

    async def test_what_is_dirty_or_unsealed_stays_until_it_is_neither(self, start: Start) -> None:
        memory = await start(MIB)
        await memory.put(1, 512 * KIB, dirty=True)
        await memory.put(2, 512 * KIB, dirty=False, sealed=False)
        with pytest.raises(BusyError):
            await memory.put(3, 512 * KIB)
        assert await memory.held() == [1, 2]
        assert memory.tier.dirty_bytes == 512 * KIB
        waiting = asyncio.create_task(memory.arena.reserve(512 * KIB, timeout_seconds=5))
        await asyncio.sleep(0)
        memory.tier.mark_clean(blob(1))
        (await waiting).release()
        assert memory.tier.dirty_bytes == 0
        assert await memory.held() == [2]
        memory.tier.mark_sealed(blob(2))
        await memory.put(4, 600 * KIB)
        assert await memory.held() == [4]

    async def test_what_a_start_finds_at_home_is_clean_sealed_and_may_go(self, start: Start) -> None:
        memory = await start(MIB)
        await memory.put(1, 512 * KIB, dirty=True, sealed=False)
        await memory.put(2, 256 * KIB, dirty=True)
        memory.tier.mark_written_down([blob(1), blob(9)])
        assert memory.tier.dirty() == [blob(2)]
        assert memory.tier.dirty_bytes == 256 * KIB
        assert memory.tier.unsealed() == frozenset()
        await memory.put(3, 512 * KIB)
        assert await memory.held() == [2, 3]

    async def test_what_is_being_read_goes_last_and_is_memory_when_the_reader_is_done(self, start: Start) -> None:
        memory = await start(MIB)
        await memory.put(1, 512 * KIB)
        await memory.put(2, 512 * KIB)
        reader = await memory.tier.get(blob(1))
        assert reader is not None
        touched = await memory.tier.get(blob(2))
        assert touched is not None
        touched.release()
        await memory.put(3, 512 * KIB)
        assert await memory.held() == [1, 3]
        other = await memory.tier.get(blob(3))
        assert other is not None
        waiting = asyncio.create_task(memory.arena.reserve(512 * KIB, timeout_seconds=5))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiting.done()
        assert bytes(reader.view) == b"\1" * 512 * KIB
        reader.release()
        (await waiting).release()
        assert await memory.held() == [3]
        other.release()

    async def test_above_the_high_watermark_a_put_makes_room_ahead(self, start: Start) -> None:
        memory = await start(2 * MIB, high_watermark=0.5)
        for sequence in range(16):
            await memory.put(sequence, 128 * KIB)
            assert memory.arena.reserved_bytes <= MIB + 128 * KIB
        assert 15 in await memory.held()

    async def test_the_row_is_gone_before_the_extent_is_anybody_elses(self, start: Start) -> None:
        memory = await start(MIB)
        await memory.put(1, MIB)
        await memory.put(2, MIB)
        with memory.database.read() as view:
            assert [bytes(key) for key, _ in view.range(DRAM_BLOBS)] == [blob(2)]

    async def test_64_uploads_into_a_small_arena_all_get_through(self, start: Start) -> None:
        memory = await start(4 * MIB)

        async def upload(sequence: int) -> None:
            pin = await memory.arena.reserve(512 * KIB, timeout_seconds=20)
            frame = PinnedFrame(pin, frame_bytes=512 * KIB)
            frame.writable[:] = bytes([sequence]) * (512 * KIB)
            await asyncio.sleep(0)
            await memory.tier.put(blob(sequence), frame, NAMES)
            frame.release()

        await asyncio.gather(*(upload(sequence) for sequence in range(64)))
        assert len(await memory.held()) == 8


class TestRestart:
    async def test_the_next_process_has_what_this_one_held(self, start: Start) -> None:
        memory = await start()
        await memory.put(1, 100 * KIB)
        await memory.put(2, 200 * KIB, dirty=True)
        await memory.put(3, 300 * KIB, sealed=False)
        await memory.put(4, 50 * KIB)
        await memory.tier.delete([blob(4)])
        lost = await memory.arena.reserve(100 * KIB, timeout_seconds=0)
        await memory.stop()
        await memory.start()
        assert memory.tier.adoption.adopted_blobs == 3
        assert memory.tier.adoption.adopted_bytes == 600 * KIB
        assert memory.tier.adoption.dropped_blobs == 0
        assert await memory.held() == [1, 2, 3]
        assert memory.tier.dirty() == [blob(2)]
        assert memory.tier.unsealed() == {blob(3)}
        assert memory.arena.usage().reserved_bytes == 600 * KIB
        assert memory.tier.needs_verification(blob(1))
        memory.tier.mark_verified(blob(1))
        assert not memory.tier.needs_verification(blob(1))
        assert lost.extent.length == 100 * KIB

    async def test_a_blob_is_adopted_as_it_was_put_since_a_start_asks_for_the_rest(self, start: Start) -> None:
        memory = await start()
        await memory.put(1, 4 * KIB, dirty=True, sealed=False)
        memory.tier.mark_sealed(blob(1))
        memory.tier.mark_clean(blob(1))
        await memory.put(2, 4 * KIB)
        memory.tier.mark_dirty(blob(2))
        assert memory.tier.dirty() == [blob(2)]
        await memory.stop()
        await memory.start()
        assert memory.tier.unsealed() == {blob(1)}
        assert memory.tier.dirty() == [blob(1)]

    async def test_rows_whose_extents_cannot_be_are_dropped(self, start: Start) -> None:
        memory = await start()
        await memory.put(1, 100 * KIB)
        await memory.put(2, 100 * KIB)
        frame = await memory.tier.get(blob(2))
        assert frame is not None
        extent = frame.pin.extent
        frame.release()
        bad = [
            (blob(3), extent, 4096),
            (blob(4), Extent(77, 0, 4096, 1), 4096),
            (blob(5), Extent(1, 0, 4096, 1), 5000),
        ]
        for blob_id, where, frame_bytes in bad:
            row = _ROW.pack(where.region, where.offset, where.length, where.generation, frame_bytes, 0)
            memory.database.write_volatile(lambda view, key=blob_id, row=row: view.put(DRAM_BLOBS, key, row))  # type: ignore[misc]
        memory.database.write_volatile(lambda view: view.put(DRAM_BLOBS, b"short", b"x"))
        await memory.stop()
        await memory.start()
        assert memory.tier.adoption.dropped_blobs == 4
        assert await memory.held() == [1, 2]

    async def test_after_another_boot_nothing_is_held(self, start: Start) -> None:
        memory = await start()
        await memory.put(1, 100 * KIB)
        await memory.stop()
        await memory.start(boot_id="another")
        assert memory.tier.adoption.adopted_blobs == 0
        assert memory.tier.adoption.dropped_blobs == 1
        assert await memory.held() == []


async def test_a_piece_of_a_frame_cannot_be_put(start: Start) -> None:
    memory = await start()
    frame = PinnedFrame(await memory.arena.reserve(8 * KIB, timeout_seconds=0), frame_bytes=8 * KIB, start=4, size=10)
    with pytest.raises(ValueError, match="piece"):
        await memory.tier.put(blob(1), frame, NAMES)
    frame.release()


async def test_usage_names_the_pages_in_use(start: Start) -> None:
    memory = await start()
    assert (await memory.tier.usage()).mode in {"4 KiB pages", "huge pages"}
