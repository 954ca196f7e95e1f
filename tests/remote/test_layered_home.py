"""Nvme with the remote below it, as recovery, scrub and sweep see it: over a real server, asked for nothing but bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from fakes import DictTier
from fakes_arena import NAMES, plain_of, put_plain, read_whole, small_arena
from fakes_remote import open_database, opened_bucket
from remote_servers import RemoteStore
from s3_proxy import FaultProxy, proxy_thread

from kvobj.arena import Arena, PinnedFrame
from kvobj.errors import TierUnavailableError
from kvobj.ids import BlobId, make_blob_id
from kvobj.tiers.corrupt_blobs import CorruptBlobs
from kvobj.tiers.layered_home import LayeredHome
from kvobj.tiers.protocol import BlobNames, ByteRange
from kvobj.tiers.remote.directory import RemoteDirectory
from kvobj.tiers.remote.names import RemoteNames
from kvobj.tiers.remote.tier import RemoteTier
from kvobj.tiers.reread import Reread

HERE, THERE, BOTH, NOWHERE = (make_blob_id(1, number) for number in range(4))
PLAIN = plain_of(1, 50_000)


@dataclass
class World:
    home: LayeredHome
    nvme: DictTier
    remote: RemoteTier
    arena: Arena
    proxy: FaultProxy

    def requests(self) -> int:
        return sum(self.proxy.requests.values())


@pytest.fixture
def proxy(kvobj_remote: RemoteStore) -> Iterator[FaultProxy]:
    with proxy_thread(kvobj_remote.host, kvobj_remote.port) as running:
        yield running


@pytest.fixture
async def world(kvobj_remote: RemoteStore, proxy: FaultProxy, tmp_path: Path, shm_path: Path) -> AsyncIterator[World]:
    database = open_database(tmp_path, shm_path)
    settings = replace(kvobj_remote.behind(proxy.port).settings(), hedge_seconds=0.0)
    async with small_arena(shm_path) as arena, opened_bucket(settings) as bucket:
        await bucket.probe()  # else it goes on beside what is counted here
        directory = RemoteDirectory(database)
        remote = RemoteTier(bucket, directory, arena=arena, names=RemoteNames(settings.prefix))
        nvme = DictTier(arena, name="nvme")
        home = LayeredHome(nvme, remote, blobs=directory)
        await put_plain(nvme, arena, HERE, PLAIN)
        await put_plain(nvme, arena, BOTH, PLAIN)
        await put_plain(remote, arena, BOTH, PLAIN)
        await put_plain(remote, arena, THERE, PLAIN)
        yield World(home, nvme, remote, arena, proxy)
        await home.aclose()
    await database.aclose()


async def test_a_blob_is_missing_only_where_neither_has_it_and_nobody_is_asked(world: World) -> None:
    before = world.requests()
    assert await world.home.missing([HERE, THERE, BOTH, NOWHERE]) == [NOWHERE]
    assert await world.home.get(NOWHERE) is None
    assert world.requests() == before


async def test_reads_come_from_nvme_and_only_else_from_the_remote(world: World) -> None:
    before = world.requests()
    encoded = await read_whole(world.home, BOTH)
    assert world.requests() == before
    assert await read_whole(world.home, THERE) == encoded
    assert world.requests() == before + 1
    assert await world.nvme.missing([THERE]) == [THERE]  # nothing is promoted here
    part = await world.home.get(THERE, ByteRange(10, 20))
    assert part is not None
    await part.complete()
    assert encoded is not None
    assert bytes(part.view) == encoded[10:20]
    part.release()


async def test_what_is_put_is_put_here_alone(world: World) -> None:
    before = world.requests()
    await put_plain(world.home, world.arena, NOWHERE, PLAIN)
    assert not world.home.is_remote(NOWHERE)
    assert world.requests() == before
    assert [blob_id async for blob_id in world.home.scan()] == [HERE, BOTH, NOWHERE]


async def test_a_delete_is_of_both_and_asks_the_remote_only_for_what_it_has(
    world: World, kvobj_remote: RemoteStore
) -> None:
    before = world.requests()
    await world.home.delete([HERE, NOWHERE])
    assert world.requests() == before
    await world.home.delete([THERE, BOTH])
    assert world.nvme.frames == {}
    assert kvobj_remote.keys("store/blobs/") == []


class OnceWrong(DictTier):
    """Calls a blob corrupt so many times, as a tier that checks does, and then has it."""

    def __init__(self, arena: Arena, corrupt: CorruptBlobs, times: int) -> None:
        super().__init__(arena)
        self.corrupt, self.left = corrupt, times

    async def get(self, blob_id: BlobId, byte_range: ByteRange | None = None) -> PinnedFrame | None:
        if self.left:
            self.left -= 1
            self.corrupt.note(blob_id)
            return None
        return await super().get(blob_id, byte_range)


@pytest.mark.parametrize(("times", "is_read"), [(0, True), (1, True), (2, False)])
async def test_what_came_wrong_is_read_once_more(shm_path: Path, times: int, is_read: bool) -> None:  # noqa: FBT001
    async with small_arena(shm_path) as arena:
        corrupt = CorruptBlobs()
        inner = OnceWrong(arena, corrupt, times)
        await put_plain(inner, arena, HERE, PLAIN)
        assert (await read_whole(Reread(inner, corrupt=corrupt), HERE) is not None) is is_read
        await inner.aclose()


async def test_a_replaced_object_is_what_is_read_from_then_on(world: World, kvobj_remote: RemoteStore) -> None:
    (key,) = [key for key in kvobj_remote.keys("store/blobs/") if THERE.hex() in key]
    stored = kvobj_remote.read(key)
    assert stored is not None
    kvobj_remote.write(key, stored[:-1] + b"?")
    good = await world.nvme.get(BOTH)
    assert good is not None
    await world.remote.replace(THERE, good, NAMES)
    assert kvobj_remote.read(key) == stored
    with pytest.raises(TierUnavailableError):
        await world.remote.replace(NOWHERE, good, BlobNames("b", "k"))
    good.release()
