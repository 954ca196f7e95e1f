"""Chunks that come through a worker into rooms that it had at hand: one call each, and alike in all else."""

from __future__ import annotations

import asyncio
import base64
import logging
import random
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import pytest
from following_world import OpenBody
from kv_driver import KvDriver, kv_node
from s3_driver import Answer, FakeBody
from tier_codecs import wait_for
from worker_pair import WorkerPair, worker_pair

from kvobj.catalog.rows import Durability, ObjectRow
from kvobj.codec.checksums import Digester
from kvobj.errors import InvalidRequestError
from kvobj.ids import BlobId
from kvobj.store.hashing import INLINE_BYTES, BlobHash
from kvobj.store.requests import PutRequest
from kvobj.workers import spare_rooms, spare_writing
from kvobj.workers.calls import FilledRoom, Hashed

SIZE_BYTES = 120_000
MEMORY = {"x-kvobj-durability": "memory"}


@pytest.fixture
async def kv(tmp_path: Path, shm_path: Path) -> AsyncIterator[KvDriver]:
    async with kv_node(tmp_path, shm_path) as node:
        yield node


@pytest.fixture
async def pair(kv: KvDriver, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[WorkerPair]:
    """Rooms are kept, and bodies not told of, however slow the machine is."""
    monkeypatch.setattr(spare_rooms, "IDLE_SECONDS", 3600.0)
    monkeypatch.setattr(spare_writing, "BEGIN_SECONDS", 3600.0)
    async with worker_pair(kv) as both:
        yield both


def data_of(seed: int, size_bytes: int = SIZE_BYTES) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


async def put(pair: WorkerPair, key: str, body: bytes | FakeBody, **headers: str) -> Answer:
    fields = MEMORY | {name.replace("_", "-"): value for name, value in headers.items()}
    return await pair.driver.request("PUT", f"/cache/{key}", body=body, headers=fields, payload="UNSIGNED-PAYLOAD")


async def with_room(pair: WorkerPair, rooms: int = 1, size_bytes: int = SIZE_BYTES) -> None:
    """Have the worker get so many rooms for such chunks, as it does when they come again and again."""
    for turn in range(rooms + 1):
        writers = [put(pair, f"early-{turn}-{each}", data_of(each, size_bytes)) for each in range(turn + 1)]
        assert {answer.status for answer in await asyncio.gather(*writers)} == {200}
        await wait_for(lambda: not pair.store.spare._asking)
    assert len(pair.desk._rooms) >= rooms
    await pair.kv.node.sealing.drain()
    assert await pair.kv.node.write_behind.flush(timeout_seconds=20)


async def row_of(pair: WorkerPair, key: str) -> ObjectRow | None:
    (row,) = await pair.kv.node.catalog.lookup("cache", [key])
    return row


async def fill_dirty_room(pair: WorkerPair) -> Callable[[], None]:
    """Have as much wait to be written down as may; what is returned makes room again."""
    placement = pair.kv.node.store._rooms._placement
    reserved = placement.dirty_bytes_max - placement.cache.dirty_bytes
    await placement.reserve_dirty(reserved)
    return partial(placement.unreserve_dirty, reserved)


async def all_is_given_back(pair: WorkerPair) -> None:
    node = pair.kv.node
    pair.store.spare.close()
    await wait_for(lambda: len(pair.desk) == 0)
    await node.sealing.drain()
    while await node.reaper.reap_batch():
        pass
    usage = await node.dram.usage()
    assert node.prepared.bytes_out == 0
    await wait_for(lambda: node.arena.usage().reserved_bytes == usage.used_bytes)


async def test_a_chunk_of_a_size_that_comes_again_is_stored_by_one_call(pair: WorkerPair) -> None:
    asked: list[int] = []
    for number in range(6):
        before = pair.calls
        assert (await put(pair, f"a{number}", data_of(number))).status == 200
        await wait_for(lambda: not pair.store.spare._asking)
        asked.append(pair.calls - before)
    assert asked == [2, 3, 1, 1, 1, 1]  # the second time a room for the third is asked for, beside it
    for number in range(6):
        assert (await pair.kv.driver.get(f"/cache/a{number}")).body == data_of(number)


@pytest.mark.parametrize("size_bytes", [1, 65_536, 65_537, SIZE_BYTES, 400_000])
async def test_it_is_as_one_that_the_store_received_itself(pair: WorkerPair, size_bytes: int) -> None:
    data, node = data_of(7, size_bytes), pair.kv.node
    if size_bytes > INLINE_BYTES:
        await with_room(pair, size_bytes=size_bytes)
    one = await put(pair, "one", data, x_amz_meta_a="b", content_type="text/plain")
    other = await pair.kv.driver.request(
        "PUT", "/cache/other", body=data, payload="UNSIGNED-PAYLOAD",
        headers=MEMORY | {"x-amz-meta-a": "b", "content-type": "text/plain"},
    )  # fmt: skip
    assert one.status == other.status == 200
    assert one.headers.keys() == other.headers.keys()
    rows = [await row_of(pair, key) for key in ("one", "other")]
    settled = [await node.store.settled(row) for row in rows if row is not None]
    assert settled[0].digest == settled[1].digest is not None
    assert settled[0].metadata == settled[1].metadata
    assert settled[0].headers == settled[1].headers
    assert settled[0].blobs[0].frame_bytes == settled[1].blobs[0].frame_bytes
    blob_ids = [BlobId(row.blobs[0].blob_id) for row in settled]
    await wait_for(lambda: all(node.dram.is_sealed(blob_id) for blob_id in blob_ids))
    frames = []
    for blob_id in blob_ids:
        frame = await node.dram.get(blob_id)
        assert frame is not None
        frames.append(bytes(frame.view))
        frame.release()
    assert frames[0] == frames[1]
    assert await node.write_behind.flush(timeout_seconds=20)
    assert node.dram.dirty() == []


async def test_rooms_that_are_not_needed_any_more_are_given_back(
    pair: WorkerPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    await with_room(pair, 3)
    assert pair.kv.node.prepared.bytes_out >= 3 * SIZE_BYTES
    monkeypatch.setattr(spare_rooms, "IDLE_SECONDS", 0.01)
    pair.store.spare._sweep()
    await wait_for(lambda: len(pair.desk) == 0)
    assert pair.kv.node.prepared.bytes_out == 0


async def test_one_chunk_of_a_size_asks_for_no_room(pair: WorkerPair) -> None:
    for size_bytes in range(100_000, 100_008):
        before = pair.calls
        assert (await put(pair, f"odd{size_bytes}", data_of(1, size_bytes))).status == 200
        assert pair.calls - before == 2
    assert len(pair.desk._rooms) == 0


async def test_what_no_room_is_to_spare_for_is_received_as_ever(pair: WorkerPair) -> None:
    prepared = pair.kv.node.prepared
    prepared.bytes_max = 0
    for number in range(5):
        assert (await put(pair, f"a{number}", data_of(number))).status == 200
    assert (await pair.kv.driver.get("/cache/a4")).body == data_of(4)
    assert prepared.bytes_out == 0


async def test_a_writer_that_goes_away_leaves_its_room_to_the_next(pair: WorkerPair) -> None:
    await with_room(pair)
    body = OpenBody(SIZE_BYTES)
    writing = asyncio.create_task(put(pair, "gone", body))
    body.send(data_of(1)[:70_000])
    await asyncio.sleep(0)
    before, rooms = pair.calls, len(pair.desk._rooms)
    body.vanish()
    assert (await writing).status == 400
    assert (pair.calls, len(pair.desk._rooms)) == (before, rooms)
    assert (await put(pair, "next", data_of(2))).status == 200
    assert (await pair.kv.driver.get("/cache/next")).body == data_of(2)
    assert (await pair.kv.driver.get("/cache/gone")).status == 404
    await all_is_given_back(pair)


@pytest.fixture
def told_soon(pair: WorkerPair, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001 - which says otherwise
    """Of bodies that are not there at once others are told."""
    monkeypatch.setattr(spare_writing, "BEGIN_SECONDS", 0.001)


async def begin(pair: WorkerPair, key: str, body: OpenBody) -> asyncio.Task[Answer]:
    """Send half of a chunk and wait until others are told of it."""
    writing = asyncio.create_task(put(pair, key, body))
    body.send(data_of(3)[: SIZE_BYTES // 2])
    await wait_for(lambda: any(begun.opening.done() for begun in pair.desk._room_puts._begun.values()))
    return writing


@pytest.mark.usefixtures("told_soon")
async def test_a_body_that_takes_its_time_is_told_of_and_stored(pair: WorkerPair) -> None:
    await with_room(pair)
    body = OpenBody(SIZE_BYTES)
    writing = await begin(pair, "slow", body)
    assert pair.desk._transfers.find(min(pair.desk._room_puts._begun)) is not None
    body.send(data_of(3)[SIZE_BYTES // 2 :])
    assert (await writing).status == 200
    assert (await pair.kv.driver.get("/cache/slow")).body == data_of(3)
    await all_is_given_back(pair)


@pytest.mark.usefixtures("told_soon")
async def test_one_that_takes_its_time_and_never_ends_leaves_nothing(pair: WorkerPair) -> None:
    await with_room(pair)
    body = OpenBody(SIZE_BYTES)
    writing = await begin(pair, "slow", body)
    body.vanish()
    assert (await writing).status == 400
    assert (await pair.kv.driver.get("/cache/slow")).status == 404
    await all_is_given_back(pair)


@pytest.mark.parametrize("is_deleted", [False, True])
async def test_a_room_is_nobody_elses_while_its_chunk_still_comes_though_another_writer_was_first(
    pair: WorkerPair, monkeypatch: pytest.MonkeyPatch, *, is_deleted: bool
) -> None:
    """The first writer's chunk stands when the second is told of; its room must not go to others while the body goes on coming."""
    await with_room(pair)
    node, body = pair.kv.node, OpenBody(SIZE_BYTES)
    monkeypatch.setattr(spare_writing, "BEGIN_SECONDS", 0.2)
    writing = asyncio.create_task(put(pair, "both", body))
    body.send(data_of(3)[:1000])
    await asyncio.sleep(0)
    assert (await pair.kv.driver.request("PUT", "/cache/both", body=data_of(1), headers=MEMORY)).status == 200
    await wait_for(lambda: any(begun.opening.done() for begun in pair.desk._room_puts._begun.values()))
    others = [f"other{number}" for number in range(8)]
    for number, key in enumerate(others):
        answer = await pair.kv.driver.request("PUT", f"/cache/{key}", body=data_of(50 + number), headers=MEMORY)
        assert answer.status == 200
    if is_deleted:
        assert (await pair.kv.driver.request("DELETE", "/cache/both")).status == 204
    body.send(data_of(3)[1000:])
    answer = await writing
    assert (answer.status, answer.headers["x-kvobj-existed"]) == (200, "false" if is_deleted else "true")
    for number, key in enumerate(others):
        assert (await pair.kv.driver.get(f"/cache/{key}")).body == data_of(50 + number)
    assert (await pair.kv.driver.get("/cache/both")).body == data_of(3 if is_deleted else 1)
    await node.sealing.drain()
    await all_is_given_back(pair)


async def request_for(pair: WorkerPair, key: str) -> PutRequest:
    bucket = await pair.kv.node.catalog.bucket("cache")
    assert bucket is not None
    return PutRequest(bucket, key, SIZE_BYTES, "o", durability=Durability.MEMORY)


@pytest.mark.usefixtures("told_soon")
async def test_what_there_was_no_room_for_when_it_was_told_of_is_stored_if_there_is_when_it_has_come(
    pair: WorkerPair,
) -> None:
    await with_room(pair)
    make_dirty_room = await fill_dirty_room(pair)
    pair.kv.node.store._rooms._placement._wait_seconds = 0.01
    body = OpenBody(SIZE_BYTES)
    writing = await begin(pair, "slow", body)
    make_dirty_room()
    body.send(data_of(3)[SIZE_BYTES // 2 :])
    assert (await writing).status == 200
    assert (await pair.kv.driver.get("/cache/slow")).body == data_of(3)
    await all_is_given_back(pair)


@pytest.mark.parametrize("is_full", ["dirty", "unhashed"])
async def test_a_hash_that_comes_with_the_call_is_kept_until_the_chunk_can_be_stored(
    pair: WorkerPair, is_full: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both in one read of the store process, which cannot store the chunk at once."""
    await with_room(pair)
    node = pair.kv.node
    make_dirty_room = await fill_dirty_room(pair) if is_full == "dirty" else None
    if is_full == "unhashed":
        monkeypatch.setattr(node.sealing, "_unhashed_bytes_max", 0)
    handle, room = next(iter(pair.desk._rooms._rooms.items()))
    room.blob.payload[:] = data_of(5)
    whole = BlobHash(memoryview(data_of(5)))
    whole.advance(SIZE_BYTES, None)
    assert whole.digest is not None
    request = await request_for(pair, "late")
    putting = pair.channel.call("put", FilledRoom(handle, request))
    pair.channel.tell("hashed", [Hashed(handle, 0, whole.digest, whole.block_crcs)])
    if make_dirty_room is not None:
        await wait_for(lambda: len(pair.desk._room_puts._begun) == 1)
        make_dirty_room()
    async with asyncio.timeout(20):
        stored = await putting
    assert stored.written.object is not None
    blob_id = BlobId(stored.written.object.blobs[0].blob_id)
    await wait_for(lambda: node.dram.is_sealed(blob_id))
    assert await node.write_behind.flush(timeout_seconds=20)
    assert node.dram.dirty() == []
    await all_is_given_back(pair)


async def test_a_call_that_is_given_up_in_the_moment_in_which_it_comes_leaves_nothing(pair: WorkerPair) -> None:
    await with_room(pair)
    make_dirty_room = await fill_dirty_room(pair)
    handle = next(iter(pair.desk._rooms._rooms))
    putting = pair.channel.call("put", FilledRoom(handle, await request_for(pair, "never")))
    putting.cancel()  # both messages leave together
    await pair.store._calls.last_event()
    await wait_for(lambda: not pair.desk._room_puts._begun)
    make_dirty_room()
    assert await row_of(pair, "never") is None
    await all_is_given_back(pair)


async def test_of_two_writers_of_a_chunk_the_first_to_end_wins(pair: WorkerPair) -> None:
    await with_room(pair, 2)
    bodies = [OpenBody(SIZE_BYTES), OpenBody(SIZE_BYTES)]
    writers = [asyncio.create_task(put(pair, "both", body)) for body in bodies]
    for number, body in enumerate(bodies):
        body.send(data_of(number)[:1000])
    await asyncio.sleep(0)
    bodies[1].send(data_of(1)[1000:])
    first = await writers[1]
    assert (first.status, first.headers["x-kvobj-existed"]) == (200, "false")
    bodies[0].send(data_of(0)[1000:])
    second = await writers[0]
    assert (second.status, second.headers["x-kvobj-existed"]) == (200, "true")
    assert second.headers["etag"] == first.headers["etag"]
    assert (await pair.kv.driver.get("/cache/both")).body == data_of(1)
    await all_is_given_back(pair)


async def test_a_chunk_that_came_meanwhile_with_another_size_refuses_the_write(pair: WorkerPair) -> None:
    await with_room(pair)
    body = OpenBody(SIZE_BYTES)
    writing = asyncio.create_task(put(pair, "both", body))
    body.send(data_of(0)[:1000])
    await asyncio.sleep(0)
    assert (await pair.kv.driver.request("PUT", "/cache/both", body=b"other", headers=MEMORY)).status == 200
    body.send(data_of(0)[1000:])
    answer = await writing
    assert (answer.status, answer.code) == (409, "ImmutableChunk")
    assert (await pair.kv.driver.get("/cache/both")).body == b"other"
    await all_is_given_back(pair)


async def test_what_refuses_a_write_refuses_it_before_the_body_is_taken(pair: WorkerPair) -> None:
    await with_room(pair)
    assert (await put(pair, "there", data_of(1))).status == 200
    rooms = len(pair.desk._rooms)
    for key, headers, status in (
        ("there", {}, 200),
        ("child", {"x-kvobj-parent": "nowhere", "x-kvobj-tokens": "16"}, 409),
    ):
        body = FakeBody(data_of(2))
        answer = await put(pair, key, body, **headers)
        assert answer.status == status, answer.body
        assert not body.accepted
    assert len(pair.desk._rooms) == rooms


async def test_a_checksum_is_made_where_the_bytes_arrive_and_a_wrong_one_stores_nothing(pair: WorkerPair) -> None:
    await with_room(pair)
    data = data_of(9)
    digester = Digester(frozenset({"crc64nvme"}))
    digester.update(memoryview(data))
    right = base64.b64encode(digester.digest("crc64nvme")).decode()
    before = pair.calls
    wrong = await put(pair, "sum", data_of(8), x_amz_checksum_crc64nvme=right)
    assert (wrong.status, wrong.code) == (400, "BadDigest")
    assert pair.calls == before
    answer = await put(pair, "sum", data, x_amz_checksum_crc64nvme=right)
    assert (answer.status, answer.headers["x-amz-checksum-crc64nvme"]) == (200, right)
    assert pair.calls == before + 1
    row = await row_of(pair, "sum")
    assert row is not None
    assert row.checksums[0].value == right
    await all_is_given_back(pair)


async def test_a_chunk_that_has_to_wait_until_others_are_written_down_waits_and_is_stored(pair: WorkerPair) -> None:
    await with_room(pair)
    make_dirty_room = await fill_dirty_room(pair)
    writing = asyncio.create_task(put(pair, "late", data_of(4)))
    await wait_for(lambda: len(pair.desk._room_puts._begun) == 1)
    assert not writing.done()
    make_dirty_room()
    assert (await writing).status == 200
    assert (await pair.kv.driver.get("/cache/late")).body == data_of(4)
    await all_is_given_back(pair)


async def test_one_that_is_given_up_while_it_waits_leaves_nothing(pair: WorkerPair) -> None:
    await with_room(pair)
    make_dirty_room = await fill_dirty_room(pair)
    writing = asyncio.create_task(put(pair, "never", data_of(4)))
    await wait_for(lambda: len(pair.desk._room_puts._begun) == 1)
    writing.cancel()
    await asyncio.wait([writing])
    await wait_for(lambda: not pair.desk._room_puts._begun)
    make_dirty_room()
    assert await row_of(pair, "never") is None
    await all_is_given_back(pair)


@pytest.mark.parametrize("call", ["spare_rooms", "put"])
async def test_rooms_that_come_when_their_asker_is_gone_are_given_back(pair: WorkerPair, call: str) -> None:
    """The answer and the end of who asked meet: it holds rooms, which nobody else knows of."""
    await with_room(pair)
    request, rooms = await request_for(pair, "a"), len(pair.desk._rooms)
    if call == "spare_rooms":
        answer = await pair.channel.call(call, request, 1)
    else:
        answer = await pair.channel.call(call, FilledRoom(next(iter(pair.desk._rooms._rooms)), request, rooms=2))
    assert len(pair.desk._rooms) == rooms + 1
    pair.store.unwanted(call, answer)
    await pair.store._calls.last_event()
    assert len(pair.desk._rooms) == rooms - (call == "put")


async def test_what_a_dead_worker_had_is_taken_back_and_what_it_had_stored_is_hashed(
    pair: WorkerPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    await with_room(pair, 3)
    monkeypatch.setattr(spare_writing, "BEGIN_SECONDS", 0.001)
    monkeypatch.setattr(pair.store.later, "_tell", lambda *_, **__: None)  # it dies before it tells the hash
    slow = OpenBody(SIZE_BYTES)
    writing = await begin(pair, "slow", slow)
    assert (await put(pair, "kept", data_of(6))).status == 200
    row = await row_of(pair, "kept")
    assert row is not None
    blob_id = BlobId(row.blobs[0].blob_id)
    assert not pair.kv.node.dram.is_sealed(blob_id)
    await pair.die()
    slow.vanish()
    await asyncio.wait([writing])
    assert len(pair.desk) == 0
    settled = await pair.kv.node.store.settled(row)
    assert settled.digest is not None
    assert pair.kv.node.dram.is_sealed(blob_id)
    assert (await pair.kv.driver.get("/cache/kept")).body == data_of(6)
    await all_is_given_back(pair)


async def test_a_hash_that_no_such_chunk_has_is_made_by_the_store(
    pair: WorkerPair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await with_room(pair)
    told: list[int] = []
    monkeypatch.setattr(pair.store.later, "_tell", lambda handle, *_, **__: told.append(handle))
    assert (await put(pair, "a", data_of(6))).status == 200
    await wait_for(lambda: bool(told))
    with caplog.at_level(logging.ERROR, "test"):
        pair.channel.tell("hashed", [Hashed(told[0], 0, bytes(32), [1, 2, 3])])
        await pair.store._calls.last_event()
    assert "not that of its blob" in caplog.text
    row = await row_of(pair, "a")
    assert row is not None
    settled = await pair.kv.node.store.settled(row)
    whole = Digester(frozenset({"blake3"}))
    whole.update(memoryview(data_of(6)))
    assert settled.digest == whole.digest("blake3")
    await all_is_given_back(pair)


async def test_a_room_is_for_the_chunk_it_was_given_for(pair: WorkerPair) -> None:
    await with_room(pair)
    bucket = await pair.kv.node.catalog.bucket("cache")
    assert bucket is not None
    (handle,) = list(pair.desk._rooms._rooms)[:1]
    other = PutRequest(bucket, "k", SIZE_BYTES + 1, "o")
    with pytest.raises(InvalidRequestError):
        await pair.store._calls.put(FilledRoom(handle, other))
    with pytest.raises(InvalidRequestError):
        await pair.store._calls.put(FilledRoom(-9999, other))
    assert await row_of(pair, "k") is None
