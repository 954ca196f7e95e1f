"""Room that was had ahead for a bucket with regions of its own, when the bucket's name goes to another, over a whole node."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from module_paths import ModulePaths
from node_writer import SIZE, writer_of
from real_store import MIB, node_settings, running_node

from kvobj.app.node import Node
from kvobj.arena import Lane
from kvobj.catalog.rows import BucketKind, BucketRow, Durability
from kvobj.config.settings import BucketSettings
from kvobj.errors import InvalidRequestError
from kvobj.same_host.messages import NewItem
from kvobj.store.places import ChunkPlace, default_namespace
from kvobj.store.requests import PutRequest
from kvobj.workers.given_rooms import GivenRooms


@pytest.fixture
async def node(tmp_path: Path, module_paths: ModulePaths) -> AsyncIterator[Node]:
    settings = node_settings(tmp_path, module_paths.mktemp("memory"), dram_mib=64)
    buckets = (BucketSettings("apart", "kv", "memory", regions="own"),)
    dram = replace(settings.dram, region_bytes=16 * MIB)
    async with running_node(replace(settings, buckets=buckets, dram=dram)) as running:
        await running.arena.populate()
        yield running


async def make_anew(node: Node) -> BucketRow:
    await node.store.delete_bucket("apart")
    await node.catalog.create_bucket(BucketRow("apart", BucketKind.KV, "another", 0, Durability.MEMORY))
    row = await node.catalog.bucket("apart")
    assert row is not None
    return row


async def test_prepared_room_of_a_bucket_that_is_gone_takes_no_chunk_of_another_that_has_its_name(node: Node) -> None:
    writer = await writer_of(node, "apart")
    rooms = writer.prepare(b"x" * SIZE)
    (room,) = writer.writes._rooms.values()
    assert node.arena.lane_of(room.pin.extent.region) == Lane.of(writer.rights.bucket)
    writer.rights = replace(writer.rights, bucket=await make_anew(node))  # as its next renewal says
    with pytest.raises(InvalidRequestError):
        await writer.commit([NewItem("k", SIZE)], rooms)
    assert await node.catalog.lookup("apart", ["k"]) == [None]
    told = await writer.commit([NewItem("k", SIZE)], writer.prepare(b"x" * SIZE))
    assert [item.status for item in told.items] == [200]
    await writer.writes.aclose()


async def test_a_workers_room_is_of_the_bucket_that_it_was_asked_for(node: Node) -> None:
    bucket = await node.catalog.bucket("apart")
    assert bucket is not None
    place = ChunkPlace(default_namespace("apart"), None, 0)
    request = PutRequest(bucket=bucket, key="k", size_bytes=SIZE, owner="root", place=place)
    rooms = GivenRooms(node.prepared, workers=1)
    (room,) = rooms.give(request, 1)
    assert rooms.get(room.handle, request).plain_bytes == SIZE
    anew = PutRequest(bucket=await make_anew(node), key="k", size_bytes=SIZE, owner="another", place=place)
    with pytest.raises(InvalidRequestError):
        rooms.get(room.handle, anew)
    rooms.close()
    assert len(rooms) == 0
