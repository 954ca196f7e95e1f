"""Tags of buckets and objects, and the attributes of objects."""

import base64
import zlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from s3_driver import ALICE, BOB, Answer, Driver
from s3_stores import STORES, driver_over

DATA = b"tagged" * 1000
CRC32 = base64.b64encode(zlib.crc32(DATA).to_bytes(4, "big")).decode()
PART_BYTES = 5 * 1024 * 1024


@pytest.fixture(params=STORES)
async def driver(request: pytest.FixtureRequest, tmp_path: Path, shm_path: Path) -> AsyncIterator[Driver]:
    async with driver_over(request.param, data=tmp_path / "data", memory=shm_path) as empty:
        await empty.put("/bucket", b"")
        await empty.put("/chunks", b"", x_kvobj_bucket_kind="kv")
        yield empty


def tagging(*pairs: tuple[str, str]) -> bytes:
    tags = "".join(f"<Tag><Key>{name}</Key><Value>{value}</Value></Tag>" for name, value in pairs)
    return f'<Tagging xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><TagSet>{tags}</TagSet></Tagging>'.encode()


def tags_of(answer: Answer) -> dict[str, str]:
    assert answer.status == 200
    return dict(zip(answer.texts("TagSet/Tag/Key"), answer.texts("TagSet/Tag/Value"), strict=True))


async def test_an_objects_tags_are_put_told_and_taken_away(driver: Driver) -> None:
    await driver.put("/bucket/key", DATA)
    before = await driver.request("HEAD", "/bucket/key")
    assert tags_of(await driver.get("/bucket/key?tagging")) == {}
    assert (await driver.put("/bucket/key?tagging", tagging(("a", "1"), ("b c", "")))).status == 200
    assert tags_of(await driver.get("/bucket/key?tagging")) == {"a": "1", "b c": ""}
    after = await driver.request("HEAD", "/bucket/key")
    assert after.headers["x-amz-tagging-count"] == "2"
    assert (after.headers["etag"], after.headers["last-modified"]) == (
        before.headers["etag"],
        before.headers["last-modified"],
    )
    assert (await driver.put("/bucket/key?tagging", tagging(("z", "9")))).status == 200
    assert tags_of(await driver.get("/bucket/key?tagging")) == {"z": "9"}
    assert (await driver.request("DELETE", "/bucket/key?tagging")).status == 204
    assert tags_of(await driver.get("/bucket/key?tagging")) == {}
    assert (await driver.get("/bucket/key")).body == DATA


async def test_tags_come_with_a_put_and_go_with_the_next(driver: Driver) -> None:
    await driver.put("/bucket/key", DATA, x_amz_tagging="team=a%20b&empty=&plain")
    assert tags_of(await driver.get("/bucket/key?tagging")) == {"team": "a b", "empty": "", "plain": ""}
    await driver.put("/bucket/key", DATA)
    assert tags_of(await driver.get("/bucket/key?tagging")) == {}


async def test_a_copy_takes_the_tags_along_or_gets_its_own(driver: Driver) -> None:
    await driver.put("/bucket/key", DATA, x_amz_tagging="a=1")
    await driver.put("/bucket/copy", b"", x_amz_copy_source="/bucket/key", x_amz_tagging="b=2")
    assert tags_of(await driver.get("/bucket/copy?tagging")) == {"a": "1"}
    await driver.put(
        "/bucket/copy", b"", x_amz_copy_source="/bucket/key", x_amz_tagging="b=2", x_amz_tagging_directive="REPLACE"
    )
    assert tags_of(await driver.get("/bucket/copy?tagging")) == {"b": "2"}
    refused = await driver.put("/bucket/copy", b"", x_amz_copy_source="/bucket/key", x_amz_tagging_directive="SOME")
    assert (refused.status, refused.code) == (400, "InvalidArgument")


async def test_an_upload_gives_its_tags_to_the_object(driver: Driver) -> None:
    begun = await driver.request("POST", "/bucket/key?uploads", headers={"x-amz-tagging": "a=1"})
    (upload_id,) = begun.texts("UploadId")
    part = await driver.put(f"/bucket/key?partNumber=1&uploadId={upload_id}", DATA)
    complete = (
        "<CompleteMultipartUpload><Part><PartNumber>1</PartNumber>"
        f"<ETag>{part.headers['etag']}</ETag></Part></CompleteMultipartUpload>"
    )
    done = await driver.request("POST", f"/bucket/key?uploadId={upload_id}", body=complete.encode())
    assert done.status == 200
    assert tags_of(await driver.get("/bucket/key?tagging")) == {"a": "1"}


@pytest.mark.parametrize(
    ("document", "code"),
    [
        (tagging(("a", "1"), ("a", "2")), "InvalidTag"),
        (tagging(("", "1")), "InvalidTag"),
        (tagging(("k" * 129, "1")), "InvalidTag"),
        (tagging(("a", "v" * 257)), "InvalidTag"),
        (tagging(("aws:x", "1")), "InvalidTag"),
        (tagging(("a", "&lt;")), "InvalidTag"),
        (tagging(*((f"k{number}", "v") for number in range(11))), "BadRequest"),
        (b"<Tagging/>", "MalformedXML"),
        (b"<Tagging><TagSet><Tag><Key>a</Key></Tag></TagSet></Tagging>", "MalformedXML"),
        (b"not xml", "MalformedXML"),
        (b"", "MalformedXML"),
    ],
)
async def test_what_no_tag_set_can_be_is_refused_and_changes_nothing(
    driver: Driver, document: bytes, code: str
) -> None:
    await driver.put("/bucket/key", DATA, x_amz_tagging="kept=1")
    refused = await driver.put("/bucket/key?tagging", document)
    assert (refused.status, refused.code) == (400, code)
    assert tags_of(await driver.get("/bucket/key?tagging")) == {"kept": "1"}


@pytest.mark.parametrize("header", ["a=1&a=2", "%zz=1", "=1", "a=%ff", "&".join(f"k{n}=v" for n in range(11))])
async def test_a_malformed_tagging_header_stores_nothing(driver: Driver, header: str) -> None:
    refused = await driver.put("/bucket/key", DATA, x_amz_tagging=header)
    assert (refused.status, refused.code) in {(400, "InvalidTag"), (400, "InvalidArgument"), (400, "BadRequest")}
    assert (await driver.get("/bucket/key")).status == 404


async def test_tags_of_what_is_not_there_are_a_404(driver: Driver) -> None:
    for method, body in (("GET", b""), ("PUT", tagging(("a", "1"))), ("DELETE", b"")):
        absent = await driver.request(method, "/bucket/absent?tagging", body=body)
        assert (absent.status, absent.code) == (404, "NoSuchKey")
        nowhere = await driver.request(method, "/nowhere/key?tagging", body=body)
        assert (nowhere.status, nowhere.code) == (404, "NoSuchBucket")


async def test_tags_are_the_owners_to_change(driver: Driver) -> None:
    for target in ("/bucket/key", "/chunks/key"):
        await driver.put(target, DATA)
        assert (await driver.put(f"{target}?tagging", tagging(("a", "1")))).status == 200
        for method, body in (("GET", b""), ("PUT", tagging(("b", "2"))), ("DELETE", b"")):
            denied = await driver.request(method, f"{target}?tagging", body=body, user=BOB)
            assert (denied.status, denied.code) == (403, "AccessDenied")
        assert tags_of(await driver.request("GET", f"{target}?tagging", user=ALICE)) == {"a": "1"}


async def test_a_buckets_tags_are_put_told_and_taken_away(driver: Driver) -> None:
    none = await driver.get("/bucket?tagging")
    assert (none.status, none.code) == (404, "NoSuchTagSet")
    many = [(f"k{number}", "v") for number in range(50)]
    assert (await driver.put("/bucket?tagging", tagging(*many))).status == 204
    assert tags_of(await driver.get("/bucket?tagging")) == dict(many)
    refused = await driver.put("/bucket?tagging", tagging(*many, ("one", "more")))
    assert (refused.status, refused.code) == (400, "BadRequest")
    assert (await driver.request("DELETE", "/bucket?tagging")).status == 204
    assert (await driver.get("/bucket?tagging")).code == "NoSuchTagSet"


async def test_attributes_tell_what_they_are_asked_for(driver: Driver) -> None:
    put = await driver.put("/bucket/key", DATA, x_amz_checksum_crc32=CRC32)
    answer = await driver.get(
        "/bucket/key?attributes", x_amz_object_attributes="ETag,Checksum,ObjectParts,StorageClass,ObjectSize"
    )
    assert answer.status == 200
    assert answer.headers["last-modified"].endswith("GMT")
    assert answer.texts("ETag") == [put.headers["etag"].strip('"')]
    assert answer.texts("Checksum/ChecksumCRC32") == [CRC32]
    assert answer.texts("Checksum/ChecksumType") == ["FULL_OBJECT"]
    assert answer.texts("StorageClass") == ["STANDARD"]
    assert answer.texts("ObjectSize") == [str(len(DATA))]
    assert answer.texts("ObjectParts") == []
    only = await driver.get("/bucket/key?attributes", x_amz_object_attributes="ObjectSize")
    assert [element.tag for element in only.xml] == ["ObjectSize"]


async def test_attributes_list_the_parts_of_an_upload_with_checksums(driver: Driver) -> None:
    begun = await driver.request(
        "POST", "/bucket/key?uploads", headers={"x-amz-checksum-algorithm": "CRC32", "x-amz-checksum-type": "COMPOSITE"}
    )
    (upload_id,) = begun.texts("UploadId")
    listed = ""
    for number, data in ((2, b"a" * PART_BYTES), (5, b"b" * 7)):
        crc32 = base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()
        part = await driver.put(
            f"/bucket/key?partNumber={number}&uploadId={upload_id}", data, x_amz_checksum_crc32=crc32
        )
        told = f"<ETag>{part.headers['etag']}</ETag><ChecksumCRC32>{crc32}</ChecksumCRC32>"
        listed += f"<Part><PartNumber>{number}</PartNumber>{told}</Part>"
    body = f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>".encode()
    done = await driver.request("POST", f"/bucket/key?uploadId={upload_id}", body=body)
    assert done.status == 200
    answer = await driver.get("/bucket/key?attributes", x_amz_object_attributes="ObjectParts,Checksum")
    assert answer.texts("ObjectParts/PartsCount") == ["2"]
    assert answer.texts("ObjectParts/Part/Size") == [str(PART_BYTES), "7"]
    assert len(answer.texts("ObjectParts/Part/ChecksumCRC32")) == 2
    assert answer.texts("Checksum/ChecksumType") == ["COMPOSITE"]
    page = await driver.get("/bucket/key?attributes", x_amz_object_attributes="ObjectParts", x_amz_max_parts="1")
    assert page.texts("ObjectParts/IsTruncated") == ["true"]
    (marker,) = page.texts("ObjectParts/NextPartNumberMarker")
    rest = await driver.get(
        "/bucket/key?attributes", x_amz_object_attributes="ObjectParts", x_amz_part_number_marker=marker
    )
    assert rest.texts("ObjectParts/Part/Size") == ["7"]
    assert rest.texts("ObjectParts/IsTruncated") == ["false"]


@pytest.mark.parametrize("named", ["", "Size", "ETag,nothing"])
async def test_attributes_that_are_none_are_refused(driver: Driver, named: str) -> None:
    await driver.put("/bucket/key", DATA)
    headers = {"x_amz_object_attributes": named} if named else {}
    refused = await driver.get("/bucket/key?attributes", **headers)
    assert (refused.status, refused.code) == (400, "InvalidArgument")


async def test_attributes_need_the_right_to_read(driver: Driver) -> None:
    await driver.put("/bucket/key", DATA)
    denied = await driver.request(
        "GET", "/bucket/key?attributes", headers={"x-amz-object-attributes": "ETag"}, user=BOB
    )
    assert (denied.status, denied.code) == (403, "AccessDenied")
    absent = await driver.get("/bucket/absent?attributes", x_amz_object_attributes="ETag")
    assert (absent.status, absent.code) == (404, "NoSuchKey")
