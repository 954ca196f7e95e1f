"""Bucket policies: put and got, whom they let in and keep out, conditions on headers and tags, and whether a bucket is public."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from s3_worlds import ALT, MAIN, Call, S3Client, World, body_of, put_keys, refused, status_of

ALT_ARN = f"arn:aws:iam:::user/{ALT.id}"
OBJECTS = "objects"
BUCKET = "bucket"


def statement(bucket: str, action: str | list[str], on: str = OBJECTS, /, **more: object) -> dict[str, object]:
    """Everybody may do it on the bucket's objects, or on the bucket; `more` are elements that replace or add."""
    resource = f"arn:aws:s3:::{bucket}" + ("/*" if on == OBJECTS else "")
    return {"Effect": "Allow", "Principal": {"AWS": "*"}, "Action": action, "Resource": resource} | more


def put_policy(client: S3Client, bucket: str, *statements: dict[str, object]) -> str:
    """Set the bucket's policy; returns its text."""
    document = json.dumps({"Version": "2012-10-17", "Statement": list(statements)})
    assert status_of(client.put_bucket_policy(Bucket=bucket, Policy=document)) == 204
    return document


@contextmanager
def with_header(client: S3Client, operation: str, name: str, value: str) -> Iterator[None]:
    """The client's calls of the operation carry this header too."""

    def add(params: dict[str, Any], **_: object) -> None:
        params["headers"][name] = value

    event = f"before-call.s3.{operation}"
    client.meta.events.register(event, add)
    try:
        yield
    finally:
        client.meta.events.unregister(event, add)


def tag_set(**tags: str) -> dict[str, Any]:
    return {"TagSet": [{"Key": name, "Value": value} for name, value in tags.items()]}


@pytest.fixture
def tagged(world: World, bucket: str) -> str:
    """A bucket with an object of each kind: tagged public, tagged private, tagged otherwise, not tagged."""
    put_keys(world.main, bucket, ("public", "private", "other", "none"))
    for key, tags in (
        ("public", {"security": "public", "foo": "bar"}),
        ("private", {"security": "private"}),
        ("other", {"security1": "public"}),
    ):
        world.main.put_object_tagging(Bucket=bucket, Key=key, Tagging=tag_set(**tags))
    return bucket


IF_PUBLIC = {"StringEquals": {"s3:ExistingObjectTag/security": "public"}}


def test_a_policy_is_put_got_and_deleted(world: World, bucket: str) -> None:
    client = world.main
    with refused(404, "NoSuchBucketPolicy"):
        client.get_bucket_policy(Bucket=bucket)
    document = put_policy(client, bucket, statement(bucket, "s3:ListBucket", BUCKET))
    assert client.get_bucket_policy(Bucket=bucket)["Policy"] == document
    for _ in range(2):
        assert status_of(client.delete_bucket_policy(Bucket=bucket)) == 204
    with refused(404, "NoSuchBucketPolicy"):
        client.get_bucket_policy(Bucket=bucket)


@pytest.mark.parametrize("who", ["alt", "nobody"])
@pytest.mark.parametrize("version", [1, 2])
def test_a_policy_lets_everybody_list(world: World, bucket: str, who: str, version: int) -> None:
    put_keys(world.main, bucket, ("asdf",))
    client = world.alt if who == "alt" else world.nobody
    call = client.list_objects if version == 1 else client.list_objects_v2
    with refused(403, "AccessDenied"):
        call(Bucket=bucket)
    put_policy(world.main, bucket, statement(bucket, "s3:ListBucket", BUCKET))
    assert [row["Key"] for row in call(Bucket=bucket)["Contents"]] == ["asdf"]
    with refused(403, "AccessDenied"):
        client.get_object(Bucket=bucket, Key="asdf")


def test_a_policy_lets_one_user_in(world: World, bucket: str) -> None:
    put_keys(world.main, bucket, ("asdf",))
    put_policy(world.main, bucket, statement(bucket, "s3:GetObject", Principal={"AWS": ALT_ARN}))
    assert body_of(world.alt, bucket, "asdf") == b"asdf"
    with refused(403, "AccessDenied"):
        world.nobody.get_object(Bucket=bucket, Key="asdf")


def test_a_policy_is_about_the_keys_it_names(world: World, bucket: str) -> None:
    put_keys(world.main, bucket, ("open/a", "shut/a"))
    put_policy(world.main, bucket, statement(bucket, "s3:Get*", Resource=f"arn:aws:s3:::{bucket}/open/*"))
    assert body_of(world.nobody, bucket, "open/a") == b"open/a"
    with refused(403, "AccessDenied"):
        world.nobody.get_object(Bucket=bucket, Key="shut/a")


@pytest.mark.parametrize("version", [1, 2])
def test_a_deny_beats_an_acl(world: World, version: int) -> None:
    bucket = world.bucket(ACL="authenticated-read")
    call = world.alt.list_objects if version == 1 else world.alt.list_objects_v2
    assert status_of(call(Bucket=bucket)) == 200
    put_policy(world.main, bucket, statement(bucket, "s3:ListBucket", BUCKET, Effect="Deny"))
    with refused(403, "AccessDenied"):
        call(Bucket=bucket)
    world.main.delete_bucket_policy(Bucket=bucket)
    assert status_of(call(Bucket=bucket)) == 200


def test_a_deny_beats_an_allow_and_binds_the_owner(world: World, bucket: str) -> None:
    put_keys(world.main, bucket, ("asdf",))
    put_policy(
        world.main, bucket, statement(bucket, "s3:*"), statement(bucket, "s3:GetObject", Effect="Deny", Principal="*")
    )
    for client in (world.main, world.alt, world.nobody):
        with refused(403, "AccessDenied"):
            client.get_object(Bucket=bucket, Key="asdf")
        assert status_of(client.put_object(Bucket=bucket, Key="new", Body=b"x")) == 200


def test_an_owner_who_denies_the_policy_to_all_can_still_mend_it(world: World, bucket: str) -> None:
    actions = ["s3:PutBucketPolicy", "s3:GetBucketPolicy", "s3:DeleteBucketPolicy"]
    put_policy(world.main, bucket, statement(bucket, "s3:*", BUCKET), statement(bucket, actions, BUCKET, Effect="Deny"))
    calls: tuple[Call, ...] = (
        lambda: world.alt.get_bucket_policy(Bucket=bucket),
        lambda: world.alt.delete_bucket_policy(Bucket=bucket),
        lambda: put_policy(world.alt, bucket, statement(bucket, "s3:*")),
    )
    for call in calls:
        with refused(403, "AccessDenied"):
            call()
    assert "Deny" in world.main.get_bucket_policy(Bucket=bucket)["Policy"]
    assert status_of(world.main.delete_bucket_policy(Bucket=bucket)) == 204


@pytest.mark.parametrize("version", [1, 2])
def test_a_policy_of_any_bucket_fits_each(world: World, version: int) -> None:
    one, other = world.bucket(), world.bucket()
    put_keys(world.main, one, ("a",))
    put_keys(world.main, other, ("b",))
    put_policy(
        world.main, one, statement("*", "s3:ListBucket", BUCKET, Resource=["arn:aws:s3:::*", "arn:aws:s3:::*/*"])
    )
    world.main.put_bucket_policy(Bucket=other, Policy=world.main.get_bucket_policy(Bucket=one)["Policy"])
    call = world.alt.list_objects if version == 1 else world.alt.list_objects_v2
    for bucket, key in ((one, "a"), (other, "b")):
        assert [row["Key"] for row in call(Bucket=bucket)["Contents"]] == [key]


@pytest.mark.parametrize(
    "change",
    [
        {"Effect": "Perhaps"},
        {"Action": "s3:NoSuchAction"},
        {"Action": "s3:ListBucket"},
        {"Resource": "arn:aws:s3:::conform-elsewhere/*"},
        {"Principal": {"AWS": "arn:aws:iam:::user/conform-missing"}},
        {"Condition": {"NoSuchOperator": {"aws:Referer": "x"}}},
        {"Condition": {"StringEquals": {"s3:NoSuchKey": "x"}}},
        {"Sid": 7},
        {"Whatever": 1},
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(world: World, bucket: str, change: dict[str, object]) -> None:
    document = json.dumps({"Version": "2012-10-17", "Statement": [statement(bucket, "s3:GetObject", **change)]})
    with refused(400, "MalformedPolicy"):
        world.main.put_bucket_policy(Bucket=bucket, Policy=document)
    with refused(404, "NoSuchBucketPolicy"):
        world.main.get_bucket_policy(Bucket=bucket)


def test_everybody_but_some_cannot_be_allowed(world: World, bucket: str) -> None:
    listed = statement(bucket, "s3:ListBucket", BUCKET, NotPrincipal={"AWS": ALT_ARN})
    del listed["Principal"]
    with refused(400, "MalformedPolicy"):
        put_policy(world.main, bucket, listed)
    put_policy(world.main, bucket, statement(bucket, "s3:ListBucket", BUCKET), listed | {"Effect": "Deny"})
    assert status_of(world.alt.list_objects_v2(Bucket=bucket)) == 200
    with refused(403, "AccessDenied"):
        world.nobody.list_objects_v2(Bucket=bucket)


def test_a_policy_of_more_than_20_kib_is_refused(world: World, bucket: str) -> None:
    with refused(400):
        put_policy(world.main, bucket, statement(bucket, "s3:GetObject", Sid="x" * 20_480))


def test_an_upload_needs_the_right_to_write_its_key(world: World, bucket: str) -> None:
    client, key = world.alt, "mpobj"
    with refused(403, "AccessDenied"):
        client.create_multipart_upload(Bucket=bucket, Key=key)
    put_policy(world.main, bucket, statement(bucket, "s3:PutObject", Resource=f"arn:aws:s3:::{bucket}/{key}"))
    with refused(403, "AccessDenied"):
        client.create_multipart_upload(Bucket=bucket, Key="other")
    upload_id = client.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]
    place = {"Bucket": bucket, "Key": key, "UploadId": upload_id}
    part = client.upload_part(**place, PartNumber=1, Body=b"bar")
    client.complete_multipart_upload(**place, MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]})
    assert body_of(world.main, bucket, key) == b"bar"


def test_an_upload_under_a_policy_that_allows_all_works_as_ever(world: World, bucket: str) -> None:
    both = [f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*"]
    put_policy(world.main, bucket, statement(bucket, "*", Principal="*", Resource=both))
    place: dict[str, Any] = {"Bucket": bucket, "Key": "foo"}
    place["UploadId"] = world.main.create_multipart_upload(**place)["UploadId"]
    part = world.main.upload_part(**place, PartNumber=1, Body=b"bar")
    parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
    assert status_of(world.main.complete_multipart_upload(**place, MultipartUpload=parts)) == 200


def test_a_condition_if_there_is_a_value_lets_in_who_has_none(world: World, bucket: str) -> None:
    put_keys(world.main, bucket, ("foo",))
    condition = {"StringLikeIfExists": {"aws:Referer": "http://www.example.com/*"}}
    put_policy(world.main, bucket, statement(bucket, "s3:GetObject", Condition=condition))
    assert body_of(world.alt, bucket, "foo") == b"foo"
    for referer, allowed in (
        ("http://www.example.com/", True),
        ("http://www.example.com/index.html", True),
        ("http://example.com", False),
    ):
        with with_header(world.alt, "GetObject", "referer", referer):
            if allowed:
                assert body_of(world.alt, bucket, "foo") == b"foo"
            else:
                with refused(403, "AccessDenied"):
                    world.alt.get_object(Bucket=bucket, Key="foo")


def test_a_condition_on_the_address_is_judged(world: World, bucket: str) -> None:
    put_keys(world.main, bucket, ("foo",))
    for network, allowed in (("127.0.0.0/8", True), ("10.0.0.0/32", False)):
        condition = {"IpAddress": {"aws:SourceIp": network}}
        put_policy(world.main, bucket, statement(bucket, "s3:GetObject", Condition=condition))
        if allowed:
            assert body_of(world.nobody, bucket, "foo") == b"foo"
        else:
            with refused(403, "AccessDenied"):
                world.nobody.get_object(Bucket=bucket, Key="foo")


def test_a_condition_on_the_key_prefix_of_a_listing(world: World, bucket: str) -> None:
    put_keys(world.main, bucket, ("open/a", "shut/a"))
    condition = {"StringLike": {"s3:prefix": "open/*"}}
    put_policy(world.main, bucket, statement(bucket, "s3:ListBucket", BUCKET, Condition=condition))
    assert [row["Key"] for row in world.alt.list_objects_v2(Bucket=bucket, Prefix="open/")["Contents"]] == ["open/a"]
    for more in ({}, {"Prefix": "shut/"}):
        with refused(403, "AccessDenied"):
            world.alt.list_objects_v2(Bucket=bucket, **more)


def test_a_key_is_told_to_be_missing_where_its_prefix_may_be_listed(world: World, bucket: str) -> None:
    condition = {"StringLike": {"s3:prefix": "public/*"}}
    put_policy(world.main, bucket, statement(bucket, "s3:ListBucket", BUCKET, Condition=condition))
    for key, status in (("public/object", 404), ("private/object", 403)):
        with refused(status):
            world.alt.head_object(Bucket=bucket, Key=key)


@pytest.mark.parametrize(
    ("action", "call"),
    [
        ("s3:GetObject", lambda client, bucket, key: client.get_object(Bucket=bucket, Key=key)),
        ("s3:GetObject", lambda client, bucket, key: client.head_object(Bucket=bucket, Key=key)),
        ("s3:GetObjectTagging", lambda client, bucket, key: client.get_object_tagging(Bucket=bucket, Key=key)),
        ("s3:GetObjectAcl", lambda client, bucket, key: client.get_object_acl(Bucket=bucket, Key=key)),
    ],
)
def test_tags_that_an_object_has_decide(world: World, tagged: str, action: str, call: Call) -> None:
    put_policy(world.main, tagged, statement(tagged, action, Condition=IF_PUBLIC))
    assert status_of(call(world.alt, tagged, "public")) == 200
    for key in ("private", "other", "none"):
        with refused(403):
            call(world.alt, tagged, key)
    if action != "s3:GetObject":
        with refused(403, "AccessDenied"):
            world.alt.get_object(Bucket=tagged, Key="public")


def test_who_may_tag_by_a_tag_can_lose_the_right_to(world: World, tagged: str) -> None:
    put_policy(world.main, tagged, statement(tagged, "s3:PutObjectTagging", Condition=IF_PUBLIC))
    public, private = tag_set(security="public", foo="bar"), tag_set(security="private")
    world.alt.put_object_tagging(Bucket=tagged, Key="public", Tagging=public)
    with refused(403, "AccessDenied"):
        world.alt.put_object_tagging(Bucket=tagged, Key="private", Tagging=public)
    world.alt.put_object_tagging(Bucket=tagged, Key="public", Tagging=private)
    with refused(403, "AccessDenied"):
        world.alt.put_object_tagging(Bucket=tagged, Key="public", Tagging=public)


def test_tags_that_a_write_brings_decide(world: World, bucket: str) -> None:
    condition = {"StringEquals": {"s3:RequestObjectTag/security": "public"}}
    put_policy(
        world.main,
        bucket,
        statement(bucket, ["s3:PutObject", "s3:PutObjectTagging"], Condition=condition),
    )
    for more in ({}, {"Tagging": "security=private"}):
        with refused(403, "AccessDenied"):
            world.alt.put_object(Bucket=bucket, Key="foo", Body=b"bar", **more)
    world.alt.put_object(Bucket=bucket, Key="foo", Body=b"bar", Tagging="security=public")
    assert world.main.get_object_tagging(Bucket=bucket, Key="foo")["TagSet"] == tag_set(security="public")["TagSet"]


@pytest.mark.parametrize(
    ("action", "call", "left"),
    [
        ("s3:GetObjectTagging", lambda client, place: client.get_object_tagging(**place), {"a": "1"}),
        (
            "s3:PutObjectTagging",
            lambda client, place: client.put_object_tagging(**place, Tagging=tag_set(b="2")),
            {"b": "2"},
        ),
        ("s3:DeleteObjectTagging", lambda client, place: client.delete_object_tagging(**place), {}),
    ],
)
def test_a_policy_gives_each_right_on_tags_by_itself(
    world: World, bucket: str, action: str, call: Call, left: dict[str, str]
) -> None:
    place = {"Bucket": bucket, "Key": "foo"}
    world.main.put_object(**place, Body=b"bar", Tagging="a=1")
    with refused(403, "AccessDenied"):
        call(world.alt, place)
    put_policy(world.main, bucket, statement(bucket, action))
    assert status_of(call(world.alt, place)) in (200, 204)
    assert world.main.get_object_tagging(**place)["TagSet"] == tag_set(**left)["TagSet"]


def test_a_part_is_copied_from_where_a_policy_lets_read(world: World, bucket: str) -> None:
    put_keys(world.main, bucket, ("public/foo", "private/foo"))
    put_policy(world.main, bucket, statement(bucket, "s3:GetObject", Resource=f"arn:aws:s3:::{bucket}/public/*"))
    place: dict[str, Any] = {"Bucket": world.bucket(world.alt), "Key": "new"}
    place["UploadId"] = world.alt.create_multipart_upload(**place)["UploadId"]
    copied = world.alt.upload_part_copy(**place, PartNumber=1, CopySource={"Bucket": bucket, "Key": "public/foo"})
    with refused(403, "AccessDenied"):
        world.alt.upload_part_copy(**place, PartNumber=2, CopySource={"Bucket": bucket, "Key": "private/foo"})
    parts = {"Parts": [{"PartNumber": 1, "ETag": copied["CopyPartResult"]["ETag"]}]}
    world.alt.complete_multipart_upload(**place, MultipartUpload=parts)
    assert body_of(world.alt, place["Bucket"], "new") == b"public/foo"


def test_the_source_of_a_copy_decides(world: World, bucket: str) -> None:
    put_keys(world.main, bucket, ("public/foo", "public/bar", "private/foo"))
    put_policy(world.main, bucket, statement(bucket, "s3:GetObject"))
    target = world.bucket()
    condition = {"StringLike": {"s3:x-amz-copy-source": f"{bucket}/public/*"}}
    put_policy(world.main, target, statement(target, "s3:PutObject", Condition=condition))
    for key in ("public/foo", "public/bar"):
        world.alt.copy_object(Bucket=target, Key=key, CopySource={"Bucket": bucket, "Key": key})
        assert body_of(world.main, target, key) == key.encode()
    with refused(403, "AccessDenied"):
        world.alt.copy_object(Bucket=target, Key="no", CopySource={"Bucket": bucket, "Key": "private/foo"})
    with refused(403, "AccessDenied"):
        world.alt.put_object(Bucket=target, Key="no", Body=b"x")


def test_what_becomes_of_a_copys_metadata_decides(world: World, bucket: str) -> None:
    put_keys(world.main, bucket, ("foo",))
    put_policy(world.main, bucket, statement(bucket, "s3:GetObject"))
    target, source = world.bucket(), {"Bucket": bucket, "Key": "foo"}
    condition = {"StringEquals": {"s3:x-amz-metadata-directive": "COPY"}}
    put_policy(world.main, target, statement(target, "s3:PutObject", Condition=condition))
    world.alt.copy_object(Bucket=target, Key="new", CopySource=source, MetadataDirective="COPY")
    assert body_of(world.main, target, "new") == b"foo"
    for more in ({}, {"MetadataDirective": "REPLACE", "Metadata": {"foo": "bar"}}):
        with refused(403, "AccessDenied"):
            world.alt.copy_object(Bucket=target, Key="no", CopySource=source, **more)


def test_a_policy_can_forbid_public_objects(world: World, bucket: str) -> None:
    public = {"StringLike": {"s3:x-amz-acl": "public*"}}
    put_policy(
        world.main,
        bucket,
        statement(bucket, ["s3:PutObject", "s3:PutObjectAcl"]),
        statement(bucket, "s3:PutObject", Effect="Deny", Condition=public),
    )
    assert status_of(world.alt.put_object(Bucket=bucket, Key="private", Body=b"bar")) == 200
    with refused(403, "AccessDenied"):
        world.alt.put_object(Bucket=bucket, Key="public", Body=b"bar", ACL="public-read")
    with refused(404):
        world.main.head_object(Bucket=bucket, Key="public")


def test_a_policy_can_ask_for_the_owners_full_control(world: World, bucket: str) -> None:
    condition = {"StringEquals": {"s3:x-amz-grant-full-control": f"id={MAIN.id}"}}
    put_policy(world.main, bucket, statement(bucket, "s3:PutObject", Condition=condition))
    with refused(403, "AccessDenied"):
        world.alt.put_object(Bucket=bucket, Key="foo", Body=b"bar")
    world.alt.put_object(Bucket=bucket, Key="foo", Body=b"bar", GrantFullControl=f"id={MAIN.id}")
    told = world.main.get_object_acl(Bucket=bucket, Key="foo")
    assert (told["Owner"]["ID"], told["Grants"][0]["Grantee"]["ID"]) == (ALT.id, MAIN.id)


def test_a_policy_can_deny_what_lacks_a_header(world: World, bucket: str) -> None:
    condition = {"Null": {"s3:x-amz-server-side-encryption": "true"}}
    put_policy(world.main, bucket, statement(bucket, "s3:PutObject", Effect="Deny", Condition=condition))
    with refused(403, "AccessDenied"):
        world.main.put_object(Bucket=bucket, Key="foo", Body=b"bar")


@pytest.mark.parametrize("acl", ["private", "public-read", "public-read-write", "authenticated-read"])
def test_an_acl_makes_a_bucket_public_or_not(world: World, acl: str) -> None:
    bucket = world.bucket(ACL=acl)
    told = world.main.get_bucket_policy_status(Bucket=bucket)["PolicyStatus"]["IsPublic"]
    assert told is (acl != "private")


@pytest.mark.parametrize(
    ("change", "public"),
    [
        ({}, True),
        ({"Principal": "*"}, True),
        ({"Principal": {"AWS": ALT_ARN}}, False),
        ({"Condition": {"IpAddress": {"aws:SourceIp": "10.0.0.0/32"}}}, False),
        ({"Condition": {"StringLike": {"aws:Referer": "http://www.example.com/*"}}}, True),
        ({"Effect": "Deny"}, False),
    ],
)
def test_a_policy_makes_a_bucket_public_or_not(
    world: World, bucket: str, change: dict[str, object], *, public: bool
) -> None:
    assert world.main.get_bucket_policy_status(Bucket=bucket)["PolicyStatus"]["IsPublic"] is False
    put_policy(world.main, bucket, statement(bucket, "s3:ListBucket", BUCKET, **change))
    assert world.main.get_bucket_policy_status(Bucket=bucket)["PolicyStatus"]["IsPublic"] is public


def test_a_conditional_delete_tells_nothing_to_who_may_not_read(world: World, bucket: str) -> None:
    put_keys(world.main, bucket, ("a", "b", "c"))
    etag = world.main.head_object(Bucket=bucket, Key="a")["ETag"]
    may_delete = statement(bucket, "s3:DeleteObject", Principal={"AWS": ALT_ARN})
    put_policy(world.main, bucket, may_delete)
    for compared in ({"IfMatch": etag}, {"IfMatch": '"other"'}, {"IfMatchSize": 1}, {"IfMatchSize": 7}):
        with refused(403, "AccessDenied"):
            world.alt.delete_object(Bucket=bucket, Key="a", **compared)
    for absent in ("*", etag):
        with refused(403, "AccessDenied"):
            world.alt.delete_object(Bucket=bucket, Key="absent", IfMatch=absent)
    entries = [{"Key": "a", "ETag": etag}, {"Key": "absent", "ETag": etag}, {"Key": "b"}]
    reply = world.alt.delete_objects(Bucket=bucket, Delete={"Objects": entries})
    assert sorted((row["Key"], row["Code"]) for row in reply["Errors"]) == [
        ("a", "AccessDenied"),
        ("absent", "AccessDenied"),
    ]
    assert [row["Key"] for row in reply["Deleted"]] == ["b"]
    assert status_of(world.alt.delete_object(Bucket=bucket, Key="c", IfMatch="*")) == 204
    may_list = statement(bucket, "s3:ListBucket", BUCKET, Principal={"AWS": ALT_ARN})
    put_policy(world.main, bucket, may_delete | {"Action": ["s3:DeleteObject", "s3:GetObject"]}, may_list)
    with refused(412, "PreconditionFailed"):
        world.alt.delete_object(Bucket=bucket, Key="a", IfMatch='"other"')
    with refused(404, "NoSuchKey"):
        world.alt.delete_object(Bucket=bucket, Key="absent", IfMatch="*")
    assert status_of(world.alt.delete_object(Bucket=bucket, Key="a", IfMatch=etag)) == 204


def test_a_condition_on_if_match_is_about_each_entry_of_a_deletion_of_many(world: World, bucket: str) -> None:
    put_keys(world.main, bucket, ("a", "b"))
    etag = world.main.head_object(Bucket=bucket, Key="a")["ETag"]
    unconditional = {"Null": {"s3:if-match": "true"}}
    put_policy(
        world.main,
        bucket,
        statement(bucket, ["s3:DeleteObject", "s3:GetObject"], Principal={"AWS": ALT_ARN}),
        statement(bucket, "s3:DeleteObject", Effect="Deny", Condition=unconditional),
    )
    entries = {"Objects": [{"Key": "a", "ETag": etag}, {"Key": "b"}]}
    with with_header(world.alt, "DeleteObjects", "If-Match", "*"):
        reply = world.alt.delete_objects(Bucket=bucket, Delete=entries)
    assert [row["Key"] for row in reply["Deleted"]] == ["a"]
    assert [(row["Key"], row["Code"]) for row in reply["Errors"]] == [("b", "AccessDenied")]


def test_a_directive_is_what_a_policy_sees_of_it(world: World, bucket: str) -> None:
    source = world.bucket(world.alt)
    put_keys(world.alt, source, ("foo",))
    replacing = {"StringEquals": {"s3:x-amz-metadata-directive": "REPLACE"}}
    put_policy(
        world.main,
        bucket,
        statement(bucket, "s3:PutObject", Principal={"AWS": ALT_ARN}),
        statement(bucket, "s3:PutObject", Effect="Deny", Condition=replacing),
    )
    copy = {"Bucket": bucket, "Key": "foo", "CopySource": {"Bucket": source, "Key": "foo"}}
    with refused(403, "AccessDenied"):
        world.alt.copy_object(**copy, MetadataDirective="REPLACE")
    for name in ("MetadataDirective", "TaggingDirective"):
        with refused(400, "InvalidArgument"):
            world.alt.copy_object(**copy, **{name: "replace"})
    assert status_of(world.alt.copy_object(**copy)) == 200


def test_tags_that_a_copy_does_not_take_count_for_nothing(world: World, bucket: str) -> None:
    source = world.bucket(world.alt)
    put_keys(world.alt, source, ("foo",))
    if_public = {"StringEquals": {"s3:RequestObjectTag/security": "public"}}
    put_policy(world.main, bucket, statement(bucket, "s3:PutObject", Principal={"AWS": ALT_ARN}, Condition=if_public))
    copy = {"Bucket": bucket, "Key": "foo", "CopySource": {"Bucket": source, "Key": "foo"}}
    for directive in ({}, {"TaggingDirective": "COPY"}):
        with refused(403, "AccessDenied"):
            world.alt.copy_object(**copy, **directive, Tagging="security=public")
    assert status_of(world.alt.copy_object(**copy, TaggingDirective="REPLACE", Tagging="security=public")) == 200
    assert world.main.get_object_tagging(Bucket=bucket, Key="foo")["TagSet"] == tag_set(security="public")["TagSet"]
