"""Multipart uploads: parts in any order, copies as parts, completion and its refusals, listings, reads by part, checksums."""

from __future__ import annotations

import base64
import hashlib
import time
from typing import Any

import pytest
from awscrt import checksums as crt  # type: ignore[import-untyped]
from s3_worlds import MAIN, PART, S3Client, World, body_of, put_keys, refused, status_of

Part = dict[str, Any]
ALGORITHMS = ("CRC32", "CRC32C", "CRC64NVME", "SHA1", "SHA256")


def begin(client: S3Client, bucket: str, /, key: str = "mymultipart", **more: object) -> str:
    upload_id: str = client.create_multipart_upload(Bucket=bucket, Key=key, **more)["UploadId"]
    return upload_id


def put_part(client: S3Client, bucket: str, upload_id: str, number: int, data: bytes, **more: object) -> Part:
    reply = client.upload_part(
        Bucket=bucket, Key="mymultipart", UploadId=upload_id, PartNumber=number, Body=data, **more
    )
    told = {name: value for name, value in reply.items() if name.startswith("Checksum") and name != "ChecksumType"}
    return {"PartNumber": number, "ETag": reply["ETag"], **told}


def complete(client: S3Client, bucket: str, upload_id: str, parts: list[Part], **more: object) -> dict[str, Any]:
    reply: dict[str, Any] = client.complete_multipart_upload(
        Bucket=bucket, Key="mymultipart", UploadId=upload_id, MultipartUpload={"Parts": parts}, **more
    )
    return reply


def uploaded(client: S3Client, bucket: str, *bodies: bytes, **more: object) -> dict[str, Any]:
    upload_id = begin(client, bucket, "mymultipart", **more)
    parts = [put_part(client, bucket, upload_id, number, data) for number, data in enumerate(bodies, 1)]
    return complete(client, bucket, upload_id, parts)


def test_parts_make_the_object_with_the_headers_of_its_beginning(world: World, bucket: str) -> None:
    client = world.main
    bodies = (b"a" * PART, b"b" * PART, b"c")
    done = uploaded(client, bucket, *bodies, ContentType="text/bla", Metadata={"foo": "bar"})
    digests = b"".join(hashlib.md5(body).digest() for body in bodies)  # noqa: S324 - what an ETag is
    assert done["ETag"] == f'"{hashlib.md5(digests).hexdigest()}-3"'  # noqa: S324 - as above
    assert (done["Bucket"], done["Key"]) == (bucket, "mymultipart")
    got = client.get_object(Bucket=bucket, Key="mymultipart")
    assert (got["ContentType"], got["Metadata"], got["ETag"]) == ("text/bla", {"foo": "bar"}, done["ETag"])
    assert got["Body"].read() == b"".join(bodies)
    assert body_of(client, bucket, "mymultipart", Range=f"bytes={PART - 1}-{2 * PART}") == b"a" + b"b" * PART + b"c"


def test_parts_may_come_again_and_in_any_order(world: World, bucket: str) -> None:
    client = world.main
    upload_id = begin(client, bucket)
    last = put_part(client, bucket, upload_id, 9, b"z" * 100)
    put_part(client, bucket, upload_id, 3, b"x" * PART)
    first = put_part(client, bucket, upload_id, 3, b"y" * PART)
    complete(client, bucket, upload_id, [first, last])
    assert body_of(client, bucket, "mymultipart") == b"y" * PART + b"z" * 100


def test_an_upload_replaces_what_stood_there_only_when_it_is_complete(world: World, bucket: str) -> None:
    client = world.main
    client.put_object(Bucket=bucket, Key="mymultipart", Body=b"old")
    upload_id = begin(client, bucket)
    part = put_part(client, bucket, upload_id, 1, b"new")
    assert body_of(client, bucket, "mymultipart") == b"old"
    complete(client, bucket, upload_id, [part])
    assert body_of(client, bucket, "mymultipart") == b"new"


def test_completions_that_do_not_fit_are_refused_and_can_be_mended(world: World, bucket: str) -> None:
    client = world.main
    upload_id = begin(client, bucket)
    with refused(400, "MalformedXML"):
        complete(client, bucket, upload_id, [])
    one, two = (put_part(client, bucket, upload_id, number, bytes([number]) * PART) for number in (1, 2))
    with refused(400, "InvalidPart"):
        complete(client, bucket, upload_id, [one, {**two, "PartNumber": 3}])
    with refused(400, "InvalidPart"):
        complete(client, bucket, upload_id, [one, {"PartNumber": 2, "ETag": '"ffffffffffffffffffffffffffffffff"'}])
    with refused(400, "InvalidPartOrder"):
        complete(client, bucket, upload_id, [two, one])
    small = put_part(client, bucket, upload_id, 1, b"small")
    with refused(400, "EntityTooSmall"):
        complete(client, bucket, upload_id, [small, two])
    one = put_part(client, bucket, upload_id, 1, b"\x01" * PART)
    complete(client, bucket, upload_id, [one, two])
    assert client.head_object(Bucket=bucket, Key="mymultipart")["ContentLength"] == 2 * PART
    with refused(404, "NoSuchUpload"):
        put_part(client, bucket, upload_id, 3, b"late")


def test_what_is_not_there_is_named(world: World, bucket: str) -> None:
    client = world.main
    for upload_id in ("56788", "x" * 128):
        with refused(404, "NoSuchUpload"):
            client.abort_multipart_upload(Bucket=bucket, Key="mymultipart", UploadId=upload_id)
        with refused(404, "NoSuchUpload"):
            put_part(client, bucket, upload_id, 1, b"x")
        with refused(404, "NoSuchUpload"):
            client.list_parts(Bucket=bucket, Key="mymultipart", UploadId=upload_id)
    with refused(404, "NoSuchBucket"):
        begin(client, "conform-missing")
    upload_id = begin(client, bucket)
    for number in (0, 10_001):
        with refused(400, "InvalidArgument"):
            put_part(client, bucket, upload_id, number, b"x")


def test_an_aborted_upload_is_gone(world: World, bucket: str) -> None:
    client = world.main
    upload_id = begin(client, bucket)
    put_part(client, bucket, upload_id, 1, b"x" * PART)
    assert status_of(client.abort_multipart_upload(Bucket=bucket, Key="mymultipart", UploadId=upload_id)) == 204
    assert "Uploads" not in client.list_multipart_uploads(Bucket=bucket)
    with refused(404):
        client.head_object(Bucket=bucket, Key="mymultipart")
    assert status_of(client.delete_bucket(Bucket=bucket)) == 204


def test_uploads_in_progress_end_with_their_bucket(world: World) -> None:
    bucket = world.bucket()
    upload_id = begin(world.main, bucket)
    put_part(world.main, bucket, upload_id, 1, b"data")
    assert status_of(world.main.delete_bucket(Bucket=bucket)) == 204
    with refused(404, "NoSuchBucket"):
        put_part(world.main, bucket, upload_id, 2, b"data")
    world.main.create_bucket(Bucket=bucket)
    assert "Uploads" not in world.main.list_multipart_uploads(Bucket=bucket)


def test_uploads_are_listed_by_key_and_in_pages(world: World, bucket: str) -> None:
    client = world.main
    ids = {key: begin(client, bucket, key) for key in ("mymultipart2", "mymultipart", "a/b", "a/c")}
    second = begin(client, bucket, "mymultipart")
    listed = client.list_multipart_uploads(Bucket=bucket)["Uploads"]
    assert [row["Key"] for row in listed] == ["a/b", "a/c", "mymultipart", "mymultipart", "mymultipart2"]
    assert {row["UploadId"] for row in listed} == {*ids.values(), second}
    assert listed[0]["Initiator"]["ID"] == listed[0]["Owner"]["ID"] == MAIN.id
    rolled = client.list_multipart_uploads(Bucket=bucket, Delimiter="/")
    assert [row["Prefix"] for row in rolled["CommonPrefixes"]] == ["a/"]
    seen: list[str] = []
    more: dict[str, str] = {}
    for _ in range(5):
        page = client.list_multipart_uploads(Bucket=bucket, MaxUploads=2, **more)
        seen += [row["UploadId"] for row in page["Uploads"]]
        if not page["IsTruncated"]:
            break
        more = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}
    assert seen == [row["UploadId"] for row in listed]


def test_uploads_of_one_key_are_listed_as_they_were_begun(world: World, bucket: str) -> None:
    client, begun = world.main, []
    for _ in range(8):
        begun.append(client.create_multipart_upload(Bucket=bucket, Key="foo")["UploadId"])
        in_ms = time.time_ns() // 1_000_000
        while time.time_ns() // 1_000_000 == in_ms:
            pass  # those of one millisecond have no order
    pages = client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, PaginationConfig={"PageSize": 3})
    assert [row["UploadId"] for page in pages for row in page["Uploads"]] == begun


def test_parts_are_listed_in_pages(world: World, bucket: str) -> None:
    client = world.main
    upload_id = begin(client, bucket)
    for number in (1, 3, 5):
        put_part(client, bucket, upload_id, number, b"x" * number)
    page = client.list_parts(Bucket=bucket, Key="mymultipart", UploadId=upload_id, MaxParts=2)
    assert ([(row["PartNumber"], row["Size"]) for row in page["Parts"]], page["IsTruncated"]) == (
        [(1, 1), (3, 3)],
        True,
    )
    rest = client.list_parts(
        Bucket=bucket, Key="mymultipart", UploadId=upload_id, PartNumberMarker=page["NextPartNumberMarker"]
    )
    assert ([row["PartNumber"] for row in rest["Parts"]], rest["IsTruncated"]) == ([5], False)


def test_a_part_is_read_by_its_number(world: World, bucket: str) -> None:
    client = world.main
    done = uploaded(client, bucket, b"a" * PART, b"b" * 10)
    for number, data in ((1, b"a" * PART), (2, b"b" * 10)):
        got = client.get_object(Bucket=bucket, Key="mymultipart", PartNumber=number)
        assert (status_of(got), got["PartsCount"], got["ETag"], got["Body"].read()) == (206, 2, done["ETag"], data)
        head = client.head_object(Bucket=bucket, Key="mymultipart", PartNumber=number)
        assert (head["ContentLength"], head["PartsCount"]) == (len(data), 2)
    with refused(416, "InvalidPartNumber"):
        client.get_object(Bucket=bucket, Key="mymultipart", PartNumber=3)
    with refused(400):
        client.get_object(Bucket=bucket, Key="mymultipart", PartNumber=1, Range="bytes=0-1")
    client.put_object(Bucket=bucket, Key="whole", Body=b"whole")
    assert body_of(client, bucket, "whole", PartNumber=1) == b"whole"
    with refused(416, "InvalidPartNumber"):
        client.get_object(Bucket=bucket, Key="whole", PartNumber=2)


def test_parts_are_copied_from_objects(world: World, bucket: str) -> None:
    client = world.main
    data = bytes(range(256)) * 21_000
    client.put_object(Bucket=bucket, Key="src %?ü", Body=data)
    source = {"Bucket": bucket, "Key": "src %?ü"}
    upload_id = begin(client, bucket)
    parts: list[Part] = []
    for number, asked in ((1, f"bytes=0-{PART - 1}"), (2, f"bytes={PART}-{len(data) - 1}"), (3, None)):
        more = {} if asked is None else {"CopySourceRange": asked}
        copied = client.upload_part_copy(
            Bucket=bucket, Key="mymultipart", UploadId=upload_id, PartNumber=number, CopySource=source, **more
        )
        parts.append({"PartNumber": number, "ETag": copied["CopyPartResult"]["ETag"]})
    with refused(400, "EntityTooSmall"):
        complete(client, bucket, upload_id, parts)
    complete(client, bucket, upload_id, [parts[0], parts[1]])
    assert body_of(client, bucket, "mymultipart") == data


@pytest.mark.parametrize(
    "asked", ["0-2", "bytes=0", "bytes=hello-world", "bytes=0-bar", "bytes=hello-", "bytes=0-2,3-5"]
)
def test_a_malformed_range_of_a_part_to_copy_is_refused(world: World, bucket: str, asked: str) -> None:
    put_keys(world.main, bucket, ("source",))
    upload_id = begin(world.main, bucket)
    with refused(400, "InvalidArgument"):
        world.main.upload_part_copy(
            Bucket=bucket,
            Key="mymultipart",
            UploadId=upload_id,
            PartNumber=1,
            CopySource={"Bucket": bucket, "Key": "source"},
            CopySourceRange=asked,
        )


def test_a_range_of_a_part_to_copy_lies_inside_its_source(world: World, bucket: str) -> None:
    put_keys(world.main, bucket, ("source",))
    upload_id = begin(world.main, bucket)
    for asked in ("bytes=0-21", "bytes=6-8"):
        with refused(400, "InvalidArgument"):
            world.main.upload_part_copy(
                Bucket=bucket,
                Key="mymultipart",
                UploadId=upload_id,
                PartNumber=1,
                CopySource={"Bucket": bucket, "Key": "source"},
                CopySourceRange=asked,
            )


def test_a_part_to_copy_keeps_its_conditions(world: World, bucket: str) -> None:
    client = world.main
    etag = client.put_object(Bucket=bucket, Key="source", Body=b"x")["ETag"]
    upload_id = begin(client, bucket)
    place: dict[str, Any] = {"Bucket": bucket, "Key": "mymultipart", "UploadId": upload_id, "PartNumber": 1}
    source = {"Bucket": bucket, "Key": "source"}
    assert client.upload_part_copy(**place, CopySource=source, CopySourceIfMatch=etag)["CopyPartResult"]["ETag"]
    with refused(412, "PreconditionFailed"):
        client.upload_part_copy(**place, CopySource=source, CopySourceIfNoneMatch=etag)


def test_conditions_of_a_completion(world: World, bucket: str) -> None:
    client = world.main
    upload_id = begin(client, bucket)
    part = put_part(client, bucket, upload_id, 1, b"one")
    with refused(404, "NoSuchKey"):
        complete(client, bucket, upload_id, [part], IfMatch='"x"')
    done = complete(client, bucket, upload_id, [part], IfNoneMatch="*")
    upload_id = begin(client, bucket)
    part = put_part(client, bucket, upload_id, 1, b"two")
    with refused(412, "PreconditionFailed"):
        complete(client, bucket, upload_id, [part], IfNoneMatch="*")
    with refused(412, "PreconditionFailed"):
        complete(client, bucket, upload_id, [part], IfMatch='"x"')
    complete(client, bucket, upload_id, [part], IfMatch=done["ETag"])
    assert body_of(client, bucket, "mymultipart") == b"two"


def test_the_size_that_a_completion_states_is_checked(world: World, bucket: str) -> None:
    upload_id = begin(world.main, bucket)
    part = put_part(world.main, bucket, upload_id, 1, b"seven b")
    with refused(400, "InvalidRequest"):
        complete(world.main, bucket, upload_id, [part], MpuObjectSize=8)
    complete(world.main, bucket, upload_id, [part], MpuObjectSize=7)


def value_of(algorithm: str, data: bytes) -> str:
    match algorithm:
        case "CRC32":
            raw = crt.crc32(data).to_bytes(4, "big")
        case "CRC32C":
            raw = crt.crc32c(data).to_bytes(4, "big")
        case "CRC64NVME":
            raw = crt.crc64nvme(data).to_bytes(8, "big")
        case _:
            raw = hashlib.new(algorithm.lower(), data).digest()
    return base64.b64encode(raw).decode()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_checksum_is_verified_stored_and_told_where_asked_for(world: World, bucket: str, algorithm: str) -> None:
    client = world.main
    name, value = f"Checksum{algorithm}", value_of(algorithm, b"checked")
    put = client.put_object(Bucket=bucket, Key="k", Body=b"checked", **{name: value})
    assert (put[name], put["ChecksumType"]) == (value, "FULL_OBJECT")
    head = client.head_object(Bucket=bucket, Key="k", ChecksumMode="ENABLED")
    assert (head[name], head["ChecksumType"]) == (value, "FULL_OBJECT")
    assert name not in client.head_object(Bucket=bucket, Key="k")
    with refused(400, "BadDigest"):
        client.put_object(Bucket=bucket, Key="k", Body=b"another", **{name: value})
    assert body_of(client, bucket, "k") == b"checked"
    attributes = client.get_object_attributes(Bucket=bucket, Key="k", ObjectAttributes=["Checksum", "ObjectSize"])
    assert (attributes["Checksum"][name], attributes["ObjectSize"]) == (value, 7)


@pytest.mark.parametrize(
    ("algorithm", "kind"),
    [*((each, "COMPOSITE") for each in ALGORITHMS if each != "CRC64NVME")]
    + [(each, "FULL_OBJECT") for each in ("CRC32", "CRC32C", "CRC64NVME")],
)
def test_checksums_of_parts_become_the_objects(world: World, bucket: str, algorithm: str, kind: str) -> None:
    client = world.main
    name, bodies = f"Checksum{algorithm}", (b"a" * PART, b"b" * 100)
    upload_id = begin(client, bucket, ChecksumAlgorithm=algorithm, ChecksumType=kind)
    parts = [
        put_part(client, bucket, upload_id, number, body, **{name: value_of(algorithm, body)})
        for number, body in enumerate(bodies, 1)
    ]
    done = complete(client, bucket, upload_id, parts)
    if kind == "FULL_OBJECT":
        expected = value_of(algorithm, b"".join(bodies))
    else:
        raw = b"".join(base64.b64decode(value_of(algorithm, body)) for body in bodies)
        expected = f"{value_of(algorithm, raw)}-2"
    assert (done[name], done["ChecksumType"]) == (expected, kind)
    head = client.head_object(Bucket=bucket, Key="mymultipart", ChecksumMode="ENABLED")
    assert (head[name], head["ChecksumType"]) == (expected, kind)


@pytest.mark.parametrize(
    ("algorithm", "kind"), [("SHA1", "FULL_OBJECT"), ("SHA256", "FULL_OBJECT"), ("CRC64NVME", "COMPOSITE")]
)
def test_a_checksum_type_that_an_algorithm_cannot_have_is_refused(
    world: World, bucket: str, algorithm: str, kind: str
) -> None:
    with refused(400, "InvalidRequest"):
        begin(world.main, bucket, ChecksumAlgorithm=algorithm, ChecksumType=kind)


def test_a_composite_checksum_is_completed_with_those_of_all_parts(world: World, bucket: str) -> None:
    client = world.main
    upload_id = begin(client, bucket, ChecksumAlgorithm="SHA256")
    part = put_part(client, bucket, upload_id, 1, b"data", ChecksumSHA256=value_of("SHA256", b"data"))
    with refused(400, "InvalidRequest"):
        complete(client, bucket, upload_id, [{"PartNumber": 1, "ETag": part["ETag"]}])
    assert complete(client, bucket, upload_id, [part])["ChecksumType"] == "COMPOSITE"


def test_a_wrong_checksum_at_completion_is_refused(world: World, bucket: str) -> None:
    client = world.main
    upload_id = begin(client, bucket, ChecksumAlgorithm="CRC32", ChecksumType="FULL_OBJECT")
    part = put_part(client, bucket, upload_id, 1, b"data", ChecksumCRC32=value_of("CRC32", b"data"))
    with refused(400):
        complete(client, bucket, upload_id, [{**part, "ChecksumCRC32": value_of("CRC32", b"other")}])
    with refused(400):
        complete(
            client, bucket, upload_id, [part], ChecksumCRC32=value_of("CRC32", b"other"), ChecksumType="FULL_OBJECT"
        )
    done = complete(
        client, bucket, upload_id, [part], ChecksumCRC32=value_of("CRC32", b"data"), ChecksumType="FULL_OBJECT"
    )
    assert done["ChecksumCRC32"] == value_of("CRC32", b"data")
