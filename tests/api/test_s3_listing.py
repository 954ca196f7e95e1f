"""Listings and bulk deletion."""

import base64
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import quote

import pytest
from s3_driver import Driver
from s3_stores import STORES, driver_over

KEYS = ["a", "b/1", "b/2", "b/c/3", "d", "e/1", "é"]


async def filled(driver: Driver) -> Driver:
    await driver.put("/bucket", b"")
    for key in KEYS:
        await driver.put(f"/bucket/{quote(key)}", key.encode())
    return driver


@pytest.fixture(params=STORES)
async def driver(request: pytest.FixtureRequest, tmp_path: Path, shm_path: Path) -> AsyncIterator[Driver]:
    async with driver_over(request.param, data=tmp_path / "data", memory=shm_path) as empty:
        yield await filled(empty)


async def test_version_2_pages_with_opaque_tokens_and_counts_prefixes(driver: Driver) -> None:
    seen: list[str] = []
    token = ""
    while True:
        page = await driver.get(f"/bucket?list-type=2&max-keys=2&delimiter=%2F{token}")
        seen += page.texts("Contents/Key") + page.texts("CommonPrefixes/Prefix")
        assert page.xml.findtext("KeyCount") == str(
            len(page.texts("Contents/Key")) + len(page.texts("CommonPrefixes/Prefix"))
        )
        following = page.xml.findtext("NextContinuationToken")
        assert (following is not None) == (page.xml.findtext("IsTruncated") == "true")
        if following is None:
            break
        token = f"&continuation-token={following.replace('=', '%3D')}"
    assert sorted(seen) == sorted(["a", "b/", "d", "e/", "é"])


async def test_version_1_pages_with_markers(driver: Driver) -> None:
    page = await driver.get("/bucket?max-keys=2&delimiter=%2F")
    assert (page.texts("Contents/Key"), page.texts("CommonPrefixes/Prefix"), page.xml.findtext("NextMarker")) == (
        ["a"],
        ["b/"],
        "b/",
    )
    rest = await driver.get("/bucket?marker=b%2F&delimiter=%2F")
    assert (rest.texts("Contents/Key"), rest.texts("CommonPrefixes/Prefix")) == (["d", "é"], ["e/"])
    assert (await driver.get("/bucket?max-keys=1")).xml.findtext("NextMarker") is None


async def test_prefix_start_after_owner_and_encoding(driver: Driver) -> None:
    page = await driver.get("/bucket?list-type=2&prefix=b%2F&start-after=b%2F1&fetch-owner=true")
    assert page.texts("Contents/Key") == ["b/2", "b/c/3"]
    assert set(page.texts("Contents/Owner/DisplayName")) == {"Alice"}
    assert (await driver.get("/bucket?list-type=2&prefix=b")).texts("Contents/Owner/ID") == []
    encoded = await driver.get("/bucket?list-type=2&encoding-type=url&start-after=f")
    assert (encoded.texts("Contents/Key"), encoded.xml.findtext("EncodingType")) == (["%C3%A9"], "url")


async def test_no_keys_wanted_is_an_empty_page_that_is_not_truncated(driver: Driver) -> None:
    for target in ("/bucket?max-keys=0", "/bucket?list-type=2&max-keys=0", "/bucket?versions&max-keys=0"):
        page = await driver.get(target)
        assert (page.xml.findtext("IsTruncated"), page.texts("Contents"), page.texts("Version")) == ("false", [], [])
    assert (await driver.get("/bucket?list-type=2&max-keys=100000")).xml.findtext("MaxKeys") == "1000"


async def test_versions_of_an_unversioned_bucket_are_null(driver: Driver) -> None:
    page = await driver.get("/bucket?versions&max-keys=2")
    assert (page.texts("Version/Key"), set(page.texts("Version/VersionId")), set(page.texts("Version/IsLatest"))) == (
        ["a", "b/1"],
        {"null"},
        {"true"},
    )
    assert (page.xml.findtext("NextKeyMarker"), page.xml.findtext("NextVersionIdMarker")) == ("b/1", "null")
    rest = await driver.get("/bucket?versions&key-marker=b%2F1&version-id-marker=null")
    assert rest.texts("Version/Key") == KEYS[2:]


async def test_many_keys_are_deleted_at_once_and_absent_ones_too(driver: Driver) -> None:
    document = (
        b"<Delete><Object><Key>a</Key></Object><Object><Key>absent</Key><VersionId>null</VersionId></Object></Delete>"
    )
    crc = base64.b64encode(zlib.crc32(document).to_bytes(4, "big")).decode()
    answer = await driver.request("POST", "/bucket?delete", body=document, headers={"x-amz-checksum-crc32": crc})
    assert (answer.status, answer.texts("Deleted/Key")) == (200, ["a", "absent"])
    assert (await driver.get("/bucket/a")).status == 404
    wrong = await driver.request("POST", "/bucket?delete", body=document, headers={"x-amz-checksum-crc32": "AAAAAA=="})
    assert wrong.code == "BadDigest"


async def test_a_quiet_deletion_tells_failures_only(driver: Driver) -> None:
    document = (
        b'<?xml version="1.0"?><Delete xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Quiet>true</Quiet>'
        b"<Object><Key>a</Key></Object><Object><Key>d</Key><ETag>&quot;other&quot;</ETag></Object>"
        b"<Object><Key>e/1</Key><VersionId>v1</VersionId></Object><Object><Key>../x</Key></Object></Delete>"
    )
    answer = await driver.request("POST", "/bucket?delete", body=document)
    assert answer.texts("Deleted") == []
    assert answer.texts("Error/Code") == ["PreconditionFailed", "NoSuchVersion", "InvalidURI"]
    assert (await driver.get("/bucket/d")).status == 200


async def test_more_than_a_thousand_keys_are_malformed(driver: Driver) -> None:
    document = b"<Delete>" + b"<Object><Key>k</Key></Object>" * 1001 + b"</Delete>"
    assert (await driver.request("POST", "/bucket?delete", body=document)).code == "MalformedXML"
