"""Cross-origin requests: rules as clients set them, preflights, and what replies tell a browser."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from s3_driver import BOB, HOST, ROOT, Answer, Driver, presign
from s3_stores import STORES, driver_over

RULES = (
    b'<CORSConfiguration xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><CORSRule><ID>one</ID>'
    b"<AllowedOrigin>https://*.test</AllowedOrigin><AllowedMethod>GET</AllowedMethod><AllowedMethod>PUT</AllowedMethod>"
    b"<AllowedHeader>content-*</AllowedHeader><ExposeHeader>ETag</ExposeHeader><MaxAgeSeconds>600</MaxAgeSeconds>"
    b"</CORSRule></CORSConfiguration>"
)
ORIGIN = "https://app.test"
NOT_ALLOWED = "CORSResponse: This CORS request is not allowed."
ALLOWED = {
    "access-control-allow-origin": ORIGIN,
    "access-control-allow-methods": "GET, PUT",
    "access-control-allow-credentials": "true",
    "access-control-expose-headers": "ETag",
    "access-control-max-age": "600",
    "vary": "Origin, Access-Control-Request-Headers, Access-Control-Request-Method",
}


@pytest.fixture(params=STORES)
async def driver(request: pytest.FixtureRequest, tmp_path: Path, shm_path: Path) -> AsyncIterator[Driver]:
    async with driver_over(request.param, data=tmp_path / "data", memory=shm_path) as made:
        await made.put("/bucket", b"")
        yield made


async def preflight(driver: Driver, target: str, **headers: str) -> Answer:
    """OPTIONS as a browser sends it, unsigned."""
    fields = [(name.replace("_", "-"), value) for name, value in headers.items()]
    return await driver.send("OPTIONS", target, [("host", HOST), *fields])


def cors_of(answer: Answer) -> dict[str, str]:
    return {
        name: value for name, value in answer.headers.items() if name.startswith("access-control-") or name == "vary"
    }


def told_of(answer: Answer) -> dict[str, str | None]:
    """What an error says but for its own name and the resource's; nothing of an empty body."""
    if not answer.body:
        return {}
    return {element.tag: element.text for element in answer.xml if element.tag not in ("Resource", "RequestId")}


async def test_rules_are_put_got_and_deleted(driver: Driver) -> None:
    missing = await driver.get("/bucket?cors")
    assert (missing.status, missing.code) == (404, "NoSuchCORSConfiguration")
    put = await driver.put("/bucket?cors", RULES)
    assert (put.status, put.body) == (200, b"")
    assert (await driver.get("/bucket?cors")).body == b'<?xml version="1.0" encoding="UTF-8"?>\n' + RULES
    for _ in range(2):
        assert (await driver.request("DELETE", "/bucket?cors")).status == 204
    assert (await driver.get("/bucket?cors")).status == 404


async def test_a_refused_document_leaves_the_rules_as_they_were(driver: Driver) -> None:
    await driver.put("/bucket?cors", RULES)
    unsupported = await driver.put("/bucket?cors", RULES.replace(b">PUT<", b">TRACE<"))
    assert (unsupported.status, unsupported.code) == (400, "InvalidRequest")
    assert (await driver.put("/bucket?cors", b"<nonsense")).code == "MalformedXML"
    assert (await driver.put("/bucket?cors", b" " * (64 * 1024 + 1))).code == "MaxMessageLengthExceeded"
    wrong = await driver.put("/bucket?cors", RULES.replace(b"600", b"1"), x_amz_checksum_crc32="AAAAAA==")
    assert wrong.code == "BadDigest"
    assert (await driver.get("/bucket?cors")).texts("CORSRule/MaxAgeSeconds") == ["600"]


async def test_only_who_may_sets_and_sees_the_rules(driver: Driver) -> None:
    for method in ("GET", "PUT", "DELETE"):
        body = RULES if method == "PUT" else b""
        answer = await driver.request(method, "/bucket?cors", body=body, user=BOB)
        assert (answer.status, answer.code) == (403, "AccessDenied"), method
    assert (await driver.request("PUT", "/bucket?cors", body=RULES, user=ROOT)).status == 200


async def test_a_preflight_is_answered_without_a_signature(driver: Driver) -> None:
    await driver.put("/bucket?cors", RULES)
    for target in ("/bucket", "/bucket/", "/bucket/any/key?uploads"):
        answer = await preflight(driver, target, origin=ORIGIN, access_control_request_method="PUT")
        assert (answer.status, answer.body) == (200, b"")
        assert cors_of(answer) == ALLOWED
        assert answer.headers["x-amz-request-id"]
    asked = await preflight(
        driver,
        "/bucket/key",
        origin=ORIGIN,
        access_control_request_method="GET",
        access_control_request_headers="Content-Type,content-md5",
    )
    assert cors_of(asked) == ALLOWED | {"access-control-allow-headers": "content-type, content-md5"}


@pytest.mark.parametrize(
    ("headers", "status", "code", "words"),
    [
        ({}, 400, "BadRequest", "Origin request header needed"),
        ({"access_control_request_method": "GET"}, 400, "BadRequest", "Origin request header needed"),
        ({"origin": ORIGIN}, 400, "BadRequest", "Access-Control-Request-Method"),
        ({"origin": "https://app.other", "access_control_request_method": "GET"}, 403, "AccessForbidden", NOT_ALLOWED),
        ({"origin": ORIGIN, "access_control_request_method": "DELETE"}, 403, "AccessForbidden", NOT_ALLOWED),
        (
            {
                "origin": ORIGIN,
                "access_control_request_method": "GET",
                "access_control_request_headers": "content-type, x-amz-acl",
            },
            403,
            "AccessForbidden",
            NOT_ALLOWED,
        ),
    ],
)
async def test_a_preflight_that_no_rule_fits_is_refused(
    driver: Driver, headers: dict[str, str], status: int, code: str, words: str
) -> None:
    await driver.put("/bucket?cors", RULES)
    answer = await preflight(driver, "/bucket/key", **headers)
    assert (answer.status, answer.code) == (status, code)
    assert cors_of(answer) == {}
    assert words in (answer.xml.findtext("Message") or "")
    if status == 403:
        method = headers["access_control_request_method"]
        assert (answer.xml.findtext("Method"), answer.xml.findtext("ResourceType")) == (method, "OBJECT")


async def test_a_preflight_where_there_are_no_rules_or_no_bucket(driver: Driver) -> None:
    for target, words in (
        ("/bucket/key", "CORSResponse: CORS is not enabled for this bucket."),
        ("/absent/key", "CORSResponse: Bucket not found"),
        ("/", "CORSResponse: Bucket not found"),
    ):
        answer = await preflight(driver, target, origin=ORIGIN)
        assert (answer.status, answer.code, answer.xml.findtext("Message")) == (403, "AccessForbidden", words)
        assert (answer.xml.findtext("Method"), answer.xml.findtext("ResourceType")) == ("OPTIONS", "BUCKET")
        assert (await preflight(driver, target)).code == "BadRequest"


async def test_a_preflight_tells_nothing_of_what_a_bucket_holds(driver: Driver) -> None:
    await driver.put("/bucket?cors", RULES)
    await driver.put("/bucket/secret", b"data")
    for headers in (
        {"origin": ORIGIN, "access_control_request_method": "GET"},
        {"origin": "https://app.other", "access_control_request_method": "GET"},
        {"origin": ORIGIN},
        {},
    ):
        there = await preflight(driver, "/bucket/secret", **headers)
        absent = await preflight(driver, "/bucket/nothing", **headers)
        assert there.status == absent.status
        assert cors_of(there) == cors_of(absent)
        assert told_of(there) == told_of(absent)


async def test_a_preflight_of_a_presigned_url_checks_no_signature(driver: Driver) -> None:
    await driver.put("/bucket?cors", RULES)
    await driver.put("/bucket/key", b"data")
    target = presign("GET", "/bucket/key")
    assert (await preflight(driver, target)).code == "BadRequest"
    assert (await preflight(driver, target, origin=ORIGIN, access_control_request_method="GET")).status == 200
    got = await driver.send("GET", target, [("host", HOST), ("origin", ORIGIN)])
    assert (got.status, got.body, cors_of(got)) == (200, b"data", ALLOWED)


async def test_replies_to_a_page_that_a_rule_names_may_be_read_by_it_refusals_too(driver: Driver) -> None:
    await driver.put("/bucket?cors", RULES)
    await driver.put("/bucket/key", b"data")
    for answer, status in (
        (await driver.get("/bucket/key", origin=ORIGIN), 200),
        (await driver.get("/bucket/key", origin=ORIGIN, range="bytes=1-2"), 206),
        (await driver.get("/bucket/absent", origin=ORIGIN), 404),
        (await driver.get("/bucket?lifecycle", origin=ORIGIN), 404),
        (await driver.put("/bucket/new", b"data", origin=ORIGIN), 200),
        (await driver.request("GET", "/bucket/key", headers={"origin": ORIGIN}, user=BOB), 403),
        (await driver.send("PUT", "/bucket/new", [("host", HOST), ("origin", ORIGIN)]), 403),
    ):
        assert answer.status == status
        assert cors_of(answer) == ALLOWED


async def test_other_replies_say_nothing_about_origins(driver: Driver) -> None:
    await driver.put("/bucket/key", b"data")
    no_rules = await driver.get("/bucket/key", origin=ORIGIN)
    await driver.put("/bucket?cors", RULES)
    for answer in (
        no_rules,
        await driver.get("/bucket/key"),
        await driver.get("/bucket/key", origin="https://app.other"),
        await driver.get("/bucket/key", origin=ORIGIN, access_control_request_method="DELETE"),
        await driver.get("/bucket/key", origin=ORIGIN, access_control_request_headers="x-amz-acl"),
        await driver.request("HEAD", "/bucket/key", headers={"origin": ORIGIN}),
        await driver.get("/", origin=ORIGIN),
    ):
        assert answer.status == 200
        assert cors_of(answer) == {}
    deleted = await driver.request("DELETE", "/bucket/key", headers={"origin": ORIGIN})
    assert (deleted.status, cors_of(deleted)) == (204, {})


async def test_a_rule_for_any_origin_gives_no_credentials(driver: Driver) -> None:
    await driver.put("/bucket?cors", RULES.replace(b"https://*.test", b"*"))
    answer = await driver.get("/bucket", origin="null")
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in answer.headers


async def test_an_origin_with_control_characters_is_not_told_again(driver: Driver) -> None:
    await driver.put("/bucket?cors", RULES.replace(b"https://*.test", b"https://*"))
    answer = await preflight(driver, "/bucket", origin="https://a\x01b", access_control_request_method="GET")
    assert (answer.status, cors_of(answer)) == (403, {})


async def test_kv_buckets_have_rules_too(driver: Driver) -> None:
    await driver.put("/chunks", b"", x_kvobj_bucket_kind="kv")
    assert (await driver.put("/chunks?cors", RULES)).status == 200
    await driver.put("/chunks/one", b"data")
    assert cors_of(await driver.get("/chunks/one", origin=ORIGIN)) == ALLOWED
    absent = await driver.request("POST", "/chunks?match", headers={"origin": ORIGIN}, body=b"{}")
    assert cors_of(absent) == {}  # no rule names POST
