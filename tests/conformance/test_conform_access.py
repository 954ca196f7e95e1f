"""Who gets in by which ACL: buckets and objects private and public, another user and who signs nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
from s3_worlds import ALT, MAIN, Call, S3Client, World, body_of, refused, status_of

ACLS = ("private", "public-read", "public-read-write")
OUTSIDERS = ("alt", "nobody")


def expected(*, allowed: bool) -> AbstractContextManager[Any]:
    return nullcontext() if allowed else refused(403, "AccessDenied")


def outsider(world: World, name: str) -> S3Client:
    return world.alt if name == "alt" else world.nobody


@pytest.mark.parametrize("who", OUTSIDERS)
@pytest.mark.parametrize("object_acl", ACLS)
@pytest.mark.parametrize("bucket_acl", ACLS)
def test_reads_go_by_the_objects_acl_and_all_else_by_the_buckets(
    world: World, bucket_acl: str, object_acl: str, who: str
) -> None:
    client = outsider(world, who)
    bucket = world.bucket(ACL=bucket_acl)
    world.main.put_object(Bucket=bucket, Key="foo", Body=b"foocontent", ACL=object_acl)
    world.main.put_object(Bucket=bucket, Key="bar", Body=b"barcontent")
    with expected(allowed=object_acl != "private"):
        assert body_of(client, bucket, "foo") == b"foocontent"
    with refused(403, "AccessDenied"):
        client.get_object(Bucket=bucket, Key="bar")
    for listing in (client.list_objects, client.list_objects_v2):
        with expected(allowed=bucket_acl != "private"):
            assert [row["Key"] for row in listing(Bucket=bucket)["Contents"]] == ["bar", "foo"]
    for key in ("foo", "bar", "new"):
        with expected(allowed=bucket_acl == "public-read-write"):
            client.put_object(Bucket=bucket, Key=key, Body=b"outside")
    with expected(allowed=bucket_acl == "public-read-write"):
        client.delete_object(Bucket=bucket, Key="foo")
    if bucket_acl == "private":
        assert body_of(world.main, bucket, "foo") == b"foocontent"


def test_what_signed_users_may_read_nobody_else_does(world: World) -> None:
    bucket = world.bucket(ACL="authenticated-read")
    world.main.put_object(Bucket=bucket, Key="foo", Body=b"bar", ACL="authenticated-read")
    assert body_of(world.alt, bucket, "foo") == b"bar"
    assert len(world.alt.list_objects_v2(Bucket=bucket)["Contents"]) == 1
    calls: tuple[Call, ...] = (
        lambda: world.nobody.get_object(Bucket=bucket, Key="foo"),
        lambda: world.nobody.list_objects(Bucket=bucket),
    )
    for call in calls:
        with refused(403, "AccessDenied"):
            call()


@pytest.mark.parametrize("who", ["main", *OUTSIDERS])
def test_who_may_list_is_told_what_is_gone(world: World, who: str) -> None:
    client = world.main if who == "main" else outsider(world, who)
    bucket = world.bucket(ACL="public-read")
    world.main.put_object(Bucket=bucket, Key="foo", Body=b"bar", ACL="public-read")
    assert body_of(client, bucket, "foo") == b"bar"
    world.main.delete_object(Bucket=bucket, Key="foo")
    with refused(404, "NoSuchKey"):
        client.get_object(Bucket=bucket, Key="foo")
    world.main.delete_bucket(Bucket=bucket)
    for call in (client.get_object, client.delete_object):
        with refused(404, "NoSuchBucket"):
            call(Bucket=bucket, Key="foo")


@pytest.mark.parametrize("who", OUTSIDERS)
def test_who_may_not_list_is_not_told_what_is_there(world: World, bucket: str, who: str) -> None:
    world.main.put_object(Bucket=bucket, Key="foo", Body=b"bar")
    client = outsider(world, who)
    for key in ("foo", "absent"):
        with refused(403, "AccessDenied"):
            client.get_object(Bucket=bucket, Key=key)
        with refused(403):
            client.head_object(Bucket=bucket, Key=key)
    with refused(403):
        client.head_bucket(Bucket=bucket)


@pytest.mark.parametrize("who", OUTSIDERS)
@pytest.mark.parametrize(
    "call",
    [
        lambda client, bucket: client.get_bucket_acl(Bucket=bucket),
        lambda client, bucket: client.put_bucket_acl(Bucket=bucket, ACL="private"),
        lambda client, bucket: client.get_bucket_tagging(Bucket=bucket),
        lambda client, bucket: client.get_bucket_policy(Bucket=bucket),
        lambda client, bucket: client.get_bucket_cors(Bucket=bucket),
        lambda client, bucket: client.get_bucket_lifecycle_configuration(Bucket=bucket),
        lambda client, bucket: client.delete_bucket(Bucket=bucket),
        lambda client, bucket: client.get_object_acl(Bucket=bucket, Key="foo"),
        lambda client, bucket: client.put_object_acl(Bucket=bucket, Key="foo", ACL="private"),
        lambda client, bucket: client.get_object_tagging(Bucket=bucket, Key="foo"),
    ],
)
def test_a_public_bucket_keeps_its_settings_to_its_owner(world: World, who: str, call: Call) -> None:
    bucket = world.bucket(ACL="public-read-write")
    world.main.put_object(Bucket=bucket, Key="foo", Body=b"bar", ACL="public-read")
    with refused(403, "AccessDenied"):
        call(outsider(world, who), bucket)
    assert body_of(world.main, bucket, "foo") == b"bar"


def test_who_writes_into_a_public_bucket_owns_what_is_written(world: World) -> None:
    bucket = world.bucket(ACL="public-read-write")
    world.alt.put_object(Bucket=bucket, Key="alts", Body=b"bar")
    world.nobody.put_object(Bucket=bucket, Key="nobodys", Body=b"bar")
    owners = {row["Key"]: row["Owner"]["ID"] for row in world.main.list_objects(Bucket=bucket)["Contents"]}
    # Nobody can own nothing: what is written without a signature belongs to the bucket's owner.
    assert owners == {"alts": ALT.id, "nobodys": MAIN.id}


def test_the_expected_owner_counts_for_outsiders_too(world: World) -> None:
    bucket = world.bucket(ACL="public-read-write")
    assert status_of(world.nobody.list_objects(Bucket=bucket, ExpectedBucketOwner=MAIN.id)) == 200
    with refused(403, "AccessDenied"):
        world.nobody.list_objects(Bucket=bucket, ExpectedBucketOwner=f"{MAIN.id}foo")
    with refused(403, "AccessDenied"):
        world.nobody.put_object(Bucket=bucket, Key="foo", Body=b"bar", ExpectedBucketOwner=f"{MAIN.id}foo")


def test_uploads_in_progress_are_told_with_who_began_them(world: World) -> None:
    bucket = world.bucket(ACL="public-read-write")
    begun = {
        user.id: client.create_multipart_upload(Bucket=bucket, Key=user.id)["UploadId"]
        for user, client in ((ALT, world.alt), (MAIN, world.main))
    }
    for client in (world.main, world.alt):
        told = client.list_multipart_uploads(Bucket=bucket)["Uploads"]
        assert {row["UploadId"]: row["Initiator"]["ID"] for row in told} == {
            upload_id: user_id for user_id, upload_id in begun.items()
        }
        assert [row["Owner"] for row in told] == [
            {"ID": user.id, "DisplayName": user.display_name} for user in (ALT, MAIN)
        ]
    world.alt.abort_multipart_upload(Bucket=bucket, Key=ALT.id, UploadId=begun[ALT.id])


def test_a_copy_within_anothers_bucket_needs_both_grants(world: World, bucket: str) -> None:
    source = {"Bucket": bucket, "Key": "foo"}
    world.main.put_object(**source, Body=b"bar", GrantRead=f"id={ALT.id}")
    with refused(403, "AccessDenied"):
        world.alt.copy_object(Bucket=bucket, Key="copy", CopySource=source)
    world.main.put_bucket_acl(Bucket=bucket, GrantWrite=f"id={ALT.id}")
    world.alt.copy_object(Bucket=bucket, Key="copy", CopySource=source)
    assert body_of(world.main, bucket, "copy") == b"bar"
    world.main.put_object_acl(**source, ACL="private")
    with refused(403, "AccessDenied"):
        world.alt.copy_object(Bucket=bucket, Key="again", CopySource=source)
