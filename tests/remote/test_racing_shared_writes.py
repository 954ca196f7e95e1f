"""Interleavings in which an acknowledged object of class `shared` could be lost: two writers of one key, two Completes of one
upload, a sweep beside either. Real tier and catalogs over a bucket in memory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import cast

import pytest
from catalog_contract import BUCKET, EPOCH, prepared, row
from fakes import ManualClock
from remote_tier_world import World as RemoteWorld
from remote_tier_world import raw_frame, remote_world
from test_lmdb_catalog import Place

from kvobj.arena import PinnedFrame
from kvobj.catalog.memory import MemoryCatalog
from kvobj.catalog.rows import CommitMode, Durability, ObjectRow, PartRow, UploadRow
from kvobj.errors import KvobjError, NotSharedError
from kvobj.ids import BlobId, make_blob_id
from kvobj.store.placement import ReadTier
from kvobj.store.remote_class import SharedWrites, Sharing
from kvobj.store.remote_frames import RemoteFrames
from kvobj.store.remote_room import QueueRoom
from kvobj.store.remote_uploads import RemoteUploads
from kvobj.tiers.in_use import BlobsInUse
from kvobj.tiers.protocol import ByteRange, Tier

LOG = logging.getLogger("test")


class Home:
    """As much of a tier as uploads read from: it has a sound frame of every blob."""

    def __init__(self, world: RemoteWorld) -> None:
        self._arena = world.arena

    async def get(self, blob_id: BlobId, byte_range: ByteRange | None = None) -> PinnedFrame:
        del byte_range
        return await raw_frame(self._arena, bytes(blob_id) * 8)


class World:
    """`shared` over the remote tier of `remote`; what was published is told at once."""

    def __init__(self, remote: RemoteWorld) -> None:
        self.remote = remote
        self.catalog = MemoryCatalog(has_remote=True)
        home = cast("Tier", Home(remote))
        frames = RemoteFrames(
            remote=remote.tier,
            local=(home,),
            read=cast("ReadTier", home),
            coded=lambda _: None,
            is_there=lambda blob_id: remote.directory.find(blob_id) is not None,
        )
        self.uploads = RemoteUploads(
            catalog=self.catalog,
            frames=frames,
            journal=self,
            in_use=BlobsInUse(),
            clock=ManualClock(),
            log=LOG,
            bytes_at_once=1 << 20,
        )
        self.shared = SharedWrites(
            catalog=self.catalog,
            uploads=self.uploads,
            room=QueueRoom(self.catalog.remote_queue, limit_bytes=1 << 20, wait_seconds=1.0),
            journal=self,
            refusal=str,
            settle=self._settle,
            write_down=self._write_down,
            deadline_seconds=5.0,
            waiting_max=8,
            log=LOG,
        )

    async def settled(self, position: int, *, timeout_seconds: float) -> bool:
        del position, timeout_seconds
        return True

    async def flush(self, *, timeout_seconds: float) -> bool:
        del timeout_seconds
        return True

    async def _settle(self, row: ObjectRow) -> ObjectRow:
        return row

    async def _write_down(self, rows: Sequence[ObjectRow], *, lossless: bool) -> None:
        raise AssertionError(rows, lossless)

    async def commit(self, given: ObjectRow) -> ObjectRow:
        outcome = await self.catalog.commit(given, mode=CommitMode.REPLACE, now_ms=1, to_remote=True)
        return outcome.row

    async def live(self, key: str) -> ObjectRow:
        (found,) = await self.catalog.lookup(BUCKET, [key])
        assert found is not None
        return found

    def lies_there(self, given: ObjectRow) -> bool:
        """Whether the server has every blob of the row."""
        keys = list(self.remote.bucket.objects)
        return all(
            any(key.startswith(self.remote.names.of_blob(BlobId(blob_id))) for key in keys)
            for blob_id in given.blob_ids
        )

    async def until_put(self, count: int) -> None:
        async with asyncio.timeout(5):
            while self.remote.bucket.count("put") < count:  # noqa: ASYNC110 - nobody tells of it
                await asyncio.sleep(0)


@asynccontextmanager
async def opened(tmp_path: Path, shm_path: Path) -> AsyncIterator[World]:
    async with remote_world(tmp_path, shm_path) as remote:
        world = World(remote)
        await prepared(world.catalog)
        world.uploads.start()
        try:
            yield world
        finally:
            await world.uploads.aclose()


async def test_a_complete_that_is_given_up_takes_nothing_from_the_one_that_was_acknowledged(
    tmp_path: Path, shm_path: Path
) -> None:
    async with opened(tmp_path, shm_path) as world:
        await world.commit(row("k", 1, durability=Durability.SHARED))
        # The same upload is completed twice at a time: a client's first answer was late. Both are at the last blob.
        whole = row("k", 2, 3, size_bytes=20)
        gate = world.remote.bucket.gates["put"] = asyncio.Semaphore(1)
        first, second = (
            asyncio.create_task(world.shared.replacing(whole, Sharing.REQUIRED, owns_blobs=False)) for _ in range(2)
        )
        await world.until_put(2)
        second.cancel()
        await asyncio.sleep(0)
        gate.release()
        stands = await world.commit(await first)
        with suppress(asyncio.CancelledError):
            await second
        assert stands.durability is Durability.SHARED
        assert world.lies_there(stands)


async def test_what_a_put_that_failed_has_uploaded_does_not_stay(tmp_path: Path, shm_path: Path) -> None:
    async with opened(tmp_path, shm_path) as world:
        await world.commit(row("k", 1, durability=Durability.SHARED))
        world.remote.bucket.gates["put"] = asyncio.Semaphore(1)
        putting = asyncio.create_task(world.shared.replacing(row("k", 2, 3, size_bytes=20), Sharing.REQUIRED))
        await world.until_put(2)
        putting.cancel()
        with suppress(asyncio.CancelledError):
            await putting
        assert not world.remote.bucket.objects


async def test_an_object_on_its_way_to_shared_is_not_replaced_by_one_that_is_local(
    tmp_path: Path, shm_path: Path
) -> None:
    """Its writer may be told so just before another row takes its place; lost with the node would then be both."""
    async with opened(tmp_path, shm_path) as world:
        gate = world.remote.bucket.gates["put"] = asyncio.Event()
        first = await world.commit(row("k", 1))
        telling = asyncio.create_task(world.shared.reached([first], Sharing.REQUIRED))
        await world.until_put(1)
        given = row("k", 2)
        replacing = asyncio.create_task(world.shared.replacing(given, Sharing.REQUIRED))
        await world.until_put(2)
        gate.set()
        replacement = await replacing
        (told,) = await telling
        assert told.durability is Durability.SHARED
        assert replacement.durability is Durability.SHARED
        assert world.lies_there(given)
        assert (await world.commit(replacement)).durability is Durability.SHARED


async def test_a_put_that_cannot_go_up_leaves_the_shared_object_that_stands(tmp_path: Path, shm_path: Path) -> None:
    async with opened(tmp_path, shm_path) as world:
        old = await world.commit(row("k", 1, durability=Durability.SHARED))
        world.remote.may_write = False
        with pytest.raises(NotSharedError):
            await world.shared.replacing(row("k", 2), Sharing.REQUIRED)
        assert (await world.live("k")).blob_ids == old.blob_ids


async def test_an_upload_that_fails_in_an_unforeseen_way_is_tried_again_and_holds_up_nobody(
    tmp_path: Path, shm_path: Path
) -> None:
    async with opened(tmp_path, shm_path) as world:
        world.remote.bucket.errors["put"] = ValueError("nobody thought of this")
        first = await world.commit(row("k", 1))
        with suppress(KvobjError):
            await world.uploads.wait_shared(first, deadline_seconds=0.2)
        del world.remote.bucket.errors["put"]
        assert await world.uploads.flush(timeout_seconds=5.0)
        assert (await world.live("k")).durability is Durability.SHARED


@pytest.mark.parametrize("steps", range(4))
async def test_a_blob_whose_upload_is_completed_while_a_sweep_reads_is_named(tmp_path: Path, steps: int) -> None:
    place = Place(tmp_path)
    catalog = await place.open()
    await prepared(catalog)
    try:
        for number, key in enumerate(("m", "z"), 10):
            await catalog.commit(row(key, number), mode=CommitMode.REPLACE, now_ms=1)
        await catalog.create_upload(UploadRow(BUCKET, "a", "u", 1, "main", Durability.LOCAL))
        whole = row("a", 1)
        part = PartRow("u", 1, whole.blobs, 10, "e", 1)
        await catalog.put_part(BUCKET, "a", part, now_ms=1)
        scan = catalog.scan_named_blobs()
        seen = [bytes(await anext(scan)) for _ in range(steps)]
        await catalog.commit(whole, mode=CommitMode.REPLACE, upload_id="u", now_ms=1)
        seen += [bytes(blob_id) async for blob_id in scan]
        assert bytes(make_blob_id(EPOCH, 1)) in seen
    finally:
        await place.close(catalog)
