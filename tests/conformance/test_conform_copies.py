"""Copies of objects and of parts: what is kept, conditions, sizes, names, objects of many parts, sources that are not there; and
completions that are asked for twice."""

from __future__ import annotations

import datetime as dt
import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from s3_worlds import MAIN, PART, S3Client, World, body_of, client_of, put_keys, refused
from server_process import MIB

KIB = 1024
WRITERS = 8
SIZES = (1, PART, PART + 100 * KIB, 2 * PART + 600 * KIB)
PAST = dt.datetime(2000, 1, 1, tzinfo=dt.UTC)
FUTURE = dt.datetime(2100, 1, 1, tzinfo=dt.UTC)
Place = dict[str, Any]


def quoted_md5(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'  # noqa: S324 - what an ETag is


def pattern(size: int) -> bytes:
    """Bytes of which no two MiB are the same."""
    return b"".join(bytes([number % 251]) * min(KIB, size - number * KIB) for number in range(-(-size // KIB)))


def upload(client: S3Client, place: Place, data: bytes, **more: object) -> dict[str, Any]:
    """The data in parts of 5 MiB."""
    upload_id = client.create_multipart_upload(**place, **more)["UploadId"]
    parts = []
    for number, start in enumerate(range(0, len(data), PART), 1):
        body = data[start : start + PART]
        reply = client.upload_part(**place, UploadId=upload_id, PartNumber=number, Body=body)
        parts.append({"PartNumber": number, "ETag": reply["ETag"]})
    done: dict[str, Any] = client.complete_multipart_upload(
        **place, UploadId=upload_id, MultipartUpload={"Parts": parts}
    )
    return done


def copy_in_parts(client: S3Client, source: Place, place: Place, size: int) -> None:
    """The first `size` bytes of the source, copied in parts of 5 MiB."""
    upload_id = client.create_multipart_upload(**place)["UploadId"]
    parts = []
    for number, start in enumerate(range(0, size, PART), 1):
        copied = client.upload_part_copy(
            **place,
            UploadId=upload_id,
            PartNumber=number,
            CopySource=source,
            CopySourceRange=f"bytes={start}-{min(start + PART, size) - 1}",
        )
        parts.append({"PartNumber": number, "ETag": copied["CopyPartResult"]["ETag"]})
    client.complete_multipart_upload(**place, UploadId=upload_id, MultipartUpload={"Parts": parts})


def test_a_copy_is_an_object_of_its_own(world: World, bucket: str) -> None:
    client = world.main
    other = world.bucket()
    client.put_object(Bucket=bucket, Key="foo 1%+ü", Body=b"foo", ContentType="audio/ogg", Metadata={"a": "1"})
    for target in (bucket, other):
        copied = client.copy_object(Bucket=target, Key="bar", CopySource={"Bucket": bucket, "Key": "foo 1%+ü"})
        assert copied["CopyObjectResult"]["ETag"] == quoted_md5(b"foo")
        head = client.head_object(Bucket=target, Key="bar")
        assert (head["ContentType"], head["Metadata"]) == ("audio/ogg", {"a": "1"})
    client.delete_object(Bucket=bucket, Key="foo 1%+ü")
    assert body_of(client, other, "bar") == b"foo"


def test_a_copy_can_take_new_metadata(world: World, bucket: str) -> None:
    client = world.main
    client.put_object(Bucket=bucket, Key="foo", Body=b"foo", ContentType="audio/ogg", Metadata={"a": "1"})
    source = {"Bucket": bucket, "Key": "foo"}
    client.copy_object(
        Bucket=bucket,
        Key="bar",
        CopySource=source,
        MetadataDirective="REPLACE",
        Metadata={"b": "2"},
        ContentType="text/x",
    )
    head = client.head_object(Bucket=bucket, Key="bar")
    assert (head["ContentType"], head["Metadata"]) == ("text/x", {"b": "2"})
    client.copy_object(Bucket=bucket, Key="baz", CopySource=source, Metadata={"b": "2"})
    assert client.head_object(Bucket=bucket, Key="baz")["Metadata"] == {"a": "1"}


def test_a_copy_to_itself_must_change_something(world: World, bucket: str) -> None:
    client = world.main
    client.put_object(Bucket=bucket, Key="foo", Body=b"foo", Metadata={"a": "1"})
    source = {"Bucket": bucket, "Key": "foo"}
    with refused(400, "InvalidRequest"):
        client.copy_object(Bucket=bucket, Key="foo", CopySource=source)
    client.copy_object(Bucket=bucket, Key="foo", CopySource=source, MetadataDirective="REPLACE", Metadata={"b": "2"})
    got = client.get_object(Bucket=bucket, Key="foo")
    assert (got["Metadata"], got["Body"].read()) == ({"b": "2"}, b"foo")


def test_copies_of_nothing_and_into_nothing_are_refused(world: World, bucket: str) -> None:
    client = world.main
    client.put_object(Bucket=bucket, Key="foo", Body=b"foo")
    for source, code in (
        ({"Bucket": bucket, "Key": "absent"}, "NoSuchKey"),
        ({"Bucket": "conform-missing", "Key": "foo"}, "NoSuchBucket"),
    ):
        with refused(404, code):
            client.copy_object(Bucket=bucket, Key="bar", CopySource=source)
    with refused(404, "NoSuchBucket"):
        client.copy_object(Bucket="conform-missing", Key="bar", CopySource={"Bucket": bucket, "Key": "foo"})
    with refused(403, "AccessDenied"):
        world.alt.copy_object(Bucket=world.bucket(world.alt), Key="bar", CopySource={"Bucket": bucket, "Key": "foo"})


def test_conditions_on_the_source_of_a_copy(world: World, bucket: str) -> None:
    client = world.main
    etag = client.put_object(Bucket=bucket, Key="foo", Body=b"bar")["ETag"]
    source = {"Bucket": bucket, "Key": "foo"}
    for good in (
        {"CopySourceIfMatch": etag},
        {"CopySourceIfNoneMatch": '"x"'},
        {"CopySourceIfModifiedSince": PAST},
        {"CopySourceIfUnmodifiedSince": FUTURE},
    ):
        client.copy_object(Bucket=bucket, Key="bar", CopySource=source, **good)
    for bad in (
        {"CopySourceIfMatch": '"x"'},
        {"CopySourceIfNoneMatch": etag},
        {"CopySourceIfModifiedSince": dt.datetime.now(dt.UTC)},
        {"CopySourceIfUnmodifiedSince": PAST},
    ):
        with refused(412, "PreconditionFailed"):
            client.copy_object(Bucket=bucket, Key="no", CopySource=source, **bad)
    with refused(404):
        client.head_object(Bucket=bucket, Key="no")


def test_a_copy_with_a_condition_on_its_target(world: World, bucket: str) -> None:
    client = world.main
    put_keys(client, bucket, ("foo", "there"))
    source = {"Bucket": bucket, "Key": "foo"}
    client.copy_object(Bucket=bucket, Key="new", CopySource=source, IfNoneMatch="*")
    with refused(412, "PreconditionFailed"):
        client.copy_object(Bucket=bucket, Key="there", CopySource=source, IfNoneMatch="*")
    assert body_of(client, bucket, "there") == b"there"


@pytest.mark.parametrize("size", [0, 3, MIB, 16 * MIB])
def test_a_copy_has_all_bytes_headers_and_metadata(world: World, bucket: str, size: int) -> None:
    client, data, other = world.main, pattern(size), world.bucket()
    metadata = {"key1": "value1", "key2": "value2"}
    client.put_object(Bucket=bucket, Key="foo", Body=data, ContentType="audio/ogg", Metadata=metadata)
    for place in ({"Bucket": bucket, "Key": "bar"}, {"Bucket": other, "Key": "bar"}):
        client.copy_object(**place, CopySource={"Bucket": bucket, "Key": "foo"})
        got = client.get_object(**place)
        assert (got["ContentType"], got["Metadata"], got["ContentLength"]) == ("audio/ogg", metadata, size)
        assert got["Body"].read() == data


def test_a_copy_of_an_object_of_many_parts_is_whole(world: World, bucket: str) -> None:
    client, data = world.main, pattern(2 * PART + 1000)
    source, copied, again = ({"Bucket": bucket, "Key": key} for key in ("foo", "copied", "again"))
    done = upload(client, source, data, ContentType="text/bla", Metadata={"foo": "bar"})
    client.copy_object(**copied, CopySource=source)
    client.copy_object(**again, CopySource=copied)
    for place in (copied, again):
        got = client.get_object(**place)
        assert (got["ContentType"], got["Metadata"]) == ("text/bla", {"foo": "bar"})
        # One PUT made it: its ETag is that of the bytes, and it has no parts.
        assert (got["ETag"] != done["ETag"], "-" in got["ETag"]) == (True, False)
        assert got["Body"].read() == data


@pytest.mark.parametrize("size", SIZES)
def test_uploads_of_any_size_come_back(world: World, bucket: str, size: int) -> None:
    data = pattern(size)
    upload(world.main, {"Bucket": bucket, "Key": "foo"}, data)
    assert body_of(world.main, bucket, "foo") == data
    for step in (1_000_000, 10_000_000):
        for start in range(0, size, step):
            asked = f"bytes={start}-{start + step - 1}"
            assert body_of(world.main, bucket, "foo", Range=asked) == data[start : start + step]


@pytest.mark.parametrize("size", SIZES)
def test_parts_are_copied_in_any_size(world: World, bucket: str, size: int) -> None:
    data, source = pattern(12 * MIB), {"Bucket": bucket, "Key": "source"}
    world.main.put_object(**source, Body=data)
    copy_in_parts(world.main, source, {"Bucket": world.bucket(), "Key": "foo"}, size)
    copy_in_parts(world.main, source, {"Bucket": bucket, "Key": "foo"}, size)
    assert body_of(world.main, bucket, "foo") == data[:size]


@pytest.mark.parametrize("key", [" ", "_", "__", "?versionId", "a+b", "a%25b", "é/ü", "%"])
def test_parts_and_objects_are_copied_from_under_any_name(world: World, bucket: str, key: str) -> None:
    source = {"Bucket": bucket, "Key": key}
    world.main.put_object(**source, Body=b"bar")
    copy_in_parts(world.main, source, {"Bucket": bucket, "Key": "part"}, 3)
    world.main.copy_object(Bucket=bucket, Key="whole", CopySource=source)
    assert body_of(world.main, bucket, "part") == body_of(world.main, bucket, "whole") == b"bar"


def test_a_name_of_a_source_is_decoded_once(world: World, bucket: str) -> None:
    client, place = world.main, {"Bucket": bucket, "Key": "foo"}
    client.put_object(Bucket=bucket, Key="name%25.txt", Body=b"encoded")
    client.put_object(**place, Body=b"old")
    upload_id = client.create_multipart_upload(**place)["UploadId"]
    with refused(404, "NoSuchKey"):
        client.upload_part_copy(
            **place, UploadId=upload_id, PartNumber=1, CopySource={"Bucket": bucket, "Key": "name%.txt"}
        )
    assert body_of(client, bucket, "foo") == b"old"


def test_a_version_of_a_source_can_be_null_and_no_other(world: World, bucket: str) -> None:
    world.main.put_object(Bucket=bucket, Key="foo?bar", Body=b"bar")
    source = {"Bucket": bucket, "Key": "foo?bar", "VersionId": "null"}
    world.main.copy_object(Bucket=bucket, Key="bar&foo", CopySource=source)
    assert body_of(world.main, bucket, "bar&foo") == b"bar"
    with refused(404):
        world.main.copy_object(Bucket=bucket, Key="no", CopySource={**source, "VersionId": "3sL4kqtJlcpXroDTDmJ"})


def test_a_completion_is_told_again_to_who_made_it(world: World, bucket: str) -> None:
    client, place = world.main, {"Bucket": bucket, "Key": "foo"}
    begun: Place = {**place, "UploadId": client.create_multipart_upload(**place)["UploadId"]}
    part = client.upload_part(**begun, PartNumber=1, Body=b"bar")
    listed = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
    first, second = (client.complete_multipart_upload(**begun, MultipartUpload=listed) for _ in range(2))
    assert first["ETag"] == second["ETag"]
    for others in ({"PartNumber": 2, "ETag": part["ETag"]}, {"PartNumber": 1, "ETag": "f" * 32}):
        with refused(404, "NoSuchUpload"):
            client.complete_multipart_upload(**begun, MultipartUpload={"Parts": [others]})
    with refused(403, "AccessDenied"):
        world.alt.complete_multipart_upload(**begun, MultipartUpload=listed)
    client.put_object(**place, Body=b"new")
    with refused(404, "NoSuchUpload"):
        client.complete_multipart_upload(**begun, MultipartUpload=listed)
    assert body_of(client, bucket, "foo") == b"new"


@pytest.mark.parametrize("condition", [{}, {"IfNoneMatch": "*"}])
@pytest.mark.parametrize("algorithm", [None, "SHA256"])
def test_completions_that_come_at_once_are_all_told_of_the_object(
    world: World, bucket: str, algorithm: str | None, condition: dict[str, str]
) -> None:
    client = client_of(world.server, MAIN, max_pool_connections=WRITERS)
    for number in range(4):
        place = {"Bucket": bucket, "Key": f"foo-{number}"}
        kind = {"ChecksumAlgorithm": algorithm} if algorithm else {}
        begun: Place = {**place, "UploadId": client.create_multipart_upload(**place, **kind)["UploadId"]}
        part = client.upload_part(**begun, PartNumber=1, Body=b"bar", **kind)
        sums = {f"Checksum{algorithm}": part[f"Checksum{algorithm}"]} if algorithm else {}
        listed = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"], **sums}]}

        def complete(_: int, begun: Place = begun, listed: Place = listed) -> str:
            etag: str = client.complete_multipart_upload(**begun, MultipartUpload=listed, **condition)["ETag"]
            return etag

        with ThreadPoolExecutor(WRITERS) as writers:
            assert set(writers.map(complete, range(2 * WRITERS))) == {client.head_object(**place)["ETag"]}
    client.close()


def test_a_completion_tells_where_the_object_is(world: World, bucket: str) -> None:
    client, place = world.main, {"Bucket": bucket, "Key": "a b/c"}
    begun: Place = {**place, "UploadId": client.create_multipart_upload(**place)["UploadId"]}
    part = client.upload_part(**begun, PartNumber=1, Body=b"bar")
    listed = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
    reply = client.complete_multipart_upload(**begun, MultipartUpload=listed)
    assert reply["Location"] == f"{world.server.endpoint}/{bucket}/a%20b/c"


def test_an_upload_that_never_began_cannot_be_completed(world: World, bucket: str) -> None:
    listed = {"Parts": [{"PartNumber": 1, "ETag": "1234"}]}
    with refused(404, "NoSuchUpload"):
        world.main.complete_multipart_upload(Bucket=bucket, Key="foo", UploadId="abc1234def", MultipartUpload=listed)
