"""A whole node: what survives a stop, what write-behind does, what gives way when the home tier is full."""

from __future__ import annotations

import random
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from blake3 import blake3
from real_store import MIB, node_settings, running_node
from s3_driver import Driver, FakeBody

from kvobj.app.node import Node, flush
from kvobj.config.settings import Settings
from kvobj.ids import BlobId


def content(seed: int, size_bytes: int) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


@pytest.fixture
def settings(tmp_path: Path, shm_path: Path) -> Settings:
    return node_settings(tmp_path / "data", shm_path)


@pytest.fixture
async def node(settings: Settings) -> AsyncIterator[Node]:
    async with running_node(settings) as running:
        yield running


async def with_buckets(node: Node) -> Driver:
    driver = Driver(store=node.store)
    await driver.put("/objects", b"")
    await driver.put("/chunks", b"", x_kvobj_bucket_kind="kv")
    return driver


async def reaped(node: Node) -> None:
    while await node.reaper.reap_batch():
        pass


async def test_a_chunk_of_class_memory_outlives_a_process_that_wrote_nothing_down(settings: Settings) -> None:
    data = content(1, 3 * MIB + 5)
    async with running_node(settings) as node:
        driver = await with_buckets(node)
        put = await driver.put("/chunks/a", data)
        assert put.headers["x-kvobj-durability"] == "memory"
    async with running_node(settings) as node:
        driver = Driver(store=node.store)
        assert node.recovery.rows == 1
        assert node.recovery.dropped_rows == 0
        got = await driver.get("/chunks/a")
        assert (got.body, got.headers["x-kvobj-tier"]) == (data, "dram")
        head = await driver.request("HEAD", "/chunks/a")
        assert head.headers["x-kvobj-digest"] == blake3(data).hexdigest()


async def test_rows_whose_memory_is_lost_go_with_it(settings: Settings) -> None:
    async with running_node(settings) as node:
        driver = await with_buckets(node)
        await driver.put("/chunks/lost", content(1, MIB))
        await driver.put("/chunks/kept", content(2, MIB), x_kvobj_durability="local")
    assert settings.dram.path is not None
    shutil.rmtree(settings.dram.path)
    async with running_node(settings) as node:
        driver = Driver(store=node.store)
        assert (await driver.get("/chunks/lost")).status == 404
        assert (await driver.get("/chunks/kept")).body == content(2, MIB)
        assert (await driver.get("/chunks?list-type=2")).texts("Contents/Key") == ["kept"]


async def test_a_flush_writes_everything_down_and_the_arena_may_go(settings: Settings) -> None:
    chunks = {f"k{number}": content(number, number * 100_000 + 1) for number in range(8)}
    assert settings.dram.path is not None
    async with running_node(settings) as node:
        driver = await with_buckets(node)
        for key, data in chunks.items():
            await driver.put(f"/chunks/{key}", data)
        assert await flush(node, timeout_seconds=30)
        assert node.dram.dirty_bytes == 0
    assert not settings.dram.path.exists()
    async with running_node(settings) as node:
        driver = Driver(store=node.store)
        for key, data in chunks.items():
            got = await driver.get(f"/chunks/{key}")
            assert (got.body, got.headers["x-kvobj-tier"]) == (data, "nvme")
            assert got.headers["x-kvobj-digest"] == blake3(data).hexdigest()


async def test_a_chunk_deleted_before_it_was_written_down_leaves_nothing(node: Node) -> None:
    driver = await with_buckets(node)
    await driver.put("/chunks/a", content(1, MIB))
    await driver.request("DELETE", "/chunks/a")
    assert await flush(node, timeout_seconds=30)
    await reaped(node)
    for tier in (node.dram, node.nvme):
        assert (await tier.usage()).blobs == 0
    assert node.arena.usage().reserved_bytes == 0


async def test_chunks_that_nobody_asks_for_give_way_to_a_writer_and_ordinary_objects_never_do(
    tmp_path: Path, shm_path: Path
) -> None:
    async with running_node(node_settings(tmp_path / "data", shm_path, nvme_mib=64)) as node:
        driver = await with_buckets(node)
        await driver.put("/objects/o", content(99, 4 * MIB))
        for number in range(80):
            put = await driver.put(f"/chunks/{number}", content(number, MIB), x_kvobj_durability="local")
            assert put.status == 200
            assert (await driver.get("/chunks/0")).status == 200  # kept warm
        left = {int(row.key) for row in (await node.catalog.list_objects("chunks")).rows}
        assert 0 in left
        assert 79 in left
        assert 40 < len(left) < 60
        (gone, *_) = sorted(set(range(80)) - left)
        assert (await driver.get(f"/chunks/{gone}")).status == 404
        assert (await driver.get("/chunks/79")).body == content(79, MIB)
        assert (await driver.get("/objects/o")).body == content(99, 4 * MIB)


async def test_a_home_tier_full_of_ordinary_objects_says_so_and_recovers(tmp_path: Path, shm_path: Path) -> None:
    async with running_node(node_settings(tmp_path / "data", shm_path, nvme_mib=64)) as node:
        driver = await with_buckets(node)
        stored = 0
        while (answer := await driver.put(f"/objects/{stored}", content(stored, 4 * MIB))).status == 200:
            stored += 1
        assert answer.status == 507
        assert (await driver.get("/objects/0")).body == content(0, 4 * MIB)
        await driver.request("DELETE", "/objects/0")
        await reaped(node)
        assert (await driver.put("/objects/again", content(0, 4 * MIB))).status == 200


@pytest.mark.parametrize("bucket", ["objects", "chunks"])
async def test_an_object_of_several_blobs_reads_back_whole_in_ranges_and_as_a_copy(node: Node, bucket: str) -> None:
    driver = await with_buckets(node)
    data = content(7, 21 * MIB + 3)
    put = await driver.put(f"/{bucket}/big", data)
    assert put.status == 200
    assert (await driver.get(f"/{bucket}/big")).body == data
    for start, stop in ((0, 1), (7 * MIB - 1, 16 * MIB + 9), (len(data) - 5, len(data))):
        part = await driver.get(f"/{bucket}/big", range=f"bytes={start}-{stop - 1}")
        assert (part.status, part.body) == (206, data[start:stop])
    copied = await driver.put("/objects/copy", b"", x_amz_copy_source=f"/{bucket}/big")
    assert copied.status == 200
    assert (await driver.get("/objects/copy")).body == data


async def test_a_zp_bucket_gives_the_bytes_back_and_takes_less_room(node: Node) -> None:
    driver = await with_buckets(node)
    chunks = await node.catalog.bucket("chunks")
    assert chunks is not None
    await node.catalog.create_bucket(msgspec.structs.replace(chunks, name="packed", codec="zp"))
    data = b"".join(number.to_bytes(2, "big") for number in range(30_000)) * 20
    assert (await driver.put("/packed/k", data)).status == 200
    assert (await driver.get("/packed/k")).body == data
    assert (await driver.get("/packed/k", range="bytes=300000-900000")).body == data[300_000:900_001]
    assert (await node.dram.usage()).used_bytes < len(data) // 2
    assert await flush(node, timeout_seconds=30)
    await node.dram.delete([blob_id async for blob_id in node.dram.scan()])
    cold = await driver.get("/packed/k")
    assert (cold.body, cold.headers["x-kvobj-tier"]) == (data, "nvme")


async def test_writers_that_leave_in_the_middle_give_back_their_room(node: Node) -> None:
    driver = await with_buckets(node)
    for target in ("/chunks/x", "/objects/x"):
        for size_bytes in (MIB, 21 * MIB):
            answer = await driver.request(
                "PUT", target, body=FakeBody(b"short", length=size_bytes), payload="UNSIGNED-PAYLOAD"
            )
            assert answer.status == 400
    await reaped(node)
    assert node.arena.usage().reserved_bytes == 0
    assert (await node.nvme.usage()).blobs == 0


async def lose(node: Node) -> None:
    """Take every blob out of every tier behind the catalog's back."""
    for tier in (node.dram, node.nvme):
        await tier.delete([blob_id async for blob_id in tier.scan()])


async def test_a_chunk_whose_bytes_are_lost_is_a_miss_and_can_be_stored_again(node: Node) -> None:
    driver = await with_buckets(node)
    await driver.put("/chunks/a", content(1, MIB), x_kvobj_durability="local")
    await lose(node)
    assert (await driver.get("/chunks/a")).status == 404
    again = await driver.put("/chunks/a", content(2, MIB))
    assert (again.status, again.headers["x-kvobj-existed"]) == (200, "false")
    assert (await driver.get("/chunks/a")).body == content(2, MIB)


async def test_an_ordinary_object_whose_bytes_are_lost_stays_for_an_operator_to_see(node: Node) -> None:
    driver = await with_buckets(node)
    await driver.put("/objects/a", content(1, MIB))
    await lose(node)
    for _ in range(2):
        assert (await driver.get("/objects/a")).status == 500


async def test_room_is_never_made_by_removing_a_chunk_that_was_stored_anew(node: Node) -> None:
    driver = await with_buckets(node)
    await driver.put("/chunks/a", content(1, MIB), x_kvobj_durability="local")
    (row,) = await node.catalog.lookup("chunks", ["a"])
    assert row is not None
    await driver.request("DELETE", "/chunks/a")
    await driver.put("/chunks/a", content(2, MIB))  # class memory: nothing of it is in the home tier
    await node.collector.written(row)  # as if the removal had not been noticed
    assert await node.collector.make_room(512 * MIB) < 2 * MIB  # what the first one left, if nobody has reaped it yet
    assert node.collector.counts.claimed == 0
    assert (await driver.get("/chunks/a")).body == content(2, MIB)


async def test_a_chunk_completed_from_parts_gives_way_too(node: Node) -> None:
    driver = await with_buckets(node)
    created = await driver.request("POST", "/chunks/m?uploads", headers={"x-kvobj-durability": "local"})
    (upload_id,) = created.texts("UploadId")
    part = await driver.put(f"/chunks/m?partNumber=1&uploadId={upload_id}", content(1, MIB))
    document = (
        "<CompleteMultipartUpload><Part><PartNumber>1</PartNumber>"
        f"<ETag>{part.headers['etag']}</ETag></Part></CompleteMultipartUpload>"
    )
    done = await driver.request("POST", f"/chunks/m?uploadId={upload_id}", body=document.encode())
    assert done.status == 200
    assert await node.collector.make_room(512 * MIB) == MIB
    assert (await driver.get("/chunks/m")).status == 404


async def test_an_open_upload_of_class_memory_outlives_a_clean_stop(settings: Settings) -> None:
    async with running_node(settings) as node:
        driver = await with_buckets(node)
        created = await driver.request("POST", "/chunks/m?uploads")
        (upload_id,) = created.texts("UploadId")
        assert await flush(node, timeout_seconds=30)
    async with running_node(settings) as node:
        driver = Driver(store=node.store)
        assert (await driver.put(f"/chunks/m?partNumber=1&uploadId={upload_id}", content(1, MIB))).status == 200


async def test_a_chunk_lost_before_it_was_written_down_is_dropped_and_never_called_local(node: Node) -> None:
    driver = await with_buckets(node)
    await driver.put("/chunks/lost", content(1, MIB))
    await node.sealing.drain()
    await lose(node)
    await driver.put("/chunks/kept", content(2, MIB))
    assert await flush(node, timeout_seconds=30)
    assert await node.catalog.lookup("chunks", ["lost"]) == [None]
    assert (await driver.get("/chunks/kept")).body == content(2, MIB)
    assert node.write_behind.failures == 1


async def test_damage_is_told_once_however_often_it_is_asked_for(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    driver = await with_buckets(node)
    body = content(1, MIB)
    await driver.put("/objects/a", body)
    (row,) = await node.catalog.lookup("objects", ["a"])
    assert row is not None
    await node.dram.delete([BlobId(row.blobs[0].blob_id)])
    (segment,) = [path for path in node.nvme_directory.iterdir() if body[:4096] in path.read_bytes()]
    with segment.open("r+b") as file:
        file.seek(segment.read_bytes().find(body[:4096]) + 10)
        file.write(bytes([body[10] ^ 1]))
    for _ in range(3):
        assert (await driver.get("/objects/a")).status == 500
    told = [record.getMessage() for record in caplog.records if "corrupt" in record.getMessage()]
    assert told == [f"a frame in nvme is corrupt blob_id={row.blobs[0].blob_id.hex()}"]
