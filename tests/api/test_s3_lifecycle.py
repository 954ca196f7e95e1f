"""Lifecycle rules as clients set them, and what replies tell of them."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from s3_driver import ALICE, BOB, ROOT, Driver
from s3_stores import STORES, driver_over

RULES = (
    b'<LifecycleConfiguration xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Rule><ID>logs one day</ID><Filter><Prefix>'
    b"logs/</Prefix></Filter><Status>Enabled</Status><Expiration><Days>1</Days></Expiration></Rule></LifecycleConfiguration>"
)
UPLOADS = (
    b"<LifecycleConfiguration><Rule><ID>uploads</ID><Filter/><Status>Enabled</Status><AbortIncompleteMultipartUpload>"
    b"<DaysAfterInitiation>7</DaysAfterInitiation></AbortIncompleteMultipartUpload></Rule></LifecycleConfiguration>"
)
TAGGED = RULES.replace(b"<Prefix>logs/</Prefix>", b"<Tag><Key>class</Key><Value>short</Value></Tag>")


@pytest.fixture(params=STORES)
async def driver(request: pytest.FixtureRequest, tmp_path: Path, shm_path: Path) -> AsyncIterator[Driver]:
    async with driver_over(request.param, data=tmp_path / "data", memory=shm_path) as made:
        await made.put("/bucket", b"")
        yield made


def midnight_after(days: int) -> str:
    day = datetime.now(UTC).replace(hour=0, minute=0, second=0) + timedelta(days=days + 1)
    return day.strftime("%a, %d %b %Y %H:%M:%S GMT")


async def test_rules_are_put_got_replaced_and_deleted(driver: Driver) -> None:
    missing = await driver.get("/bucket?lifecycle")
    assert (missing.status, missing.code) == (404, "NoSuchLifecycleConfiguration")
    assert missing.xml.findtext("BucketName") == "bucket"
    put = await driver.put("/bucket?lifecycle", RULES)
    assert (put.status, put.body) == (200, b"")
    assert put.headers["x-amz-transition-default-minimum-object-size"] == "all_storage_classes_128K"
    got = await driver.get("/bucket?lifecycle")
    assert (got.status, got.headers["content-type"]) == (200, "application/xml")
    assert got.body == b'<?xml version="1.0" encoding="UTF-8"?>\n' + RULES
    assert (await driver.put("/bucket?lifecycle", UPLOADS)).status == 200
    assert (await driver.get("/bucket?lifecycle")).texts("Rule/ID") == ["uploads"]
    for _ in range(2):
        assert (await driver.request("DELETE", "/bucket?lifecycle")).status == 204
    assert (await driver.get("/bucket?lifecycle")).status == 404


async def test_a_refused_document_leaves_the_rules_as_they_were(driver: Driver) -> None:
    await driver.put("/bucket?lifecycle", RULES)
    refused = await driver.put("/bucket?lifecycle", UPLOADS.replace(b">7<", b">0<"))
    assert (refused.status, refused.code) == (400, "InvalidArgument")
    for document in (b"", b"<nonsense", RULES.replace(b"Enabled", b"enabled")):
        assert (await driver.put("/bucket?lifecycle", document)).code == "MalformedXML"
    too_large = await driver.put("/bucket?lifecycle", b" " * (1024 * 1024 + 1))
    assert (too_large.status, too_large.code) == (400, "MaxMessageLengthExceeded")
    minimum = await driver.put("/bucket?lifecycle", RULES, x_amz_transition_default_minimum_object_size="other")
    assert minimum.code == "InvalidRequest"
    assert (await driver.get("/bucket?lifecycle")).texts("Rule/ID") == ["logs one day"]


async def test_the_documents_digest_is_verified(driver: Driver) -> None:
    md5 = base64.b64encode(hashlib.md5(RULES, usedforsecurity=False).digest()).decode()
    assert (await driver.put("/bucket?lifecycle", RULES, content_md5=md5)).status == 200
    wrong = base64.b64encode(bytes(16)).decode()
    assert (await driver.put("/bucket?lifecycle", UPLOADS, content_md5=wrong)).code == "BadDigest"
    crc = await driver.put("/bucket?lifecycle", UPLOADS, x_amz_checksum_crc32="AAAAAA==")
    assert crc.code == "BadDigest"
    assert (await driver.get("/bucket?lifecycle")).texts("Rule/ID") == ["logs one day"]


async def test_only_who_may_sets_and_sees_the_rules(driver: Driver) -> None:
    await driver.put("/bucket?lifecycle", RULES)
    for method in ("GET", "PUT", "DELETE"):
        answer = await driver.request(method, "/bucket?lifecycle", body=RULES if method == "PUT" else b"", user=BOB)
        assert (answer.status, answer.code) == (403, "AccessDenied"), method
        anonymous = await driver.send(method, "/bucket?lifecycle", [("host", "127.0.0.1")])
        assert (anonymous.status, anonymous.code) == (403, "AccessDenied"), method
        assert (await driver.request(method, "/absent?lifecycle", user=ALICE)).code == "NoSuchBucket"
    assert (await driver.request("GET", "/bucket?lifecycle", user=ROOT)).status == 200
    posted = await driver.request("POST", "/bucket?lifecycle")
    assert (posted.status, posted.headers["allow"]) == (405, "GET, PUT, DELETE")


async def test_replies_tell_when_an_object_expires(driver: Driver) -> None:
    await driver.put("/bucket?lifecycle", RULES)
    expected = f'expiry-date="{midnight_after(1)}", rule-id="logs one day"'
    put = await driver.put("/bucket/logs/a", b"data")
    assert put.headers["x-amz-expiration"] == expected
    for method in ("GET", "HEAD"):
        assert (await driver.request(method, "/bucket/logs/a")).headers["x-amz-expiration"] == expected
    part = await driver.get("/bucket/logs/a", range="bytes=0-1")
    assert (part.status, part.headers["x-amz-expiration"]) == (206, expected)
    copied = await driver.put("/bucket/logs/b", b"", x_amz_copy_source="/bucket/logs/a")
    assert copied.headers["x-amz-expiration"] == expected
    for answer in (await driver.put("/bucket/else", b"data"), await driver.get("/bucket/else")):
        assert answer.status == 200
        assert "x-amz-expiration" not in answer.headers


async def test_a_completed_upload_tells_when_it_expires(driver: Driver) -> None:
    await driver.put("/bucket?lifecycle", RULES)
    created = await driver.request("POST", "/bucket/logs/parts?uploads")
    assert "x-amz-abort-date" not in created.headers
    upload_id = created.xml.findtext("UploadId")
    part = await driver.put(f"/bucket/logs/parts?partNumber=1&uploadId={upload_id}", b"x")
    document = (
        f"<CompleteMultipartUpload><Part><PartNumber>1</PartNumber><ETag>{part.headers['etag']}</ETag></Part>"
        "</CompleteMultipartUpload>"
    )
    done = await driver.request("POST", f"/bucket/logs/parts?uploadId={upload_id}", body=document.encode())
    assert done.headers["x-amz-expiration"] == f'expiry-date="{midnight_after(1)}", rule-id="logs one day"'


async def test_an_upload_tells_when_it_is_ended(driver: Driver) -> None:
    await driver.put("/bucket?lifecycle", UPLOADS)
    created = await driver.request("POST", "/bucket/big?uploads")
    listed = await driver.get(f"/bucket/big?uploadId={created.xml.findtext('UploadId')}")
    for answer in (created, listed):
        assert answer.status == 200
        assert answer.headers["x-amz-abort-date"] == midnight_after(7)
        assert answer.headers["x-amz-abort-rule-id"] == "uploads"


async def test_a_rule_of_a_tag_counts_once_the_object_has_it(driver: Driver) -> None:
    await driver.put("/bucket?lifecycle", TAGGED)
    await driver.put("/bucket/a", b"data")
    assert "x-amz-expiration" not in (await driver.get("/bucket/a")).headers
    tagging = b"<Tagging><TagSet><Tag><Key>class</Key><Value>short</Value></Tag></TagSet></Tagging>"
    assert (await driver.put("/bucket/a?tagging", tagging)).status == 200
    assert 'rule-id="logs one day"' in (await driver.get("/bucket/a")).headers["x-amz-expiration"]
    await driver.request("DELETE", "/bucket?lifecycle")
    assert "x-amz-expiration" not in (await driver.get("/bucket/a")).headers


async def test_kv_buckets_have_rules_too(driver: Driver) -> None:
    await driver.put("/chunks", b"", x_kvobj_bucket_kind="kv")
    assert (await driver.put("/chunks?lifecycle", RULES.replace(b"logs/", b"logs"))).status == 200
    for _ in range(2):  # the second is answered by the chunk that is there
        put = await driver.put("/chunks/logs-a", b"data")
        assert 'rule-id="logs one day"' in put.headers["x-amz-expiration"]
    assert "x-amz-expiration" in (await driver.request("HEAD", "/chunks/logs-a")).headers
