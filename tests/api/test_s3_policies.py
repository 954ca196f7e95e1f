"""Bucket policies as clients use them, and cases about access that were published for other servers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from s3_driver import ALICE, BOB, HOST, ROOT, Driver, presign
from s3_sharing import (
    CAROL,
    NOBODY,
    TAGS,
    allow,
    deny,
    expect,
    set_policy,
    shared_bucket,
)
from s3_stores import STORES, driver_over

from kvobj.api.exchange import S3Settings
from kvobj.config.parse import parse_settings


@pytest.fixture(params=STORES)
async def shared(request: pytest.FixtureRequest, tmp_path: Path, shm_path: Path) -> AsyncIterator[Driver]:
    async with driver_over(request.param, data=tmp_path / "data", memory=shm_path) as driver:
        yield await shared_bucket(driver)


@pytest.fixture
async def quick() -> Driver:
    """The shared bucket over the fake store alone: for what no store can change."""
    return await shared_bucket(Driver())


async def test_a_policy_is_kept_as_it_was_put(shared: Driver) -> None:
    assert (await expect(shared, ALICE, "GET", "/data?policy", status=404)).code == "NoSuchBucketPolicy"
    document = json.dumps(
        {"Id": "mine", "Statement": allow("s3:GetObject", on="arn:aws:s3:::data/*")}, indent=3
    ).encode()
    await expect(shared, ALICE, "PUT", "/data?policy", document, status=204)
    answer = await expect(shared, ALICE, "GET", "/data?policy")
    assert (answer.body, answer.headers["content-type"]) == (document, "application/json")
    for _ in range(2):
        await expect(shared, ALICE, "DELETE", "/data?policy", status=204)
    assert (await expect(shared, ALICE, "GET", "/data?policy", status=404)).code == "NoSuchBucketPolicy"


async def test_a_policy_that_makes_no_sense_is_refused(quick: Driver) -> None:
    for document, code in (
        (b"", "MalformedPolicy"),
        (b"{}", "MalformedPolicy"),
        (json.dumps({"Statement": allow("s3:GetObject", on="arn:aws:s3:::other/*")}).encode(), "MalformedPolicy"),
        (json.dumps({"Statement": allow("s3:GetObject", to={"AWS": "mallory"})}).encode(), "MalformedPolicy"),
        (json.dumps({"Id": "x" * 21_000, "Statement": allow("s3:GetObject")}).encode(), "PolicyTooLarge"),
        (b" " * 200_000, "MaxMessageLengthExceeded"),
    ):
        assert (await expect(quick, ALICE, "PUT", "/data?policy", document, status=400)).code == code
    await expect(quick, ALICE, "GET", "/data?policy", status=404)


async def test_many_deletes_are_decided_key_by_key(shared: Driver) -> None:
    await set_policy(shared, allow("s3:DeleteObject", to={"AWS": "carol"}, on="arn:aws:s3:::data/b*"))
    document = b"<Delete><Object><Key>alices</Key></Object><Object><Key>bobs</Key></Object></Delete>"
    answer = await expect(shared, CAROL, "POST", "/data?delete", document)
    assert answer.texts("Deleted/Key") == ["bobs"]
    assert answer.texts("Error/Key") == ["alices"]
    assert answer.texts("Error/Code") == ["AccessDenied"]
    await expect(shared, ALICE, "GET", "/data/alices")


async def test_a_write_by_policy_states_an_acl_only_with_the_right_to(quick: Driver) -> None:
    await set_policy(quick, allow("s3:PutObject", to={"AWS": "carol"}))
    for headers in (
        {"x-amz-acl": "private"},
        {"x-amz-acl": "bucket-owner-full-control"},
        {"x-amz-grant-full-control": "id=alice"},
    ):
        await expect(quick, CAROL, "PUT", "/data/new", b"x", headers=headers)
    for headers in ({"x-amz-acl": "public-read"}, {"x-amz-grant-read": "id=bob"}):
        await expect(quick, CAROL, "PUT", "/data/new", b"x", headers=headers, status=403)
        await expect(quick, CAROL, "POST", "/data/new?uploads", headers=headers, status=403)
    await set_policy(quick, allow("s3:PutObject", "s3:PutObjectAcl", to={"AWS": "carol"}))
    await expect(quick, CAROL, "PUT", "/data/new", b"x", headers={"x-amz-acl": "public-read"})
    await set_policy(
        quick,
        allow("s3:PutObject*", to={"AWS": "carol"}),
        deny("s3:PutObject*", Condition={"StringLike": {"s3:x-amz-acl": "public*"}}),
    )
    await expect(quick, CAROL, "PUT", "/data/new", b"x", headers={"x-amz-acl": "public-read"}, status=403)
    await expect(quick, ALICE, "PUT", "/data/new", b"x", headers={"x-amz-acl": "public-read"}, status=403)
    await expect(quick, CAROL, "PUT", "/data/new", b"x")


async def test_an_upload_under_a_policy_states_its_acl_once(quick: Driver) -> None:
    wanted = {"x-amz-acl": "bucket-owner-full-control"}
    condition = {"s3:x-amz-acl": "bucket-owner-full-control"}
    for statements in (
        [allow("s3:PutObject", to={"AWS": "carol"}, Condition={"StringEquals": condition})],
        [allow("s3:PutObject", to={"AWS": "carol"}), deny("s3:PutObject", Condition={"StringNotEquals": condition})],
    ):
        await set_policy(quick, *statements)
        await expect(quick, CAROL, "POST", "/data/large?uploads", status=403)
        begun = await expect(quick, CAROL, "POST", "/data/large?uploads", headers=wanted)
        upload_id = begun.xml.findtext("UploadId")
        part = await expect(quick, CAROL, "PUT", f"/data/large?partNumber=1&uploadId={upload_id}", b"x")
        listed = f"<Part><PartNumber>1</PartNumber><ETag>{part.headers['etag']}</ETag></Part>"
        document = f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>".encode()
        await expect(quick, BOB, "POST", f"/data/large?uploadId={upload_id}", document, status=403)
        await expect(quick, CAROL, "POST", f"/data/large?uploadId={upload_id}", document)
        acl = await expect(quick, CAROL, "GET", "/data/large?acl")
        assert acl.texts("AccessControlList/Grant/Grantee/ID") == ["carol", "alice"]


async def test_a_write_by_policy_tags_only_with_the_right_to(shared: Driver) -> None:
    await set_policy(shared, allow("s3:PutObject", to={"AWS": "carol"}))
    tags = {"x-amz-tagging": "level=open"}
    await expect(shared, CAROL, "PUT", "/data/new", b"x", headers=tags, status=403)
    await expect(shared, CAROL, "PUT", "/data/new", b"x")
    condition = {"StringEquals": {"s3:RequestObjectTag/level": "open"}}
    await set_policy(shared, allow("s3:PutObject", to={"AWS": "carol"}, Condition=condition))
    await expect(shared, CAROL, "PUT", "/data/new", b"x", headers=tags)  # for the tags it is allowed
    await expect(shared, CAROL, "PUT", "/data/new", b"x", headers={"x-amz-tagging": "level=secret"}, status=403)
    await expect(shared, CAROL, "PUT", "/data/new?tagging", TAGS, status=403)
    await set_policy(shared, allow("s3:PutObject", "s3:PutObjectTagging", to={"AWS": "carol"}, Condition=condition))
    await expect(shared, CAROL, "PUT", "/data/new", b"x", headers=tags)
    await expect(shared, CAROL, "PUT", "/data/new", b"x", headers={"x-amz-tagging": "level=secret"}, status=403)
    await expect(shared, CAROL, "PUT", "/data/new", b"x", status=403)
    document = b"<Tagging><TagSet><Tag><Key>level</Key><Value>%s</Value></Tag></TagSet></Tagging>"
    await expect(shared, CAROL, "PUT", "/data/new?tagging", document % b"open")
    await expect(shared, CAROL, "PUT", "/data/new?tagging", document % b"secret", status=403)


async def test_tags_of_an_object_decide_where_a_policy_asks_for_them(quick: Driver) -> None:
    condition = {"StringEquals": {"s3:ExistingObjectTag/a": "b"}}
    await set_policy(quick, allow("s3:GetObject", on="arn:aws:s3:::data/*", Condition=condition))
    await expect(quick, NOBODY, "GET", "/data/alices", status=403)
    await expect(quick, ALICE, "PUT", "/data/alices?tagging", TAGS)
    await expect(quick, NOBODY, "GET", "/data/alices")
    await expect(quick, NOBODY, "HEAD", "/data/alices")


async def test_a_copy_needs_the_right_to_read_its_source_and_its_tags(shared: Driver) -> None:
    await expect(shared, CAROL, "PUT", "/carols-own")
    source = {"x-amz-copy-source": "data/alices"}
    await expect(shared, CAROL, "PUT", "/carols-own/a", headers=source, status=403)
    begun = await expect(shared, CAROL, "POST", "/carols-own/a?uploads")
    part = f"/carols-own/a?partNumber=1&uploadId={begun.xml.findtext('UploadId')}"
    await expect(shared, CAROL, "PUT", part, headers=source, status=403)  # RustFS CVE-2026-39360
    await set_policy(shared, allow("s3:GetObject", to={"AWS": "carol"}))
    await expect(shared, CAROL, "PUT", part, headers=source)
    await expect(shared, CAROL, "PUT", "/carols-own/a", headers=source)
    await expect(shared, ALICE, "PUT", "/data/alices?tagging", TAGS)
    await expect(shared, CAROL, "PUT", "/carols-own/a", headers=source, status=403)
    await expect(shared, CAROL, "PUT", "/carols-own/a", headers={**source, "x-amz-tagging-directive": "REPLACE"})
    await set_policy(shared, allow("s3:GetObject", "s3:GetObjectTagging", to={"AWS": "carol"}))
    await expect(shared, CAROL, "PUT", "/carols-own/a", headers=source)


async def test_a_missing_key_is_told_only_to_who_may_list(quick: Driver) -> None:
    await set_policy(quick, allow("s3:GetObject", on="arn:aws:s3:::data/*"))
    for method in ("GET", "HEAD"):
        await expect(quick, NOBODY, method, "/data/absent", status=403)
        await expect(quick, ALICE, method, "/data/absent", status=404)
    prefix = {"StringEquals": {"s3:prefix": "absent"}}
    await set_policy(quick, allow("s3:GetObject"), allow("s3:ListBucket", on="arn:aws:s3:::data", Condition=prefix))
    await expect(quick, NOBODY, "GET", "/data/absent", status=404)  # the key is what S3 takes for the prefix
    await expect(quick, NOBODY, "GET", "/data/gone?prefix=absent", status=403)  # and the query's is no listing's
    await set_policy(quick, allow("s3:GetObject", "s3:ListBucket"))
    await expect(quick, NOBODY, "GET", "/data/absent", status=404)
    await set_policy(quick, allow("s3:*"), deny("s3:GetObject", Resource="arn:aws:s3:::data/absent"))
    await expect(quick, NOBODY, "GET", "/data/absent", status=403)


async def test_public_or_not_is_told_of_policy_and_acl(quick: Driver) -> None:
    async def is_public() -> bool:
        return (await expect(quick, ALICE, "GET", "/data?policyStatus")).xml.findtext("IsPublic") == "true"

    assert not await is_public()
    await set_policy(quick, allow("s3:GetObject", Condition={"IpAddress": {"aws:SourceIp": "10.0.0.0/8"}}))
    assert not await is_public()
    await set_policy(quick, allow("s3:GetObject"))
    assert await is_public()
    await expect(quick, ALICE, "DELETE", "/data?policy", status=204)
    await expect(quick, ALICE, "PUT", "/data?acl", headers={"x-amz-acl": "authenticated-read"})
    assert await is_public()


async def test_conditions_are_not_evaluated_for_who_may_not_read(quick: Driver) -> None:
    """MinIO CVE-2024-36107: If-Modified-Since answered before the access check told of an object, and of its age."""
    for headers in (
        {"if-modified-since": "Fri, 01 Jan 2100 00:00:00 GMT"},
        {"if-none-match": "*"},
        {"if-match": '"nothing"'},
        {"range": "bytes=100-"},
    ):
        await expect(quick, NOBODY, "GET", "/data/alices", headers=headers, status=403)
        await expect(quick, CAROL, "HEAD", "/data/alices", headers=headers, status=403)


async def test_signed_users_only_are_meant_where_users_are_meant(quick: Driver) -> None:
    """Ceph CVE-2016-7031: authenticated-read let who signed nothing list."""
    await expect(quick, ALICE, "PUT", "/data?acl", headers={"x-amz-acl": "authenticated-read"})
    await expect(quick, NOBODY, "GET", "/data", status=403)
    await expect(quick, NOBODY, "GET", "/data?list-type=2", status=403)
    await expect(quick, CAROL, "GET", "/data")


async def test_a_forwarded_address_is_not_believed(tmp_path: Path) -> None:
    """RustFS CVE-2026-21862: X-Forwarded-For counted for aws:SourceIp, whoever sent it."""
    for proxies, status in (([], 403), (["127.0.0.0/8"], 200), (["10.0.0.0/8"], 403)):
        document = {"server": {"data": str(tmp_path), "trusted_proxies": proxies}}
        trusted = parse_settings(document, environment={}).server.trusted_proxies
        driver = Driver(settings=S3Settings(trusted_proxies=trusted))
        await expect(driver, ALICE, "PUT", "/data")
        await expect(driver, ALICE, "PUT", "/data/key", b"x")
        await set_policy(driver, allow("s3:GetObject", Condition={"IpAddress": {"aws:SourceIp": "192.0.2.0/24"}}))
        forwarded = {"x-forwarded-for": "203.0.113.1, 192.0.2.9"}
        await expect(driver, NOBODY, "GET", "/data/key", headers=forwarded, status=status)


async def test_overrides_of_reply_headers_are_for_signed_requests(quick: Driver) -> None:
    await set_policy(quick, allow("s3:GetObject"))
    target = "/data/alices?response-content-type=text%2Fhtml"
    assert (await expect(quick, NOBODY, "GET", target, status=400)).code == "InvalidRequest"
    assert (await expect(quick, CAROL, "GET", target)).headers["content-type"] == "text/html"
    presigned = await quick.send("GET", presign("GET", target, user=CAROL), [("host", HOST)])
    assert (presigned.status, presigned.headers["content-type"]) == (200, "text/html")


async def test_a_presigned_url_has_its_signers_rights_and_no_more(quick: Driver) -> None:
    target = presign("GET", "/data/alices", user=CAROL)
    assert (await quick.send("GET", target, [("host", HOST)])).status == 403
    only_presigned = {"StringEquals": {"s3:authType": "REST-QUERY-STRING"}}
    await set_policy(quick, allow("s3:GetObject", to={"AWS": "carol"}, Condition=only_presigned))
    assert (await quick.send("GET", presign("GET", "/data/alices", user=CAROL), [("host", HOST)])).status == 200
    await expect(quick, CAROL, "GET", "/data/alices", status=403)


async def test_a_policy_of_an_earlier_version_that_is_not_understood_keeps_all_but_its_mender_out() -> None:
    driver = Driver()
    await expect(driver, ALICE, "PUT", "/data")
    rows = driver.fake.catalog.bucket_rows
    rows["data"] = msgspec.structs.replace(rows["data"], policy=b'{"Statement": "unknown"}')
    await expect(driver, ALICE, "GET", "/data", status=403)
    await expect(driver, ROOT, "GET", "/data")
    await expect(driver, ALICE, "DELETE", "/data?policy", status=204)
    await expect(driver, ALICE, "GET", "/data")
