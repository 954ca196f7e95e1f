"""Batches in room that was reserved, over a whole node: what a writer is told and when, and that what it gave up leaves nothing."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3
from module_paths import ModulePaths
from node_writer import SIZE, Writer, writer_of
from real_store import MIB, node_settings, running_node

from kvobj.api.same_host.writes import ExtentWrites, StagingBudget, reserved_bytes_max
from kvobj.app.node import Node
from kvobj.arena import ALIGNMENT
from kvobj.config.settings import BucketSettings
from kvobj.errors import (
    BusyError,
    EntityTooLargeError,
    IncompleteBodyError,
    InvalidChunkIdError,
    InvalidRequestError,
    KvobjError,
)
from kvobj.same_host.messages import Commit, NewItem, Reserve
from kvobj.store.extents import extent_bytes


@pytest.fixture
async def node(tmp_path: Path, module_paths: ModulePaths) -> AsyncIterator[Node]:
    settings = node_settings(tmp_path, module_paths.mktemp("memory"), dram_mib=64)
    async with running_node(replace(settings, buckets=(BucketSettings("cache", "kv", "memory"),))) as running:
        await running.arena.populate()
        yield running


@pytest.fixture
async def writer(node: Node) -> Writer:
    return await writer_of(node)


async def test_what_is_written_into_its_room_is_stored_and_told_of_once(node: Node, writer: Writer) -> None:
    data = [os.urandom(SIZE), os.urandom(2 * SIZE)]
    number, rooms = await writer.reserve(*((f"k{index}", len(each)) for index, each in enumerate(data)))
    for room, each in zip(rooms, data, strict=True):
        writer.fill(room, each)
    told = await writer.commit_reserved(number)
    assert [item.status for item in told.items] == [200, 200]
    assert not any(item.existed for item in told.items)
    assert len(writer.told) == 1
    await node.sealing.drain()
    for row, each in zip(await node.catalog.lookup("cache", ["k0", "k1"]), data, strict=True):
        assert row is not None
        assert (await node.store.settled(row)).digest == blake3(each).digest()


async def test_a_writer_is_told_before_the_store_goes_on_with_its_chunks(node: Node, writer: Writer) -> None:
    number, (room,) = await writer.reserve(("k", SIZE))
    writer.fill(room, bytes(SIZE))
    arrival = node.store.arriving.of("cache", "k")[0]
    was_alive: list[bool] = []
    await writer.writes.commit(Commit(number), writer.rights, lambda _: was_alive.append(arrival.is_alive))
    assert was_alive == [True]
    assert not arrival.is_alive


async def test_nobody_sees_bytes_in_a_room_before_their_commit(node: Node, writer: Writer) -> None:
    number, (room,) = await writer.reserve(("k", SIZE))
    arrival = node.store.arriving.of("cache", "k")[0]
    writer.fill(room, bytes(SIZE))
    assert arrival.is_seen
    assert arrival.filled == 0
    await writer.commit_reserved(number)
    assert arrival.filled == SIZE
    assert not arrival.is_alive


class Turns:
    """How many turns the event loop gives others while something goes on that waits for nothing."""

    def __init__(self) -> None:
        self.taken = 0
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.taken += 1

    def end(self) -> int:
        self._task.cancel()
        return self.taken


async def test_others_get_their_turn_all_through_a_batch_of_many_chunks(node: Node, writer: Writer) -> None:
    sizes = [(f"k{index}", 4096) for index in range(8 * 64)]
    turns = Turns()
    number, rooms = await writer.reserve(*sizes)
    assert turns.end() >= 2 * (len(sizes) // 64 - 1)  # while room is made, and while the writer fills it
    for room in rooms:
        writer.fill(room, bytes(4096))
    turns = Turns()
    told = await writer.commit_reserved(number)
    assert turns.end() >= 2 * (len(sizes) // 64 - 1)  # before the commit, and behind it
    assert {item.status for item in told.items} == {200}
    await node.sealing.drain()
    assert len(node.store.arriving) == 0


async def test_chunks_that_stand_get_no_room_and_the_others_of_the_batch_do(writer: Writer) -> None:
    number, rooms = await writer.reserve(("a", SIZE), ("b", SIZE))
    for room in rooms:
        writer.fill(room, bytes(SIZE))
    await writer.commit_reserved(number)
    number, rooms = await writer.reserve(("a", SIZE), ("new", SIZE), ("b", SIZE + 1))
    assert [room is None for room in rooms] == [True, False, True]
    writer.fill(rooms[1], bytes(SIZE))
    told = await writer.commit_reserved(number)
    assert [(item.status, item.existed) for item in told.items] == [(200, True), (200, False), (409, False)]


async def test_two_writers_of_one_chunk_are_both_answered_and_the_first_ones_stands(node: Node, writer: Writer) -> None:
    first, (room,) = await writer.reserve(("k", SIZE))
    second, (other,) = await writer.reserve(("k", SIZE))
    writer.fill(room, b"1" * SIZE)
    writer.fill(other, b"2" * SIZE)
    assert not (await writer.commit_reserved(first)).items[0].existed
    assert (await writer.commit_reserved(second)).items[0].existed
    await node.sealing.drain()
    (row,) = await node.catalog.lookup("cache", ["k"])
    assert row is not None
    assert (await node.store.settled(row)).digest == blake3(b"1" * SIZE).digest()


async def test_a_chunk_named_twice_refuses_the_batch_and_leaves_nothing(node: Node, writer: Writer) -> None:
    before = node.arena.reserved_bytes
    with pytest.raises(InvalidRequestError):
        await writer.reserve(("a", SIZE), ("b", SIZE), ("a", SIZE))
    assert node.arena.reserved_bytes == before
    assert len(node.store.arriving) == 0


async def test_room_that_is_given_back_leaves_nothing(node: Node, writer: Writer) -> None:
    before = node.arena.reserved_bytes
    number, _ = await writer.reserve(("a", SIZE), ("b", SIZE))
    assert node.arena.reserved_bytes > before
    await writer.writes.abandon(number)
    assert node.arena.reserved_bytes == before
    assert await node.catalog.lookup("cache", ["a", "b"]) == [None, None]
    assert len(node.store.arriving) == 0
    with pytest.raises(InvalidRequestError):
        await writer.commit_reserved(number)


async def test_one_connection_reserves_a_part_of_what_all_batches_may_be(node: Node, writer: Writer) -> None:
    share = reserved_bytes_max(node.kv.gate.limit_bytes)
    half = share // 2 - ALIGNMENT
    first, _ = await writer.reserve(("a", half))
    await writer.reserve(("b", half))
    before = node.arena.reserved_bytes
    with pytest.raises(BusyError):
        await writer.reserve(("c", half))
    with pytest.raises(EntityTooLargeError):
        await writer.reserve(("d", share))
    assert node.arena.reserved_bytes == before
    await writer.writes.abandon(first)
    await writer.reserve(("c", half))
    await writer.writes.aclose()


@pytest.mark.parametrize(("batches_mib", "one_mib"), [(2048, 512), (400, 100), (256, 96), (192, 96), (64, 32)])
def test_a_connection_may_reserve_a_quarter_and_in_a_small_arena_a_chunk_of_80_mib(
    batches_mib: int, one_mib: int
) -> None:
    assert reserved_bytes_max(batches_mib * MIB) == one_mib * MIB


async def test_short_chunks_are_reserved_as_what_they_take_of_the_arena(node: Node, writer: Writer) -> None:
    count = reserved_bytes_max(node.kv.gate.limit_bytes) // ALIGNMENT
    batches = [[(f"k{number}", 1) for number in range(at, min(at + 500, count))] for at in range(0, count, 500)]
    for batch in batches:
        await writer.reserve(*batch)
    with pytest.raises(BusyError):
        await writer.reserve(("more", 1))
    await writer.writes.aclose()


async def test_room_that_is_set_aside_stays_its_writers_and_lets_other_batches_in(node: Node) -> None:
    before = node.arena.reserved_bytes
    share = reserved_bytes_max(node.kv.gate.limit_bytes)
    size_bytes = share // 2 - 2 * ALIGNMENT
    writers = [await writer_of(node) for _ in range(node.kv.gate.limit_bytes // share)]
    for number, each in enumerate(writers):
        await each.reserve((f"a{number}", size_bytes), (f"b{number}", size_bytes))
    held = node.arena.reserved_bytes
    other = await writer_of(node)
    reserving = asyncio.create_task(other.reserve(("other", size_bytes)))
    await asyncio.sleep(0)
    assert not reserving.done()
    writers[0].writes.set_aside()
    number, (room,) = await reserving
    assert node.arena.reserved_bytes == held + extent_bytes(size_bytes)
    other.fill(room, bytes(size_bytes))
    assert (await other.commit_reserved(number)).items[0].status == 200
    for each in writers:
        await each.writes.aclose()
    assert node.arena.reserved_bytes == before + extent_bytes(size_bytes)
    assert await node.catalog.lookup("cache", ["a0", "b0"]) == [None, None]
    await node.kv.gate.enter(node.kv.gate.limit_bytes)  # nothing is inside any more
    node.kv.gate.leave(node.kv.gate.limit_bytes)


@pytest.mark.parametrize(
    ("items", "error"),
    [
        ([NewItem("k" * 1025, SIZE)], InvalidChunkIdError),
        ([NewItem(b"k" * 31, SIZE)], InvalidChunkIdError),
        ([NewItem("k", SIZE, digest=bytes(31))], InvalidRequestError),
        ([NewItem(f"k{number}", 2**63 - 1) for number in range(3)], EntityTooLargeError),
    ],
    ids=["key", "id", "digest", "size"],
)
async def test_what_is_no_batch_is_refused_without_waiting_for_room(
    node: Node, writer: Writer, items: list[NewItem], error: type[KvobjError]
) -> None:
    await node.kv.gate.enter(node.kv.gate.limit_bytes)  # as much as batches may have
    with pytest.raises(error):
        await writer.writes.reserve(Reserve("default", items), writer.rights)
    with pytest.raises(error):
        await writer.writes.commit(Commit(0, "default", items), writer.rights, writer.told.append)
    with pytest.raises(IncompleteBodyError):
        await writer.writes.commit(Commit(0, "default", [NewItem("k", SIZE)]), writer.rights, writer.told.append)


async def local_batch(writer: Writer, *keys: str) -> int:
    items = [NewItem(key, SIZE) for key in keys]
    number, rooms = await writer.writes.reserve(Reserve("default", items, "local"), writer.rights)
    await writer.writes.expect(number)
    for room in rooms:
        writer.fill(room, bytes(SIZE))
    return number


@pytest.mark.parametrize("turns", range(6))
async def test_a_writer_that_goes_once_it_is_told_leaves_its_chunks_whole_and_no_room_held(
    node: Node, writer: Writer, turns: int
) -> None:
    """`turns` of the loop after its answer its connection's task is cancelled."""
    before = node.arena.reserved_bytes
    await writer.commit_reserved(await local_batch(writer, "a", "b"))
    growth = node.arena.reserved_bytes - before
    loop = asyncio.get_running_loop()

    def cancel(turns_left: int) -> None:
        if turns_left:
            loop.call_soon(cancel, turns_left - 1)
        else:
            committing.cancel()

    number = await local_batch(writer, "c", "d")
    committing = asyncio.create_task(writer.writes.commit(Commit(number), writer.rights, lambda _: cancel(turns)))
    await asyncio.wait([committing])
    assert node.arena.reserved_bytes == before + 2 * growth
    assert len(node.store.arriving) == 0
    for row in await node.catalog.lookup("cache", ["c", "d"]):
        assert row is not None
        assert (await node.store.settled(row)).digest == blake3(bytes(SIZE)).digest()


async def test_room_is_kept_for_a_copy_that_is_under_way_however_often_its_writer_is_cancelled(
    node: Node, writer: Writer
) -> None:
    before = node.arena.reserved_bytes
    budget = StagingBudget(connection_bytes_max=MIB, total_bytes_max=MIB)
    may_copy = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(may_copy.wait, 30)
        writes = ExtentWrites(node.kv.chunks, pool, budget, node.prepared, reserved_bytes_max=0)
        writes.stage(MIB, writer.rights)
        request = Commit(0, "default", [NewItem("k", MIB)])
        committing = asyncio.create_task(writes.commit(request, writer.rights, writer.told.append))
        try:
            async with asyncio.timeout(10):
                while not pool._work_queue.qsize():  # noqa: ASYNC110 - a pool tells nobody
                    await asyncio.sleep(0)
            for _ in range(2):
                committing.cancel()
                await asyncio.wait([committing], timeout=0.02)
            assert node.arena.reserved_bytes > before
        finally:
            may_copy.set()
            await asyncio.wait([committing])
        assert committing.cancelled()
        assert node.arena.reserved_bytes == before
        await writes.aclose()
