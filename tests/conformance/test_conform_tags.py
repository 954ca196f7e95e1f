"""Tags of buckets and objects: put, got and deleted as a set, brought along by writes, and their bounds."""

from __future__ import annotations

from typing import Any

import pytest
from s3_worlds import Call, World, body_of, refused, status_of

Tags = list[tuple[str, str]]


def tag_set(tags: Tags) -> dict[str, Any]:
    return {"TagSet": [{"Key": name, "Value": value} for name, value in tags]}


def numbered(count: int) -> Tags:
    return [(str(number), str(number)) for number in range(count)]


@pytest.fixture
def place(world: World, bucket: str) -> dict[str, str]:
    """Where an object without tags stands."""
    world.main.put_object(Bucket=bucket, Key="foo", Body=b"bar")
    return {"Bucket": bucket, "Key": "foo"}


def test_a_buckets_tags_are_put_got_and_deleted(world: World, bucket: str) -> None:
    client = world.main
    with refused(404, "NoSuchTagSet"):
        client.get_bucket_tagging(Bucket=bucket)
    assert status_of(client.put_bucket_tagging(Bucket=bucket, Tagging=tag_set([("Hello", "World")]))) == 204
    assert client.get_bucket_tagging(Bucket=bucket)["TagSet"] == [{"Key": "Hello", "Value": "World"}]
    assert status_of(client.delete_bucket_tagging(Bucket=bucket)) == 204
    with refused(404, "NoSuchTagSet"):
        client.get_bucket_tagging(Bucket=bucket)


def test_a_bucket_is_made_with_tags(world: World) -> None:
    bucket = world.bucket(CreateBucketConfiguration={"Tags": tag_set([("team", "a"), ("cost", "")])["TagSet"]})
    told = world.main.get_bucket_tagging(Bucket=bucket)["TagSet"]
    assert {tag["Key"]: tag["Value"] for tag in told} == {"team": "a", "cost": ""}
    for tags, code in ((numbered(51), "BadRequest"), ([("aws:a", "b")], "InvalidTag")):
        with refused(400, code):
            world.bucket(CreateBucketConfiguration={"Tags": tag_set(tags)["TagSet"]})


def test_an_object_without_tags_has_an_empty_set(world: World, place: dict[str, str]) -> None:
    assert world.main.get_object_tagging(**place)["TagSet"] == []
    assert "x-amz-tagging-count" not in world.main.head_object(**place)["ResponseMetadata"]["HTTPHeaders"]


@pytest.mark.parametrize("count", [1, 2, 10])
def test_tags_come_back_and_are_counted_on_reads(world: World, place: dict[str, str], count: int) -> None:
    tags = tag_set(numbered(count))
    assert status_of(world.main.put_object_tagging(**place, Tagging=tags)) == 200
    assert world.main.get_object_tagging(**place)["TagSet"] == tags["TagSet"]
    for reply in (world.main.head_object(**place), world.main.get_object(**place)):
        assert reply["ResponseMetadata"]["HTTPHeaders"]["x-amz-tagging-count"] == str(count)


def test_names_and_values_may_be_as_long_as_s3_lets_them(world: World, place: dict[str, str]) -> None:
    tags = tag_set([(f"{number}".ljust(128, "k"), "v" * 256) for number in range(10)])
    world.main.put_object_tagging(**place, Tagging=tags)
    assert world.main.get_object_tagging(**place)["TagSet"] == tags["TagSet"]


@pytest.mark.parametrize(
    ("tags", "code"),
    [
        (numbered(11), "BadRequest"),
        ([("k" * 129, "v")], "InvalidTag"),
        ([("k", "v" * 257)], "InvalidTag"),
        ([("k", "1"), ("k", "2")], "InvalidTag"),
        ([("aws:k", "v")], "InvalidTag"),
        ([("k!", "v")], "InvalidTag"),
    ],
)
def test_tags_that_s3_does_not_take_change_nothing(world: World, place: dict[str, str], tags: Tags, code: str) -> None:
    world.main.put_object_tagging(**place, Tagging=tag_set([("old", "1")]))
    with refused(400, code):
        world.main.put_object_tagging(**place, Tagging=tag_set(tags))
    assert world.main.get_object_tagging(**place)["TagSet"] == tag_set([("old", "1")])["TagSet"]


def test_a_new_set_replaces_the_old(world: World, place: dict[str, str]) -> None:
    world.main.put_object_tagging(**place, Tagging=tag_set([("key", "val"), ("key2", "val2")]))
    world.main.put_object_tagging(**place, Tagging=tag_set([("key3", "val3")]))
    assert world.main.get_object_tagging(**place)["TagSet"] == tag_set([("key3", "val3")])["TagSet"]


def test_deleted_tags_are_gone_and_the_object_stays(world: World, place: dict[str, str]) -> None:
    head = world.main.head_object(**place)
    world.main.put_object_tagging(**place, Tagging=tag_set(numbered(2)))
    assert status_of(world.main.delete_object_tagging(**place)) == 204
    assert world.main.get_object_tagging(**place)["TagSet"] == []
    now = world.main.head_object(**place)
    assert (now["ETag"], now["LastModified"]) == (head["ETag"], head["LastModified"])
    assert body_of(world.main, place["Bucket"], "foo") == b"bar"


def test_a_write_brings_tags_in_a_header(world: World, bucket: str) -> None:
    place = {"Bucket": bucket, "Key": "foo"}
    world.main.put_object(**place, Body=b"bar", Tagging="foo=bar&bar&two+words=a%2Fb")
    told = world.main.get_object_tagging(**place)["TagSet"]
    assert told == tag_set([("bar", ""), ("foo", "bar"), ("two words", "a/b")])["TagSet"]
    world.main.put_object(**place, Body=b"bar")
    assert world.main.get_object_tagging(**place)["TagSet"] == []


def test_a_write_with_bad_tags_stores_nothing(world: World, bucket: str) -> None:
    for value in ("&".join(f"k{number}=v" for number in range(11)), "aws:k=v", "k=1&k=2"):
        with refused(400):
            world.main.put_object(Bucket=bucket, Key="foo", Body=b"bar", Tagging=value)
    with refused(404):
        world.main.head_object(Bucket=bucket, Key="foo")


def test_an_upload_brings_the_tags_of_its_beginning(world: World, bucket: str) -> None:
    place: dict[str, Any] = {"Bucket": bucket, "Key": "foo"}
    upload_id = world.main.create_multipart_upload(**place, Tagging="Hello=World&foo=bar")["UploadId"]
    part = world.main.upload_part(**place, UploadId=upload_id, PartNumber=1, Body=b"x")
    parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
    world.main.complete_multipart_upload(**place, UploadId=upload_id, MultipartUpload=parts)
    told = world.main.get_object_tagging(**place)["TagSet"]
    assert told == tag_set([("Hello", "World"), ("foo", "bar")])["TagSet"]
    assert status_of(world.main.delete_object_tagging(**place)) == 204
    assert world.main.get_object_tagging(**place)["TagSet"] == []


@pytest.mark.parametrize(
    ("more", "tags"),
    [
        ({}, [("a", "1")]),
        ({"TaggingDirective": "COPY"}, [("a", "1")]),
        ({"TaggingDirective": "REPLACE", "Tagging": "b=2"}, [("b", "2")]),
        ({"TaggingDirective": "REPLACE"}, []),
    ],
)
def test_a_copy_keeps_or_replaces_tags(world: World, bucket: str, more: dict[str, str], tags: Tags) -> None:
    world.main.put_object(Bucket=bucket, Key="foo", Body=b"bar", Tagging="a=1")
    world.main.copy_object(Bucket=bucket, Key="new", CopySource={"Bucket": bucket, "Key": "foo"}, **more)
    assert world.main.get_object_tagging(Bucket=bucket, Key="new")["TagSet"] == tag_set(tags)["TagSet"]


def test_tags_of_what_is_not_there_are_a_404(world: World, bucket: str) -> None:
    client, place = world.main, {"Bucket": bucket, "Key": "absent"}
    calls: tuple[Call, ...] = (
        lambda: client.get_object_tagging(**place),
        lambda: client.put_object_tagging(**place, Tagging=tag_set([("a", "1")])),
        lambda: client.delete_object_tagging(**place),
    )
    for call in calls:
        with refused(404, "NoSuchKey"):
            call()
    with refused(404, "NoSuchBucket"):
        client.get_bucket_tagging(Bucket="conform-missing")
