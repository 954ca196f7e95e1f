"""Reads that are answered at once from memory: the same answers as by the way of all requests, and none that way would refuse."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from kv_driver import KvDriver, kv_node
from s3_driver import BOB, HOST, Answer, presign

from kvobj.catalog.rows import ChunkName
from kvobj.policy.chunk_policy import chunk_name
from kvobj.store.object_reads import COPIED_BYTES_MAX

IDS = {"x-amz-request-id"}
# Signed, and known to no read: what has it goes the way of all requests.
OTHER_WAY = {"x-anything": "1"}


@pytest.fixture
async def kv(tmp_path: Path, shm_path: Path) -> AsyncIterator[KvDriver]:
    async with kv_node(tmp_path, shm_path) as node:
        yield node


def was_hot(answer: Answer) -> bool:
    return bool(answer.reply.ready)


def told(answer: Answer) -> tuple[object, ...]:
    headers = {name: value for name, value in answer.headers.items() if name not in IDS}
    return answer.status, headers, answer.body, answer.reply.log


async def read_both_ways(kv: KvDriver, target: str, *, method: str = "GET", **headers: str) -> Answer:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    hot = await kv.driver.request(method, target, headers=sent)
    ordinary = await kv.driver.request(method, target, headers=sent | OTHER_WAY)
    assert not was_hot(ordinary)
    assert told(hot) == told(ordinary)
    return hot


@pytest.mark.parametrize("size_bytes", [1, 4096, COPIED_BYTES_MAX, COPIED_BYTES_MAX + 1, 300_000])
async def test_what_lies_in_memory_is_read_alike_at_once_and_step_by_step(kv: KvDriver, size_bytes: int) -> None:
    body = (bytes(range(251)) * (size_bytes // 251 + 1))[:size_bytes]
    said = {"content-type": "text/plain", "cache-control": "no-store", "x-amz-meta-a": "b", "x-amz-tagging": "a=b"}
    for bucket in ("cache", "files"):
        for key, headers in (("plain", {}), ("said", said), ("summed", {"x-amz-checksum-algorithm": "CRC32C"})):
            stated = headers if bucket == "files" or key != "said" else {**said, "x-amz-tagging": ""}
            put = await kv.driver.request("PUT", f"/{bucket}/{key}", body=body, headers=stated)
            assert put.status == 200
            await kv.node.sealing.drain()
            hot = await read_both_ways(kv, f"/{bucket}/{key}")
            assert (was_hot(hot), hot.body) == (True, body)
            assert was_hot(await read_both_ways(kv, f"/{bucket}/{key}", x_amz_checksum_mode="enabled"))
            for asked in ({}, {"x_amz_checksum_mode": "enabled"}):
                head = await read_both_ways(kv, f"/{bucket}/{key}", method="HEAD", **asked)
                assert (was_hot(head), head.body, head.reply.content_length) == (True, b"", size_bytes)
                assert hot.headers.keys() - head.headers.keys() == {"x-kvobj-tier"}
            by_url = await kv.driver.send("GET", presign("GET", f"/{bucket}/{key}"), [("host", HOST)])
            assert (was_hot(by_url), by_url.body) == (True, body)
    assert len(kv.node.in_use) == 0


async def test_what_asks_for_more_than_the_whole_is_not_answered_at_once(kv: KvDriver) -> None:
    etag = (await kv.driver.put("/cache/a", b"x" * 1000)).headers["etag"]
    assert was_hot(await kv.driver.get("/cache/a"))
    for target, headers in (
        ("/cache/a?part=0", {}),
        ("/cache/a?versionId=null", {}),
        ("/cache/a?response-expires=0", {}),
        ("/cache/a", {"range": "bytes=0-1"}),
        ("/cache/a", {"if-none-match": etag}),
        ("/cache/a", {"x-kvobj-accept": "raw"}),
        ("/cache/a", {"x-kvobj-pin": "0" * 32}),
        ("/cache/a", {"x-amz-expected-bucket-owner": "somebody"}),
        ("/cache/a", {"origin": "http://a.example"}),
    ):
        assert not was_hot(await kv.driver.request("GET", target, headers=headers)), (target, headers)
    assert not was_hot(await kv.driver.request("GET", "/cache/a", body=b"a body"))
    assert not was_hot(await kv.driver.request("HEAD", "/cache/a", headers={"range": "bytes=0-1"}))
    assert not was_hot(await kv.driver.request("HEAD", "/cache/a", body=b"a body"))


async def test_a_head_is_answered_at_once_wherever_the_bytes_lie_and_however_many_there_are(kv: KvDriver) -> None:
    await kv.driver.put("/files/empty", b"")
    assert was_hot(await read_both_ways(kv, "/files/empty", method="HEAD"))
    await kv.driver.request("PUT", "/cache/a", body=b"x" * 1000, headers={"x-kvobj-durability": "local"})
    (row,) = await kv.node.catalog.lookup("cache", ["a"])
    assert row is not None
    dram = kv.node.dram
    dram.mark_clean(row.blobs[0].blob_id)  # type: ignore[arg-type]
    assert dram.evict_corrupt(row.blobs[0].blob_id)  # type: ignore[arg-type]
    answer = await read_both_ways(kv, "/cache/a", method="HEAD")
    assert (was_hot(answer), answer.status, answer.reply.content_length) == (True, 200, 1000)
    for key in ("absent", "empty"):
        assert (await kv.driver.request("HEAD", f"/cache/{key}")).status == 404


async def test_a_head_of_a_chunk_rescues_it_and_holds_it_against_policy(kv: KvDriver) -> None:
    await kv.driver.put("/cache/a", b"x" * 1000)
    (row,) = await kv.node.catalog.lookup("cache", ["a"])
    assert row is not None
    marks, name = kv.node.catalog._marks, ChunkName("cache", "a", row.blobs[0].blob_id)
    assert marks.add([name], not_before_boot_ms=0) == [True]
    assert was_hot(await kv.driver.request("HEAD", "/cache/a"))
    assert not marks.is_marked("cache", "a")
    assert kv.node.collector._holds.is_held(chunk_name("cache", "a"), now_boot_ms=kv.now_boot_ms())
    marks.add([name], not_before_boot_ms=0)
    assert marks.begin_claim(now_boot_ms=1, limit=1) == [name]
    assert (await kv.driver.request("HEAD", "/cache/a")).status == 404
    marks.end_claim([name])
    assert (await kv.driver.request("DELETE", "/cache/a")).status == 204
    assert (await kv.driver.request("HEAD", "/cache/a")).status == 404


async def test_only_who_may_do_all_with_the_bucket_is_told_of_an_object_at_once(kv: KvDriver) -> None:
    for bucket in ("cache", "files"):
        await kv.driver.put(f"/{bucket}/a", b"x" * 1000)
        assert (await kv.driver.request("HEAD", f"/{bucket}/a", user=BOB)).status == 403
        assert (await kv.driver.send("HEAD", f"/{bucket}/a", [("host", HOST)])).status == 403


async def test_only_who_may_do_all_with_the_bucket_is_answered_at_once(kv: KvDriver) -> None:
    for bucket in ("cache", "files"):
        await kv.driver.put(f"/{bucket}/a", b"x" * 1000)
        assert was_hot(await kv.driver.get(f"/{bucket}/a"))
        denied = await kv.driver.request("GET", f"/{bucket}/a", user=BOB)
        anonymous = await kv.driver.send("GET", f"/{bucket}/a", [("host", HOST)])
        assert [(answer.status, answer.code) for answer in (denied, anonymous)] == [(403, "AccessDenied")] * 2
    policy = (
        b'{"Statement":[{"Effect":"Deny","Principal":"*","Action":"s3:GetObject","Resource":"arn:aws:s3:::files/*"}]}'
    )
    assert (await kv.driver.request("PUT", "/files?policy", body=policy)).status == 204
    assert (await kv.driver.get("/files/a")).status == 403


async def test_a_read_at_once_sees_what_was_written_last(kv: KvDriver) -> None:
    for body in (b"one", b"other", b"x" * (COPIED_BYTES_MAX + 1), b"y" * (COPIED_BYTES_MAX + 1)):
        etag = (await kv.driver.put("/files/a", body)).headers["etag"]
        for _ in range(2):
            answer = await kv.driver.get("/files/a")
            assert (was_hot(answer), answer.body, answer.headers["etag"]) == (True, body, etag)
    await kv.driver.request(
        "PUT", "/files/a?tagging", body=b"<Tagging><TagSet><Tag><Key>a</Key><Value>b</Value></Tag></TagSet></Tagging>"
    )
    assert (await kv.driver.get("/files/a")).headers["x-amz-tagging-count"] == "1"
    for bucket in ("files", "cache"):
        await kv.driver.put(f"/{bucket}/a", b"one")
        assert was_hot(await kv.driver.get(f"/{bucket}/a"))
        assert (await kv.driver.request("DELETE", f"/{bucket}/a")).status == 204
        assert (await kv.driver.get(f"/{bucket}/a")).status == 404
    assert (await kv.driver.request("DELETE", "/files")).status == 204
    assert (await kv.driver.get("/files/a")).code == "NoSuchBucket"
    assert (await kv.driver.request("PUT", "/files")).status == 200
    assert (await kv.driver.get("/files/a")).code == "NoSuchKey"


async def test_short_heads_are_remembered_and_long_ones_made_anew(kv: KvDriver) -> None:
    long = dict.fromkeys(("content-disposition", "content-language"), "x" * 1000)
    for key, headers, is_remembered in (("short", {}, True), ("long", long, False)):
        assert (await kv.driver.request("PUT", f"/files/{key}", body=b"x", headers=headers)).status == 200
        first, second = [await kv.driver.get(f"/files/{key}") for _ in range(2)]
        assert first.reply.ready == second.reply.ready != ""
        assert (first.reply.ready is second.reply.ready) == is_remembered


async def test_what_was_stored_in_parts_is_not_remembered_since_its_row_may_be_large(kv: KvDriver) -> None:
    begun = await kv.driver.request("POST", "/files/parts?uploads")
    upload_id = begun.body.decode().partition("<UploadId>")[2].partition("<")[0]
    part = await kv.driver.put(f"/files/parts?partNumber=1&uploadId={upload_id}", b"x" * 1000)
    listed = f"<Part><PartNumber>1</PartNumber><ETag>{part.headers['etag']}</ETag></Part>"
    document = f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>".encode()
    assert (await kv.driver.request("POST", f"/files/parts?uploadId={upload_id}", body=document)).status == 200
    first, second = [await kv.driver.request("HEAD", "/files/parts") for _ in range(2)]
    assert first.reply.ready == second.reply.ready != ""
    assert first.reply.ready is not second.reply.ready
    assert first.reply.content_length == 1000


async def test_a_chunk_that_policy_condemned_is_rescued_by_a_read_and_absent_while_it_is_claimed(kv: KvDriver) -> None:
    await kv.driver.put("/cache/a", b"x" * 1000)
    (row,) = await kv.node.catalog.lookup("cache", ["a"])
    assert row is not None
    marks = kv.node.catalog._marks
    name = ChunkName("cache", "a", row.blobs[0].blob_id)
    assert marks.add([name], not_before_boot_ms=0) == [True]
    assert was_hot(await kv.driver.get("/cache/a"))
    assert not marks.is_marked("cache", "a")
    marks.add([name], not_before_boot_ms=0)
    assert marks.begin_claim(now_boot_ms=1, limit=1) == [name]
    assert (await kv.driver.get("/cache/a")).status == 404
    marks.end_claim([name])
    assert was_hot(await kv.driver.get("/cache/a"))


async def test_what_is_not_in_memory_or_not_checked_yet_is_read_by_the_tiers(kv: KvDriver) -> None:
    body = b"x" * 1000
    await kv.driver.request("PUT", "/cache/a", body=body, headers={"x-kvobj-durability": "local"})
    (row,) = await kv.node.catalog.lookup("cache", ["a"])
    assert row is not None
    blob_id, dram = row.blobs[0].blob_id, kv.node.dram
    dram._entries[blob_id].verified = False  # type: ignore[index]  # as after a start
    answer = await kv.driver.get("/cache/a")
    assert (was_hot(answer), answer.body) == (False, body)
    assert was_hot(await kv.driver.get("/cache/a"))
    dram.mark_clean(blob_id)  # type: ignore[arg-type]
    assert dram.evict_corrupt(blob_id)  # type: ignore[arg-type]
    answer = await kv.driver.get("/cache/a")
    assert (was_hot(answer), answer.body, answer.headers["x-kvobj-tier"]) == (False, body, "nvme")


async def test_reads_at_once_are_counted_as_hits_and_as_use(kv: KvDriver) -> None:
    gets, sent = kv.node.instruments.gets, kv.node.instruments.bytes

    def hits() -> tuple[float, float]:
        counted = {
            tuple(sample.labels.values()): sample.value
            for counter in (gets, sent)
            for family in counter.collect()
            for sample in family.samples
            if sample.name.endswith("_total")
        }
        return counted["dram", "hit"], counted["dram", "out"]

    await kv.driver.put("/cache/a", b"x" * 1000)
    before = hits()
    assert was_hot(await kv.driver.get("/cache/a"))
    after_one = hits()
    await kv.driver.request("GET", "/cache/a", headers=OTHER_WAY)
    after_two = hits()
    for earlier, later in ((before, after_one), (after_one, after_two)):
        assert (later[0] - earlier[0], later[1] - earlier[1]) == (1, after_two[1] - after_one[1])
    assert after_two[1] - after_one[1] >= 1000
