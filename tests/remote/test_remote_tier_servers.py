"""The remote tier over real servers: large frames in parts, what a cancelled put leaves, blobs of other nodes, coded ones too."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3
from fakes_remote import on_thread, open_database, opened_bucket
from remote_servers import RemoteStore
from remote_tier_world import MIB, NAMES, blob, open_arena, raw_frame, until

from kvobj.arena import Arena, PinnedFrame
from kvobj.codec.frame import raw_frame_bytes, raw_payload_offset
from kvobj.database import Database
from kvobj.metrics import Metrics
from kvobj.tiers.coded import Coded
from kvobj.tiers.coded_frames import Coding, coded_bound, encode_coded
from kvobj.tiers.instruments import TierInstruments
from kvobj.tiers.protocol import ByteRange, Tier
from kvobj.tiers.remote.bucket import RemoteBucket
from kvobj.tiers.remote.directory import RemoteCodings, RemoteDirectory
from kvobj.tiers.remote.located import Located
from kvobj.tiers.remote.names import CodedNames, RemoteNames
from kvobj.tiers.remote.tier import RemoteTier

PART_BYTES = 5 * MIB


class Node:
    """One node's side of the remote: a directory and a tier of its own, in an arena that all of a test share."""

    def __init__(self, bucket: RemoteBucket, database: Database, arena: Arena, prefix: str) -> None:
        self.tier = RemoteTier(bucket, RemoteDirectory(database), arena=arena, names=RemoteNames(prefix))
        instruments = TierInstruments(Metrics())
        index = RemoteCodings(self.tier.directory)
        coded = Coded(self.tier, index=index, arena=arena, run=on_thread, instruments=instruments)
        self.read: Tier = Located(coded, remote=self.tier)


@pytest.fixture
async def arena(shm_path: Path) -> AsyncIterator[Arena]:
    arena = await open_arena(shm_path, mib=64)
    yield arena
    assert arena.usage().reserved_bytes == 0
    await arena.aclose(remove=True)


@pytest.fixture
async def nodes(
    remote_store: RemoteStore, arena: Arena, tmp_path: Path, shm_path: Path
) -> AsyncIterator[tuple[Node, Node]]:
    """Two nodes of one store."""
    databases = [open_database(tmp_path / name, shm_path / name) for name in ("a", "b")]
    async with opened_bucket(replace(remote_store.settings(), part_bytes=PART_BYTES)) as bucket:
        first, second = (Node(bucket, database, arena, remote_store.prefix) for database in databases)
        yield first, second
        for node in (first, second):
            await node.tier.aclose()
    for database in databases:
        await database.aclose()


def blobs_of(store: RemoteStore) -> list[str]:
    """The keys of blobs: the bucket itself tries things out beside them."""
    return store.keys(f"{store.prefix}blobs/")


def uploads_of(store: RemoteStore) -> list[str]:
    """The keys of unfinished uploads of blobs."""
    return [key for key, _ in store.uploads() if key.startswith(f"{store.prefix}blobs/")]


def has_parts(store: RemoteStore) -> bool:
    """Whether a part of an unfinished upload has arrived, so that whoever sends it knows the upload's id."""
    with store.raw() as raw:
        for key, upload_id in store.uploads():
            if key.startswith(f"{store.prefix}blobs/"):
                query = {"uploadId": upload_id}
                return b"<Part>" in raw.request("GET", f"/{store.bucket}/{key}", query=query, payload=None).body
    return False


def plain_of(size_bytes: int) -> bytes:
    return hashlib.shake_128(b"remote").digest(size_bytes)


async def content(frame: PinnedFrame | None) -> bytes | None:
    if frame is None:
        return None
    try:
        await frame.complete()
        return bytes(frame.view)
    finally:
        frame.release()


async def test_a_frame_of_many_parts_comes_back_whole(
    nodes: tuple[Node, Node], arena: Arena, remote_store: RemoteStore
) -> None:
    node, other = nodes
    frame = await raw_frame(arena, plain_of(3 * PART_BYTES + 77))
    encoded = bytes(frame.view)
    await node.tier.put(blob(1), frame, NAMES)
    frame.release()
    (key,) = blobs_of(remote_store)
    assert remote_store.read(key) == encoded
    assert uploads_of(remote_store) == []
    filling = await other.tier.get(blob(1))
    assert filling is not None
    assert filling.size == len(encoded)
    assert await content(filling) == encoded
    span = ByteRange(PART_BYTES - 10, 2 * PART_BYTES + 10)
    assert await content(await other.tier.get(blob(1), span)) == encoded[span.start : span.stop]


async def test_a_cancelled_put_of_many_parts_leaves_nothing(
    nodes: tuple[Node, Node], arena: Arena, remote_store: RemoteStore
) -> None:
    node, _ = nodes
    frame = await raw_frame(arena, plain_of(4 * PART_BYTES))
    putting = asyncio.create_task(node.tier.put(blob(1), frame, NAMES))
    async with asyncio.timeout(20):
        while not await asyncio.to_thread(has_parts, remote_store) and not putting.done():  # noqa: ASYNC110 - a server's
            await asyncio.sleep(0)
    was_caught = not putting.done()
    putting.cancel()
    await asyncio.gather(putting, return_exceptions=True)
    await until(lambda: not node.tier.in_flight)
    frame.release()
    if was_caught:
        assert uploads_of(remote_store) == []
    await node.tier.delete([blob(1)])
    assert blobs_of(remote_store) == []
    assert await node.tier.get(blob(1)) is None


async def test_a_node_finds_and_deletes_what_another_has_put(
    nodes: tuple[Node, Node], arena: Arena, remote_store: RemoteStore
) -> None:
    node, other = nodes
    frame = await raw_frame(arena, b"of the first node")
    encoded = bytes(frame.view)
    await node.tier.put(blob(1), frame, NAMES)
    frame.release()
    assert await other.tier.missing([blob(2), blob(1)]) == [blob(2)]
    assert await content(await other.read.get(blob(1))) == encoded
    await other.tier.delete([blob(1)])
    assert blobs_of(remote_store) == []
    assert await node.tier.get(blob(1)) is None
    assert await node.tier.missing([blob(1)]) == [blob(1)]


async def test_a_coded_blob_of_another_node_is_given_decoded(nodes: tuple[Node, Node], arena: Arena) -> None:
    node, other = nodes
    plain = bytes(range(64)) * 8192
    coding = Coding("zp", element_bytes=2)
    pin = await arena.reserve(coded_bound(coding, len(plain)), timeout_seconds=5)
    frame_bytes = encode_coded(memoryview(plain), pin.view, coding, digest=blake3(plain).digest())
    frame = PinnedFrame(pin, frame_bytes=frame_bytes)
    stored = bytes(frame.view)
    await node.tier.put(blob(1), frame, CodedNames("bucket", "key", "zp", len(plain)))
    frame.release()
    decoded = await content(await other.read.get(blob(1)))
    assert decoded is not None
    assert len(decoded) == raw_frame_bytes(len(plain))
    offset = raw_payload_offset(len(plain))
    assert decoded[offset:] == plain
    span = ByteRange(offset + 1000, offset + 1100)
    assert await content(await other.read.get(blob(1), span)) == plain[1000:1100]
    assert await content(await other.tier.get(blob(1))) == stored
    place = other.tier.directory.find(blob(1))
    assert place is not None
    assert place.coded is not None
    assert (place.coded.codec, place.coded.plain_bytes, place.frame_bytes) == ("zp", len(plain), frame_bytes)


async def test_names_of_all_kinds_are_found_again(
    nodes: tuple[Node, Node], arena: Arena, remote_store: RemoteStore
) -> None:
    node, other = nodes
    keys = ["a b", "ü/€/𝄞", "../../x", "100%", "a//b/", "~", "?&=+#", "x" * 1024, "<xml>&amp;", "\\", '"', "a\tb\r\n"]
    for number, key in enumerate(keys):
        frame = await raw_frame(arena, key.encode())
        await node.tier.put(blob(number), frame, replace(NAMES, key=key))
        frame.release()
    assert [each async for each in other.tier.scan()] == [blob(n) for n in range(len(keys))]
    census = await other.tier.census()
    assert (census.blobs, census.noted, census.foreign) == (len(keys), len(keys), 0)
    for number, key in enumerate(keys):
        found = await content(await other.tier.get(blob(number)))
        assert found is not None
        assert found.endswith(key.encode())
    await other.tier.delete([blob(n) for n in range(len(keys))])
    assert blobs_of(remote_store) == []
