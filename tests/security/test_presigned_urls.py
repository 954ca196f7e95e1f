"""Presigned URLs: what they bind, what their query may carry and how long they hold, through the whole service."""

from __future__ import annotations

import datetime as dt
import hashlib
import hmac
import json
from time import gmtime, strftime
from urllib.parse import quote

import msgspec
import pytest
from s3_driver import ALICE, HOST, Answer, Driver, WallClock, chunk_key, presign

from kvobj.api.credential import CredentialParser
from kvobj.api.errors import S3Error
from kvobj.api.query_headers import with_query_headers
from kvobj.api.request import HostRules, parse_target
from kvobj.api.users import REFRESH_SECONDS
from kvobj.catalog.setting_rows import BucketUpdate

DATA = b"0123456789" * 3000
UNSIGNED = "UNSIGNED-PAYLOAD"
Fields = list[tuple[str, str]]


@pytest.fixture
async def driver() -> Driver:
    made = Driver()
    await made.put("/bucket", b"")
    return made


def presigned(
    method: str,
    path: str,
    query: dict[str, str],
    *,
    payload: str = UNSIGNED,
    lower: bool = False,
    headers: Fields | None = None,
    expires_seconds: int = 60,
    stamp: str | None = None,
) -> str:
    """A presigned target, signed by hand: botocore puts neither headers nor a digest into the query."""
    stamp = stamp or dt.datetime.now(dt.UTC).strftime("%Y%m%dT%H%M%SZ")
    scope = f"{stamp[:8]}/us-east-1/s3/aws4_request"
    signed = sorted([("host", HOST), *(headers or [])])
    names = ";".join(name for name, _ in signed)
    own = {
        "X-Amz-Algorithm": "AWS4-HMAC-SHA256",
        "X-Amz-Credential": f"{ALICE.access_key}/{scope}",
        "X-Amz-Date": stamp,
        "X-Amz-Expires": str(expires_seconds),
        "X-Amz-SignedHeaders": names,
    }
    pairs = {**query, **{name.lower() if lower else name: value for name, value in own.items()}}
    encoded = sorted((quote(name, safe="~"), quote(value, safe="~")) for name, value in pairs.items())
    text = "&".join(f"{name}={value}" for name, value in encoded)
    lines = "".join(f"{name}:{value}\n" for name, value in signed)
    canonical = f"{method}\n{path}\n{text}\n{lines}\n{names}\n{payload}"
    to_sign = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    signature = hmac.digest(chunk_key(ALICE, stamp), to_sign.encode(), "sha256").hex()
    return f"{path}?{text}&{'x-amz-signature' if lower else 'X-Amz-Signature'}={signature}"


async def visit(driver: Driver, method: str, target: str, body: bytes = b"", headers: Fields | None = None) -> Answer:
    return await driver.send(method, target, [("host", HOST), *(headers or [])], body)


async def test_a_presigned_get_gives_no_head_no_put_and_no_delete(driver: Driver) -> None:
    await driver.put("/bucket/key", DATA)
    target = presign("GET", "/bucket/key")
    assert (await visit(driver, "GET", target)).body == DATA
    for method in ("HEAD", "PUT", "DELETE", "POST"):
        assert (await visit(driver, method, target)).status == 403
    assert (await driver.get("/bucket/key")).body == DATA


async def test_a_url_that_was_used_holds_no_longer_than_its_user_and_its_time(driver: Driver) -> None:
    await driver.put("/bucket/key", DATA)
    target = presign("GET", "/bucket/key", expires_seconds=60)
    for _ in range(2):
        assert (await visit(driver, "GET", target)).body == DATA
    signature = target[-64:]
    for other in (
        target[:-64] + signature[::-1],
        target.replace("/bucket/key", "/bucket/kez"),
        target.replace("Expires=60", "Expires=61"),
    ):
        assert (await visit(driver, "GET", other)).code == "SignatureDoesNotMatch"
    assert (await driver.send("GET", target, [("host", f"other.{HOST}")])).code == "SignatureDoesNotMatch"
    assert (await visit(driver, "DELETE", target)).code == "SignatureDoesNotMatch"
    assert (await visit(driver, "GET", target, headers=[("x-amz-checksum-mode", "ENABLED")])).status == 403
    digest = [("x-amz-content-sha256", hashlib.sha256(b"").hexdigest())]
    assert (await visit(driver, "GET", target, headers=digest)).status == 403
    assert (await visit(driver, "GET", target)).body == DATA
    driver.fake.catalog.user_rows[ALICE.id] = msgspec.structs.replace(
        ALICE, secret_key="another secret, forty characters long .."
    )
    driver.clock.offset_ms += int(REFRESH_SECONDS * 1000)
    assert (await visit(driver, "GET", target)).code == "SignatureDoesNotMatch"
    driver.fake.catalog.user_rows[ALICE.id] = ALICE
    driver.clock.offset_ms += int(REFRESH_SECONDS * 1000)
    assert (await visit(driver, "GET", target)).body == DATA
    driver.clock.offset_ms += 61_000
    assert (await visit(driver, "GET", target)).code == "AccessDenied"


async def test_the_names_of_a_presigned_url_may_be_of_either_case(driver: Driver) -> None:
    target = presigned("GET", "/bucket", {}, lower=True)
    assert (await visit(driver, "GET", target)).status == 200
    assert (await visit(driver, "GET", target.replace("x-amz-expires", "X-Amz-Expires"))).status == 403


@pytest.mark.parametrize("names", ["host", "host;x-amz-meta-a"])
async def test_a_presigned_query_claims_the_same_in_whatever_order_it_was_written(names: str) -> None:
    """The usual order is read in one step, any other parameter by parameter."""
    headers = [("x-amz-meta-a", "1")] if ";" in names else None
    usual = presigned("GET", "/bucket/key", {}, headers=headers)
    path, _, query = usual.partition("?")
    pieces = query.split("&")
    parser = CredentialParser(frozenset({"us-east-1"}))
    read_at_once = parse_target(usual, HOST, HostRules())
    assert read_at_once.presigned is not None
    for order in (pieces[::-1], [*pieces[1:], pieces[0]]):
        one_by_one = parse_target(f"{path}?{'&'.join(order)}", HOST, HostRules())
        assert one_by_one.presigned is None
        assert parser.parse({}, one_by_one) == parser.parse({}, read_at_once)
        signed = [target.canonical_query(without="X-Amz-Signature") for target in (one_by_one, read_at_once)]
        assert signed[0] == signed[1] == "&".join(pieces[:-1])
        assert one_by_one.canonical_query() == read_at_once.canonical_query()


@pytest.mark.parametrize(
    "change",
    [
        ("X-Amz-Algorithm=AWS4-HMAC-SHA256", "X-Amz-Algorithm=AWS4-HMAC-SHA1"),
        ("%2Fs3%2F", "%2fs3%2f"),
        ("X-Amz-Expires=60", "X-Amz-Expires=+60"),
        ("X-Amz-Expires=60", "X-Amz-Expires=%36%30"),
        ("X-Amz-Signature=", "X-Amz-Signature=A"),
        ("X-Amz-Signature=", "versionId=null&X-Amz-Signature="),
        ("X-Amz-SignedHeaders=host", "X-Amz-SignedHeaders=host&X-Amz-Security-Token=t"),
    ],
)
async def test_what_is_not_quite_a_usual_presigned_query_is_not_taken_for_one(change: tuple[str, str]) -> None:
    usual = presigned("GET", "/bucket/key", {})
    assert parse_target(usual.replace(*change), HOST, HostRules()).presigned is None


@pytest.mark.parametrize(
    "name",
    ["X-Amz-Credential", "x-amz-credential", "X-Amz-Date", "X-Amz-Expires", "X-Amz-Signature", "x-amz-signature"],
)
async def test_a_presigned_url_with_a_parameter_twice_is_refused(driver: Driver, name: str) -> None:
    target = presign("GET", "/bucket")
    value = next(piece for piece in target.partition("?")[2].split("&") if piece.lower().startswith(name.lower()))
    answer = await visit(driver, "GET", f"{target}&{name}={value.partition('=')[2]}")
    assert (answer.status, answer.code) == (400, "AuthorizationQueryParametersError")


async def test_a_presigned_url_may_name_the_digest_of_its_body(driver: Driver) -> None:
    digest = hashlib.sha256(DATA).hexdigest()
    target = presigned("PUT", "/bucket/key", {"X-Amz-Content-Sha256": digest}, payload=digest)
    assert (await visit(driver, "PUT", target, DATA[::-1])).code == "XAmzContentSHA256Mismatch"
    assert (await visit(driver, "PUT", target, DATA)).status == 200
    unsigned = presigned("PUT", "/bucket/key", {"X-Amz-Content-Sha256": UNSIGNED})
    assert (await visit(driver, "PUT", unsigned, DATA[::-1])).status == 200
    as_header = [("x-amz-content-sha256", digest)]
    by_header = presigned("PUT", "/bucket/key", {}, payload=digest, headers=as_header)
    assert (await visit(driver, "PUT", by_header, DATA, as_header)).status == 200
    both = presigned("PUT", "/bucket/key", {"X-Amz-Content-Sha256": UNSIGNED}, payload=digest, headers=as_header)
    assert (await visit(driver, "PUT", both, DATA, as_header)).code == "InvalidArgument"


async def test_headers_in_the_query_of_a_presigned_url_are_headers(driver: Driver) -> None:
    query = {"x-amz-meta-a": "voil\u00e0", "X-Amz-Meta-B": "2", "x-amz-storage-class": "REDUCED_REDUNDANCY"}
    assert (await visit(driver, "PUT", presigned("PUT", "/bucket/key", query), DATA)).status == 200
    headers = (await driver.get("/bucket/key")).headers
    assert (headers["x-amz-meta-b"], headers["x-amz-meta-a"]) == ("2", "=?UTF-8?B?dm9pbMOg?=")
    # What is in the query of a request that is not presigned is no header.
    assert (await driver.put("/bucket/other?x-amz-meta-a=1", DATA)).status == 200
    assert "x-amz-meta-a" not in (await driver.get("/bucket/other")).headers
    for name, value, code in (
        ("x-amz-object-lock-mode", "GOVERNANCE", "NotImplemented"),
        ("x-amz-meta-a", "1\r\nx-evil: 1", "InvalidArgument"),
        ("x-amz-meta-a b", "1", "InvalidArgument"),
    ):
        answer = await visit(driver, "PUT", presigned("PUT", "/bucket/no", {name: value}), DATA)
        assert answer.code == code
    assert (await driver.get("/bucket/no")).status == 404


async def test_the_checksum_that_sdks_put_into_a_url_before_there_is_a_body_does_not_count(driver: Driver) -> None:
    query = {"x-amz-checksum-crc32": "AAAAAA==", "x-amz-sdk-checksum-algorithm": "CRC32"}
    assert (await visit(driver, "PUT", presigned("PUT", "/bucket/key", query), DATA)).status == 200
    assert (await driver.get("/bucket/key", x_amz_checksum_mode="ENABLED")).body == DATA
    header = [("x-amz-checksum-crc32", "AAAAAA==")]
    target = presigned("PUT", "/bucket/key", query, headers=header)
    assert (await visit(driver, "PUT", target, DATA, header)).code == "BadDigest"


@pytest.mark.parametrize("lower", [False, True])
async def test_a_policy_on_how_old_signatures_are_holds_however_they_are_spelt(driver: Driver, *, lower: bool) -> None:
    await driver.put("/bucket/key", DATA)
    statement = {
        "Effect": "Deny",
        "Principal": "*",
        "Action": "s3:GetObject",
        "Resource": "arn:aws:s3:::bucket/*",
        "Condition": {"NumericGreaterThan": {"s3:signatureAge": "600000"}},
    }
    policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]}).encode()
    await driver.fake.catalog.update_bucket("bucket", BucketUpdate(policy=policy))
    target = presigned("GET", "/bucket/key", {}, lower=lower, expires_seconds=3600)
    assert (await visit(driver, "GET", target)).status == 200
    driver.clock.offset_ms = 11 * 60_000
    assert (await visit(driver, "GET", target)).status == 403


async def test_a_header_both_in_the_query_and_beside_it_has_one_value(driver: Driver) -> None:
    for value, status in (("1", 200), ("2", 400)):
        header = [("x-amz-meta-a", value)]
        target = presigned("PUT", "/bucket/key", {"x-amz-meta-a": "1"}, headers=header)
        assert (await visit(driver, "PUT", target, DATA, header)).status == status


async def test_a_presigned_url_takes_no_further_headers_that_count(driver: Driver) -> None:
    target = presign("PUT", "/bucket/key")
    for name in ("x-amz-acl", "x-amz-meta-a", "x-amz-copy-source", "x-kvobj-namespace"):
        answer = await visit(driver, "PUT", target, DATA, [(name, "x")])
        assert (answer.code, answer.xml.findtext("HeadersNotSigned")) == ("AccessDenied", name)
    assert (await visit(driver, "PUT", target, DATA, [("content-type", "text/plain")])).status == 200


async def test_a_token_for_a_permanent_key_is_refused_and_never_ignored(driver: Driver) -> None:
    answer = await driver.request("GET", "/bucket", headers={"x-amz-security-token": "t"})
    assert (answer.status, answer.code) == (400, "InvalidToken")
    answer = await visit(driver, "GET", presigned("GET", "/bucket", {"X-Amz-Security-Token": "t"}))
    assert (answer.status, answer.code) == (400, "InvalidToken")


class StillClock(WallClock):
    """Stands at the second in which it was made."""

    def __init__(self) -> None:
        super().__init__()
        self._now_ms = super().now_ms() // 1000 * 1000

    def now_ms(self) -> int:
        return self._now_ms + self.offset_ms


async def test_a_presigned_url_may_begin_within_the_skew_of_clocks(driver: Driver) -> None:
    target = presign("GET", "/bucket")
    driver.clock.offset_ms = -14 * 60_000
    assert (await visit(driver, "GET", target)).status == 200
    driver.clock.offset_ms = -16 * 60_000
    answer = await visit(driver, "GET", target)
    assert (answer.code, answer.xml.findtext("Message")) == ("AccessDenied", "Request is not yet valid")


async def test_a_presigned_url_of_no_time_has_expired() -> None:
    driver = Driver(clock=StillClock())
    stamp = strftime("%Y%m%dT%H%M%SZ", gmtime(driver.clock.now_ms() // 1000))
    answer = await visit(driver, "GET", presigned("GET", "/bucket", {}, expires_seconds=0, stamp=stamp))
    assert (answer.status, answer.code) == (403, "AccessDenied")
    assert answer.xml.findtext("Message") == "Request has expired"
    assert answer.xml.findtext("ServerTime")


def headers_of(query: str) -> dict[str, str]:
    return with_query_headers(
        {"host": HOST, "x-amz-acl": "private"}, parse_target(f"/bucket/key?{query}", HOST, HostRules())
    )


def test_a_header_in_the_query_is_what_it_would_be_on_the_wire() -> None:
    assert headers_of("X-Amz-Meta-A=%20a%C3%A0%09&x-amz-acl=private&x-id=PutObject&X-Amz-Expires=60&x-amz-date=x") == {
        "host": HOST,
        "x-amz-acl": "private",
        "x-amz-meta-a": "a\u00c3\u00a0",
    }
    assert headers_of("prefix=x-amz-meta-a") == {"host": HOST, "x-amz-acl": "private"}


@pytest.mark.parametrize(
    "query",
    [
        "x-amz-meta-a=1%0D%0Ax-evil:1",
        "x-amz-meta-a=%00",
        "x-amz-meta-a=%7F",
        "x-amz-meta-a%0D%0A=1",
        "x-amz-meta-a%20b=1",
        "x-amz-meta-%C3%A0=1",
        "x-amz-meta-a:=1",
        "x-amz-=1",
        "x-amz-meta-" + "a" * 200 + "=1",
        "x-amz-acl=public-read",
        "x-amz-meta-a=1&X-Amz-Meta-A=2",
    ],
)
def test_what_no_header_could_hold_or_would_say_twice_is_refused(query: str) -> None:
    with pytest.raises(S3Error) as caught:
        headers_of(query)
    assert caught.value.code == "InvalidArgument"
