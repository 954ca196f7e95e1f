"""Objects: put, get, head, ranges, headers and metadata, conditions, deletes."""

from __future__ import annotations

import datetime as dt
import hashlib
from email.header import decode_header, make_header
from typing import Any
from urllib.request import Request, urlopen

import pytest
from s3_worlds import MAIN, World, body_of, put_keys, refused, status_of
from server_process import MIB

PAST = dt.datetime(2000, 1, 1, tzinfo=dt.UTC)
FUTURE = dt.datetime(2100, 1, 1, tzinfo=dt.UTC)
ALPHABET = b"abcdefghijklmnopqrstuvwxyz"


def quoted_md5(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'  # noqa: S324 - what an ETag is


def test_what_is_missing_is_named(world: World, bucket: str) -> None:
    client = world.main
    with refused(404, "NoSuchKey"):
        client.get_object(Bucket=bucket, Key="absent")
    with refused(404):
        client.head_object(Bucket=bucket, Key="absent")
    with refused(404, "NoSuchBucket"):
        client.get_object(Bucket="conform-missing", Key="absent")
    with refused(404, "NoSuchBucket"):
        client.put_object(Bucket="conform-missing", Key="key", Body=b"x")
    assert status_of(client.delete_object(Bucket=bucket, Key="absent")) == 204
    with refused(404, "NoSuchBucket"):
        client.delete_object(Bucket="conform-missing", Key="key")


@pytest.mark.parametrize("data", [b"", b"bar", bytes(range(256)) * 5000])
def test_an_object_is_written_read_and_written_again(world: World, bucket: str, data: bytes) -> None:
    client = world.main
    put = client.put_object(Bucket=bucket, Key="foo", Body=data)
    assert put["ETag"] == quoted_md5(data)
    got = client.get_object(Bucket=bucket, Key="foo")
    assert (got["Body"].read(), got["ETag"], got["ContentLength"]) == (data, put["ETag"], len(data))
    assert got["ContentType"] == "binary/octet-stream"
    client.put_object(Bucket=bucket, Key="foo", Body=b"soup")
    assert body_of(client, bucket, "foo") == b"soup"
    client.delete_object(Bucket=bucket, Key="foo")
    with refused(404, "NoSuchKey"):
        client.get_object(Bucket=bucket, Key="foo")


@pytest.mark.parametrize(
    "key",
    [
        " ",
        "'",
        '"',
        "$",
        "%",
        "&",
        "*",
        "<",
        ">",
        "_",
        "_ ",
        "_ _",
        "__",
        "a b/",
        "a//b",
        "/lead",
        "a/../b",
        "\x01",
        "é",
        "鍵/🔑",
        "a+b",
        "a%2Fb",
        "a?b",
        "a#b",
        "k" * 1024,
    ],
)
def test_any_key_is_stored_listed_and_deleted(world: World, bucket: str, key: str) -> None:
    client = world.main
    client.put_object(Bucket=bucket, Key=key, Body=b"v")
    assert body_of(client, bucket, key) == b"v"
    assert [row["Key"] for row in client.list_objects_v2(Bucket=bucket)["Contents"]] == [key]
    assert status_of(client.put_object_acl(Bucket=bucket, Key=key, ACL="private")) == 200
    client.delete_object(Bucket=bucket, Key=key)
    assert "Contents" not in client.list_objects_v2(Bucket=bucket)


def test_a_key_that_is_too_long_is_refused(world: World, bucket: str) -> None:
    with refused(400, "KeyTooLongError"):
        world.main.put_object(Bucket=bucket, Key="k" * 1025, Body=b"")


@pytest.mark.parametrize("value", ["bar", "", "two words"])
def test_metadata_comes_back_and_goes_with_the_next_write(world: World, bucket: str, value: str) -> None:
    client = world.main
    client.put_object(Bucket=bucket, Key="foo", Body=b"bar", Metadata={"meta1": value})
    assert client.head_object(Bucket=bucket, Key="foo")["Metadata"] == {"meta1": value}
    client.put_object(Bucket=bucket, Key="foo", Body=b"bar")
    assert client.head_object(Bucket=bucket, Key="foo")["Metadata"] == {}


def test_metadata_may_be_any_text(world: World, bucket: str) -> None:
    value = "Hello Wörld é"
    reply = world.raw("PUT", f"/{bucket}/foo", b"bar", headers={"x-amz-meta-meta1": value.encode().decode("latin-1")})
    assert reply.status == 200
    told = world.main.head_object(Bucket=bucket, Key="foo")["Metadata"]["meta1"]
    assert str(make_header(decode_header(told))) == value


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ("gzip", "gzip"),
        ("deflate, gzip", "deflate, gzip"),
        ("gzip, aws-chunked", "gzip"),
        ("aws-chunked, gzip", "gzip"),
        ("aws-chunked", None),
        ("aws-chunked, aws-chunked", None),
    ],
)
def test_the_framing_of_an_upload_is_no_encoding_of_the_object(
    world: World, bucket: str, sent: str, kept: str | None
) -> None:
    world.main.put_object(Bucket=bucket, Key="foo", Body=b"bar", ContentEncoding=sent)
    assert world.main.head_object(Bucket=bucket, Key="foo").get("ContentEncoding") == kept


def test_a_header_of_amazons_that_nobody_knows_is_left_alone(world: World, bucket: str) -> None:
    assert world.raw("PUT", f"/{bucket}/foo", b"bar", headers={"x-amz-foo": "bar"}).status == 200
    assert body_of(world.main, bucket, "foo") == b"bar"


def test_there_is_one_storage_class(world: World, bucket: str) -> None:
    client = world.main
    for storage_class in ("STANDARD", "REDUCED_REDUNDANCY"):
        client.put_object(Bucket=bucket, Key="foo", Body=b"bar", StorageClass=storage_class)
        assert client.list_objects_v2(Bucket=bucket)["Contents"][0]["StorageClass"] == "STANDARD"
    for storage_class in ("STANDARD_IA", "GLACIER", "INTELLIGENT_TIERING", "standard"):
        with refused(400, "InvalidStorageClass"):
            client.put_object(Bucket=bucket, Key="other", Body=b"bar", StorageClass=storage_class)
        with refused(400, "InvalidStorageClass"):
            client.create_multipart_upload(Bucket=bucket, Key="other", StorageClass=storage_class)
        with refused(400, "InvalidStorageClass"):
            client.copy_object(Bucket=bucket, Key="other", CopySource=f"{bucket}/foo", StorageClass=storage_class)


def test_metadata_beyond_its_bound_is_refused_and_stores_nothing(world: World, bucket: str) -> None:
    with refused(400, "MetadataTooLarge"):
        world.main.put_object(Bucket=bucket, Key="foo", Body=b"bar", Metadata={"a": "v" * 2048})
    with refused(404):
        world.main.head_object(Bucket=bucket, Key="foo")


def test_standard_headers_come_back_and_can_be_overridden(world: World, bucket: str) -> None:
    client = world.main
    sent: dict[str, Any] = {
        "CacheControl": "public, max-age=14400",
        "ContentDisposition": "bla",
        "ContentEncoding": "aaa",
        "ContentLanguage": "esperanto",
        "ContentType": "foo/bar",
    }
    client.put_object(Bucket=bucket, Key="foo", Body=b"bar", Expires=FUTURE, **sent)
    for reply in (client.head_object(Bucket=bucket, Key="foo"), client.get_object(Bucket=bucket, Key="foo")):
        assert {name: reply[name] for name in sent} == sent
        assert reply["ExpiresString"] == "Fri, 01 Jan 2100 00:00:00 GMT"
    overridden = {f"Response{name}": f"x-{value}" for name, value in sent.items()}
    reply = client.get_object(Bucket=bucket, Key="foo", ResponseExpires=PAST, **overridden)
    assert {f"Response{name}": reply[name] for name in sent} == overridden
    assert reply["ExpiresString"] == "Sat, 01 Jan 2000 00:00:00 GMT"


def test_a_content_md5_is_held_against_the_body(world: World, bucket: str) -> None:
    client = world.main
    for value, code in (
        ("YWJyYWNhZGFicmE=", "InvalidDigest"),
        ("", "InvalidDigest"),
        ("rL0Y20zC+Fzt72VPzMSk2A==", "BadDigest"),
    ):
        with refused(400, code):
            client.put_object(Bucket=bucket, Key="foo", Body=b"bar", ContentMD5=value)
    client.put_object(Bucket=bucket, Key="foo", Body=b"bar", ContentMD5="N7UdGUp1E+RbVvZSTy1R8g==")
    assert body_of(client, bucket, "foo") == b"bar"


@pytest.mark.parametrize(
    ("asked", "first", "last"),
    [
        ("bytes=4-7", 4, 7),
        ("bytes=4-", 4, 25),
        ("bytes=-8", 18, 25),
        ("bytes=0-0", 0, 0),
        ("bytes=20-999", 20, 25),
        ("bytes=-999", 0, 25),
    ],
)
def test_a_range_is_answered_with_its_bytes(world: World, bucket: str, asked: str, first: int, last: int) -> None:
    client = world.main
    client.put_object(Bucket=bucket, Key="foo", Body=ALPHABET)
    reply = client.get_object(Bucket=bucket, Key="foo", Range=asked)
    assert (status_of(reply), reply["Body"].read()) == (206, ALPHABET[first : last + 1])
    assert (reply["ContentRange"], reply["AcceptRanges"]) == (f"bytes {first}-{last}/26", "bytes")


def test_a_range_of_a_large_object_is_answered_with_its_bytes(world: World, bucket: str) -> None:
    data = b"".join(b"%07d " % number for number in range(MIB))
    world.main.put_object(Bucket=bucket, Key="foo", Body=data)
    reply = world.main.get_object(Bucket=bucket, Key="foo", Range="bytes=3145728-5242880")
    assert (reply["ContentRange"], status_of(reply)) == ("bytes 3145728-5242880/8388608", 206)
    assert reply["Body"].read() == data[3_145_728:5_242_881]


@pytest.mark.parametrize("asked", ["bytes=0-1,3-4", "bytes=abc", "bytes=7-4", "lines=1-2", "bytes 0-4"])
def test_what_is_no_single_range_gets_the_whole(world: World, bucket: str, asked: str) -> None:
    world.main.put_object(Bucket=bucket, Key="foo", Body=ALPHABET)
    reply = world.main.get_object(Bucket=bucket, Key="foo", Range=asked)
    assert (status_of(reply), reply["Body"].read()) == (200, ALPHABET)


@pytest.mark.parametrize(
    ("data", "asked"),
    [
        (ALPHABET, "bytes=40-50"),
        (ALPHABET, "bytes=26-"),
        (b"", "bytes=40-50"),
        (b"", "bytes=-1"),
        (ALPHABET, "bytes=-0"),
    ],
)
def test_a_range_past_the_end_is_refused(world: World, bucket: str, data: bytes, asked: str) -> None:
    world.main.put_object(Bucket=bucket, Key="foo", Body=data)
    with refused(416, "InvalidRange"):
        world.main.get_object(Bucket=bucket, Key="foo", Range=asked)


def test_read_conditions(world: World, bucket: str) -> None:
    client = world.main
    etag = client.put_object(Bucket=bucket, Key="foo", Body=b"bar")["ETag"]
    other = '"ABCORZ"'
    for good in (
        {"IfMatch": etag},
        {"IfNoneMatch": other},
        {"IfModifiedSince": PAST},
        {"IfUnmodifiedSince": FUTURE},
        {"IfMatch": "*"},
    ):
        assert body_of(client, bucket, "foo", **good) == b"bar"
        assert status_of(client.head_object(Bucket=bucket, Key="foo", **good)) == 200
    for stale in ({"IfNoneMatch": etag}, {"IfNoneMatch": "*"}, {"IfModifiedSince": dt.datetime.now(dt.UTC)}):
        with refused(304):
            client.get_object(Bucket=bucket, Key="foo", **stale)
    for failing in ({"IfMatch": other}, {"IfUnmodifiedSince": PAST}):
        with refused(412, "PreconditionFailed"):
            client.get_object(Bucket=bucket, Key="foo", **failing)
        with refused(412):
            client.head_object(Bucket=bucket, Key="foo", **failing)
    # RFC 9110 §13.2.2: an entity tag that holds outweighs a date that does not.
    assert body_of(client, bucket, "foo", IfMatch=etag, IfUnmodifiedSince=PAST) == b"bar"
    assert body_of(client, bucket, "foo", IfNoneMatch=other, IfModifiedSince=FUTURE) == b"bar"


def test_conditional_writes(world: World, bucket: str) -> None:
    client = world.main
    with refused(404, "NoSuchKey"):
        client.put_object(Bucket=bucket, Key="foo", Body=b"x", IfMatch="*")
    with refused(404, "NoSuchKey"):
        client.put_object(Bucket=bucket, Key="foo", Body=b"x", IfMatch='"abc"')
    etag = client.put_object(Bucket=bucket, Key="foo", Body=b"bar", IfNoneMatch="*")["ETag"]
    with refused(412, "PreconditionFailed"):
        client.put_object(Bucket=bucket, Key="foo", Body=b"zar", IfNoneMatch="*")
    with refused(412, "PreconditionFailed"):
        client.put_object(Bucket=bucket, Key="foo", Body=b"zar", IfMatch='"ABCORZ"')
    assert body_of(client, bucket, "foo") == b"bar"
    etag = client.put_object(Bucket=bucket, Key="foo", Body=b"zar", IfMatch=etag)["ETag"]
    client.put_object(Bucket=bucket, Key="foo", Body=b"any", IfMatch="*")
    assert body_of(client, bucket, "foo") == b"any"
    with refused(412, "PreconditionFailed"):
        client.put_object(Bucket=bucket, Key="foo", Body=b"late", IfMatch=etag)


def test_conditional_deletes(world: World, bucket: str) -> None:
    client = world.main
    put = client.put_object(Bucket=bucket, Key="foo", Body=b"bar")
    head = client.head_object(Bucket=bucket, Key="foo")
    for failing in (
        {"IfMatch": '"badetag"'},
        {"IfMatchSize": 9999},
        {"IfMatchLastModifiedTime": PAST},
        {"IfMatch": put["ETag"], "IfMatchSize": 1},
    ):
        with refused(412, "PreconditionFailed"):
            client.delete_object(Bucket=bucket, Key="foo", **failing)
    assert body_of(client, bucket, "foo") == b"bar"
    exact = {"IfMatch": put["ETag"], "IfMatchSize": 3, "IfMatchLastModifiedTime": head["LastModified"]}
    assert status_of(client.delete_object(Bucket=bucket, Key="foo", **exact)) == 204
    for absent in ('"badetag"', put["ETag"], "*"):
        with refused(404, "NoSuchKey"):
            client.delete_object(Bucket=bucket, Key="foo", IfMatch=absent)
    assert status_of(client.delete_object(Bucket=bucket, Key="foo", IfMatchSize=3)) == 204
    client.put_object(Bucket=bucket, Key="foo", Body=b"bar")
    assert status_of(client.delete_object(Bucket=bucket, Key="foo", IfMatch="*")) == 204


def test_conditions_of_a_deletion_of_many_count_key_by_key(world: World, bucket: str) -> None:
    client = world.main
    etag = client.put_object(Bucket=bucket, Key="a", Body=b"1")["ETag"]
    put_keys(client, bucket, ("b", "c"))
    reply = client.delete_objects(
        Bucket=bucket,
        Delete={
            "Objects": [
                {"Key": "a", "ETag": etag},
                {"Key": "b", "ETag": '"bad"'},
                {"Key": "c", "Size": 7},
                {"Key": "d"},
                {"Key": "e", "ETag": etag},
            ]
        },
    )
    assert sorted(row["Key"] for row in reply["Deleted"]) == ["a", "d"]
    assert [(row["Key"], row["Code"]) for row in reply["Errors"]] == [
        ("b", "PreconditionFailed"),
        ("c", "PreconditionFailed"),
        ("e", "NoSuchKey"),
    ]
    assert [row["Key"] for row in client.list_objects_v2(Bucket=bucket)["Contents"]] == ["b", "c"]


def test_many_are_deleted_at_once(world: World, bucket: str) -> None:
    client = world.main
    put_keys(client, bucket, ("key0", "key1", "key2"))
    wanted = {"Objects": [{"Key": f"key{number}"} for number in range(3)]}
    assert sorted(row["Key"] for row in client.delete_objects(Bucket=bucket, Delete=wanted)["Deleted"]) == [
        "key0",
        "key1",
        "key2",
    ]
    again = client.delete_objects(Bucket=bucket, Delete={**wanted, "Quiet": True})
    assert ("Deleted" in again, "Errors" in again) == (False, False)
    assert "Contents" not in client.list_objects_v2(Bucket=bucket)
    with refused(400, "MalformedXML"):
        client.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": f"k{number}"} for number in range(1001)]})
    with refused(404, "NoSuchBucket"):
        client.delete_objects(Bucket="conform-missing", Delete=wanted)


def test_presigned_urls_give_what_their_signer_may(world: World, bucket: str) -> None:
    client = world.main
    client.put_object(Bucket=bucket, Key="foo", Body=b"bar")
    url = client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": "foo"}, ExpiresIn=60)
    with urlopen(url) as reply:  # noqa: S310 - a URL of our own
        assert reply.read() == b"bar"
    put = client.generate_presigned_url("put_object", Params={"Bucket": bucket, "Key": "new"}, ExpiresIn=60)
    with urlopen(Request(put, data=b"sent", method="PUT", headers={"content-type": ""})) as reply:  # noqa: S310 - as above
        assert reply.status == 200
    assert body_of(client, bucket, "new") == b"sent"


def test_the_expected_owner_of_a_bucket_is_checked(world: World, bucket: str) -> None:
    client = world.main
    client.put_object(Bucket=bucket, Key="foo", Body=b"bar", ExpectedBucketOwner=MAIN.id)
    assert body_of(client, bucket, "foo", ExpectedBucketOwner=MAIN.id) == b"bar"
    with refused(403, "AccessDenied"):
        client.get_object(Bucket=bucket, Key="foo", ExpectedBucketOwner="111122223333")
    with refused(403):
        client.head_bucket(Bucket=bucket, ExpectedBucketOwner="111122223333")
    with refused(403, "AccessDenied"):
        client.copy_object(
            Bucket=bucket,
            Key="b",
            CopySource={"Bucket": bucket, "Key": "foo"},
            ExpectedSourceBucketOwner="111122223333",
        )


def test_encryption_is_not_asked_for_when_reading(world: World, bucket: str) -> None:
    world.main.put_object(Bucket=bucket, Key="foo", Body=b"bar")
    for value in ("AES256", "aws:kms"):
        headers = {"x-amz-server-side-encryption": value}
        refusal = world.raw("GET", f"/{bucket}/foo", headers=headers)
        assert (refusal.status, b"<Code>InvalidArgument</Code>" in refusal.body) == (400, True)
        assert world.raw("HEAD", f"/{bucket}/foo", headers=headers).status == 400


def test_a_key_for_what_is_not_encrypted_is_refused(world: World, bucket: str) -> None:
    client = world.main
    client.put_object(Bucket=bucket, Key="foo", Body=b"bar")
    sealed = {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": "k" * 32}
    with refused(400, "InvalidRequest"):
        client.get_object(Bucket=bucket, Key="foo", **sealed)
    assert body_of(client, bucket, "foo") == b"bar"
