"""The contract of `kvobj.tiers.protocol.Tier`: run by every tier and every wrapper, which subclass it.

A subclass gives the fixtures `tier` (made over the `arena` fixture) and `raw_read`, which looks at the medium by
another way, so that no tier agrees with itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from blake3 import blake3

from kvobj.arena import Arena, PinnedFrame
from kvobj.codec.codec import codec_named
from kvobj.codec.frame import raw_frame_bytes
from kvobj.errors import InvalidRangeError
from kvobj.ids import BlobId, make_blob_id
from kvobj.tiers.protocol import BlobNames, ByteRange, Tier

KIB = 1024
MIB = 1024 * KIB
SIZES = [
    0, 1, 4095, 4096, 4097, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, 256 * KIB - 1, 256 * KIB, 256 * KIB + 1,
    MIB, 5 * MIB + 123,
]  # fmt: skip
NAMES = BlobNames(bucket="bucket", key="a/key")

MakeFrame = Callable[[BlobId, bytes], Awaitable[PinnedFrame]]
RawRead = Callable[[BlobId], Awaitable[bytes | None]]


def plain_of(seed: int, size_bytes: int) -> bytes:
    """Bytes without repeats, other ones for each seed."""
    return blake3(seed.to_bytes(8, "big")).digest(length=size_bytes)


def blob(sequence: int) -> BlobId:
    return make_blob_id(7, sequence)


async def read_whole(tier: Tier, blob_id: BlobId) -> bytes | None:
    """The encoded bytes that the tier serves for the blob, its pin released again."""
    return await read_range(tier, blob_id, None)


async def read_range(tier: Tier, blob_id: BlobId, byte_range: ByteRange | None) -> bytes | None:
    frame = await tier.get(blob_id, byte_range)
    if frame is None:
        return None
    try:
        await frame.ready(frame.size)
        return bytes(frame.view)
    finally:
        frame.release()


async def put_plain(tier: Tier, make_frame: MakeFrame, blob_id: BlobId, plain: bytes) -> bytes:
    """Put a raw frame of `plain` and return its encoded bytes; no pin is left."""
    frame = await make_frame(blob_id, plain)
    try:
        encoded = bytes(frame.view)
        await tier.put(blob_id, frame, NAMES)
    finally:
        frame.release()
    return encoded


class TierContract:
    """Subclass, give the fixtures `tier` and `raw_read`, override nothing else."""

    @pytest.fixture
    async def arena(self, shm_path: Path) -> AsyncIterator[Arena]:
        """A small arena for the tier and for the frames put into it."""
        arena = await Arena.open(
            shm_path / "arena",
            capacity_bytes=16 * MIB,
            region_bytes=8 * MIB,
            store_id=b"contract",
            boot_id="boot",
            huge_pages=False,
        )
        await arena.populate()
        yield arena
        await arena.aclose(remove=True)

    @pytest.fixture
    def make_frame(self, arena: Arena) -> MakeFrame:
        """Make a complete raw frame in an extent of its own; the test releases it."""

        async def make(blob_id: BlobId, plain: bytes) -> PinnedFrame:
            del blob_id
            frame_bytes = raw_frame_bytes(len(plain))
            frame = PinnedFrame(await arena.reserve(frame_bytes, timeout_seconds=5), frame_bytes=frame_bytes)
            codec_named("raw").encode(memoryview(plain), frame.writable, digest=blake3(plain).digest())
            return frame

        return make

    @pytest.mark.parametrize("size_bytes", SIZES)
    async def test_what_was_put_is_what_is_got(
        self, tier: Tier, make_frame: MakeFrame, raw_read: RawRead, size_bytes: int
    ) -> None:
        encoded = await put_plain(tier, make_frame, blob(1), plain_of(1, size_bytes))
        assert await read_whole(tier, blob(1)) == encoded
        assert await raw_read(blob(1)) == encoded

    @pytest.mark.parametrize("size_bytes", [0, 1, 4097, 64 * KIB + 1, 3 * MIB + 77])
    async def test_a_got_frame_says_what_it_covers(self, tier: Tier, make_frame: MakeFrame, size_bytes: int) -> None:
        encoded = await put_plain(tier, make_frame, blob(1), plain_of(1, size_bytes))
        frame = await tier.get(blob(1))
        assert frame is not None
        await frame.complete()
        assert (frame.start, frame.size, frame.frame_bytes) == (0, len(encoded), len(encoded))
        assert frame.view.readonly
        assert frame.tier
        frame.release()

    @pytest.mark.parametrize("size_bytes", [1, 4096, 64 * KIB + 1, 3 * MIB + 77])
    async def test_ranges_are_slices(self, tier: Tier, make_frame: MakeFrame, size_bytes: int) -> None:
        encoded = await put_plain(tier, make_frame, blob(1), plain_of(2, size_bytes))
        end = len(encoded)
        cuts = sorted({0, 1, 128, 255, 256, 257, end // 3, end // 2, end - 1, end})
        for start in cuts:
            for stop in cuts:
                if start <= stop <= end:
                    assert await read_range(tier, blob(1), ByteRange(start, stop)) == encoded[start:stop]

    async def test_a_range_says_what_it_covers(self, tier: Tier, make_frame: MakeFrame) -> None:
        encoded = await put_plain(tier, make_frame, blob(1), plain_of(2, MIB))
        frame = await tier.get(blob(1), ByteRange(300_001, 300_011))
        assert frame is not None
        await frame.ready(10)
        assert (frame.start, frame.size, frame.frame_bytes) == (300_001, 10, len(encoded))
        frame.release()

    @pytest.mark.parametrize("size_bytes", [1, 64 * KIB + 1, MIB])
    async def test_a_range_past_the_end_is_refused(
        self, tier: Tier, make_frame: MakeFrame, arena: Arena, size_bytes: int
    ) -> None:
        encoded = await put_plain(tier, make_frame, blob(1), plain_of(1, size_bytes))
        held = arena.usage().reserved_bytes
        for start in (0, len(encoded) - 1, len(encoded), len(encoded) + 1):
            with pytest.raises(InvalidRangeError):
                await tier.get(blob(1), ByteRange(start, len(encoded) + 2))
        assert arena.usage().reserved_bytes == held

    async def test_what_was_never_put_is_a_miss(self, tier: Tier) -> None:
        assert await tier.get(blob(1)) is None
        assert await tier.get(blob(1), ByteRange(0, 10)) is None

    async def test_putting_twice_is_putting_once(self, tier: Tier, make_frame: MakeFrame) -> None:
        before = await tier.usage()
        encoded = await put_plain(tier, make_frame, blob(1), plain_of(1, 100_000))
        once = await tier.usage()
        assert await put_plain(tier, make_frame, blob(1), plain_of(1, 100_000)) == encoded
        twice = await tier.usage()
        assert (twice.used_bytes, twice.blobs) == (once.used_bytes, once.blobs)
        assert await read_whole(tier, blob(1)) == encoded
        await tier.delete([blob(1)])
        after = await tier.usage()
        assert (after.used_bytes, after.blobs) == (before.used_bytes, before.blobs)

    async def test_the_callers_pin_stays_the_callers(self, tier: Tier, make_frame: MakeFrame) -> None:
        frame = await make_frame(blob(1), plain_of(1, 100_000))
        encoded = bytes(frame.view)
        await tier.put(blob(1), frame, NAMES)
        await tier.delete([blob(1)])
        assert bytes(frame.view) == encoded
        frame.release()

    async def test_missing_names_what_is_not_held(self, tier: Tier, make_frame: MakeFrame) -> None:
        for sequence in (1, 3):
            await put_plain(tier, make_frame, blob(sequence), plain_of(sequence, 1000 * sequence))
        assert await tier.missing([]) == []
        assert await tier.missing([blob(n) for n in (4, 3, 2, 1)]) == [blob(4), blob(2)]

    async def test_deleting_what_is_absent_is_fine(self, tier: Tier, make_frame: MakeFrame) -> None:
        await tier.delete([])
        await tier.delete([blob(1), blob(2)])
        await put_plain(tier, make_frame, blob(1), plain_of(1, 10))
        await tier.delete([blob(2), blob(1)])
        await tier.delete([blob(1)])
        assert await tier.get(blob(1)) is None

    @pytest.mark.parametrize("size_bytes", [1000, 100_000, 2 * MIB])
    async def test_a_delete_hides_at_once_and_leaves_readers_alone(
        self, tier: Tier, make_frame: MakeFrame, raw_read: RawRead, size_bytes: int
    ) -> None:
        encoded = await put_plain(tier, make_frame, blob(1), plain_of(1, size_bytes))
        reader = await tier.get(blob(1))
        assert reader is not None
        await tier.delete([blob(1)])
        assert await tier.get(blob(1)) is None
        assert await tier.missing([blob(1)]) == [blob(1)]
        assert await raw_read(blob(1)) is None
        others = {n: await put_plain(tier, make_frame, blob(n), plain_of(n, size_bytes)) for n in range(2, 5)}
        await reader.complete()
        assert bytes(reader.view) == encoded
        reader.release()
        for sequence, other in others.items():
            assert await read_whole(tier, blob(sequence)) == other

    async def test_an_id_can_come_back_after_its_delete(self, tier: Tier, make_frame: MakeFrame) -> None:
        await put_plain(tier, make_frame, blob(1), plain_of(1, 300_000))
        await tier.delete([blob(1)])
        encoded = await put_plain(tier, make_frame, blob(1), plain_of(1, 300_000))
        assert await read_whole(tier, blob(1)) == encoded

    @pytest.mark.parametrize("size_bytes", [1000, MIB + 5])
    async def test_concurrent_gets_all_get_it(self, tier: Tier, make_frame: MakeFrame, size_bytes: int) -> None:
        encoded = await put_plain(tier, make_frame, blob(1), plain_of(1, size_bytes))
        results = await asyncio.gather(*(read_whole(tier, blob(1)) for _ in range(8)))
        assert all(result == encoded for result in results)

    async def test_concurrent_puts_gets_and_deletes_keep_apart(self, tier: Tier, make_frame: MakeFrame) -> None:
        async def live(sequence: int) -> None:
            plain = plain_of(sequence, 30_000 * sequence)
            encoded = await put_plain(tier, make_frame, blob(sequence), plain)
            assert await read_whole(tier, blob(sequence)) == encoded
            await tier.delete([blob(sequence)])
            assert await read_whole(tier, blob(sequence)) is None

        await asyncio.gather(*(live(sequence) for sequence in range(1, 13)))

    async def test_a_cancelled_put_has_happened_or_has_not(self, tier: Tier, make_frame: MakeFrame) -> None:
        frame = await make_frame(blob(1), plain_of(1, MIB))
        encoded = bytes(frame.view)
        putting = asyncio.create_task(tier.put(blob(1), frame, NAMES))
        await asyncio.sleep(0)
        putting.cancel()
        await asyncio.gather(putting, return_exceptions=True)
        frame.release()
        assert await read_whole(tier, blob(1)) in (None, encoded)
        assert await put_plain(tier, make_frame, blob(1), plain_of(1, MIB)) == encoded
        assert await read_whole(tier, blob(1)) == encoded

    async def test_a_cancelled_get_leaves_no_pin(self, tier: Tier, make_frame: MakeFrame, arena: Arena) -> None:
        encoded = await put_plain(tier, make_frame, blob(1), plain_of(1, 2 * MIB))
        assert await read_whole(tier, blob(1)) == encoded
        getting = asyncio.create_task(tier.get(blob(1)))
        await asyncio.sleep(0)
        getting.cancel()
        for result in await asyncio.gather(getting, return_exceptions=True):
            if isinstance(result, PinnedFrame):
                result.release()
        await tier.delete([blob(1)])
        await tier.aclose()
        assert arena.usage().reserved_bytes == 0

    async def test_a_scan_is_ascending_and_whole(self, tier: Tier, make_frame: MakeFrame) -> None:
        assert [each async for each in tier.scan()] == []
        for sequence in (300, 2, 1 << 40, 17, 1):
            await put_plain(tier, make_frame, blob(sequence), plain_of(sequence, sequence % 100_000))
        assert [each async for each in tier.scan()] == [blob(n) for n in (1, 2, 17, 300, 1 << 40)]

    async def test_usage_counts_what_is_held(self, tier: Tier, make_frame: MakeFrame) -> None:
        empty = await tier.usage()
        sizes = {1: 0, 2: 5000, 3: 100_000, 4: 2 * MIB}
        encoded_bytes = 0
        for sequence, size_bytes in sizes.items():
            encoded_bytes += len(await put_plain(tier, make_frame, blob(sequence), plain_of(sequence, size_bytes)))
        full = await tier.usage()
        assert full.blobs > empty.blobs
        assert full.used_bytes - empty.used_bytes >= encoded_bytes
        assert full.used_bytes <= full.capacity_bytes
        await tier.delete([blob(sequence) for sequence in sizes])
        after = await tier.usage()
        assert (after.used_bytes, after.blobs) == (empty.used_bytes, empty.blobs)

    async def test_no_pin_is_left_behind(self, tier: Tier, make_frame: MakeFrame, arena: Arena) -> None:
        sizes = [0, 5000, 70_000, 300_000, 2 * MIB]
        for sequence, size_bytes in enumerate(sizes):
            encoded = await put_plain(tier, make_frame, blob(sequence), plain_of(sequence, size_bytes))
            for byte_range in (None, ByteRange(0, 1), ByteRange(len(encoded) // 2, len(encoded))):
                await read_range(tier, blob(sequence), byte_range)
        await tier.delete([blob(sequence) for sequence in range(len(sizes))])
        await tier.aclose()
        assert arena.usage().reserved_bytes == 0

    async def test_closing_twice_is_closing_once(self, tier: Tier, make_frame: MakeFrame) -> None:
        await put_plain(tier, make_frame, blob(1), plain_of(1, 10))
        await tier.aclose()
        await tier.aclose()
