"""What engines' S3 clients depend on beyond the everyday: Dynamo's locks and marks (kvbm-engine, `object/s3`), NIXL's spelling.

Dynamo offloads a block so: HEAD of `HASH.meta`, PUT of `HASH.lock` unless it is there, PUT of the block, PUT of an empty
`HASH.meta`, DELETE of the lock. A lock whose deadline (in its JSON) has passed is taken over by a PUT that names its ETag.
"""

import asyncio
import base64
import json
import zlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from s3_driver import Answer, Driver, unsigned_chunks
from s3_stores import STORES, driver_over

HASH = "001bd8e239354745e840000000000000"
BLOCK = bytes(range(256)) * 64


@pytest.fixture(params=STORES)
async def driver(request: pytest.FixtureRequest, tmp_path: Path, shm_path: Path) -> AsyncIterator[Driver]:
    async with driver_over(request.param, data=tmp_path / "data", memory=shm_path) as empty:
        await empty.put("/ordinary", b"")
        await empty.put("/chunks", b"", x_kvobj_bucket_kind="kv")
        yield empty


both_kinds = pytest.mark.parametrize("bucket", ["ordinary", "chunks"])


def lock(owner: str) -> bytes:
    return json.dumps({"instance_id": owner, "acquired_at": "2026-01-01T00:00:00Z", "deadline": "…"}).encode()


async def put_as_the_rust_sdk(driver: Driver, target: str, data: bytes, *, is_streamed: bool, **headers: str) -> Answer:
    """A PutObject as aws-sdk-rust sends it: a checksum in the head, or behind aws-chunked where the body is a stream."""
    checksum = base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    sent |= {"amz-sdk-request": "attempt=1; max=3", "content-type": "application/octet-stream"}
    if not is_streamed:
        sent |= {"x-amz-checksum-crc32": checksum, "x-amz-sdk-checksum-algorithm": "CRC32"}
        return await driver.request("PUT", f"{target}?x-id=PutObject", body=data, headers=sent)
    sent |= {
        "x-amz-trailer": "x-amz-checksum-crc32",
        "content-encoding": "aws-chunked",
        "x-amz-decoded-content-length": str(len(data)),
    }
    body = unsigned_chunks([data] if data else [], [("x-amz-checksum-crc32", checksum)])
    payload = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"
    return await driver.request("PUT", f"{target}?x-id=PutObject", body=body, headers=sent, payload=payload)


async def test_a_bucket_that_is_not_there_is_made_and_found(driver: Driver) -> None:
    assert (await driver.request("HEAD", "/kvbm-blocks")).status == 404
    for _racing_leader in range(2):
        assert (await driver.request("PUT", "/kvbm-blocks")).status == 200
    assert (await driver.request("HEAD", "/kvbm-blocks")).status == 200


@both_kinds
@pytest.mark.parametrize("checksum", ["in the head", "behind the body"])
async def test_a_block_is_offloaded_under_a_lock_and_marked_by_an_empty_object(
    driver: Driver, bucket: str, checksum: str
) -> None:
    place, is_streamed = f"/{bucket}/{HASH}", checksum == "behind the body"
    assert (await driver.request("HEAD", f"{place}.meta")).status == 404
    taken = await put_as_the_rust_sdk(driver, f"{place}.lock", lock("a"), is_streamed=is_streamed, if_none_match="*")
    assert taken.status == 200
    assert (await put_as_the_rust_sdk(driver, place, BLOCK, is_streamed=is_streamed)).status == 200
    assert (await put_as_the_rust_sdk(driver, f"{place}.meta", b"", is_streamed=is_streamed)).status == 200
    assert (await driver.request("DELETE", f"{place}.lock")).status == 204
    assert (await driver.request("DELETE", f"{place}.lock")).status == 204
    assert (await driver.request("HEAD", f"{place}.meta")).status == 200
    assert (await driver.get(f"{place}.meta")).body == b""
    assert (await driver.get(place)).body == BLOCK
    gone = await driver.get(f"{place}.lock")
    assert (gone.status, gone.code) == (404, "NoSuchKey")


@both_kinds
async def test_of_two_that_want_a_lock_one_gets_it(driver: Driver, bucket: str) -> None:
    place = f"/{bucket}/{HASH}.lock"
    answers = await asyncio.gather(
        *(put_as_the_rust_sdk(driver, place, lock(owner), is_streamed=False, if_none_match="*") for owner in "ab")
    )
    assert sorted(answer.status for answer in answers) == [200, 412]
    assert {answer.code for answer in answers if answer.status == 412} == {"PreconditionFailed"}
    later = await put_as_the_rust_sdk(driver, place, lock("c"), is_streamed=False, if_none_match="*")
    assert (later.status, later.code) == (412, "PreconditionFailed")


@both_kinds
async def test_a_stale_lock_is_taken_over_by_one_alone(driver: Driver, bucket: str) -> None:
    place = f"/{bucket}/{HASH}.lock"
    await put_as_the_rust_sdk(driver, place, lock("stale"), is_streamed=False, if_none_match="*")
    seen = await driver.get(place)
    assert json.loads(seen.body)["instance_id"] == "stale"
    etag = seen.headers["etag"]
    taken = await put_as_the_rust_sdk(driver, place, lock("the-next"), is_streamed=False, if_match=etag)
    assert taken.status == 200
    lost = await put_as_the_rust_sdk(driver, place, lock("too-late"), is_streamed=False, if_match=etag)
    assert (lost.status, lost.code) == (412, "PreconditionFailed")
    assert json.loads((await driver.get(place)).body)["instance_id"] == "the-next"
    await driver.request("DELETE", place)
    nothing = await put_as_the_rust_sdk(driver, place, lock("too-late"), is_streamed=False, if_match=etag)
    assert (nothing.status, nothing.code) == (404, "NoSuchKey")


@both_kinds
async def test_a_block_that_was_offloaded_before_is_taken_again(driver: Driver, bucket: str) -> None:
    """A leader that died between block and mark: the next one sends the block once more."""
    place = f"/{bucket}/{HASH}"
    for _leader in range(2):
        assert (await put_as_the_rust_sdk(driver, place, BLOCK, is_streamed=False)).status == 200
        assert (await put_as_the_rust_sdk(driver, f"{place}.meta", b"", is_streamed=False)).status == 200
    assert (await driver.get(place)).body == BLOCK


@both_kinds
async def test_checksums_are_told_to_who_asks_in_lower_case(driver: Driver, bucket: str) -> None:
    """aws-sdk-cpp in NIXL writes `enabled`."""
    await put_as_the_rust_sdk(driver, f"/{bucket}/block", BLOCK, is_streamed=True)
    told = await driver.get(f"/{bucket}/block", x_amz_checksum_mode="enabled")
    assert told.headers["x-amz-checksum-crc32"] == base64.b64encode(zlib.crc32(BLOCK).to_bytes(4, "big")).decode()


@both_kinds
@pytest.mark.parametrize("upload", ["whole", "in parts"])
async def test_what_stands_behind_an_etags_hyphen_is_a_number_of_parts(
    driver: Driver, bucket: str, upload: str
) -> None:
    """aws-c-s3 reads it so, and never ends a transfer of a large object where it cannot (NIXL 1.5.1 with `crtMinLimit`)."""
    if upload == "in parts":
        created = await driver.request("POST", f"/{bucket}/block?uploads")
        upload_id = created.xml.findtext("UploadId")
        part = await driver.put(f"/{bucket}/block?partNumber=1&uploadId={upload_id}", BLOCK)
        etags = [part.headers["etag"]]
        listed = f"<Part><PartNumber>1</PartNumber><ETag>{etags[0]}</ETag></Part>"
        body = f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>".encode()
        done = await driver.request("POST", f"/{bucket}/block?uploadId={upload_id}", body=body)
        assert done.status == 200
    else:
        etags = [(await driver.put(f"/{bucket}/block", BLOCK)).headers["etag"]]
    etags.append((await driver.request("HEAD", f"/{bucket}/block")).headers["etag"])
    for etag in etags:
        _start, hyphen, parts = etag.strip('"').partition("-")
        assert not hyphen or 1 <= int(parts) <= 10_000
