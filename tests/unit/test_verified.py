"""Verification: a wrong byte is never served, whatever its place, the codec, and the moment it is found."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest
from blake3 import blake3
from fakes import DictTier, Fault, FaultyTier, flip, truncate
from fakes_arena import NAMES, frame_of, plain_of, put_plain, read_whole, small_arena

from kvobj.arena import Arena, PinnedFrame
from kvobj.codec.frame import (
    BLOCK_PLAIN_BYTES,
    DIRECTORY_ENTRY_BYTES,
    HEADER_BYTES,
    block_crcs,
    parse_frame,
    raw_frame_bytes,
    raw_payload_offset,
    seal_raw,
)
from kvobj.errors import FrameCorruptError, KvobjError, TierUnavailableError
from kvobj.ids import BlobId, make_blob_id
from kvobj.metrics import Metrics
from kvobj.tiers.instruments import TierInstruments
from kvobj.tiers.protocol import ByteRange
from kvobj.tiers.verified import Verified

BLOB = make_blob_id(1, 1)
T = TypeVar("T")


@dataclass
class Checked:
    """A verified tier over a dict behind faults to be set, and what it told."""

    arena: Arena
    medium: DictTier
    faults: FaultyTier
    corrupt: list[BlobId] = field(default_factory=list)
    verified: list[BlobId] = field(default_factory=list)
    trusted: set[BlobId] = field(default_factory=set)
    jobs: int = 0

    def __post_init__(self) -> None:
        self.tier = Verified(
            self.faults,
            run=self.run,
            instruments=TierInstruments(Metrics()),
            on_corrupt=self.corrupt.append,
            on_verified=self.verified.append,
            needs_check=lambda blob_id: blob_id not in self.trusted,
        )

    def run(self, work: Callable[..., T], /, *arguments: object) -> Awaitable[T]:
        self.jobs += 1
        return asyncio.to_thread(work, *arguments)

    def spoil(self, change: Callable[[memoryview], None]) -> None:
        self.faults.faults["get", 0] = Fault(spoil=change)


@pytest.fixture
async def checked(shm_path: Path) -> AsyncIterator[Checked]:
    async with small_arena(shm_path) as arena:
        medium = DictTier(arena, name="medium")
        checked = Checked(arena, medium, FaultyTier(medium, arena))
        yield checked
        await checked.tier.aclose()
        assert arena.usage().reserved_bytes == 0


def compressible(size_bytes: int) -> bytes:
    return (b"a text that compresses well, " * (size_bytes // 29 + 1))[:size_bytes]


@pytest.mark.parametrize("codec", ["raw", "zp"])
@pytest.mark.parametrize(
    "size_bytes", [0, 1, 64 * 1024, 64 * 1024 + 1, 5 * BLOCK_PLAIN_BYTES + 3, 20 * BLOCK_PLAIN_BYTES]
)
async def test_a_right_frame_passes_and_is_said_to_be_verified(checked: Checked, codec: str, size_bytes: int) -> None:
    encoded = await put_plain(checked.tier, checked.arena, BLOB, compressible(size_bytes), codec=codec)
    assert await read_whole(checked.tier, BLOB) == encoded
    assert (checked.verified, checked.corrupt) == ([BLOB], [])


async def test_what_is_small_is_hashed_where_it_is(checked: Checked) -> None:
    await put_plain(checked.tier, checked.arena, BLOB, plain_of(1, 64 * 1024))
    assert await read_whole(checked.tier, BLOB)
    assert checked.jobs == 0


async def test_what_is_large_is_hashed_on_the_pool(checked: Checked) -> None:
    await put_plain(checked.tier, checked.arena, BLOB, plain_of(1, 64 * 1024 + 1))
    assert await read_whole(checked.tier, BLOB)
    assert checked.jobs == 1


@pytest.mark.parametrize("codec", ["raw", "zp"])
async def test_a_flipped_bit_in_a_small_frame_is_a_miss(checked: Checked, codec: str) -> None:
    encoded = await put_plain(checked.tier, checked.arena, BLOB, compressible(5000), codec=codec)
    offset = raw_payload_offset(5000)
    for at in (0, 5, 13, 100, 121, HEADER_BYTES, HEADER_BYTES + 5, HEADER_BYTES + 9, offset, len(encoded) - 1):
        checked.spoil(flip(at))
        assert await checked.tier.get(BLOB) is None
    assert len(checked.corrupt) == 10
    assert not checked.verified


async def test_a_hole_in_place_of_the_frame_is_a_miss(checked: Checked) -> None:
    await put_plain(checked.tier, checked.arena, BLOB, plain_of(1, 5000))
    for length in (0, 64, HEADER_BYTES, 1000):
        checked.spoil(truncate(length))
        assert await checked.tier.get(BLOB) is None


async def test_a_bit_flipped_late_ends_the_frame_before_its_block(checked: Checked) -> None:
    plain = plain_of(1, 24 * BLOCK_PLAIN_BYTES)
    encoded = await put_plain(checked.tier, checked.arena, BLOB, plain)
    bad_block = 20
    bad_at = raw_payload_offset(len(plain)) + bad_block * BLOCK_PLAIN_BYTES
    checked.spoil(flip(bad_at + 77))
    frame = await checked.tier.get(BLOB)
    assert frame is not None
    assert frame.progress is not None
    with pytest.raises(FrameCorruptError):
        await frame.complete()
    assert 0 < frame.progress.filled <= bad_at
    assert bytes(frame.view[: frame.progress.filled]) == encoded[: frame.progress.filled]
    with pytest.raises(FrameCorruptError):
        await frame.ready(bad_at + 1)
    frame.release()
    assert (checked.corrupt, checked.verified) == ([BLOB], [])


async def frame_with_a_wrong_digest(arena: Arena, plain: bytes) -> PinnedFrame:
    frame_bytes = raw_frame_bytes(len(plain))
    frame = PinnedFrame(await arena.reserve(frame_bytes, timeout_seconds=5), frame_bytes=frame_bytes)
    payload = frame.writable[raw_payload_offset(len(plain)) :]
    payload[:] = plain
    wrong = blake3(plain + b"x").digest()
    seal_raw(frame.writable, plain_bytes=len(plain), digest=wrong, block_crcs=block_crcs(payload))
    return frame


async def test_a_wrong_digest_of_a_short_frame_is_a_miss(checked: Checked) -> None:
    for sequence, size_bytes in enumerate((0, 1000, 3 * BLOCK_PLAIN_BYTES)):
        frame = await frame_with_a_wrong_digest(checked.arena, plain_of(1, size_bytes))
        await checked.tier.put(make_blob_id(2, sequence), frame, NAMES)
        frame.release()
        assert await checked.tier.get(make_blob_id(2, sequence)) is None
    assert len(checked.corrupt) == 3


async def test_a_wrong_digest_of_a_long_frame_is_never_served_whole(checked: Checked) -> None:
    frame = await frame_with_a_wrong_digest(checked.arena, plain_of(1, 20 * BLOCK_PLAIN_BYTES))
    await checked.tier.put(BLOB, frame, NAMES)
    frame.release()
    got = await checked.tier.get(BLOB)
    assert got is not None
    with pytest.raises(FrameCorruptError):
        await got.complete()
    assert got.progress is not None
    assert got.progress.filled < got.size
    got.release()
    assert (checked.corrupt, checked.verified) == ([BLOB], [])


async def test_blocks_are_served_as_they_come(checked: Checked) -> None:
    plain = plain_of(1, 8 * BLOCK_PLAIN_BYTES)
    encoded = await put_plain(checked.tier, checked.arena, BLOB, plain)
    checked.medium.fill_gates = gates = [asyncio.Event() for _ in range(4)]
    gates[0].set()
    frame = await checked.tier.get(BLOB)
    assert frame is not None
    assert frame.progress is not None
    first = frame.progress.filled
    assert raw_payload_offset(len(plain)) + BLOCK_PLAIN_BYTES <= first <= len(encoded) // 4
    assert bytes(frame.view[:first]) == encoded[:first]
    for gate in gates:
        gate.set()
    await frame.complete()
    assert bytes(frame.view) == encoded
    frame.release()
    assert checked.verified == [BLOB]


async def test_a_medium_that_fails_later_fails_the_frame_and_quarantines_nothing(checked: Checked) -> None:
    await put_plain(checked.tier, checked.arena, BLOB, plain_of(1, 8 * BLOCK_PLAIN_BYTES))
    gate = asyncio.Event()
    gate.set()
    checked.medium.fill_gates, checked.medium.fill_error = [gate] * 4, TierUnavailableError("down")
    frame = await checked.tier.get(BLOB)
    assert frame is not None
    with pytest.raises(TierUnavailableError):
        await frame.complete()
    frame.release()
    assert (checked.corrupt, checked.verified) == ([], [])


async def test_a_medium_that_fails_at_once_is_an_error_and_no_miss(checked: Checked) -> None:
    checked.faults.faults["get", 1] = Fault(error=TierUnavailableError("down"))
    with pytest.raises(TierUnavailableError):
        await checked.tier.get(BLOB)


async def test_corruption_that_the_medium_itself_finds_is_a_miss(checked: Checked) -> None:
    checked.faults.faults["get", 1] = Fault(error=FrameCorruptError("record page"))
    assert await checked.tier.get(BLOB) is None
    assert checked.corrupt == [BLOB]


@pytest.mark.parametrize("codec", ["raw", "zp"])
async def test_a_range_of_a_wrong_block_is_never_served(checked: Checked, codec: str) -> None:
    plain = compressible(4 * BLOCK_PLAIN_BYTES)
    encoded = await put_plain(checked.tier, checked.arena, BLOB, plain, codec=codec)
    header = parse_frame(memoryview(encoded), len(encoded))
    start, stop = header.offset(2), header.end(2)

    def spoil_block_2(view: memoryview) -> None:
        # The head is read alone first and is as long as its range; the blocks' read is spoiled in its last byte.
        if len(view) != min(len(encoded), raw_payload_offset(128 << 20)):
            view[-1] ^= 1

    checked.spoil(spoil_block_2)
    if codec == "raw":
        assert await checked.tier.get(BLOB, ByteRange(start + 5, start + 6)) is None
        assert checked.corrupt == [BLOB]
    checked.faults.faults.clear()
    frame = await checked.tier.get(BLOB, ByteRange(start + 5, stop - 5))
    assert frame is not None
    await frame.ready(frame.size)
    assert bytes(frame.view) == encoded[start + 5 : stop - 5]
    frame.release()
    assert not checked.verified


async def test_a_wrong_head_makes_its_ranges_misses(checked: Checked) -> None:
    encoded = await put_plain(checked.tier, checked.arena, BLOB, plain_of(1, 4 * BLOCK_PLAIN_BYTES))
    checked.spoil(flip(90))
    for byte_range in (ByteRange(0, 1), ByteRange(100, 300), ByteRange(len(encoded) - 1, len(encoded))):
        assert await checked.tier.get(BLOB, byte_range) is None
    assert checked.corrupt == [BLOB] * 3


@pytest.mark.parametrize("codec", ["raw", "zp"])
async def test_every_byte_of_a_head_counts_where_a_range_shows_it(checked: Checked, codec: str) -> None:
    plain = compressible(3 * BLOCK_PLAIN_BYTES + 5)
    encoded = await put_plain(checked.tier, checked.arena, BLOB, plain, codec=codec)
    header = parse_frame(memoryview(encoded), len(encoded))
    for at in range(header.payload_offset):
        asked = ByteRange(at, at + 1)
        checked.spoil(flip(at, 0x10))
        assert await checked.tier.get(BLOB, asked) is None, f"byte {at}"
        checked.faults.faults.clear()
        frame = await checked.tier.get(BLOB, asked)
        assert frame is not None
        await frame.complete()
        assert bytes(frame.view) == encoded[at : at + 1]
        frame.release()


async def test_a_range_shows_no_entry_of_the_directory_before_its_block_is_checked(checked: Checked) -> None:
    encoded = await put_plain(checked.tier, checked.arena, BLOB, plain_of(1, 40 * BLOCK_PLAIN_BYTES))
    checked.spoil(flip(HEADER_BYTES + 39 * DIRECTORY_ENTRY_BYTES + 9))
    assert await checked.tier.get(BLOB, ByteRange(0, raw_payload_offset(40 * BLOCK_PLAIN_BYTES) + 10)) is None
    assert checked.corrupt == [BLOB]
    frame = await checked.tier.get(BLOB, ByteRange(HEADER_BYTES, HEADER_BYTES + 38 * DIRECTORY_ENTRY_BYTES))
    assert frame is not None  # what it does not show does not matter to it
    assert bytes(frame.view) == encoded[HEADER_BYTES : HEADER_BYTES + 38 * DIRECTORY_ENTRY_BYTES]
    frame.release()


async def test_a_long_range_is_served_as_it_is_checked(checked: Checked) -> None:
    plain = plain_of(1, 40 * BLOCK_PLAIN_BYTES)
    encoded = await put_plain(checked.tier, checked.arena, BLOB, plain)
    offset = raw_payload_offset(len(plain))
    start, stop = offset + BLOCK_PLAIN_BYTES + 100, offset + 39 * BLOCK_PLAIN_BYTES + 100
    frame = await checked.tier.get(BLOB, ByteRange(start, stop))
    assert frame is not None
    await frame.ready(10)
    assert bytes(frame.view[:10]) == encoded[start : start + 10]
    await frame.complete()
    assert bytes(frame.view) == encoded[start:stop]
    frame.release()


async def test_a_trusted_frame_is_handed_on_unchecked(checked: Checked) -> None:
    await put_plain(checked.tier, checked.arena, BLOB, plain_of(1, 5000))
    checked.trusted.add(BLOB)
    checked.spoil(flip(3000))
    assert await read_whole(checked.tier, BLOB)
    assert (checked.corrupt, checked.verified, checked.faults.calls["get"]) == ([], [], 1)


async def test_a_reader_that_leaves_early_leaks_nothing(checked: Checked) -> None:
    await put_plain(checked.tier, checked.arena, BLOB, plain_of(1, 8 * BLOCK_PLAIN_BYTES))
    checked.medium.fill_gates = gates = [asyncio.Event() for _ in range(4)]
    gates[0].set()
    frame = await checked.tier.get(BLOB)
    assert frame is not None
    frame.release()
    for gate in gates:
        gate.set()


async def test_a_reader_cancelled_before_the_first_block_leaks_nothing(checked: Checked) -> None:
    await put_plain(checked.tier, checked.arena, BLOB, plain_of(1, 8 * BLOCK_PLAIN_BYTES))
    checked.medium.fill_gates = gates = [asyncio.Event() for _ in range(4)]
    getting = asyncio.create_task(checked.tier.get(BLOB))
    for _ in range(5):
        await asyncio.sleep(0)
    getting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await getting
    for gate in gates:
        gate.set()


async def test_a_pool_that_is_gone_reaches_the_reader(checked: Checked) -> None:
    await put_plain(checked.tier, checked.arena, BLOB, plain_of(1, 24 * BLOCK_PLAIN_BYTES))

    async def broken(work: Callable[..., T], /, *arguments: object) -> T:
        checked.jobs += 1
        if checked.jobs > 1:
            raise RuntimeError("pool is shut down")
        return await asyncio.to_thread(work, *arguments)

    tier = Verified(
        checked.medium, run=broken, instruments=TierInstruments(Metrics()), on_corrupt=checked.corrupt.append
    )
    frame = await tier.get(BLOB)
    assert frame is not None
    with pytest.raises(RuntimeError, match="shut down"):
        await frame.complete()
    frame.release()


async def test_every_byte_of_a_small_frame_counts(checked: Checked) -> None:
    encoded = await put_plain(checked.tier, checked.arena, BLOB, plain_of(1, 700))
    for at in range(0, len(encoded), 7):
        checked.spoil(flip(at, 0x80))
        try:
            served = await read_whole(checked.tier, BLOB)
        except KvobjError:
            served = None
        assert served is None


async def test_the_pinned_extent_is_the_mediums_own(checked: Checked) -> None:
    frame = await frame_of(checked.arena, plain_of(1, 8 * BLOCK_PLAIN_BYTES))
    await checked.tier.put(BLOB, frame, NAMES)
    got = await checked.tier.get(BLOB)
    assert got is not None
    assert got.pin.extent == frame.pin.extent
    assert got.is_whole
    await got.complete()
    got.release()
    frame.release()
