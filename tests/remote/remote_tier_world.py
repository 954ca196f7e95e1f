"""A remote tier over a bucket in memory, with an arena and a directory of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from blake3 import blake3
from fakes_remote import DictBucket, open_database

from kvobj.arena import Arena, PinnedFrame
from kvobj.codec.codec import codec_named
from kvobj.codec.frame import raw_frame_bytes
from kvobj.ids import BlobId, make_blob_id
from kvobj.tiers.protocol import BlobNames
from kvobj.tiers.remote.directory import RemoteDirectory
from kvobj.tiers.remote.names import RemoteNames
from kvobj.tiers.remote.tier import RemoteTier, RemoteTimeouts

MIB = 1 << 20
NAMES = BlobNames("bucket", "a/key")


def blob(sequence: int) -> BlobId:
    return make_blob_id(7, sequence)


async def open_arena(shm_path: Path, *, mib: int = 16) -> Arena:
    """A small one, all of it usable."""
    arena = await Arena.open(
        shm_path / "arena",
        capacity_bytes=mib * MIB,
        region_bytes=mib * MIB,
        store_id=b"remote",
        boot_id="boot",
        huge_pages=False,
    )
    await arena.populate()
    return arena


async def raw_frame(arena: Arena, plain: bytes) -> PinnedFrame:
    """A complete raw frame in an extent of its own; the caller releases it."""
    frame_bytes = raw_frame_bytes(len(plain))
    frame = PinnedFrame(await arena.reserve(frame_bytes, timeout_seconds=5), frame_bytes=frame_bytes)
    codec_named("raw").encode(memoryview(plain), frame.writable, digest=blake3(plain).digest())
    return frame


class World:
    """`tier` over `bucket`. What is held at the end of a test is a leak."""

    def __init__(self, arena: Arena, directory: RemoteDirectory) -> None:
        self.arena = arena
        self.directory = directory
        self.bucket = DictBucket()
        self.names = RemoteNames("store/")
        self.may_write = True
        self.tier = self.another()

    def another(self, *, puts_at_once: int = 16, lists_at_once: int = 16, close_seconds: float = 10.0) -> RemoteTier:
        """Another tier over the same bucket and directory."""
        return RemoteTier(
            self.bucket,
            self.directory,
            arena=self.arena,
            names=self.names,
            may_write=lambda: self.may_write,
            timeouts=RemoteTimeouts(reserve_seconds=2.0, close_seconds=close_seconds),
            puts_at_once=puts_at_once,
            lists_at_once=lists_at_once,
        )

    def key(self, blob_id: BlobId, names: BlobNames = NAMES) -> str:
        return self.names.key(blob_id, self.names.name(names))

    async def put(self, blob_id: BlobId, plain: bytes, names: BlobNames = NAMES) -> bytes:
        """Put a raw frame of `plain`; its encoded bytes."""
        frame = await raw_frame(self.arena, plain)
        try:
            encoded = bytes(frame.view)
            await self.tier.put(blob_id, frame, names)
        finally:
            frame.release()
        return encoded

    async def read(self, blob_id: BlobId) -> bytes | None:
        frame = await self.tier.get(blob_id)
        if frame is None:
            return None
        try:
            await frame.complete()
            return bytes(frame.view)
        finally:
            frame.release()


@asynccontextmanager
async def remote_world(tmp_path: Path, shm_path: Path) -> AsyncIterator[World]:
    """The world, closed at the end, when no extent may be held any more."""
    arena = await open_arena(shm_path)
    database = open_database(tmp_path, shm_path)
    world = World(arena, RemoteDirectory(database))
    try:
        yield world
        await world.tier.aclose()
        assert arena.usage().reserved_bytes == 0
    finally:
        await world.tier.aclose()
        await database.aclose()
        await arena.aclose(remove=True)


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until it holds."""
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - what is waited for tells nobody
            await asyncio.sleep(0)
