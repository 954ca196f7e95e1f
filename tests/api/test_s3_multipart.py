"""Multipart uploads and listings of them."""

import base64
import hashlib
import zlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import cast

import pytest
from s3_driver import Answer, Driver
from s3_stores import STORES, driver_over

from kvobj.api.exchange import S3Settings
from kvobj.api.object_store import ObjectStore

MIB = 1 << 20
FIRST, SECOND, LAST = b"a" * (5 * MIB), b"b" * (5 * MIB), b"end"


def crc32(data: bytes) -> str:
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()


async def filled(driver: Driver) -> Driver:
    await driver.put("/bucket", b"")
    await driver.put("/chunks", b"", x_kvobj_bucket_kind="kv")
    return driver


@pytest.fixture(params=STORES)
async def driver(request: pytest.FixtureRequest, tmp_path: Path, shm_path: Path) -> AsyncIterator[Driver]:
    async with driver_over(request.param, data=tmp_path / "data", memory=shm_path) as empty:
        yield await filled(empty)


async def create(driver: Driver, target: str = "/bucket/key", **headers: str) -> str:
    answer = await driver.request(
        "POST", f"{target}?uploads", headers={name.replace("_", "-"): value for name, value in headers.items()}
    )
    assert answer.status == 200, answer.body
    return answer.xml.findtext("UploadId") or ""


async def put_part(
    driver: Driver, upload_id: str, number: int, data: bytes, target: str = "/bucket/key", **headers: str
) -> str:
    answer = await driver.put(f"{target}?partNumber={number}&uploadId={upload_id}", data, **headers)
    assert answer.status == 200, answer.body
    return answer.headers["etag"]


async def complete(
    driver: Driver,
    upload_id: str,
    parts: list[tuple[int, str]],
    target: str = "/bucket/key",
    *,
    told: Mapping[int, str] = MappingProxyType({}),
    **headers: str,
) -> Answer:
    """`told`: what else the document says of a part, by number."""
    listed = "".join(
        f"<Part><PartNumber>{number}</PartNumber><ETag>{etag}</ETag>{told.get(number, '')}</Part>"
        for number, etag in parts
    )
    document = (
        f'<CompleteMultipartUpload xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{listed}</CompleteMultipartUpload>'
    )
    return await driver.request(
        "POST",
        f"{target}?uploadId={upload_id}",
        body=document.encode(),
        headers={name.replace("_", "-"): value for name, value in headers.items()},
    )


async def test_parts_out_of_order_and_sent_again_make_the_object(driver: Driver) -> None:
    upload_id = await create(driver, content_type="text/plain", x_amz_meta_a="1")
    last = await put_part(driver, upload_id, 7, LAST)
    await put_part(driver, upload_id, 1, SECOND)
    second = await put_part(driver, upload_id, 2, SECOND)
    first = await put_part(driver, upload_id, 1, FIRST)
    assert (await driver.get("/bucket/key")).status == 404
    done = await complete(
        driver, upload_id, [(1, first), (2, second), (7, last)], x_amz_mp_object_size=str(len(FIRST + SECOND + LAST))
    )
    md5s = b"".join(bytes.fromhex(etag.strip('"')) for etag in (first, second, last))
    etag = f'"{hashlib.md5(md5s).hexdigest()}-3"'  # noqa: S324 - what an ETag is
    assert (done.status, done.xml.findtext("ETag"), done.xml.findtext("Key")) == (200, etag, "key")
    got = await driver.get("/bucket/key")
    assert got.body == FIRST + SECOND + LAST
    assert (got.headers["etag"], got.headers["content-type"], got.headers["x-amz-meta-a"]) == (etag, "text/plain", "1")
    part = await driver.get("/bucket/key?partNumber=3")
    assert (part.status, part.body, part.headers["x-amz-mp-parts-count"]) == (206, LAST, "3")
    assert (await driver.get("/bucket/key?partNumber=4")).code == "InvalidPartNumber"
    assert (await complete(driver, upload_id, [(1, first)])).code == "NoSuchUpload"
    again = await complete(driver, upload_id, [(1, first), (2, second), (7, last)])
    assert (again.status, again.xml.findtext("ETag")) == (200, etag)


async def test_complete_refuses_what_does_not_fit(driver: Driver) -> None:
    upload_id = await create(driver)
    first, last = await put_part(driver, upload_id, 1, b"small"), await put_part(driver, upload_id, 2, LAST)
    for parts, code in (
        ([(1, first), (2, last)], "EntityTooSmall"),
        ([(2, last), (1, first)], "InvalidPartOrder"),
        ([(2, last), (2, last)], "InvalidPartOrder"),
        ([(1, '"' + "0" * 32 + '"')], "InvalidPart"),
        ([(3, first)], "InvalidPart"),
        ([], "MalformedXML"),
    ):
        answer = await complete(driver, upload_id, parts)
        assert (answer.status, answer.code) == (400, code), parts
    assert (await complete(driver, upload_id, [(2, last)], x_amz_mp_object_size="99")).code == "InvalidRequest"
    assert (await complete(driver, upload_id, [(2, last)], if_match='"x"')).code == "NoSuchKey"
    assert (await complete(driver, upload_id, [(2, last.strip('"'))])).status == 200


async def test_conditions_are_evaluated_at_complete(driver: Driver) -> None:
    upload_id = await create(driver)
    etag = await put_part(driver, upload_id, 1, LAST)
    await driver.put("/bucket/key", b"meanwhile")
    refused = await complete(driver, upload_id, [(1, etag)], if_none_match="*")
    assert (refused.status, refused.code) == (412, "PreconditionFailed")
    assert (await driver.get("/bucket/key")).body == b"meanwhile"
    assert (await complete(driver, upload_id, [(1, etag)])).status == 200


async def test_an_upload_that_is_not_there_is_named(driver: Driver) -> None:
    assert (await driver.put("/bucket/key?partNumber=1&uploadId=absent", b"x")).code == "NoSuchUpload"
    assert (await driver.request("DELETE", "/bucket/key?uploadId=absent")).code == "NoSuchUpload"
    assert (await driver.get(f"/bucket/key?uploadId={'a' * 600}")).code == "NoSuchUpload"
    assert (await driver.get("/bucket/key?uploadId=..%2F..%2Fetc")).code == "NoSuchUpload"


async def test_parts_and_uploads_are_listed_and_an_abort_forgets_them(driver: Driver) -> None:
    upload_id = await create(driver, x_amz_checksum_algorithm="SHA256")
    for number in (1, 2, 3):
        await put_part(driver, upload_id, number, b"x" * number)
    page = await driver.get(f"/bucket/key?uploadId={upload_id}&max-parts=2")
    assert (
        page.texts("Part/PartNumber"),
        page.xml.findtext("IsTruncated"),
        page.xml.findtext("NextPartNumberMarker"),
    ) == (["1", "2"], "true", "2")
    assert page.xml.findtext("Part/ChecksumSHA256") == base64.b64encode(hashlib.sha256(b"x").digest()).decode()
    rest = await driver.get(f"/bucket/key?uploadId={upload_id}&part-number-marker=2")
    assert (rest.texts("Part/Size"), rest.xml.findtext("IsTruncated")) == (["3"], "false")
    other = await create(driver, "/bucket/dir/other")
    assert sorted((await driver.get("/bucket?uploads")).texts("Upload/Key")) == ["dir/other", "key"]
    assert (await driver.get("/bucket?uploads&delimiter=%2F")).texts("CommonPrefixes/Prefix") == ["dir/"]
    first = await driver.get("/bucket?uploads=&max-uploads=1")
    assert (first.xml.findtext("NextKeyMarker"), first.xml.findtext("NextUploadIdMarker")) == ("dir/other", other)
    assert (await driver.get("/bucket?uploads&key-marker=dir%2Fother")).texts("Upload/Key") == ["key"]
    assert (await driver.request("DELETE", f"/bucket/key?uploadId={upload_id}")).status == 204
    assert (await driver.get("/bucket?uploads")).texts("Upload/Key") == ["dir/other"]


@pytest.mark.parametrize("kind", ["FULL_OBJECT", "COMPOSITE"])
async def test_checksums_of_parts_become_the_objects(driver: Driver, kind: str) -> None:
    upload_id = await create(driver, x_amz_checksum_algorithm="CRC32", x_amz_checksum_type=kind)
    first = await put_part(driver, upload_id, 1, FIRST, x_amz_checksum_crc32=crc32(FIRST))
    last = await put_part(driver, upload_id, 2, LAST)  # computed by the server, since the upload names an algorithm
    whole = (
        crc32(FIRST + LAST)
        if kind == "FULL_OBJECT"
        else crc32(base64.b64decode(crc32(FIRST)) + base64.b64decode(crc32(LAST))) + "-2"
    )
    parts = [(1, first), (2, last)]
    told = {number: f"<ChecksumCRC32>{crc32(data)}</ChecksumCRC32>" for number, data in ((1, FIRST), (2, LAST))}
    untold = await complete(driver, upload_id, parts, told={1: told[1]}, x_amz_checksum_crc32="AAAAAA==")
    assert (untold.status, untold.code) == (400, "InvalidRequest" if kind == "COMPOSITE" else "BadDigest")
    wrong = await complete(driver, upload_id, parts, told=told, x_amz_checksum_crc32="AAAAAA==")
    assert (wrong.status, wrong.code) == (400, "BadDigest")
    done = await complete(driver, upload_id, parts, told=told, x_amz_checksum_crc32=whole)
    assert (done.xml.findtext("ChecksumCRC32"), done.xml.findtext("ChecksumType")) == (whole, kind)
    got = await driver.get("/bucket/key", x_amz_checksum_mode="ENABLED")
    assert (got.headers["x-amz-checksum-crc32"], got.headers["x-amz-checksum-type"]) == (whole, kind)


async def test_a_part_with_another_algorithm_than_the_uploads_is_refused(driver: Driver) -> None:
    upload_id = await create(driver, x_amz_checksum_algorithm="SHA256")
    answer = await driver.put(f"/bucket/key?partNumber=1&uploadId={upload_id}", LAST, x_amz_checksum_crc32=crc32(LAST))
    assert (answer.status, answer.code) == (400, "InvalidRequest")


async def test_a_part_is_copied_with_a_range(driver: Driver) -> None:
    await driver.put("/bucket/source", FIRST + LAST)
    upload_id = await create(driver)
    target = f"/bucket/key?partNumber=1&uploadId={upload_id}"
    copied = await driver.put(
        target, b"", x_amz_copy_source="/bucket/source", x_amz_copy_source_range=f"bytes=1-{len(FIRST)}"
    )
    assert copied.status == 200
    etag = copied.xml.findtext("ETag") or ""
    for bad, code, status in (
        ("bytes=0-99999999", "InvalidArgument", 400),
        ("0-3", "InvalidArgument", 400),
        ("bytes=-3", "InvalidArgument", 400),
    ):
        answer = await driver.put(target, b"", x_amz_copy_source="/bucket/source", x_amz_copy_source_range=bad)
        assert (answer.status, answer.code) == (status, code)
    last = await put_part(driver, upload_id, 2, LAST)
    assert (await complete(driver, upload_id, [(1, etag), (2, last)])).status == 200
    assert (await driver.get("/bucket/key")).body == (FIRST + LAST)[1 : len(FIRST) + 1] + LAST


async def test_complete_over_a_live_chunk_keeps_the_first(driver: Driver) -> None:
    await driver.put("/chunks/id", LAST)
    upload_id = await create(driver, "/chunks/id")
    etag = await put_part(driver, upload_id, 1, b"END", "/chunks/id")
    done = await complete(driver, upload_id, [(1, etag)], "/chunks/id")
    assert (done.status, done.headers["x-kvobj-existed"]) == (200, "true")
    assert (await driver.get("/chunks/id")).body == LAST


async def test_an_entity_or_an_oversized_document_at_complete_is_refused(driver: Driver) -> None:
    upload_id = await create(driver)
    for body, code in (
        (b'<!DOCTYPE a [<!ENTITY x "y">]><CompleteMultipartUpload>&x;</CompleteMultipartUpload>', "MalformedXML"),
        (b"<CompleteMultipartUpload>" + b" " * (4 * MIB) + b"</CompleteMultipartUpload>", "MaxMessageLengthExceeded"),
    ):
        answer = await driver.request("POST", f"/bucket/key?uploadId={upload_id}", body=body)
        assert (answer.status, answer.code) == (400, code)


async def test_a_bucket_has_so_many_uploads_in_progress_and_no_more() -> None:
    driver = await filled(Driver(settings=S3Settings(bucket_uploads=3)))
    uploads = [await create(driver, f"/bucket/{index}") for index in range(3)]
    for _ in range(2):
        answer = await driver.request("POST", "/bucket/one-more?uploads")
        assert (answer.status, answer.code, answer.xml.findtext("Limit")) == (400, "TooManyUploads", "3")
    assert (await driver.request("POST", "/chunks/other-bucket?uploads")).status == 200
    await driver.request("DELETE", f"/bucket/0?uploadId={uploads[0]}")
    etag = await put_part(driver, uploads[1], 1, LAST, "/bucket/1")
    assert (await complete(driver, uploads[1], [(1, etag)], "/bucket/1")).status == 200
    assert [(await driver.request("POST", f"/bucket/{index}?uploads")).status for index in range(3)] == [200, 200, 400]


async def test_uploads_of_an_earlier_run_count() -> None:
    before = await filled(Driver())
    for index in range(3):
        await create(before, f"/bucket/{index}")
    driver = Driver(store=cast("ObjectStore", before.fake), settings=S3Settings(bucket_uploads=4))
    await create(driver, "/bucket/3")
    assert (await driver.request("POST", "/bucket/4?uploads")).code == "TooManyUploads"
