"""A small arena and raw frames in it, for tests of what lies above tiers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from blake3 import blake3

from kvobj.arena import Arena, PinnedFrame
from kvobj.codec.codec import codec_named
from kvobj.ids import BlobId
from kvobj.tiers.protocol import BlobNames, Tier

NAMES = BlobNames(bucket="bucket", key="key")


@asynccontextmanager
async def small_arena(directory: Path, *, capacity_bytes: int = 32 << 20) -> AsyncIterator[Arena]:
    """An arena of one region, populated, removed afterwards."""
    arena = await Arena.open(
        directory / "arena",
        capacity_bytes=capacity_bytes,
        region_bytes=capacity_bytes,
        store_id=b"test",
        boot_id="boot",
        huge_pages=False,
    )
    try:
        await arena.populate()
        yield arena
    finally:
        await arena.aclose(remove=True)


def plain_of(seed: int, size_bytes: int) -> bytes:
    """Bytes without repeats, other ones for each seed."""
    return blake3(seed.to_bytes(8, "big")).digest(length=size_bytes)


async def frame_of(arena: Arena, plain: bytes, *, codec: str = "raw") -> PinnedFrame:
    """A complete frame of `plain` in an extent of its own, to be released by the caller."""
    into = bytearray(codec_named(codec).encode_bound(len(plain)))
    length = codec_named(codec).encode(
        memoryview(plain), memoryview(into), digest=blake3(plain).digest(), element_bytes=1
    )
    frame = PinnedFrame(await arena.reserve(length, timeout_seconds=5), frame_bytes=length)
    frame.writable[:] = into[:length]
    return frame


async def put_plain(tier: Tier, arena: Arena, blob_id: BlobId, plain: bytes, *, codec: str = "raw") -> bytes:
    """Put a frame of `plain` and return its encoded bytes; the caller's pin is released."""
    frame = await frame_of(arena, plain, codec=codec)
    try:
        await tier.put(blob_id, frame, NAMES)
        return bytes(frame.view)
    finally:
        frame.release()


async def read_whole(tier: Tier, blob_id: BlobId) -> bytes | None:
    """The encoded bytes the tier serves, its pin released again."""
    frame = await tier.get(blob_id)
    if frame is None:
        return None
    try:
        await frame.ready(frame.size)
        return bytes(frame.view)
    finally:
        frame.release()
