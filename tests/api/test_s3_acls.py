"""ACLs as clients use them: put, told, stated by what makes buckets and objects, refused."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from s3_driver import ALICE, BOB, Driver, FakeBody, sign
from s3_sharing import (
    CAROL,
    NOBODY,
    TAGS,
    acl_of,
    allow,
    expect,
    send,
    set_policy,
    shared_bucket,
)
from s3_stores import STORES, driver_over

ALL_USERS = "http://acs.amazonaws.com/groups/global/AllUsers"


@pytest.fixture(params=STORES)
async def shared(request: pytest.FixtureRequest, tmp_path: Path, shm_path: Path) -> AsyncIterator[Driver]:
    async with driver_over(request.param, data=tmp_path / "data", memory=shm_path) as driver:
        yield await shared_bucket(driver)


@pytest.fixture
async def quick() -> Driver:
    """The shared bucket over the fake store alone: for what no store can change."""
    return await shared_bucket(Driver())


async def test_acls_are_told_as_they_were_put(shared: Driver) -> None:
    for target in ("/data?acl", "/data/alices?acl"):
        await expect(shared, ALICE, "PUT", target, headers={"x-amz-acl": "public-read"})
        answer = await expect(shared, ALICE, "GET", target)
        assert answer.texts("AccessControlList/Grant/Permission") == ["READ", "FULL_CONTROL"]
        assert answer.texts("AccessControlList/Grant/Grantee/URI") == [ALL_USERS]
        assert answer.texts("AccessControlList/Grant/Grantee/DisplayName") == ["Alice"]
        await expect(shared, ALICE, "PUT", target, headers={"x-amz-grant-write-acp": "id=bob,id=carol"})
        changed = await expect(shared, ALICE, "GET", target)
        assert changed.texts("AccessControlList/Grant/Grantee/ID") == ["bob", "carol"]
        document = answer.body
        await expect(shared, ALICE, "PUT", target, document)
        assert (await expect(shared, ALICE, "GET", target)).body == document


@pytest.mark.parametrize("target", ["/data?acl", "/data/alices?acl"])
async def test_an_acl_that_makes_no_sense_is_refused(quick: Driver, target: str) -> None:
    private = await acl_of(quick, target)
    refusals: list[tuple[bytes, dict[str, str], int, str]] = [
        (b"", {}, 400, "MissingSecurityHeader"),
        (private, {"x-amz-acl": "private"}, 400, "UnexpectedContent"),
        (b"", {"x-amz-acl": "private", "x-amz-grant-read": "id=bob"}, 400, "InvalidRequest"),
        (b"", {"x-amz-acl": "open"}, 400, "InvalidArgument"),
        (b"", {"x-amz-grant-read": "id=mallory"}, 400, "InvalidArgument"),
        (b"", {"x-amz-grant-read": "emailAddress=a@b.example"}, 400, "UnresolvableGrantByEmailAddress"),
        (private.replace(b'"CanonicalUser"><ID>alice', b'"CanonicalUser"><ID>mallory'), {}, 400, "InvalidArgument"),
        (private.replace(b"<Owner><ID>alice", b"<Owner><ID>bob"), {}, 403, "AccessDenied"),
        (b"<AccessControlPolicy/>", {}, 400, "MalformedACLError"),
        (b"x" * 100_000, {}, 400, "MaxMessageLengthExceeded"),
    ]  # fmt: skip
    for body, headers, status, code in refusals:
        answer = await send(quick, ALICE, "PUT", target, body, headers=headers)
        assert (answer.status, answer.code) == (status, code), (body, headers)
    assert await acl_of(quick, target) == private


async def test_owner_and_writer_can_always_mend_an_acl(quick: Driver) -> None:
    empty = ET.fromstring(await acl_of(quick, "/data/bobs?acl"))  # noqa: S314 - our own output
    listed = empty[1]
    for grant in list(listed):
        listed.remove(grant)
    await expect(quick, BOB, "PUT", "/data/bobs?acl", ET.tostring(empty))
    assert (await expect(quick, BOB, "GET", "/data/bobs?acl")).texts("AccessControlList/Grant") == []
    await expect(quick, BOB, "GET", "/data/bobs", status=403)
    await expect(quick, ALICE, "GET", "/data/bobs")
    await expect(quick, BOB, "PUT", "/data/bobs?acl", headers={"x-amz-acl": "private"})
    await expect(quick, BOB, "GET", "/data/bobs")


class ReplacingBody(FakeBody):
    """A body that comes after another request has replaced the object."""

    def __init__(self, data: bytes, replace: Callable[[], Awaitable[object]]) -> None:
        super().__init__(data)
        self._replace: Callable[[], Awaitable[object]] | None = replace

    def take_whole(self) -> bytes | None:
        return None

    async def read_some(self, limit: int) -> bytes:
        if self._replace is not None:
            replace, self._replace = self._replace, None
            await replace()
        return await super().read_some(limit)


@pytest.mark.parametrize("setting", ["acl", "tagging"])
async def test_an_object_that_was_replaced_meanwhile_is_not_opened(shared: Driver, setting: str) -> None:
    target = f"/data/bobs?{setting}"
    await expect(shared, BOB, "PUT", "/data/bobs?acl", headers={"x-amz-acl": "public-read"})
    user, document = (BOB, await acl_of(shared, target)) if setting == "acl" else (ALICE, TAGS)
    fields = sign("PUT", target, document, user=user)
    body = ReplacingBody(document, lambda: expect(shared, ALICE, "PUT", "/data/bobs", b"secret"))
    answer = await shared.send("PUT", target, fields, body)
    assert (answer.status, answer.code) == (409, "ConditionalRequestConflict")
    await expect(shared, NOBODY, "GET", "/data/bobs", status=403)
    assert (await expect(shared, ALICE, "GET", "/data/bobs?tagging")).texts("TagSet/Tag") == []


@pytest.mark.parametrize("way", ["put", "copy", "multipart"])
async def test_an_object_gets_the_acl_that_its_write_states(shared: Driver, way: str) -> None:
    headers = {"x-amz-acl": "public-read"}
    await expect(shared, ALICE, "PUT", "/data/alices?acl", headers=headers)
    if way == "put":
        await expect(shared, ALICE, "PUT", "/data/new", b"new", headers=headers)
    elif way == "copy":
        source = {"x-amz-copy-source": "data/alices"}
        await expect(shared, ALICE, "PUT", "/data/new", headers=source)
        await expect(shared, NOBODY, "GET", "/data/new", status=403)  # a copy does not copy the ACL
        await expect(shared, ALICE, "PUT", "/data/new", headers={**source, **headers})
    else:
        begun = await expect(shared, ALICE, "POST", "/data/new?uploads", headers=headers)
        upload_id = begun.xml.findtext("UploadId")
        part = await expect(shared, ALICE, "PUT", f"/data/new?partNumber=1&uploadId={upload_id}", b"new")
        listed = f"<Part><PartNumber>1</PartNumber><ETag>{part.headers['etag']}</ETag></Part>"
        document = f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>".encode()
        await expect(shared, ALICE, "POST", f"/data/new?uploadId={upload_id}", document)
    await expect(shared, NOBODY, "GET", "/data/new")
    await expect(shared, ALICE, "PUT", "/data/new", b"again")  # a new object: what the old one said is gone
    await expect(shared, NOBODY, "GET", "/data/new", status=403)


async def test_who_writes_into_anothers_bucket_says_who_may_read(quick: Driver) -> None:
    await expect(quick, ALICE, "PUT", "/data?acl", headers={"x-amz-acl": "public-read-write"})
    await expect(quick, BOB, "PUT", "/data/theirs", b"x", headers={"x-amz-acl": "bucket-owner-read"})
    acl = await expect(quick, BOB, "GET", "/data/theirs?acl")
    assert acl.texts("Owner/ID") == ["bob"]
    assert acl.texts("AccessControlList/Grant/Grantee/ID") == ["bob", "alice"]
    await expect(quick, BOB, "PUT", "/data/theirs", b"x", headers={"x-amz-grant-read": "id=carol"})
    await expect(quick, CAROL, "GET", "/data/theirs")
    await expect(quick, NOBODY, "GET", "/data/theirs", status=403)
    listed = await expect(quick, ALICE, "GET", "/data")
    assert dict(zip(listed.texts("Contents/Key"), listed.texts("Contents/Owner/ID"), strict=True))["theirs"] == "bob"


async def test_what_nobody_writes_belongs_to_the_buckets_owner(shared: Driver) -> None:
    await expect(shared, ALICE, "PUT", "/data?acl", headers={"x-amz-acl": "public-read-write"})
    await expect(shared, NOBODY, "PUT", "/data/found", b"left behind")
    listed = await expect(shared, NOBODY, "GET", "/data?list-type=2&fetch-owner=true&prefix=found")
    assert listed.texts("Contents/Owner/DisplayName") == ["Alice"]
    await expect(shared, NOBODY, "GET", "/data/found", status=403)
    assert (await expect(shared, ALICE, "GET", "/data/found")).body == b"left behind"
    await expect(shared, NOBODY, "PUT", "/data/open", b"for all", headers={"x-amz-acl": "public-read"})
    assert (await expect(shared, NOBODY, "GET", "/data/open")).body == b"for all"


async def test_uploads_and_copies_are_for_those_who_sign(quick: Driver) -> None:
    await set_policy(quick, allow("s3:*"))
    for method, target, headers in (
        ("POST", "/data/large?uploads", {}),
        ("PUT", "/data/copied", {"x-amz-copy-source": "data/alices"}),
    ):
        answer = await expect(quick, NOBODY, method, target, headers=headers, status=403)
        assert (answer.code, "Anonymous users cannot" in (answer.xml.findtext("Message") or "")) == (
            "AccessDenied",
            True,
        )


async def test_a_bucket_is_made_with_an_acl_and_again_only_with_the_same(shared: Driver) -> None:
    headers = {"x-amz-acl": "public-read"}
    await expect(shared, ALICE, "PUT", "/open", headers=headers)
    await expect(shared, NOBODY, "GET", "/open")
    await expect(shared, ALICE, "PUT", "/open", headers=headers)
    for differs in ({}, {"x-amz-acl": "public-read-write"}, {"x-amz-grant-read": "id=bob"}):
        answer = await expect(shared, ALICE, "PUT", "/open", headers=differs, status=409)
        assert answer.code == "BucketAlreadyExists"
    await expect(shared, ALICE, "PUT", "/closed", headers={"x-amz-grant-full-control": "id=alice"})
    await expect(shared, ALICE, "PUT", "/closed")
    assert (
        await expect(shared, ALICE, "PUT", "/wrong", headers={"x-amz-acl": "x"}, status=400)
    ).code == "InvalidArgument"
    answer = await expect(shared, ALICE, "PUT", "/wrong", headers={"x-amz-grant-read": "id=mallory"}, status=400)
    assert answer.code == "InvalidArgument"


async def test_chunks_are_shared_by_namespaces_alone(shared: Driver) -> None:
    kv = {"x-kvobj-bucket-kind": "kv"}
    for acl in ("public-read", "authenticated-read", "public-read-write"):
        answer = await expect(shared, ALICE, "PUT", "/chunks", headers={**kv, "x-amz-acl": acl}, status=400)
        assert answer.code == "InvalidRequest"
    await expect(shared, ALICE, "PUT", "/chunks", headers={**kv, "x-amz-acl": "bucket-owner-full-control"})
    await expect(shared, ALICE, "PUT", "/chunks/a", b"x", headers={"x-amz-acl": "private"})
    opening = {"x-amz-acl": "public-read"}
    for target, body in (("/chunks?acl", b""), ("/chunks/a?acl", b""), ("/chunks/b", b"x")):
        answer = await expect(shared, ALICE, "PUT", target, body, headers=opening, status=400)
        assert (answer.code, "namespaces" in (answer.xml.findtext("Message") or "")) == ("InvalidRequest", True)
    for target in ("/chunks?acl", "/chunks/a?acl"):
        await expect(shared, ALICE, "PUT", target, headers={"x-amz-acl": "private"})
        assert (await expect(shared, ALICE, "GET", target)).texts("AccessControlList/Grant/Grantee/ID") == ["alice"]
    policy = json.dumps({"Statement": allow("s3:*", on="arn:aws:s3:::chunks/*")}).encode()
    assert (await expect(shared, ALICE, "PUT", "/chunks?policy", policy, status=400)).code == "InvalidRequest"
    assert (await expect(shared, ALICE, "GET", "/chunks?policy", status=404)).code == "NoSuchBucketPolicy"
    for target in ("/chunks", "/chunks/a", "/chunks?acl"):
        await expect(shared, NOBODY, "GET", target, status=403)
