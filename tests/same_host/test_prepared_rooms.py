"""Room that a writer has before it names a chunk, over a whole node: what is committed of it, and that the rest leaves nothing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from blake3 import blake3
from module_paths import ModulePaths
from node_writer import SIZE, Writer, writer_of
from real_store import MIB, node_settings, running_node

from kvobj.app.node import Node
from kvobj.catalog.rows import Durability
from kvobj.catalog.setting_rows import RemoteRule
from kvobj.config.settings import BucketSettings
from kvobj.errors import BusyError, InvalidRequestError
from kvobj.same_host.messages import Commit, Committed, NewItem, Prepare, Reserve
from kvobj.store.prepared import ROOMS_MAX


@pytest.fixture
async def node(tmp_path: Path, module_paths: ModulePaths) -> AsyncIterator[Node]:
    settings = node_settings(tmp_path, module_paths.mktemp("memory"), dram_mib=64)
    buckets = (BucketSettings("cache", "kv", "memory"), BucketSettings("kept", "kv", "local"))
    async with running_node(replace(settings, buckets=buckets)) as running:
        await running.arena.populate()
        yield running


@pytest.fixture
async def writer(node: Node) -> Writer:
    return await writer_of(node)


async def digest_of(node: Node, key: str) -> bytes | None:
    (row,) = await node.catalog.lookup("cache", [key])
    assert row is not None
    return (await node.store.settled(row)).digest


def items_of(*keys: str, size_bytes: int = SIZE) -> list[NewItem]:
    return [NewItem(key, size_bytes) for key in keys]


async def test_what_lies_in_prepared_room_is_stored_and_told_of_once(node: Node, writer: Writer) -> None:
    data = [os.urandom(SIZE) for _ in range(3)]
    told = await writer.commit(items_of("a", "b", "c"), writer.prepare(*data))
    assert [(item.status, item.existed) for item in told.items] == [(200, False)] * 3
    assert len(writer.told) == 1
    assert node.prepared.bytes_out == 0
    await node.sealing.drain()
    for key, each, item in zip("abc", data, told.items, strict=True):
        assert await digest_of(node, key) == blake3(each).digest()
        (row,) = await node.catalog.lookup("cache", [key])
        assert row is not None
        assert (row.etag, row.durability.value) == (item.etag, item.durability)


async def test_a_chunk_of_prepared_room_is_as_one_of_reserved_room(node: Node, writer: Writer) -> None:
    await writer.commit([NewItem("a", SIZE, tokens=7)], writer.prepare(bytes(SIZE)))
    number, (room,) = await writer.writes.reserve(Reserve("default", [NewItem("b", SIZE, tokens=7)]), writer.rights)
    assert room is not None
    await writer.writes.expect(number)
    await writer.writes.commit(Commit(number), writer.rights, writer.told.append)
    await node.sealing.drain()
    one, other = await node.catalog.lookup("cache", ["a", "b"])
    assert one is not None
    assert other is not None
    alike = {"key": "", "blobs": (), "etag": "", "modified_ms": 0, "sequence": 0, "digest": None}
    fields = [name for name in one.__struct_fields__ if name not in alike]
    assert [getattr(one, name) for name in fields] == [getattr(other, name) for name in fields]
    assert one.blobs[0].frame_bytes == other.blobs[0].frame_bytes


async def test_room_that_is_not_used_leaves_nothing(node: Node, writer: Writer) -> None:
    before = node.arena.reserved_bytes
    writer.prepare(bytes(SIZE), bytes(SIZE))
    assert node.arena.reserved_bytes > before
    assert writer.writes.has_reserved
    writer.prepare()
    assert (node.arena.reserved_bytes, node.prepared.bytes_out) == (before, 0)
    writer.prepare(bytes(SIZE))
    await writer.writes.aclose()
    assert (node.arena.reserved_bytes, node.prepared.bytes_out) == (before, 0)


async def test_rooms_of_the_last_call_are_in_place_of_those_before(node: Node, writer: Writer) -> None:
    old = writer.prepare(bytes(SIZE), bytes(SIZE))
    held = node.prepared.bytes_out
    new = writer.prepare(bytes(SIZE), bytes(SIZE))
    assert node.prepared.bytes_out == held
    with pytest.raises(InvalidRequestError):
        await writer.commit(items_of("k"), old[:1])
    assert (await writer.commit(items_of("k"), new[:1])).items[0].status == 200


async def test_rooms_are_used_once_and_each_for_one_chunk_of_its_size(node: Node, writer: Writer) -> None:
    first, second = writer.prepare(b"1" * SIZE, b"2" * SIZE)
    held = node.prepared.bytes_out
    for items, rooms in (
        (items_of("a"), [second + 1]),
        (items_of("a", size_bytes=SIZE - 5000), [first]),
        (items_of("a", "b"), [first, first]),
        (items_of("a", "b"), [first]),
        ([NewItem("a", SIZE, digest=bytes(32))], [first]),
    ):
        with pytest.raises(InvalidRequestError):
            await writer.commit(items, rooms)
    assert node.prepared.bytes_out == held
    await writer.commit(items_of("a"), [first])
    with pytest.raises(InvalidRequestError):
        await writer.commit(items_of("b"), [first])
    await writer.commit(items_of("b"), [second])
    await node.sealing.drain()
    assert await digest_of(node, "a") == blake3(b"1" * SIZE).digest()
    assert await digest_of(node, "b") == blake3(b"2" * SIZE).digest()


async def test_a_chunk_named_twice_refuses_the_commit_and_leaves_nothing(node: Node, writer: Writer) -> None:
    before = node.arena.reserved_bytes
    rooms = writer.prepare(bytes(SIZE), bytes(SIZE))
    with pytest.raises(InvalidRequestError):
        await writer.commit(items_of("a", "a"), rooms)
    assert (node.arena.reserved_bytes, node.prepared.bytes_out) == (before, 0)
    assert await node.catalog.lookup("cache", ["a"]) == [None]


async def test_chunks_that_stand_keep_their_bytes_and_the_others_are_stored(node: Node, writer: Writer) -> None:
    await writer.commit(items_of("a"), writer.prepare(b"1" * SIZE))
    other = SIZE - 8192
    await writer.commit(items_of("b", size_bytes=other), writer.prepare(b"1" * other, size_bytes=other))
    await node.sealing.drain()
    before = node.arena.reserved_bytes
    told = await writer.commit(items_of("a", "b", "c"), writer.prepare(*[b"2" * SIZE] * 3))
    assert [(item.status, item.existed) for item in told.items] == [(200, True), (409, False), (200, False)]
    await node.sealing.drain()
    assert await digest_of(node, "a") == blake3(b"1" * SIZE).digest()
    assert await digest_of(node, "c") == blake3(b"2" * SIZE).digest()
    while await node.reaper.reap_batch():
        pass
    (row,) = await node.catalog.lookup("cache", ["c"])
    assert row is not None
    frame = await node.store.frame_of(row)
    assert frame is not None
    grown = frame.pin.extent.length
    frame.release()
    assert node.arena.reserved_bytes == before + grown


async def test_who_is_not_trusted_and_who_wants_more_than_memory_has_no_room_prepared(node: Node) -> None:
    for writer, request in (
        (await writer_of(node, is_trusted=False), Prepare(SIZE, 2)),
        (await writer_of(node, "kept"), Prepare(SIZE, 2)),
        (await writer_of(node), Prepare(SIZE, 2, "local")),
        (await writer_of(node), Prepare(0, 2)),
        (await writer_of(node), Prepare(1 << 40, 1)),
        (await writer_of(node), Prepare(SIZE, ROOMS_MAX + 1)),
        (await writer_of(node), Prepare(MIB, 10)),  # a sixteenth of the arena is 4 MiB
    ):
        assert writer.writes.prepare(request, writer.rights).rooms == []
    assert node.prepared.bytes_out == 0
    kept = await writer_of(node, "kept")
    assert len(kept.writes.prepare(Prepare(SIZE, 2, "memory"), kept.rights).rooms) == 2
    await kept.writes.aclose()


async def test_all_writers_together_have_a_part_of_the_arena_prepared(node: Node) -> None:
    writers = [await writer_of(node) for _ in range(8)]
    answers = [writer.writes.prepare(Prepare(MIB, 1), writer.rights) for writer in writers]
    assert 0 < sum(len(answer.rooms) for answer in answers) < len(writers)
    assert node.prepared.bytes_out <= node.arena.capacity_bytes // 16
    for writer in writers:
        await writer.writes.aclose()
    assert node.prepared.bytes_out == 0


async def test_nobody_has_room_prepared_while_somebody_waits_for_some(node: Node, writer: Writer) -> None:
    everything = [node.arena.try_reserve(MIB) for _ in range(64)]
    waiting = asyncio.create_task(node.arena.reserve(2 * MIB, timeout_seconds=30))
    await asyncio.sleep(0)
    for pin in everything[:1]:
        if pin is not None:
            pin.release()
    assert node.arena.is_waited_for
    assert writer.writes.prepare(Prepare(SIZE, 1), writer.rights).rooms == []
    for pin in everything[1:]:
        if pin is not None:
            pin.release()
    (await waiting).release()
    assert node.prepared.bytes_out == 0


async def test_a_commit_that_finds_too_much_not_written_down_leaves_nothing(node: Node, writer: Writer) -> None:
    before = node.arena.reserved_bytes
    rooms = writer.prepare(bytes(SIZE))
    placement = node.prepared._placement
    await placement.reserve_dirty(placement.dirty_bytes_max - placement.cache.dirty_bytes)
    try:
        with pytest.raises(BusyError):
            await writer.commit(items_of("k"), rooms)
    finally:
        placement.unreserve_dirty(placement.dirty_bytes_max - placement.cache.dirty_bytes)
    assert (node.arena.reserved_bytes, node.prepared.bytes_out) == (before, 0)
    assert await node.catalog.lookup("cache", ["k"]) == [None]


async def test_a_writer_that_goes_as_it_is_told_leaves_its_chunks_whole(node: Node, writer: Writer) -> None:
    class GoneError(Exception):
        """The socket has ended."""

    def tell(_: Committed) -> None:
        raise GoneError

    rooms = writer.prepare(b"1" * SIZE, b"2" * SIZE)
    with pytest.raises(GoneError):
        await writer.writes.commit(Commit(0, "default", items_of("a", "b"), None, rooms), writer.rights, tell)
    await writer.writes.aclose()
    assert node.prepared.bytes_out == 0
    await node.sealing.drain()
    assert await digest_of(node, "a") == blake3(b"1" * SIZE).digest()
    assert await digest_of(node, "b") == blake3(b"2" * SIZE).digest()


async def test_chunks_of_prepared_room_are_written_down(node: Node, writer: Writer) -> None:
    data = os.urandom(SIZE)
    await writer.commit(items_of("k"), writer.prepare(data))
    await node.sealing.drain()
    assert await node.write_behind.flush(timeout_seconds=60)
    (row,) = await node.catalog.lookup("cache", ["k"])
    assert row is not None
    assert (row.durability, row.digest) == (Durability.LOCAL, blake3(data).digest())


async def test_rooms_are_not_committed_as_another_class_than_memory(node: Node, writer: Writer) -> None:
    before = node.arena.reserved_bytes
    bucket = writer.rights.bucket
    rooms = writer.prepare(bytes(SIZE))
    with pytest.raises(InvalidRequestError):
        await writer.commit(items_of("k"), rooms, durability="local")
    assert (node.arena.reserved_bytes, node.prepared.bytes_out) == (before, 0)
    for changed in (
        msgspec.structs.replace(bucket, durability=Durability.LOCAL),
        msgspec.structs.replace(bucket, remote=RemoteRule.ALWAYS),
        msgspec.structs.replace(bucket, codec="lz4"),
    ):
        rooms = writer.prepare(bytes(SIZE))
        kept, writer.rights = writer.rights, replace(writer.rights, bucket=changed)  # the grant was renewed
        with pytest.raises(InvalidRequestError):
            await writer.commit(items_of("k"), rooms)
        writer.rights = kept
        assert (node.arena.reserved_bytes, node.prepared.bytes_out) == (before, 0)
    assert await node.catalog.lookup("cache", ["k"]) == [None]


async def test_nothing_is_made_for_chunks_far_larger_than_a_blob(node: Node, writer: Writer) -> None:
    assert writer.writes.prepare(Prepare(1 << 62, 1), writer.rights).rooms == []
    assert node.prepared.bytes_out == 0


async def test_what_is_prepared_keeps_its_bound_as_extents_count(node: Node) -> None:
    writers = [await writer_of(node) for _ in range(40)]
    worst = 0
    for writer in writers:
        writer.writes.prepare(Prepare(4000, 60), writer.rights)  # 60 of 8 KiB do not fill the sixteenth
        worst = max(worst, node.prepared.bytes_out)
    assert 0 < worst <= node.arena.capacity_bytes // 16
    for writer in writers:
        await writer.writes.aclose()


async def test_an_earlier_chunk_counts_as_asked_for(node: Node, writer: Writer) -> None:
    await writer.commit(items_of("a"), writer.prepare(bytes(SIZE)))
    asked: list[str] = []
    node.prepared._on_asked = lambda row: asked.append(row.key)
    await writer.commit(items_of("a", "b"), writer.prepare(bytes(SIZE), bytes(SIZE)))
    assert asked == ["a"]


async def check_a_writer_that_goes(node: Node, key: str, committing: Callable[[], Awaitable[object]]) -> None:
    """Have a writer go while its commit of a chunk is with the durable writer, and see that it is whole all the same.
    `stands` is stored."""
    # A durable change of its key is under way: what comes behind it goes to the durable writer, too.
    await node.sealing.drain()
    assert await node.write_behind.flush(timeout_seconds=60)
    going = asyncio.create_task(node.store.delete("cache", ["stands", key], []))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not node.database.is_idle
    task = asyncio.ensure_future(committing())
    for _ in range(4):
        await asyncio.sleep(0)
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await going
    await node.sealing.drain()
    assert await node.write_behind.flush(timeout_seconds=60)
    (row,) = await node.catalog.lookup("cache", [key])
    assert row is not None
    assert (row.durability, row.digest) == (Durability.LOCAL, blake3(b"2" * SIZE).digest())
    assert node.prepared._placement.cache.dirty_bytes == 0
    assert node.prepared.bytes_out == 0


async def test_a_writer_that_goes_during_a_durable_commit_leaves_its_chunks_whole(node: Node, writer: Writer) -> None:
    await writer.commit(items_of("stands"), writer.prepare(b"1" * SIZE))
    rooms = writer.prepare(b"2" * SIZE)
    await check_a_writer_that_goes(node, "stands", lambda: writer.commit(items_of("stands"), rooms))


async def test_a_writer_of_reserved_room_that_goes_during_a_durable_commit_leaves_its_chunks_whole(
    node: Node, writer: Writer
) -> None:
    await writer.commit(items_of("stands"), writer.prepare(b"1" * SIZE))
    number, (room,) = await writer.writes.reserve(Reserve("default", items_of("k")), writer.rights)
    assert room is not None
    region = node.arena._regions[room.region].room
    assert region is not None
    region[room.offset : room.offset + SIZE] = b"2" * SIZE
    await writer.writes.expect(number)
    told = writer.told.append
    await check_a_writer_that_goes(node, "k", lambda: writer.writes.commit(Commit(number), writer.rights, told))
