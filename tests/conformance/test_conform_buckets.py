"""Buckets: names, creation and removal, regions, listings of them, and what is not built."""

from __future__ import annotations

import datetime as dt

import pytest
from s3_worlds import ALT, MAIN, World, body_of, client_of, put_keys, refused, status_of

GOOD_NAMES = ("aaa", "a" * 63, "foo.bar", "foo-bar", "0ab", "foo.b-ar", "10.0.0")
BAD_NAMES = (
    "aa",
    "a" * 64,
    "Foo",
    "foo_bar",
    "foo..bar",
    "-foo",
    "foo-",
    "foo.",
    "192.168.5.123",
    "xn--foo",
    "foo--x-s3",
    "foo.-bar",
    "foo-.bar",
    "_foo",
    "a",
)


def test_a_bucket_is_made_found_and_removed(world: World) -> None:
    client = world.main
    bucket = world.bucket()
    assert status_of(client.head_bucket(Bucket=bucket)) == 200
    assert client.head_bucket(Bucket=bucket)["BucketRegion"] == "us-east-1"
    assert client.get_bucket_location(Bucket=bucket)["LocationConstraint"] is None
    assert bucket in [row["Name"] for row in client.list_buckets()["Buckets"]]
    client.put_object(Bucket=bucket, Key="foo", Body=b"")
    with refused(409, "BucketNotEmpty"):
        client.delete_bucket(Bucket=bucket)
    client.delete_object(Bucket=bucket, Key="foo")
    assert status_of(client.delete_bucket(Bucket=bucket)) == 204
    for call in (client.delete_bucket, client.list_objects, client.get_bucket_location, client.get_bucket_acl):
        with refused(404, "NoSuchBucket"):
            call(Bucket=bucket)
    with refused(404):
        client.head_bucket(Bucket=bucket)


@pytest.mark.parametrize("name", GOOD_NAMES)
def test_a_good_name_is_taken(world: World, name: str) -> None:
    assert status_of(world.main.create_bucket(Bucket=name)) == 200
    world.main.delete_bucket(Bucket=name)


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_bad_name_is_refused(world: World, name: str) -> None:
    reply = world.raw("PUT", f"/{name}")
    assert (reply.status, reply.code) == (400, "InvalidBucketName")


def test_ones_own_bucket_again_is_a_200_and_anothers_a_409(world: World) -> None:
    bucket = world.bucket()
    assert status_of(world.main.create_bucket(Bucket=bucket)) == 200
    with refused(409, "BucketAlreadyExists"):
        world.alt.create_bucket(Bucket=bucket)


def test_ones_own_bucket_again_keeps_what_it_holds(world: World, bucket: str) -> None:
    put_keys(world.main, bucket, ("mykey1", "mykey2"))
    assert status_of(world.main.create_bucket(Bucket=bucket)) == 200
    assert [row["Key"] for row in world.main.list_objects_v2(Bucket=bucket)["Contents"]] == ["mykey1", "mykey2"]


def test_a_bucket_tells_when_it_was_made(world: World) -> None:
    before = dt.datetime.now(dt.UTC) - dt.timedelta(seconds=2)
    bucket = world.bucket()
    (made,) = [row["CreationDate"] for row in world.main.list_buckets()["Buckets"] if row["Name"] == bucket]
    assert before <= made <= dt.datetime.now(dt.UTC)


def test_a_bucket_can_be_asked_for_in_the_region_it_is_in(world: World) -> None:
    bucket = world.bucket(CreateBucketConfiguration={"LocationConstraint": "us-east-1"})
    assert world.main.get_bucket_location(Bucket=bucket)["LocationConstraint"] is None


def test_a_region_that_is_not_ours_is_refused(world: World) -> None:
    with refused(400, "InvalidLocationConstraint"):
        world.main.create_bucket(
            Bucket="conform-elsewhere", CreateBucketConfiguration={"LocationConstraint": "eu-south-9"}
        )
    elsewhere = client_of(world.server, MAIN)
    elsewhere.meta.events.register(
        "before-sign.s3", lambda request, **_: request.context.update(signing={"region": "eu-west-1"})
    )
    with refused(400, "AuthorizationHeaderMalformed") as raised:
        elsewhere.list_buckets()
    assert raised.value.response["Error"]["Region"] == "us-east-1"
    elsewhere.close()


def test_buckets_are_listed_by_name_and_in_pages(world: World) -> None:
    names = ["paged-a", "paged-b", "paged-c"]
    for name in reversed(names):
        world.main.create_bucket(Bucket=name)
    told = world.main.list_buckets()
    assert told["Owner"] == {"ID": MAIN.id, "DisplayName": MAIN.display_name}
    assert [row["Name"] for row in told["Buckets"]] == sorted(row["Name"] for row in told["Buckets"])
    first = world.main.list_buckets(Prefix="paged-", MaxBuckets=2)
    assert ([row["Name"] for row in first["Buckets"]], first["Prefix"]) == (names[:2], "paged-")
    rest = world.main.list_buckets(Prefix="paged-", MaxBuckets=2, ContinuationToken=first["ContinuationToken"])
    assert ([row["Name"] for row in rest["Buckets"]], "ContinuationToken" in rest) == (names[2:], False)
    assert world.main.list_buckets(BucketRegion="eu-west-1")["Buckets"] == []
    assert "paged-a" not in [row["Name"] for row in world.alt.list_buckets()["Buckets"]]
    with refused(403, "AccessDenied"):
        world.nobody.list_buckets()
    for name in names:
        world.main.delete_bucket(Bucket=name)


def test_a_wrong_key_and_a_wrong_secret_are_told_apart(world: World) -> None:
    unknown = client_of(world.server, type(MAIN)("x", "nosuchaccesskey00001", MAIN.secret_key))
    with refused(403, "InvalidAccessKeyId"):
        unknown.list_buckets()
    wrong = client_of(world.server, type(MAIN)("x", MAIN.access_key, ALT.secret_key))
    with refused(403, "SignatureDoesNotMatch"):
        wrong.list_buckets()
    for client in (unknown, wrong):
        client.close()


@pytest.mark.parametrize(
    "call",
    [
        lambda client, bucket: client.put_bucket_versioning(
            Bucket=bucket, VersioningConfiguration={"Status": "Enabled"}
        ),
        lambda client, bucket: client.put_bucket_website(
            Bucket=bucket, WebsiteConfiguration={"IndexDocument": {"Suffix": "i"}}
        ),
        lambda client, bucket: client.get_object_lock_configuration(Bucket=bucket),
        lambda client, bucket: client.get_bucket_encryption(Bucket=bucket),
        lambda client, bucket: client.put_public_access_block(Bucket=bucket, PublicAccessBlockConfiguration={}),
        lambda client, bucket: client.get_bucket_ownership_controls(Bucket=bucket),
        lambda client, bucket: client.get_bucket_logging(Bucket=bucket),
        lambda client, bucket: client.get_bucket_replication(Bucket=bucket),
        lambda client, bucket: client.list_bucket_inventory_configurations(Bucket=bucket),
        lambda client, bucket: client.put_object(Bucket=bucket, Key="k", Body=b"", ServerSideEncryption="AES256"),
        lambda client, bucket: client.put_object_legal_hold(Bucket=bucket, Key="k", LegalHold={"Status": "ON"}),
        lambda client, bucket: client.restore_object(Bucket=bucket, Key="k", RestoreRequest={}),
    ],
)
def test_what_is_not_built_says_so(world: World, bucket: str, call: object) -> None:
    assert callable(call)
    with refused(501, "NotImplemented"):
        call(world.main, bucket)


@pytest.mark.parametrize(
    "call",
    [
        lambda client, bucket: client.put_object_annotation(
            Bucket=bucket, Key="k", AnnotationName="a", AnnotationPayload=b"note"
        ),
        lambda client, bucket: client.delete_object_annotation(Bucket=bucket, Key="k", AnnotationName="a"),
        lambda client, bucket: client.get_object_annotation(Bucket=bucket, Key="k", AnnotationName="a"),
        lambda client, bucket: client.list_object_annotations(Bucket=bucket, Key="k"),
        lambda client, bucket: client.update_object_encryption(
            Bucket=bucket, Key="k", ObjectEncryption={"SSEKMS": {"KMSKeyArn": "arn:aws:kms:us-east-1:1:key/1"}}
        ),
        lambda client, bucket: client.get_bucket_abac(Bucket=bucket),
        lambda client, bucket: client.put_bucket_abac(Bucket=bucket, AbacStatus={"Status": "Enabled"}),
        lambda client, bucket: client.get_bucket_metadata_configuration(Bucket=bucket),
    ],
)
def test_what_came_to_s3_later_says_so_and_touches_no_object(world: World, bucket: str, call: object) -> None:
    assert callable(call)
    put_keys(world.main, bucket, ["k"])
    with refused(501, "NotImplemented"):
        call(world.main, bucket)
    assert body_of(world.main, bucket, "k") == b"k"


def test_no_sub_resource_of_a_bucket_is_taken_for_the_bucket(world: World, bucket: str) -> None:
    with refused(501, "NotImplemented"):
        world.main.delete_bucket_metadata_configuration(Bucket=bucket)
    assert world.raw("DELETE", f"/{bucket}", query={"tomorrows": ""}).status == 501
    assert world.raw("DELETE", f"/{bucket}", query={"uploads": ""}).status == 405
    assert status_of(world.main.head_bucket(Bucket=bucket)) == 200


def test_an_ownership_that_acls_do_not_have_is_refused(world: World) -> None:
    for ownership in ("BucketOwnerEnforced", "BucketOwnerPreferred"):
        with refused(501, "NotImplemented"):
            world.bucket(ObjectOwnership=ownership)
    with refused(400, "InvalidArgument"):
        world.bucket(ObjectOwnership="Nobody")
    assert world.bucket(ObjectOwnership="ObjectWriter")


def test_a_directory_bucket_is_not_made(world: World) -> None:
    directory = {
        "Location": {"Type": "AvailabilityZone", "Name": "use1-az4"},
        "Bucket": {"Type": "Directory", "DataRedundancy": "SingleAvailabilityZone"},
    }
    with refused(501, "NotImplemented"):
        world.bucket(CreateBucketConfiguration=directory)


def test_versioning_that_was_never_enabled_is_told_as_such(world: World, bucket: str) -> None:
    assert "Status" not in world.main.get_bucket_versioning(Bucket=bucket)
