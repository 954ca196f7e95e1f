import asyncio
import errno
import shutil
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import pytest
from fakes_nvme import KIB, MIB, NAMES, FaultyDisk, Gate, NvmeNode, blob, failing, plain_of
from hypothesis import given
from hypothesis import strategies as st
from nvme_read_faults import NvmeReadFaults

from kvobj.codec.frame import raw_payload_offset
from kvobj.database import WriteView
from kvobj.errors import (
    BusyError,
    FrameCorruptError,
    StoreFullError,
    TierUnavailableError,
    UnavailableError,
)
from kvobj.ids import BlobId
from kvobj.metrics import Metrics
from kvobj.tiers.instruments import TierInstruments
from kvobj.tiers.nvme import NvmeTimeouts
from kvobj.tiers.nvme.directory import INLINE, INLINE_BYTES_MAX
from kvobj.tiers.nvme.frame_reading import pieces_of
from kvobj.tiers.nvme.space import default_segment_bytes
from kvobj.tiers.protocol import ByteRange
from kvobj.tiers.verified import Verified


@pytest.fixture
async def node(tmp_path: Path, shm_path: Path) -> AsyncIterator[NvmeNode]:
    (tmp_path / "node").mkdir()
    node = NvmeNode(tmp_path / "node", shm_path)
    yield node
    await node.stop()


async def used(node: NvmeNode) -> int:
    return (await node.tier.usage()).used_bytes


async def fill(node: NvmeNode, size_bytes: int, *, start: int = 0) -> dict[int, bytes]:
    """Put blobs until one is refused."""
    held: dict[int, bytes] = {}
    for sequence in range(start, start + 200):
        try:
            held[sequence] = await node.put(sequence, size_bytes)
        except StoreFullError:
            return held
    pytest.fail("never full")


async def fill_with_small_ones(node: NvmeNode) -> list[BlobId]:
    """Put blobs that lie in the database, many at once, until one is refused; which are held, in order."""
    held: list[BlobId] = []
    frame = await node.make_frame(plain_of(1, 1500))
    try:
        while True:
            batch = [blob(sequence) for sequence in range(len(held), len(held) + 500)]
            puts = [node.tier.put(blob_id, frame, NAMES) for blob_id in batch]
            errors = await asyncio.gather(*puts, return_exceptions=True)
            held += [blob_id for blob_id, error in zip(batch, errors, strict=True) if error is None]
            refused = [error for error in errors if error is not None]
            if refused:
                assert all(isinstance(error, StoreFullError) for error in refused)
                return held
    finally:
        frame.release()


async def use_the_last_room(node: NvmeNode) -> None:
    """Fill the room in the database that is for removals alone."""
    for sequence in range(10_000, 11_000):

        def change(view: WriteView, sequence: int = sequence) -> None:
            view.put(INLINE, blob(sequence), b"", headroom=True)

        try:
            await node.database.write(change)
        except StoreFullError:
            return
    pytest.fail("never full")


@given(st.integers(1, 40_000))
def test_pieces_cover_a_frame_without_gap_or_overlap(pages: int) -> None:
    pieces = pieces_of(pages * 4096)
    assert pieces[0][0] == 0
    assert pieces[-1][1] == pages * 4096
    assert all(before[1] == after[0] for before, after in pairwise(pieces))
    assert all(start < stop and start % 4096 == stop % 4096 == 0 for start, stop in pieces)


def test_a_segment_holds_the_largest_blob_and_a_small_capacity_is_one() -> None:
    gib = 1 << 30
    assert default_segment_bytes(64 * gib) == gib
    assert default_segment_bytes(2 * gib) == gib // 2
    assert default_segment_bytes(gib // 4) == 160 * MIB
    assert default_segment_bytes(10 * MIB) == 10 * MIB


class TestModes:
    @pytest.mark.parametrize(
        "refusals",
        [
            ("refuse_direct_at_open",),
            ("refuse_direct_at_transfer",),
            ("refuse_direct_at_allocation", "refuse_direct_at_transfer"),
        ],
        ids="+".join,
    )
    async def test_where_direct_io_is_refused_it_is_buffered_and_says_so(
        self, node: NvmeNode, refusals: tuple[str, ...]
    ) -> None:
        for refusal in refusals:
            setattr(node.disk, refusal, True)
        await node.start()
        encoded = await node.put(1, MIB)
        assert await node.read(1) == encoded
        assert (await node.tier.usage()).mode == "buffered"
        await node.stop()
        await node.start()
        assert await node.read(1) == encoded
        assert [segment.mode for segment in node.tier.segments] == ["buffered"]

    async def test_short_transfers_are_finished(self, node: NvmeNode) -> None:
        await node.start()
        node.disk.limit_bytes = 128 * KIB
        encoded = await node.put(1, 3 * MIB)
        assert await node.read(1) == encoded
        assert await node.read(1, ByteRange(5000, 2 * MIB + 1)) == encoded[5000 : 2 * MIB + 1]


class TestReading(NvmeReadFaults):
    async def test_the_first_bytes_are_there_before_the_last_are_read(self, node: NvmeNode) -> None:
        await node.start()
        encoded = await node.put(1, 8 * MIB)
        gate = Gate(pass_first=2)
        node.disk.fail["read"] = gate
        frame = await node.tier.get(blob(1))
        assert frame is not None
        async with asyncio.timeout(10):
            await frame.ready(256 * KIB)
        assert frame.progress is not None
        assert not frame.progress.done
        assert frame.view[: 256 * KIB] == encoded[: 256 * KIB]
        gate.open()
        await frame.complete()
        assert frame.view == encoded
        frame.release()

    @pytest.mark.parametrize("reads_that_work", [0, 1, 2])
    async def test_a_failing_medium_fails_the_progress_and_leaves_no_pin(
        self, node: NvmeNode, reads_that_work: int
    ) -> None:
        await node.start()
        await node.put(1, 8 * MIB)
        left = [reads_that_work]

        def fail() -> None:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.EIO, "bad sector")

        node.disk.fail["read"] = fail
        with pytest.raises(TierUnavailableError, match="bad sector"):
            await node.read(1)
        del node.disk.fail["read"]
        assert await node.read(1) is not None
        await node.tier.aclose()
        assert node.arena.usage().reserved_bytes == 0

    @pytest.mark.parametrize("frame_offset", [0, 100, 150, 300 * KIB, 5 * MIB])
    async def test_a_flipped_bit_in_the_frame_is_never_served(self, node: NvmeNode, frame_offset: int) -> None:
        await node.start()
        encoded = await node.put(1, 6 * MIB)
        node.flip(1, frame_offset)
        corrupt: list[BlobId] = []
        verified = Verified(
            node.tier, run=asyncio.to_thread, instruments=TierInstruments(Metrics()), on_corrupt=corrupt.append
        )
        frame = await verified.get(blob(1))
        if frame is not None:
            with pytest.raises(FrameCorruptError):
                await frame.complete()
            assert frame.progress is not None
            payload = slice(raw_payload_offset(6 * MIB), frame.progress.filled)
            assert frame.view[payload] == encoded[payload]
            frame.release()
        await verified.aclose()
        assert corrupt == [blob(1)]

    async def test_a_read_that_hangs_fails_at_its_deadline(self, node: NvmeNode) -> None:
        await node.start(timeouts=NvmeTimeouts(io_seconds=0.05))
        await node.put(1, MIB)
        gate = node.disk.fail["read"] = Gate()
        with pytest.raises(TierUnavailableError, match="deadline"):
            await node.read(1)
        assert node.arena.usage().reserved_bytes > 0
        gate.open()
        await node.tier.aclose()
        assert node.arena.usage().reserved_bytes == 0

    async def test_without_room_in_the_arena_a_read_is_busy_and_nothing_is_held(self, node: NvmeNode) -> None:
        await node.start(timeouts=NvmeTimeouts(reserve_seconds=0.01))
        encoded = await node.put(1, MIB)
        taken = [await node.arena.reserve(32 * MIB, timeout_seconds=1) for _ in range(2)]
        with pytest.raises(BusyError):
            await node.tier.get(blob(1))
        for pin in taken:
            pin.release()
        assert await node.read(1) == encoded
        await node.tier.delete([blob(1)])
        assert await used(node) == 0

    async def test_a_blob_whose_segment_is_gone_is_unavailable_and_can_be_deleted(self, node: NvmeNode) -> None:
        await node.start()
        await node.put(1, MIB)
        await node.stop()
        (node.directory / "segment-000000").unlink()
        await node.start()
        assert node.tier.lost_segments == (0,)
        with pytest.raises(TierUnavailableError, match="missing"):
            await node.tier.get(blob(1))
        await node.tier.delete([blob(1)])
        assert await node.tier.get(blob(1)) is None


class TestRoom:
    async def test_a_full_tier_reads_and_deletes_and_then_takes_more(self, node: NvmeNode) -> None:
        await node.start(capacity_bytes=8 * MIB, segment_bytes=4 * MIB)
        held = await fill(node, MIB)
        assert len(held) == 6
        assert len(node.tier.segments) == 2
        for sequence, encoded in held.items():
            assert await node.read(sequence) == encoded
        full = await used(node)
        with pytest.raises(StoreFullError):
            await node.put(99, 3 * MIB)
        assert (await used(node), await node.read(99)) == (full, None)
        await node.tier.delete([blob(0)])
        held[50] = await node.put(50, MIB)
        assert await node.read(50) == held[50]

    async def test_small_frames_count_against_the_capacity(self, node: NvmeNode) -> None:
        await node.start(capacity_bytes=64 * KIB, segment_bytes=64 * KIB)
        for sequence in range(3):
            await node.put(sequence, 20 * KIB)
        with pytest.raises(StoreFullError):
            await node.put(3, 20 * KIB)
        await node.tier.delete([blob(n) for n in range(3)])
        assert await used(node) == 0

    @pytest.mark.parametrize("call", ["allocate", "available"])
    async def test_a_full_disk_refuses_puts_and_recovers(self, node: NvmeNode, call: str) -> None:
        await node.start(capacity_bytes=8 * MIB, segment_bytes=2 * MIB)
        encoded = await node.put(1, MIB)
        await node.tier._space.settle()
        second = len(node.tier.segments)
        if call == "available":
            node.disk.available = 0
        else:
            node.disk.fail["allocate"] = failing(errno.ENOSPC)
        await fill(node, MIB, start=2)
        assert await node.read(1) == encoded
        assert sorted(path.name for path in node.directory.iterdir()) == [
            f"segment-{number:06d}" for number in range(second)
        ]
        node.disk.fail.clear()
        node.disk.available = None
        encoded = await node.put(20, MIB)
        assert await node.read(20) == encoded

    async def test_a_full_disk_at_a_write_leaves_nothing_half_done(self, node: NvmeNode) -> None:
        await node.start()
        node.disk.fail["write"] = failing(errno.ENOSPC)
        with pytest.raises(StoreFullError):
            await node.put(1, MIB)
        assert (await used(node), await node.read(1)) == (0, None)
        del node.disk.fail["write"]
        encoded = await node.put(1, MIB)
        assert await node.read(1) == encoded
        assert not any(segment.failed for segment in node.tier.segments)

    async def test_segments_are_made_ahead_of_need(self, node: NvmeNode) -> None:
        await node.start(capacity_bytes=8 * MIB, segment_bytes=4 * MIB)
        await node.put(1, 2 * MIB)
        assert len(node.tier.segments) == 1
        await node.put(2, MIB)
        await node.tier._space.settle()
        assert len(node.tier.segments) == 2

    async def test_room_is_not_reused_while_it_is_read(self, node: NvmeNode) -> None:
        await node.start(capacity_bytes=4 * MIB, segment_bytes=4 * MIB)
        encoded = await node.put(1, 3 * MIB)
        gate = node.disk.fail["read"] = Gate()
        reader = await node.tier.get(blob(1))
        assert reader is not None
        await node.tier.delete([blob(1)])
        with pytest.raises(StoreFullError):
            await node.put(2, 3 * MIB)
        gate.open()
        await reader.complete()
        assert reader.view == encoded
        reader.release()
        await node.tier._tasks.wait(10)
        assert await used(node) == 0
        assert await node.put(2, 3 * MIB) == await node.read(2)

    async def test_room_is_not_reused_before_the_freeing_commit(self, node: NvmeNode) -> None:
        await node.start(capacity_bytes=4 * MIB, segment_bytes=4 * MIB)
        await node.put(1, 3 * MIB)
        gate = Gate()
        holding = asyncio.ensure_future(node.database.write(lambda view: gate()))  # noqa: ARG005 - holds the writer thread
        deleting = asyncio.ensure_future(node.tier.delete([blob(1)]))
        assert await asyncio.to_thread(gate.reached.wait, 10)
        with pytest.raises(StoreFullError):
            await node.put(2, 3 * MIB)
        gate.open()
        await asyncio.gather(holding, deleting)
        assert await node.put(2, 3 * MIB) == await node.read(2)


class TestWriting:
    async def test_after_a_failed_flush_the_segment_takes_nothing_new_but_is_read(self, node: NvmeNode) -> None:
        await node.start(capacity_bytes=8 * MIB, segment_bytes=4 * MIB)
        encoded = await node.put(1, MIB)
        node.disk.fail["flush"] = failing(errno.EIO)
        with pytest.raises(TierUnavailableError):
            await node.put(2, MIB)
        assert (await node.read(2), await node.read(1)) == (None, encoded)
        del node.disk.fail["flush"]
        flushes = node.disk.calls.count("flush")
        other = await node.put(3, MIB)
        assert node.disk.calls.count("flush") == flushes + 1
        place = node.place(3)
        assert place is not None
        assert place.segment == 1
        assert await node.read(3) == other
        assert [segment.failed for segment in node.tier.segments] == [True, False]

    async def test_with_only_failed_segments_left_a_put_is_unavailable(self, node: NvmeNode) -> None:
        await node.start(capacity_bytes=4 * MIB, segment_bytes=4 * MIB)
        node.disk.fail["write"] = failing(errno.EIO)
        for sequence in (1, 2):
            with pytest.raises(TierUnavailableError):
                await node.put(sequence, MIB)
        assert await used(node) == 0

    async def test_puts_that_wait_for_a_flush_share_the_next(self, node: NvmeNode) -> None:
        await node.start()
        gate = node.disk.fail["flush"] = Gate()
        first = asyncio.create_task(node.put(1, 100 * KIB))
        assert await asyncio.to_thread(gate.reached.wait, 10)
        others = [asyncio.create_task(node.put(n, 100 * KIB)) for n in range(2, 8)]
        while len(node.tier._space._segments[0].file.flushes._waiting) < 6:
            await asyncio.to_thread(gate.reached.wait, 0.001)
        assert not first.done()
        gate.open()
        await asyncio.gather(first, *others)
        assert node.disk.calls.count("flush") == 2

    async def test_concurrent_puts_of_one_id_write_once(self, node: NvmeNode) -> None:
        await node.start()
        frame = await node.make_frame(plain_of(1, MIB))
        before = node.disk.calls.count("write")
        await asyncio.gather(*(node.tier.put(blob(1), frame, NAMES) for _ in range(4)))
        assert node.disk.calls.count("write") == before + 1
        frame.release()

    async def test_a_put_that_nobody_wants_any_more_holds_nothing(self, node: NvmeNode) -> None:
        await node.start()
        gate = node.disk.fail["write"] = Gate()
        frame = await node.make_frame(plain_of(1, MIB))
        putting = asyncio.create_task(node.tier.put(blob(1), frame, NAMES))
        assert await asyncio.to_thread(gate.reached.wait, 10)
        putting.cancel()
        await asyncio.gather(putting, return_exceptions=True)
        frame.release()
        assert node.arena.usage().reserved_bytes > 0
        gate.open()
        await node.tier.delete([blob(1)])
        assert (await used(node), await node.read(1)) == (0, None)
        assert node.arena.usage().reserved_bytes == 0

    async def test_a_write_that_hangs_fails_at_its_deadline_and_keeps_its_room_until_it_ends(
        self, node: NvmeNode
    ) -> None:
        await node.start(timeouts=NvmeTimeouts(io_seconds=0.05))
        gate = node.disk.fail["write"] = Gate()
        with pytest.raises(TierUnavailableError, match="deadline"):
            await node.put(1, MIB)
        assert await used(node) > 0
        assert node.arena.usage().reserved_bytes > 0
        gate.open()
        await node.tier._tasks.wait(10)
        assert (await used(node), node.arena.usage().reserved_bytes) == (0, 0)

    async def test_a_full_database_refuses_puts_takes_deletes_and_recovers(self, node: NvmeNode) -> None:
        await node.start(map_bytes=2 * MIB)
        count = len(await fill(node, 40 * KIB))
        held, room = await node.tier.usage(), await used(node)
        for sequence, size_bytes in ((1000, MIB), (1001, 40 * KIB)):
            with pytest.raises(StoreFullError, match="database"):
                await node.put(sequence, size_bytes)
        assert (await node.tier.usage(), await used(node)) == (held, room)
        assert await node.read(count - 1) is not None
        await node.tier.delete([blob(n) for n in range(count)])
        assert await used(node) == 0
        for sequence, size_bytes in ((1000, MIB), (1001, 40 * KIB)):
            assert await node.put(sequence, size_bytes) == await node.read(sequence)

    async def test_a_full_database_takes_a_delete_of_many_scattered_blobs(self, node: NvmeNode) -> None:
        await node.start(map_bytes=8 * MIB)
        held = await fill_with_small_ones(node)
        # Each second one: each page of the table loses a row, and with them all there is no room for.
        removed, kept = held[::2], held[1::2]
        before = await used(node)
        await node.tier.delete(removed)
        assert await node.tier.missing(held) == removed
        assert await used(node) * len(held) == before * len(kept)

    async def test_a_delete_that_no_room_is_left_for_says_so_and_takes_nothing_away(self, node: NvmeNode) -> None:
        await node.start(map_bytes=2 * MIB)
        held = await fill_with_small_ones(node)
        before = await used(node)
        with node.database.read():  # keeps what is freed from use
            await use_the_last_room(node)
            with pytest.raises(StoreFullError):
                await node.tier.delete(held)
        assert await node.tier.missing(held) == []
        assert await used(node) == before

    async def test_a_closed_tier_says_so(self, node: NvmeNode) -> None:
        await node.start()
        await node.put(1, MIB)
        await node.tier.aclose()
        with pytest.raises(UnavailableError):
            await node.tier.get(blob(1))
        with pytest.raises(UnavailableError):
            await node.put(2, MIB)

    async def test_a_piece_of_a_frame_cannot_be_put(self, node: NvmeNode) -> None:
        await node.start()
        frame = await node.make_frame(plain_of(1, MIB))
        piece = frame.piece(10, 100)
        with pytest.raises(ValueError, match="whole frame"):
            await node.tier.put(blob(1), piece, NAMES)
        piece.release()
        frame.release()


class TestReopening:
    async def test_a_reopened_tier_holds_what_it_held(self, node: NvmeNode) -> None:
        await node.start()
        held = {n: await node.put(n, n * 50 * KIB) for n in range(1, 30)}
        await node.tier.delete([blob(n) for n in range(1, 30, 3)])
        before = await node.tier.usage()
        await node.stop()
        await node.start()
        assert await node.tier.usage() == before
        for n, encoded in held.items():
            assert await node.read(n) == (None if n % 3 == 1 else encoded)

    async def test_data_without_a_directory_row_is_free_room_after_a_crash(
        self, node: NvmeNode, tmp_path: Path, shm_path: Path
    ) -> None:
        await node.start(capacity_bytes=4 * MIB, segment_bytes=4 * MIB)
        frame = await node.make_frame(plain_of(1, 3 * MIB))
        gate = Gate()
        holding = asyncio.ensure_future(node.database.write(lambda view: gate()))  # noqa: ARG005 - holds the writer thread
        putting = asyncio.create_task(node.tier.put(blob(1), frame, NAMES))
        while "flush" not in node.disk.calls:
            await asyncio.to_thread(gate.reached.wait, 0.001)
        # What a kill at this moment leaves on the disk: the frame is there and flushed, its row is not.
        killed = tmp_path / "killed"
        shutil.copytree(tmp_path / "node", killed, ignore=shutil.ignore_patterns("lock.mdb"))
        gate.open()
        await asyncio.gather(holding, putting)
        frame.release()
        await node.stop()
        after = NvmeNode(killed, shm_path)
        await after.start(capacity_bytes=4 * MIB, segment_bytes=4 * MIB)
        assert (await after.read(1), await used(after)) == (None, 0)
        assert await after.put(2, 3 * MIB) == await after.read(2)
        await after.stop()

    async def test_a_segment_left_unfinished_is_swept_away(self, node: NvmeNode) -> None:
        node.directory.mkdir()
        (node.directory / "segment-000000.new").write_bytes(b"half")
        (node.directory / "notes.txt").write_bytes(b"not ours")
        await node.start()
        assert sorted(path.name for path in node.directory.iterdir()) == ["notes.txt", "segment-000000"]

    async def test_a_smaller_capacity_keeps_what_is_there_and_takes_nothing_new(self, node: NvmeNode) -> None:
        await node.start(capacity_bytes=8 * MIB, segment_bytes=4 * MIB)
        encoded = await node.put(1, 3 * MIB)
        await node.stop()
        await node.start(capacity_bytes=2 * MIB, segment_bytes=4 * MIB)
        assert await node.read(1) == encoded
        with pytest.raises(StoreFullError):
            await node.put(2, 100 * KIB)


@pytest.mark.parametrize("size_bytes", [INLINE_BYTES_MAX - 256, INLINE_BYTES_MAX - 255])
async def test_small_frames_are_in_the_database_and_larger_ones_are_not(node: NvmeNode, size_bytes: int) -> None:
    await node.start()
    encoded = await node.put(1, size_bytes)
    place = node.place(1)
    assert place is not None
    assert place.inline == (len(encoded) <= INLINE_BYTES_MAX)


async def test_in_shared_memory_the_mode_is_what_the_file_system_gives(shm_path: Path) -> None:
    (shm_path / "data").mkdir()
    node = NvmeNode(shm_path / "data", shm_path, FaultyDisk())
    await node.start(capacity_bytes=8 * MIB, segment_bytes=4 * MIB)
    encoded = await node.put(1, MIB)
    assert await node.read(1) == encoded
    assert (await node.tier.usage()).mode in {"O_DIRECT", "buffered"}
    await node.stop()
