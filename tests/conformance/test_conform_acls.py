"""ACLs of buckets and objects: canned ones, grants one by one, what they let another user do, and ACLs that make no sense."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from botocore.exceptions import ClientError
from s3_worlds import ALT, MAIN, Call, S3Client, World, body_of, refused, status_of

ALL_USERS = "http://acs.amazonaws.com/groups/global/AllUsers"
SIGNED_USERS = "http://acs.amazonaws.com/groups/global/AuthenticatedUsers"
OWN = (MAIN.id, "FULL_CONTROL")
PERMISSIONS = ("READ", "WRITE", "READ_ACP", "WRITE_ACP", "FULL_CONTROL")
CANNED = [
    ("private", [OWN]),
    ("public-read", [(ALL_USERS, "READ"), OWN]),
    ("public-read-write", [(ALL_USERS, "READ"), (ALL_USERS, "WRITE"), OWN]),
    ("authenticated-read", [(SIGNED_USERS, "READ"), OWN]),
]
GRANT_HEADERS = dict.fromkeys(
    ("GrantRead", "GrantWrite", "GrantReadACP", "GrantWriteACP", "GrantFullControl"), f"id={ALT.id}"
)

Grants = list[tuple[str, str]]
"""Who, by id or by the group's URI, and what."""


def grants_of(reply: dict[str, Any]) -> Grants:
    """The grants in their order; each has the type that its grantee's is, and users their names."""
    told: Grants = []
    for grant in reply["Grants"]:
        grantee = grant["Grantee"]
        if grantee["Type"] == "Group":
            told.append((grantee["URI"], grant["Permission"]))
        else:
            named = {MAIN.id: MAIN.display_name, ALT.id: ALT.display_name}
            assert (grantee["Type"], grantee["DisplayName"]) == ("CanonicalUser", named[grantee["ID"]])
            told.append((grantee["ID"], grant["Permission"]))
    return told


def acl(*grants: tuple[str, str], owner: str = MAIN.id) -> dict[str, Any]:
    """The document with these grants."""
    return {
        "Owner": {"ID": owner},
        "Grants": [{"Grantee": _grantee(who), "Permission": permission} for who, permission in grants],
    }


def _grantee(who: str) -> dict[str, str]:
    if who.startswith("http:"):
        return {"Type": "Group", "URI": who}
    if "@" in who:
        return {"Type": "AmazonCustomerByEmail", "EmailAddress": who}
    return {"Type": "CanonicalUser", "ID": who}


def test_a_bucket_is_its_owners_alone_by_default(world: World, bucket: str) -> None:
    told = world.main.get_bucket_acl(Bucket=bucket)
    assert told["Owner"] == {"ID": MAIN.id, "DisplayName": MAIN.display_name}
    assert grants_of(told) == [OWN]


def test_an_object_is_its_owners_alone_by_default(world: World, bucket: str) -> None:
    world.main.put_object(Bucket=bucket, Key="foo", Body=b"bar")
    told = world.main.get_object_acl(Bucket=bucket, Key="foo")
    assert told["Owner"] == {"ID": MAIN.id, "DisplayName": MAIN.display_name}
    assert grants_of(told) == [OWN]


@pytest.mark.parametrize(("canned", "grants"), CANNED)
def test_a_canned_acl_of_a_new_bucket_is_told_as_grants(world: World, canned: str, grants: Grants) -> None:
    bucket = world.bucket(ACL=canned)
    assert sorted(grants_of(world.main.get_bucket_acl(Bucket=bucket))) == sorted(grants)


@pytest.mark.parametrize(("canned", "grants"), CANNED)
def test_a_canned_acl_replaces_a_buckets(world: World, canned: str, grants: Grants) -> None:
    bucket = world.bucket(ACL="public-read")
    assert status_of(world.main.put_bucket_acl(Bucket=bucket, ACL=canned)) == 200
    assert sorted(grants_of(world.main.get_bucket_acl(Bucket=bucket))) == sorted(grants)


@pytest.mark.parametrize(("canned", "grants"), CANNED)
def test_a_canned_acl_of_a_new_object_is_told_as_grants(world: World, bucket: str, canned: str, grants: Grants) -> None:
    world.main.put_object(Bucket=bucket, Key="foo", Body=b"bar", ACL=canned)
    assert sorted(grants_of(world.main.get_object_acl(Bucket=bucket, Key="foo"))) == sorted(grants)


@pytest.mark.parametrize(("canned", "grants"), CANNED)
def test_a_canned_acl_replaces_an_objects(world: World, bucket: str, canned: str, grants: Grants) -> None:
    world.main.put_object(Bucket=bucket, Key="foo", Body=b"bar", ACL="public-read")
    world.main.put_object_acl(Bucket=bucket, Key="foo", ACL=canned)
    assert sorted(grants_of(world.main.get_object_acl(Bucket=bucket, Key="foo"))) == sorted(grants)


@pytest.mark.parametrize(
    ("canned", "permission"), [("bucket-owner-read", "READ"), ("bucket-owner-full-control", "FULL_CONTROL")]
)
def test_who_writes_into_anothers_bucket_can_let_its_owner_in(world: World, canned: str, permission: str) -> None:
    bucket = world.bucket(ACL="public-read-write")
    world.alt.put_object(Bucket=bucket, Key="foo", Body=b"bar", ACL=canned)
    told = world.alt.get_object_acl(Bucket=bucket, Key="foo")
    assert told["Owner"]["ID"] == ALT.id
    assert grants_of(told) == [(ALT.id, "FULL_CONTROL"), (MAIN.id, permission)]


def test_a_canned_acl_that_is_none_is_refused(world: World, bucket: str) -> None:
    world.main.put_object(Bucket=bucket, Key="foo", Body=b"bar")
    calls: tuple[Call, ...] = (
        lambda: world.main.put_bucket_acl(Bucket=bucket, ACL="public-ready"),
        lambda: world.main.put_object_acl(Bucket=bucket, Key="foo", ACL="public-ready"),
        lambda: world.main.put_object(Bucket=bucket, Key="foo", Body=b"x", ACL="public-ready"),
    )
    for call in calls:
        with refused(400, "InvalidArgument"):
            call()
    assert body_of(world.main, bucket, "foo") == b"bar"


def test_a_document_with_a_group_is_kept(world: World, bucket: str) -> None:
    world.main.put_bucket_acl(Bucket=bucket, AccessControlPolicy=acl(OWN, (ALL_USERS, "READ")))
    assert sorted(grants_of(world.main.get_bucket_acl(Bucket=bucket))) == sorted([OWN, (ALL_USERS, "READ")])
    assert status_of(world.nobody.list_objects(Bucket=bucket)) == 200


@pytest.mark.parametrize("permission", PERMISSIONS)
def test_an_objects_owner_may_have_any_permission(world: World, bucket: str, permission: str) -> None:
    world.main.put_object(Bucket=bucket, Key="foo", Body=b"bar")
    world.main.put_object_acl(Bucket=bucket, Key="foo", AccessControlPolicy=acl((MAIN.id, permission)))
    assert grants_of(world.main.get_object_acl(Bucket=bucket, Key="foo")) == [(MAIN.id, permission)]


def _may(call: Call, **named: object) -> bool:
    """Whether the call is answered, and not a 403."""
    try:
        call(**named)
    except ClientError as error:
        if status_of(error.response) != 403:
            raise
        return False
    return True


@pytest.mark.parametrize("permission", PERMISSIONS)
def test_a_grant_on_a_bucket_gives_what_it_says_and_no_more(world: World, bucket: str, permission: str) -> None:
    client = world.alt
    world.main.put_bucket_acl(Bucket=bucket, AccessControlPolicy=acl(OWN, (ALT.id, permission)))
    assert sorted(grants_of(world.main.get_bucket_acl(Bucket=bucket))) == sorted([OWN, (ALT.id, permission)])
    allowed = {
        "READ": _may(client.head_bucket, Bucket=bucket) and _may(client.list_objects_v2, Bucket=bucket),
        "READ_ACP": _may(client.get_bucket_acl, Bucket=bucket),
        "WRITE": _may(client.put_object, Bucket=bucket, Key="new", Body=b"bar"),
        "WRITE_ACP": _may(client.put_bucket_acl, Bucket=bucket, ACL="public-read"),
    }
    assert allowed == {name: permission in (name, "FULL_CONTROL") for name in allowed}
    assert world.main.get_bucket_acl(Bucket=bucket)["Owner"]["ID"] == MAIN.id


@pytest.mark.parametrize("permission", PERMISSIONS)
def test_a_grant_on_an_object_gives_what_it_says_and_no_more(world: World, bucket: str, permission: str) -> None:
    client, place = world.alt, {"Bucket": bucket, "Key": "foo"}
    etag = world.main.put_object(**place, Body=b"bar", ContentType="text/x")["ETag"]
    world.main.put_object_acl(**place, AccessControlPolicy=acl(OWN, (ALT.id, permission)))
    head = world.main.head_object(**place)
    assert (head["ETag"], head["ContentType"]) == (etag, "text/x")
    allowed = {
        "READ": _may(client.get_object, **place) and _may(client.head_object, **place),
        "READ_ACP": _may(client.get_object_acl, **place),
        "WRITE_ACP": _may(client.put_object_acl, **place, ACL="public-read"),
    }
    assert allowed == {name: permission in (name, "FULL_CONTROL") for name in allowed}
    # WRITE on an object is nothing in S3: what is under a key is the bucket's to replace.
    assert not _may(client.put_object, **place, Body=b"x")
    assert world.main.get_object_acl(**place)["Owner"]["ID"] == MAIN.id


def test_who_has_full_control_changes_the_acl_but_not_the_owner(world: World, bucket: str) -> None:
    place = {"Bucket": bucket, "Key": "foo"}
    world.main.put_object(**place, Body=b"bar")
    world.main.put_object_acl(**place, AccessControlPolicy=acl((ALT.id, "FULL_CONTROL")))
    world.alt.put_object_acl(**place, AccessControlPolicy=acl((ALT.id, "READ_ACP")))
    assert world.alt.get_object_acl(**place)["Owner"]["ID"] == MAIN.id
    with refused(403, "AccessDenied"):
        world.main.put_object_acl(**place, AccessControlPolicy=acl(OWN, owner=ALT.id))


def test_grants_of_headers_make_an_objects_acl(world: World, bucket: str) -> None:
    headers = {name: value for name, value in GRANT_HEADERS.items() if name != "GrantWrite"}
    world.main.put_object(Bucket=bucket, Key="foo", Body=b"bar", **headers)
    told = grants_of(world.main.get_object_acl(Bucket=bucket, Key="foo"))
    assert sorted(told) == sorted((ALT.id, each) for each in PERMISSIONS if each != "WRITE")
    assert body_of(world.alt, bucket, "foo") == b"bar"


def test_a_grant_to_write_an_object_is_kept_though_it_gives_nothing(world: World, bucket: str) -> None:
    headers = {"x-amz-grant-write": f"id={ALT.id}", "x-amz-grant-read": f"id={ALT.id}"}
    assert world.raw("PUT", f"/{bucket}/foo", b"bar", headers=headers).status == 200
    told = grants_of(world.main.get_object_acl(Bucket=bucket, Key="foo"))
    assert sorted(told) == [(ALT.id, "READ"), (ALT.id, "WRITE")]
    with refused(403, "AccessDenied"):
        world.alt.put_object(Bucket=bucket, Key="foo", Body=b"x")


def test_grants_of_headers_make_a_buckets_acl(world: World) -> None:
    bucket = world.bucket(**GRANT_HEADERS)
    assert sorted(grants_of(world.main.get_bucket_acl(Bucket=bucket))) == sorted((ALT.id, each) for each in PERMISSIONS)
    assert status_of(world.alt.put_object(Bucket=bucket, Key="foo", Body=b"bar")) == 200
    assert status_of(world.alt.put_bucket_acl(Bucket=bucket, ACL="public-read-write")) == 200


def test_grants_of_headers_replace_an_acl(world: World, bucket: str) -> None:
    world.main.put_bucket_acl(Bucket=bucket, GrantRead=f'id="{ALT.id}", uri="{ALL_USERS}"')
    assert sorted(grants_of(world.main.get_bucket_acl(Bucket=bucket))) == sorted(
        [(ALT.id, "READ"), (ALL_USERS, "READ")]
    )


def test_a_canned_acl_beside_grants_is_refused(world: World, bucket: str) -> None:
    with refused(400, "InvalidRequest"):
        world.main.put_bucket_acl(Bucket=bucket, ACL="private", GrantRead=f"id={ALT.id}")


@pytest.mark.parametrize(
    ("grantee", "code"),
    [
        ("_foo", "InvalidArgument"),
        ("http://acs.amazonaws.com/groups/global/Friends", "InvalidArgument"),
        ("nobody@example.invalid", "UnresolvableGrantByEmailAddress"),
    ],
)
def test_a_grantee_that_there_is_not_is_refused(world: World, bucket: str, grantee: str, code: str) -> None:
    with refused(400, code):
        world.main.put_bucket_acl(Bucket=bucket, AccessControlPolicy=acl(OWN, (grantee, "FULL_CONTROL")))
    assert grants_of(world.main.get_bucket_acl(Bucket=bucket)) == [OWN]


def test_a_permission_that_there_is_not_is_refused(world: World, bucket: str) -> None:
    with refused(400, "MalformedACLError"):
        world.main.put_bucket_acl(Bucket=bucket, AccessControlPolicy=acl((MAIN.id, "EVERYTHING")))


def test_an_owner_who_takes_every_grant_away_can_give_them_again(world: World, bucket: str) -> None:
    client = world.main
    client.put_object(Bucket=bucket, Key="foo", Body=b"bar")
    client.put_bucket_acl(Bucket=bucket, AccessControlPolicy=acl())
    client.put_object_acl(Bucket=bucket, Key="foo", AccessControlPolicy=acl())
    assert client.get_bucket_acl(Bucket=bucket)["Grants"] == []
    assert client.get_object_acl(Bucket=bucket, Key="foo")["Grants"] == []
    client.put_bucket_acl(Bucket=bucket, AccessControlPolicy=acl(OWN))
    assert grants_of(client.get_bucket_acl(Bucket=bucket)) == [OWN]


def test_an_acl_of_what_is_not_there_is_a_404(world: World, bucket: str) -> None:
    for client_call in (world.main.get_object_acl, lambda **place: world.main.put_object_acl(**place, ACL="private")):
        with refused(404, "NoSuchKey"):
            client_call(Bucket=bucket, Key="absent")
    with refused(404, "NoSuchBucket"):
        world.main.put_bucket_acl(Bucket="conform-missing", ACL="private")


def test_many_set_the_same_acl_at_once(world: World, bucket: str) -> None:
    with ThreadPoolExecutor(10) as pool:
        done = [pool.submit(world.main.put_bucket_acl, Bucket=bucket, ACL="public-read") for _ in range(30)]
        assert [status_of(each.result(30)) for each in done] == [200] * 30
    assert sorted(grants_of(world.main.get_bucket_acl(Bucket=bucket))) == sorted([OWN, (ALL_USERS, "READ")])


def test_an_acl_leaves_an_objects_date_alone(world: World, bucket: str) -> None:
    client: S3Client = world.main
    client.put_object(Bucket=bucket, Key="foo", Body=b"bar")
    (before,) = client.list_objects_v2(Bucket=bucket)["Contents"]
    client.put_object_acl(Bucket=bucket, Key="foo", ACL="public-read")
    assert client.list_objects_v2(Bucket=bucket)["Contents"] == [before]


def test_a_write_puts_the_acl_back_to_private(world: World, bucket: str) -> None:
    world.main.put_object(Bucket=bucket, Key="foo", Body=b"bar", ACL="public-read")
    world.main.put_object(Bucket=bucket, Key="foo", Body=b"bar")
    assert grants_of(world.main.get_object_acl(Bucket=bucket, Key="foo")) == [OWN]


def test_a_copy_has_an_acl_of_its_own(world: World, bucket: str) -> None:
    client, source = world.main, {"Bucket": bucket, "Key": "foo"}
    client.put_object(**source, Body=b"bar", ACL="public-read")
    client.copy_object(Bucket=bucket, Key="plain", CopySource=source)
    client.copy_object(Bucket=bucket, Key="public", CopySource=source, ACL="public-read")
    client.copy_object(
        Bucket=bucket, Key="foo", CopySource=source, ACL="public-read", MetadataDirective="REPLACE", Metadata={"a": "1"}
    )
    with refused(403, "AccessDenied"):
        world.alt.get_object(Bucket=bucket, Key="plain")
    assert body_of(world.alt, bucket, "public") == body_of(world.alt, bucket, "foo") == b"bar"


def test_an_upload_gives_its_object_the_acl_of_its_beginning(world: World, bucket: str) -> None:
    client = world.main
    upload_id = client.create_multipart_upload(Bucket=bucket, Key="foo", ACL="public-read")["UploadId"]
    part = client.upload_part(Bucket=bucket, Key="foo", UploadId=upload_id, PartNumber=1, Body=b"bar")
    parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
    client.complete_multipart_upload(Bucket=bucket, Key="foo", UploadId=upload_id, MultipartUpload=parts)
    assert body_of(world.nobody, bucket, "foo") == b"bar"


def test_a_bucket_again_with_another_acl_is_a_409(world: World) -> None:
    public, private = world.bucket(ACL="public-read"), world.bucket()
    with refused(409, "BucketAlreadyExists"):
        world.main.create_bucket(Bucket=public)
    with refused(409, "BucketAlreadyExists"):
        world.main.create_bucket(Bucket=private, ACL="public-read")
    assert sorted(grants_of(world.main.get_bucket_acl(Bucket=public))) == sorted([OWN, (ALL_USERS, "READ")])
    assert grants_of(world.main.get_bucket_acl(Bucket=private)) == [OWN]
