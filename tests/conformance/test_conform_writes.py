"""Writes whole or not at all: overwritten while read, half sent, raced by others; and conditions that are judged at the commit."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from botocore.exceptions import ClientError
from raw_http import Credentials, RawConnection, RawReply, canonical_query, sign_head
from s3_worlds import MAIN, Call, World, body_of, refused, status_of
from server_process import MIB

SIZES = (MIB, 4 * MIB, 8 * MIB)
Place = dict[str, Any]


class HalfPut:
    """A PUT of which half is sent."""

    def __init__(self, connection: RawConnection, rest: bytes) -> None:
        self._connection, self._rest = connection, rest

    def finish(self) -> RawReply:
        """Send what is missing."""
        self._connection.send(self._rest)
        return self._connection.read_reply()


@contextmanager
def half_put(
    world: World,
    bucket: str,
    data: bytes,
    *,
    headers: Mapping[str, str] | None = None,
    query: Mapping[str, str] | None = None,
) -> Iterator[HalfPut]:
    """Begin a PUT of `foo` in the bucket, and leave it half sent for the block."""
    with RawConnection("127.0.0.1", world.server.port) as connection:
        head = sign_head(
            Credentials(MAIN.access_key, MAIN.secret_key),
            "PUT",
            f"127.0.0.1:{world.server.port}",
            f"/{bucket}/foo",
            query=query,
            headers={"content-length": str(len(data)), **(headers or {})},
        )
        connection.send(head.head)
        connection.send(data[: len(data) // 2])
        yield HalfPut(connection, data[len(data) // 2 :])


@pytest.mark.parametrize("size", SIZES)
def test_a_read_that_was_overtaken_by_a_write_goes_on_in_the_old_bytes(world: World, bucket: str, size: int) -> None:
    place: Place = {"Bucket": bucket, "Key": "foo"}
    world.main.put_object(**place, Body=b"a" * size)
    with world.main.get_object(**place)["Body"] as stream:
        first = stream.read(1000)
        world.main.put_object(**place, Body=b"b" * size)
        assert first + stream.read() == b"a" * size
    assert body_of(world.main, bucket, "foo") == b"b" * size


@pytest.mark.parametrize("size", SIZES)
def test_a_write_is_seen_once_it_is_whole(world: World, bucket: str, size: int) -> None:
    world.main.put_object(Bucket=bucket, Key="foo", Body=b"a" * size)
    with half_put(world, bucket, b"b" * size) as writing:
        assert body_of(world.main, bucket, "foo") == b"a" * size
        assert writing.finish().status == 200
    assert body_of(world.main, bucket, "foo") == b"b" * size


@pytest.mark.parametrize("size", SIZES)
def test_of_two_writes_the_one_that_ends_last_stands_whole(world: World, bucket: str, size: int) -> None:
    with half_put(world, bucket, b"b" * size) as writing:
        world.main.put_object(Bucket=bucket, Key="foo", Body=b"a" * size)
        assert body_of(world.main, bucket, "foo") == b"a" * size
        assert writing.finish().status == 200
    assert body_of(world.main, bucket, "foo") == b"b" * size


def test_a_conditional_write_is_seen_once_it_is_whole(world: World, bucket: str) -> None:
    world.main.put_object(Bucket=bucket, Key="foo", Body=b"a" * MIB)
    with half_put(world, bucket, b"b" * MIB, headers={"if-match": "*"}) as writing:
        assert body_of(world.main, bucket, "foo") == b"a" * MIB
        assert writing.finish().status == 200
    assert body_of(world.main, bucket, "foo") == b"b" * MIB


@pytest.mark.parametrize("condition", ["if-match", "if-none-match"])
def test_a_condition_that_fails_while_the_body_comes_refuses_the_write(
    world: World, bucket: str, condition: str
) -> None:
    place: Place = {"Bucket": bucket, "Key": "foo"}
    value = "*"
    if condition == "if-match":
        value = world.main.put_object(**place, Body=b"a" * MIB)["ETag"]
    with half_put(world, bucket, b"c" * MIB, headers={condition: value}) as writing:
        world.main.put_object(**place, Body=b"b" * MIB)
        reply = writing.finish()
    assert (reply.status, reply.code) == (412, "PreconditionFailed")
    assert body_of(world.main, bucket, "foo") == b"b" * MIB


def test_a_write_into_a_bucket_that_goes_meanwhile_is_refused(world: World, bucket: str) -> None:
    with half_put(world, bucket, b"b" * MIB) as writing:
        assert status_of(world.main.delete_bucket(Bucket=bucket)) == 204
        reply = writing.finish()
    assert (reply.status, reply.code) == (404, "NoSuchBucket")


def test_an_upload_that_is_given_up_leaves_the_object(world: World, bucket: str) -> None:
    place: Place = {"Bucket": bucket, "Key": "foo"}
    world.main.put_object(**place, Body=b"bar")
    upload_id = world.main.create_multipart_upload(**place)["UploadId"]
    world.main.upload_part(**place, UploadId=upload_id, PartNumber=1, Body=b"x")
    assert body_of(world.main, bucket, "foo") == b"bar"
    world.main.abort_multipart_upload(**place, UploadId=upload_id)
    assert body_of(world.main, bucket, "foo") == b"bar"


def test_of_a_part_sent_twice_the_one_that_ends_last_counts(world: World, bucket: str) -> None:
    place: Place = {"Bucket": bucket, "Key": "foo"}
    place["UploadId"] = world.main.create_multipart_upload(**place)["UploadId"]
    with half_put(world, bucket, b"aaaaaaaa", query={"partNumber": "1", "uploadId": place["UploadId"]}) as writing:
        world.main.upload_part(**place, PartNumber=1, Body=b"bbbbbbbb")
        etag = writing.finish().headers["etag"]
    parts = {"Parts": [{"PartNumber": 1, "ETag": etag}]}
    world.main.complete_multipart_upload(**place, MultipartUpload=parts)
    assert body_of(world.main, bucket, "foo") == b"aaaaaaaa"


@pytest.mark.parametrize("condition", ["IfNoneMatch", "IfMatch"])
def test_of_racing_conditional_writes_one_wins(world: World, bucket: str, condition: str) -> None:
    place: Place = {"Bucket": bucket, "Key": "foo"}
    value = "*" if condition == "IfNoneMatch" else world.main.put_object(**place, Body=b"old")["ETag"]

    def write(number: int) -> int:
        try:
            return status_of(world.main.put_object(**place, Body=b"%d" % number, **{condition: value}))
        except ClientError as error:
            return status_of(error.response)

    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(write, range(8)))
    assert Counter(status == 200 for status in statuses) == {True: 1, False: 7}
    assert set(statuses) <= {200, 409, 412}
    assert body_of(world.main, bucket, "foo") == b"%d" % statuses.index(200)


@pytest.mark.parametrize("quotes", ['"', ""])
def test_an_entity_tag_may_stand_bare(world: World, bucket: str, quotes: str) -> None:
    place: Place = {"Bucket": bucket, "Key": "foo"}
    etag = quotes + world.main.put_object(**place, Body=b"bar")["ETag"].strip('"') + quotes
    assert body_of(world.main, bucket, "foo", IfMatch=etag) == b"bar"
    with refused(304):
        world.main.get_object(**place, IfNoneMatch=etag)
    other = f"{quotes}ABCORZ{quotes}"
    with refused(412, "PreconditionFailed"):
        world.main.get_object(**place, IfMatch=other)
    assert body_of(world.main, bucket, "foo", IfNoneMatch=other) == b"bar"
    assert status_of(world.main.put_object(**place, Body=b"bar", IfMatch=etag)) == 200


def _complete(world: World, place: Place, data: bytes, **condition: str) -> str:
    upload_id = world.main.create_multipart_upload(**place)["UploadId"]
    part = world.main.upload_part(**place, UploadId=upload_id, PartNumber=1, Body=data)
    parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
    reply = world.main.complete_multipart_upload(**place, UploadId=upload_id, MultipartUpload=parts, **condition)
    return str(reply["ETag"])


def _put(world: World, place: Place, data: bytes, **condition: str) -> str:
    return str(world.main.put_object(**place, Body=data, **condition)["ETag"])


@pytest.mark.parametrize("write", [_put, _complete])
def test_conditions_of_writes_of_both_kinds(world: World, bucket: str, write: Call) -> None:
    place: Place = {"Bucket": bucket, "Key": "foo"}
    etag = write(world, place, b"1", IfNoneMatch="*")
    for failing in ({"IfNoneMatch": "*"}, {"IfNoneMatch": etag}, {"IfMatch": "badetag"}):
        with refused(412, "PreconditionFailed"):
            write(world, place, b"x", **failing)
    assert body_of(world.main, bucket, "foo") == b"1"
    # S3 knows no If-None-Match but `*` on writes; another is judged as on reads.
    assert write(world, place, b"1", IfNoneMatch="badetag") == etag
    assert write(world, place, b"1", IfMatch=etag) == etag
    world.main.delete_object(**place)
    for failing in ({"IfMatch": "*"}, {"IfMatch": etag}):
        with refused(404, "NoSuchKey"):
            write(world, place, b"x", **failing)
    assert write(world, place, b"1", IfNoneMatch=etag) == etag
    assert write(world, place, b"2", IfMatch="*") != etag
    assert body_of(world.main, bucket, "foo") == b"2"


def test_a_304_tells_the_entity_tag(world: World, bucket: str) -> None:
    place: Place = {"Bucket": bucket, "Key": "foo"}
    etag = world.main.put_object(**place, Body=b"bar")["ETag"]
    with refused(304) as raised:
        world.main.get_object(**place, IfNoneMatch=etag)
    headers = raised.value.response["ResponseMetadata"]["HTTPHeaders"]
    assert (headers["etag"], headers.get("content-type")) == (etag, None)


def test_deletes_of_many_by_racing_clients_all_succeed(world: World, bucket: str) -> None:
    keys = [f"key_{number}" for number in range(5)]
    for key in keys:
        world.main.put_object(Bucket=bucket, Key=key, Body=b"x")
    wanted = {"Objects": [{"Key": key} for key in keys]}
    with ThreadPoolExecutor(5) as pool:
        replies = list(pool.map(lambda _: world.main.delete_objects(Bucket=bucket, Delete=wanted), range(5)))
    for reply in replies:
        assert (sorted(row["Key"] for row in reply["Deleted"]), "Errors" in reply) == (keys, False)
    assert "Contents" not in world.main.list_objects_v2(Bucket=bucket)


def test_if_match_of_a_delete_wants_an_object_and_its_size_does_not(world: World, bucket: str) -> None:
    with refused(404, "NoSuchKey"):
        world.main.delete_object(Bucket=bucket, Key="absent", IfMatch='"badetag"')
    assert status_of(world.main.delete_object(Bucket=bucket, Key="absent", IfMatchSize=9999)) == 204
    world.main.put_object(Bucket=bucket, Key="there", Body=b"")
    for failing in ({"IfMatch": '"badetag"'}, {"IfMatchSize": 9999}):
        with refused(412, "PreconditionFailed"):
            world.main.delete_object(Bucket=bucket, Key="there", **failing)


@pytest.mark.parametrize("name", ["ETag", "Size", "LastModifiedTime"])
def test_a_deletion_of_many_takes_what_fits_its_condition(world: World, bucket: str, name: str) -> None:
    client, place = world.main, {"Bucket": bucket, "Key": "obj"}
    client.put_object(**place, Body=b"")
    head = client.head_object(**place)
    good = {"ETag": head["ETag"], "Size": 0, "LastModifiedTime": head["LastModified"]}[name]
    bad = {"ETag": "badetag", "Size": 9999, "LastModifiedTime": dt.datetime(2015, 1, 1, tzinfo=dt.UTC)}[name]
    replies = [
        client.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": "obj", name: value}]})
        for value in (bad, good, bad)
    ]
    # Of what is absent, size and date say nothing; whoever names an ETag means an object.
    absent = ["NoSuchKey"] if name == "ETag" else []
    told = [[row["Code"] for row in reply.get("Errors", [])] for reply in replies]
    assert told == [["PreconditionFailed"], [], absent]
    gone = [[row["Key"] for row in reply.get("Deleted", [])] for reply in replies]
    assert gone == [[], ["obj"], [] if absent else ["obj"]]


def test_a_query_that_is_signed_is_the_one_that_counts(world: World, bucket: str) -> None:
    target = f"/{bucket}?{canonical_query({'list-type': '2', 'prefix': 'a'})}"
    with RawConnection("127.0.0.1", world.server.port) as connection:
        authority = f"127.0.0.1:{world.server.port}"
        signed = sign_head(Credentials(MAIN.access_key, MAIN.secret_key), "GET", authority, f"/{bucket}").head
        connection.send(signed.replace(f"/{bucket} ".encode(), f"{target} ".encode(), 1))
        reply = connection.read_reply()
    assert (reply.status, reply.code) == (403, "SignatureDoesNotMatch")
