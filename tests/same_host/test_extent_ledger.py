"""The ledger over a whole node: what holders open, that it stays right, and that nothing of it stays when they go."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from blake3 import blake3
from module_paths import ModulePaths
from real_store import MIB, node_settings, running_node

from kvobj.api.same_host.reads import ExtentReads
from kvobj.api.same_host.rights import Rights
from kvobj.app.node import Node
from kvobj.arena import ALIGNMENT, Lane, Pin
from kvobj.catalog.rows import BucketKind, BucketRow, Durability, ObjectRow
from kvobj.codec.frame import block_crcs
from kvobj.config.settings import BucketSettings
from kvobj.errors import BusyError, InvalidRequestError, NoSuchBucketError
from kvobj.ids import BlobId
from kvobj.same_host.messages import Open
from kvobj.store.extents import ExtentLedger, PinnedBudget, Place, extent_bytes, room_of
from kvobj.store.ingest import PutTransfer
from kvobj.store.places import ChunkPlace, default_namespace
from kvobj.store.requests import PutRequest


@pytest.fixture
async def node(tmp_path: Path, module_paths: ModulePaths) -> AsyncIterator[Node]:
    settings = node_settings(tmp_path, module_paths.mktemp("memory"), dram_mib=64)
    buckets = (
        BucketSettings("cache", "kv", "memory"),
        BucketSettings("apart", "kv", "memory", regions="own"),
        BucketSettings("plain"),
    )
    dram = replace(settings.dram, region_bytes=16 * MIB)
    async with running_node(replace(settings, buckets=buckets, dram=dram)) as running:
        await running.arena.populate()
        yield running


def budget(holder_mib: int = 32) -> PinnedBudget:
    return PinnedBudget(holder_bytes_max=holder_mib * MIB, total_bytes_max=48 * MIB)


def ledger_of(node: Node, pinned: PinnedBudget | None = None, *, lane: Lane | None = None) -> ExtentLedger:
    return ExtentLedger(
        store=node.store,
        arena=node.arena,
        budget=pinned or budget(),
        reads=node.host_reads,
        lane=lane,
        reserve_seconds=1.0,
    )


async def lane_of(node: Node) -> Lane:
    return Lane.of(await bucket_row(node, "apart"))


async def make_anew(node: Node, owner: str) -> None:
    """The bucket with regions of its own is gone with its chunk, and another of its name is there."""
    await node.store.delete("apart", ["k"])
    await node.store.delete_bucket("apart")
    await node.catalog.create_bucket(BucketRow("apart", BucketKind.KV, owner, 0, Durability.MEMORY))


async def bucket_row(node: Node, bucket: str = "cache") -> BucketRow:
    row = await node.catalog.bucket(bucket)
    assert isinstance(row, BucketRow)
    return row


async def request(node: Node, key: str, size_bytes: int, *, bucket: str = "cache", **more: object) -> PutRequest:
    row = await bucket_row(node, bucket)
    place = None if bucket == "plain" else ChunkPlace(default_namespace(bucket), None, 0)
    made = PutRequest(bucket=row, key=key, size_bytes=size_bytes, owner="root", place=place)
    return msgspec.structs.replace(made, **more)


def memory(node: Node, place: Place) -> memoryview:
    path, size_bytes = node.arena.region_file(place.region)
    assert place.offset + place.size_bytes <= size_bytes
    view = node.arena._regions[place.region].room
    assert view is not None
    assert path.exists()
    return view[place.offset : place.offset + place.size_bytes]


class Given:
    """A `ByteSource` of bytes that are there, with hashes that somebody else made of them, or without."""

    def __init__(self, data: bytes, adopt: Callable[[], None] = lambda: None) -> None:
        self._data = data
        self._adopt = adopt

    async def receive_into(self, buffer: memoryview, on_bytes: Callable[[int], None]) -> None:
        buffer[:] = self._data
        self._adopt()
        on_bytes(len(buffer))


def adopt_hash(transfer: PutTransfer, digest: bytes, crcs: Sequence[int]) -> None:
    """As who fills the room tells it."""
    pipeline, _ = transfer.hash_elsewhere()
    assert transfer.held is not None
    assert transfer.held.hash is not None
    pipeline.adopt(transfer.held.hash, digest, crcs)


async def stored(node: Node, key: str, data: bytes, *, bucket: str = "cache") -> ObjectRow:
    async with await node.store.start_put(await request(node, key, len(data), bucket=bucket)) as transfer:
        await transfer.receive(Given(data))
        row = (await transfer.commit()).row
    assert isinstance(row, ObjectRow)
    return row


async def test_what_is_stored_is_opened_where_it_lies(node: Node) -> None:
    ledger, data = ledger_of(node), os.urandom(300_000)
    async with await node.store.start_put(await request(node, "k", len(data))) as transfer:
        place = room_of(transfer)
        await transfer.receive(Given(data))
        row = (await transfer.commit()).row
    assert isinstance(row, ObjectRow)
    opened = await ledger.open(row)
    assert opened is not None
    assert opened.place == place
    assert memory(node, opened.place) == data
    assert ledger.pinned_bytes == extent_bytes(len(data))
    assert len(ledger) == 1
    await node.sealing.drain()
    assert (await node.store.settled(row)).digest == blake3(data).digest()
    ledger.close()
    assert (len(ledger), ledger.pinned_bytes) == (0, 0)
    assert await ledger.open(row) is None


async def test_hashes_made_elsewhere_are_taken_over(node: Node) -> None:
    ledger, data = ledger_of(node), os.urandom(700_000)
    made = await request(node, "k", len(data), durability=Durability.LOCAL)
    async with await node.store.start_put(made) as transfer:
        crcs = block_crcs(memoryview(data))
        await transfer.receive(Given(data, lambda: adopt_hash(transfer, blake3(data).digest(), crcs)))
        row = (await transfer.commit()).row
    assert isinstance(row, ObjectRow)
    assert row.digest == blake3(data).digest()
    await node.dram.delete([BlobId(row.blobs[0].blob_id)])
    opened = await ledger.open(row)  # read back from nvme, every block of it checked
    assert opened is not None
    assert memory(node, opened.place) == data
    assert opened.tier == "nvme"
    ledger.close()


async def test_hashes_of_another_size_are_refused_and_nothing_is_stored(node: Node) -> None:
    before = node.arena.reserved_bytes
    async with await node.store.start_put(await request(node, "k", 1000)) as transfer:
        with pytest.raises(InvalidRequestError):
            await transfer.receive(Given(bytes(1000), lambda: adopt_hash(transfer, bytes(32), [1, 2, 3])))
    assert await node.catalog.lookup("cache", ["k"]) == [None]
    assert node.arena.reserved_bytes == before
    assert len(node.store.arriving) == 0


async def test_bytes_stay_right_under_a_handle_whatever_becomes_of_the_chunk(node: Node) -> None:
    ledger, data = ledger_of(node), os.urandom(5 * MIB)
    row = await stored(node, "k", data)
    await node.sealing.drain()
    opened = await ledger.open(row)
    assert opened is not None
    await node.store.delete("cache", ["k"])
    await node.dram.delete([BlobId(row.blobs[0].blob_id)])
    held = node.arena.reserved_bytes
    for number in range(20):
        await stored(node, f"more-{number}", os.urandom(MIB))
    assert memory(node, opened.place) == data
    ledger.release([opened.handle, opened.handle, 999])
    assert ledger.pinned_bytes == 0
    assert held > 0
    assert await ledger.open(row) is None


async def test_pins_of_one_holder_and_of_all_are_bounded(node: Node) -> None:
    shared = PinnedBudget(holder_bytes_max=2 * extent_bytes(MIB), total_bytes_max=3 * extent_bytes(MIB))
    one, other = ledger_of(node, shared), ledger_of(node, shared)
    rows = [await stored(node, f"k{number}", os.urandom(MIB)) for number in range(4)]
    held = [await one.open(row) for row in rows[:2]]
    with pytest.raises(BusyError):
        await one.open(rows[2])
    assert await other.open(rows[2]) is not None
    with pytest.raises(BusyError):
        await other.open(rows[3])
    assert held[0] is not None
    one.release([held[0].handle])
    assert await other.open(rows[3]) is not None
    one.close()
    other.close()
    assert (shared.pinned_bytes, shared.handles) == (0, 0)


async def test_what_is_opened_and_let_go_of_is_told_as_read_and_what_is_open_ahead_until_it_is_let_go_of(
    node: Node,
) -> None:
    holder, reads = ledger_of(node), node.host_reads
    row = await stored(node, "k", os.urandom(MIB))
    length = extent_bytes(MIB)

    async def pin() -> Pin:
        frame = await node.store.frame_of(row)
        assert frame is not None
        return frame.pin

    ahead, other = holder.keep(await pin(), is_ahead=True), holder.keep(await pin())
    holder.keep(await pin(), is_ahead=True)
    assert (reads.seen_bytes, reads.ahead_bytes) == (3 * length, 2 * length)
    holder.release([ahead, other, ahead])
    assert (reads.seen_bytes, reads.ahead_bytes) == (5 * length, length)
    holder.close()
    assert (reads.seen_bytes, reads.ahead_bytes) == (6 * length, 0)


async def test_chunks_of_a_byte_pin_no_more_of_the_arena_than_long_ones(node: Node) -> None:
    shared = PinnedBudget(holder_bytes_max=4 * ALIGNMENT, total_bytes_max=6 * ALIGNMENT)
    one, other = ledger_of(node, shared), ledger_of(node, shared)
    rows = [await stored(node, f"k{number}", b"x") for number in range(8)]
    for row in rows[:4]:
        assert await one.open(row) is not None
    with pytest.raises(BusyError):
        await one.open(rows[4])
    assert [await other.open(row) is not None for row in rows[4:6]] == [True, True]
    with pytest.raises(BusyError):
        await other.open(rows[6])
    assert shared.pinned_bytes == 6 * ALIGNMENT
    one.close()
    assert await other.open(rows[6]) is not None
    other.close()
    assert (shared.pinned_bytes, shared.handles) == (0, 0)


async def test_handles_of_all_holders_together_are_bounded_also_on_one_extent(node: Node) -> None:
    shared = PinnedBudget(holder_bytes_max=32 * MIB, total_bytes_max=48 * MIB, handles_max=5)
    one, other = ledger_of(node, shared), ledger_of(node, shared)
    row = await stored(node, "k", b"x")
    for ledger in (one, other, one, other):
        assert await ledger.open(row) is not None
    assert not other.has_room_for(2, 0)
    assert await other.open(row) is not None
    with pytest.raises(BusyError):
        await one.open(row)
    assert shared.handles == 5
    other.close()
    assert await one.open(row) is not None
    one.close()
    assert (shared.pinned_bytes, shared.handles) == (0, 0)


async def test_opens_that_are_under_way_count_before_they_have_their_bytes(node: Node) -> None:
    shared = PinnedBudget(holder_bytes_max=2 * ALIGNMENT, total_bytes_max=2 * ALIGNMENT)
    ledger = ledger_of(node, shared)
    rows = [await stored(node, f"k{number}", b"x") for number in range(5)]
    told = await asyncio.gather(*(ledger.open(row) for row in rows), return_exceptions=True)
    assert sum(isinstance(each, BusyError) for each in told) == 3
    assert len(ledger) == 2
    ledger.close()
    assert (shared.pinned_bytes, shared.handles) == (0, 0)


async def test_a_holder_of_a_lane_is_shown_regions_of_its_bucket_alone(node: Node) -> None:
    lane = await lane_of(node)
    own = ledger_of(node, lane=lane)
    await stored(node, "k", os.urandom(MIB))
    data = os.urandom(MIB)
    row = await stored(node, "k", data, bucket="apart")
    opened = await own.open(row)
    assert opened is not None
    assert node.arena.lane_of(opened.place.region) == lane
    # Promoted from nvme it lands among others' bytes: the lane gets a copy.
    await node.sealing.drain()
    assert await node.write_behind.flush(timeout_seconds=10)
    await node.dram.delete([BlobId(row.blobs[0].blob_id)])
    again = await own.open(row)
    assert again is not None
    assert node.arena.lane_of(again.place.region) == lane
    assert memory(node, again.place) == data
    own.close()


async def test_a_region_that_was_lent_stays_its_buckets_and_begins_empty(node: Node) -> None:
    everyone = ledger_of(node)
    # Something of others was in every region before.
    rows = [await stored(node, f"k{number}", b"\xee" * (3 * MIB)) for number in range(18)]
    await node.sealing.drain()
    await node.write_behind.flush(timeout_seconds=10)
    await node.dram.delete([BlobId(row.blobs[0].blob_id) for row in rows])
    row = await stored(node, "k", b"mine", bucket="apart")
    opened = await everyone.open(row)
    assert opened is not None
    region = opened.place.region
    lane = await lane_of(node)
    node.arena.lend(region, lane)
    room = node.arena._regions[region].room
    assert room is not None
    assert bytes(room).count(b"\xee\xee\xee\xee") == 0
    everyone.release([opened.handle])
    await node.store.delete("apart", ["k"])
    await node.dram.delete([BlobId(row.blobs[0].blob_id)])
    for number in range(12):
        await stored(node, f"later-{number}", os.urandom(3 * MIB))
    assert node.arena.lane_of(region) == lane
    with pytest.raises(ValueError, match="alone"):
        node.arena.lend((region + 1) % 4, lane)


async def test_whoever_was_shown_a_bucket_sees_nothing_of_another_that_gets_its_name(node: Node) -> None:
    row = await stored(node, "k", b"mine", bucket="apart")
    before = await lane_of(node)
    own = ledger_of(node, lane=before)
    opened = await own.open(row)
    assert opened is not None
    node.arena.lend(opened.place.region, before)
    seen = node.arena._regions[opened.place.region].room
    assert seen is not None
    own.close()
    await make_anew(node, "another")
    secret = b"secret of another" * 1000
    fresh = await stored(node, "k", secret, bucket="apart")
    assert bytes(seen).find(secret) < 0
    now = await lane_of(node)
    theirs = ledger_of(node, lane=now)
    shown = await theirs.open(fresh)
    assert shown is not None
    assert memory(node, shown.place) == secret
    assert shown.place.region != opened.place.region
    assert node.arena.lane_of(opened.place.region) == before
    theirs.close()


async def test_a_holder_of_a_bucket_that_is_gone_is_shown_no_chunk_of_one_that_has_its_name(node: Node) -> None:
    await stored(node, "k", b"mine", bucket="apart")
    bucket = await bucket_row(node, "apart")
    lane = Lane.of(bucket)
    rights = Rights(bucket, bucket.owner, is_owner=True, lane=lane, may_write=True, is_trusted=False)
    reads = ExtentReads(node.store, node.kv.chunks, node.dram.held, lambda *_: None, node.catalog.bucket)
    ledger = ledger_of(node, lane=lane)
    assert (await reads.open(Open(["k"]), rights, ledger)).extents[0] is not None
    ledger.release([1])
    await make_anew(node, "another")
    await stored(node, "k", b"secret", bucket="apart")
    with pytest.raises(NoSuchBucketError):
        await reads.open(Open(["k"]), rights, ledger)
    assert len(ledger) == 0


class Unsettled:
    """Rows whose digests are not known, of a store that is too busy to look for them."""

    def __init__(self, *rows: ObjectRow) -> None:
        self._rows = {row.key: row for row in rows}

    async def pinned(self, bucket: str, key: str, pin: bytes, *, user_id: str) -> ObjectRow | None:  # noqa: ARG002
        return self._rows[key]

    async def settled(self, row: ObjectRow, *, wait: bool = True) -> ObjectRow:  # noqa: ARG002
        raise BusyError("no room to read it")


@pytest.mark.parametrize("is_cold", [False, True])
async def test_a_chunk_whose_digest_cannot_be_looked_for_comes_another_way_and_the_others_are_opened(
    node: Node, *, is_cold: bool
) -> None:
    unsettled = msgspec.structs.replace(await stored(node, "unsettled", os.urandom(1000)), digest=None)
    other = msgspec.structs.replace(await stored(node, "other", os.urandom(2000)), digest=bytes(32))
    reads = ExtentReads(
        Unsettled(unsettled, other),
        node.kv.chunks,
        lambda blobs: [not is_cold for _ in blobs],
        lambda *_: None,
        node.catalog.bucket,
    )
    ledger = ledger_of(node)
    rights = Rights(await bucket_row(node), "root", is_owner=True, lane=None, may_write=True, is_trusted=True)
    opened = await reads.open(Open(["unsettled", "other"], pins=[bytes(16)]), rights, ledger)
    assert [extent and extent.size_bytes for extent in opened.extents] == [None, 2000]
    assert opened.sizes == [1000, 2000]
    assert (len(ledger), ledger.pinned_bytes) == (1, extent_bytes(2000))
    ledger.close()
