"""Requests as no SDK would send them: changed heads, dates, presigned URLs, announced bodies, and what every reply carries."""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
from raw_http import Credentials, RawConnection, RawReply, canonical_query, sign_head, signing_key
from s3_worlds import MAIN, S3Client, World, body_of, refused, status_of

Change = Callable[[list[str]], list[str]]
KEYS = Credentials(MAIN.access_key, MAIN.secret_key, "us-east-1")


def exchange(world: World, head: str, body: bytes = b"") -> RawReply:
    """Send a head and a body as they are."""
    with RawConnection("127.0.0.1", world.server.port) as connection:
        connection.send(head.encode("latin-1") + body)
        return connection.read_reply(has_body=not head.startswith("HEAD "))


def changed(
    world: World,
    method: str,
    target: str,
    change: Change,
    body: bytes = b"",
    *,
    headers: Mapping[str, str] | None = None,
    **sign: Any,  # noqa: ANN401 - what sign_head takes
) -> RawReply:
    """A signed request whose head's lines were changed after it was signed."""
    sent = {"content-length": str(len(body)), **(headers or {})}
    head = sign_head(KEYS, method, f"127.0.0.1:{world.server.port}", target, headers=sent, **sign).head
    lines = change(head.decode("latin-1").split("\r\n")[:-2])
    return exchange(world, "\r\n".join([*lines, "", ""]), body)


def without(lines: list[str], name: str) -> list[str]:
    return [line for line in lines if not line.lower().startswith(f"{name}:")]


def by(name: str, value: str | None) -> Change:
    """A change that puts the header's value in place of what it was, or takes the header away."""
    more = [] if value is None else [f"{name}: {value}"]
    return lambda lines: [*without(lines, name), *more]


BAD_HEADS: list[tuple[Change, int, str | None]] = [
    (by("content-length", ""), 400, None),
    (by("content-length", "-1"), 400, None),
    (by("authorization", None), 403, "AccessDenied"),
    (by("authorization", ""), 403, "AccessDenied"),
    (by("authorization", "AWS HAHAHA"), 400, "InvalidArgument"),
    (by("authorization", "AWS4 HAHAHA"), 400, None),
    (by("authorization", "AWS4-HMAC-SHA256 x"), 400, "AuthorizationHeaderMalformed"),
    (by("authorization", "AWS4-HMAC-SHA256 Credential=HAHAHA"), 400, "AuthorizationHeaderMalformed"),
    (by("x-amz-date", None), 403, "AccessDenied"),
    (by("x-amz-date", "bad date"), 403, "AccessDenied"),
    (by("x-amz-date", ""), 403, "AccessDenied"),
    (by("x-amz-date", "19500707T215304Z"), 403, None),
    (by("x-amz-date", "20100707T215304Z"), 403, None),
    (by("x-amz-date", "20400707T215304Z"), 403, None),
    (by("x-amz-date", "99990707T215304Z"), 403, None),
    (by("x-amz-acl", "public-read"), 403, "AccessDenied"),
    (by("x-amz-meta-signed", None), 403, None),
    (by("x-amz-meta-signed", "other"), 403, "SignatureDoesNotMatch"),
]
GOOD_HEADS: list[Change] = [
    by("user-agent", "mine"),
    by("user-agent", ""),
    by("date", "Bad Date"),
    by("date", ""),
    by("date", "Tue, 07 Jul 1950 21:53:04 GMT"),
    by("date", "Tue, 07 Jul 2010 21:53:04 GMT"),
    by("date", "Tue, 07 Jul 2040 21:53:04 GMT"),
    by("date", "Tue, 07 Jul 9999 21:53:04 GMT"),
]


@pytest.mark.parametrize(
    ("change", "status", "code"), [(by("content-length", None), 411, "MissingContentLength"), *BAD_HEADS]
)
def test_an_object_with_a_bad_head_is_refused(
    world: World, bucket: str, change: Change, status: int, code: str | None
) -> None:
    reply = changed(world, "PUT", f"/{bucket}/foo", change, b"bar", headers={"x-amz-meta-signed": "a"})
    assert (reply.status, reply.code) == (status, code or reply.code), reply.body
    with refused(404):
        world.main.head_object(Bucket=bucket, Key="foo")


@pytest.mark.parametrize(("change", "status", "code"), BAD_HEADS)
def test_a_bucket_with_a_bad_head_is_refused(world: World, change: Change, status: int, code: str | None) -> None:
    reply = changed(world, "PUT", "/conform-bad-head", change, headers={"x-amz-meta-signed": "a"})
    assert (reply.status, reply.code) == (status, code or reply.code), reply.body
    with refused(404):
        world.main.head_bucket(Bucket="conform-bad-head")


@pytest.mark.parametrize("change", [*GOOD_HEADS, by("expect", "200")])
def test_headers_that_decide_nothing_are_not_judged(world: World, bucket: str, change: Change) -> None:
    assert changed(world, "PUT", f"/{bucket}/foo", change, b"bar").status == 200
    assert body_of(world.main, bucket, "foo") == b"bar"


@pytest.mark.parametrize("change", [*GOOD_HEADS, by("content-length", None)])
def test_a_bucket_is_made_whatever_decides_nothing(world: World, change: Change) -> None:
    assert changed(world, "PUT", "/conform-good-head", change).status == 200
    assert status_of(world.main.delete_bucket(Bucket="conform-good-head")) == 204


def test_an_acl_is_set_without_a_content_length(world: World, bucket: str) -> None:
    world.main.put_object(Bucket=bucket, Key="foo", Body=b"bar")
    reply = changed(
        world,
        "PUT",
        f"/{bucket}/foo",
        by("content-length", None),
        query={"acl": ""},
        headers={"x-amz-acl": "public-read"},
    )
    assert reply.status == 200
    assert body_of(world.nobody, bucket, "foo") == b"bar"


def test_a_body_that_is_not_the_one_signed_is_refused(world: World, bucket: str) -> None:
    reply = changed(world, "PUT", f"/{bucket}/foo", by("content-length", "2"), b"ba", payload=b"bar")
    assert (reply.status, reply.code) == (400, "XAmzContentSHA256Mismatch")
    with refused(404):
        world.main.head_object(Bucket=bucket, Key="foo")


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_clock_that_is_off_is_told_the_time(world: World, bucket: str, hours: int) -> None:
    at = time.time() + hours * 3600
    reply = changed(world, "GET", f"/{bucket}", lambda lines: lines, at=at)
    assert (reply.status, reply.code) == (403, "RequestTimeTooSkewed")
    assert b"<ServerTime>" in reply.body


def test_every_reply_has_ids_and_an_error_repeats_them(world: World, bucket: str) -> None:
    good = world.raw("GET", f"/{bucket}")
    bad = world.raw("GET", f"/{bucket}/absent")
    assert good.headers["x-amz-request-id"] != bad.headers["x-amz-request-id"]
    assert f"<RequestId>{bad.headers['x-amz-request-id']}</RequestId>".encode() in bad.body
    assert f"<HostId>{bad.headers['x-amz-id-2']}</HostId>".encode() in bad.body
    assert b"<Key>absent</Key>" in bad.body


# -- presigned URLs ----------------------------------------------------------------------------------------------------
def presigned(world: World, operation: str, place: dict[str, str], client: S3Client = None, **more: object) -> str:
    """The target of a presigned URL."""
    url: str = (client or world.main).generate_presigned_url(operation, Params={**place, **more}, ExpiresIn=100_000)
    return url[len(world.server.endpoint) :]


def send(world: World, method: str, target: str, body: bytes = b"", lines: Iterable[str] = ()) -> RawReply:
    head = [f"{method} {target} HTTP/1.1", f"host: 127.0.0.1:{world.server.port}", f"content-length: {len(body)}"]
    return exchange(world, "\r\n".join([*head, *lines, "", ""]), body)


@pytest.fixture
def place(world: World, bucket: str) -> dict[str, str]:
    world.main.put_object(Bucket=bucket, Key="foo", Body=b"bar")
    return {"Bucket": bucket, "Key": "foo"}


def test_a_presigned_url_is_for_its_method_and_key(world: World, place: dict[str, str]) -> None:
    target = presigned(world, "get_object", place)
    assert (send(world, "GET", target).status, send(world, "GET", target).body) == (200, b"bar")
    for method in ("HEAD", "PUT", "DELETE"):
        assert send(world, method, target).status == 403
    reply = send(world, "GET", target.replace("/foo?", "/fop?"))
    assert (reply.status, reply.code) == (403, "SignatureDoesNotMatch")


@pytest.mark.parametrize(
    ("seconds", "status", "code"),
    [
        (0, 403, "AccessDenied"),
        (-7, 400, "AuthorizationQueryParametersError"),
        (609_901, 400, "AuthorizationQueryParametersError"),
        (604_800, 200, ""),
    ],
)
def test_a_presigned_url_lasts_a_week_at_most(
    world: World, place: dict[str, str], seconds: int, status: int, code: str
) -> None:
    target = presigned_at(world, "GET", f"/{place['Bucket']}/foo", at=time.time(), seconds=seconds)
    reply = send(world, "GET", target)
    assert (reply.status, reply.code) == (status, code)


def presigned_at(world: World, method: str, path: str, *, at: float, seconds: int) -> str:
    """The target of a URL that was presigned then, signed by hand: clients know no other time than now."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(at))
    scope = f"{stamp[:8]}/us-east-1/s3/aws4_request"
    query = canonical_query(
        {
            "X-Amz-Algorithm": "AWS4-HMAC-SHA256",
            "X-Amz-Credential": f"{MAIN.access_key}/{scope}",
            "X-Amz-Date": stamp,
            "X-Amz-Expires": str(seconds),
            "X-Amz-SignedHeaders": "host",
        }
    )
    host = f"127.0.0.1:{world.server.port}"
    canonical = f"{method}\n{path}\n{query}\nhost:{host}\n\nhost\nUNSIGNED-PAYLOAD"
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    signature = hmac.digest(signing_key(KEYS, stamp[:8]), text.encode(), "sha256").hex()
    return f"{path}?{query}&X-Amz-Signature={signature}"


@pytest.mark.parametrize(
    ("age_seconds", "status", "words"), [(10, 200, b""), (120, 403, b"expired"), (-3600, 403, b"not yet valid")]
)
def test_a_presigned_url_has_its_time(
    world: World, place: dict[str, str], age_seconds: int, status: int, words: bytes
) -> None:
    path = f"/{place['Bucket']}/foo"
    reply = send(world, "PUT", presigned_at(world, "PUT", path, at=time.time() - age_seconds, seconds=60), b"new")
    assert (reply.status, reply.code) == (status, "" if status == 200 else "AccessDenied")
    assert words in reply.body
    assert body_of(world.main, place["Bucket"], "foo") == (b"new" if status == 200 else b"bar")


@pytest.mark.parametrize(
    "name", ["X-Amz-Expires", "X-Amz-Date", "X-Amz-Credential", "X-Amz-SignedHeaders", "X-Amz-Signature"]
)
def test_a_presigned_url_that_lacks_something_is_refused(world: World, place: dict[str, str], name: str) -> None:
    target = presigned(world, "put_object", place)
    cut = re.sub(rf"&{name}=[^&]*", "", target)
    assert cut != target
    reply = send(world, "PUT", cut, b"new")
    assert (reply.status, reply.code) == (400, "AuthorizationQueryParametersError")
    assert body_of(world.main, place["Bucket"], "foo") == b"bar"


def test_a_presigned_put_with_an_acl_needs_the_header(world: World, place: dict[str, str]) -> None:
    target = presigned(world, "put_object", place, ACL="private")
    assert send(world, "PUT", target, b"new").status == 403
    assert send(world, "PUT", target, b"new", ["x-amz-acl: public-read"]).status == 403
    assert send(world, "PUT", target, b"new", ["x-amz-acl: private"]).status == 200
    assert send(world, "GET", presigned(world, "get_object", place)).body == b"new"


def test_a_presigned_put_cannot_be_given_more_headers(world: World, place: dict[str, str]) -> None:
    target = presigned(world, "put_object", place)
    for line in ("x-amz-meta-a: 1", "x-amz-acl: public-read", "x-amz-tagging: a=b"):
        assert send(world, "PUT", target, b"new", [line]).status == 403
    assert body_of(world.main, place["Bucket"], "foo") == b"bar"


def test_a_presigned_url_has_its_signers_rights(world: World, place: dict[str, str]) -> None:
    reply = send(world, "GET", presigned(world, "get_object", place, world.alt))
    assert (reply.status, reply.code) == (403, "AccessDenied")


def test_headers_of_a_reply_are_overridden_by_who_signs_alone(world: World) -> None:
    bucket = world.bucket()
    world.main.put_object(Bucket=bucket, Key="foo", Body=b"bar", ACL="public-read")
    assert status_of(world.nobody.get_object(Bucket=bucket, Key="foo")) == 200
    with refused(400, "InvalidRequest"):
        world.nobody.get_object(Bucket=bucket, Key="foo", ResponseContentType="text/x")


# -- announced bodies --------------------------------------------------------------------------------------------------
def test_continue_is_said_to_who_may_write_alone(world: World, bucket: str) -> None:
    head = f"PUT /{bucket}/foo HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 123\r\nexpect: 100-continue\r\n\r\n"
    assert exchange(world, head).status == 403
    world.main.put_bucket_acl(Bucket=bucket, ACL="public-read-write")
    assert exchange(world, head).status == 100


def test_a_client_whose_announced_body_was_refused_goes_on(world: World, bucket: str) -> None:
    with refused(404, "NoSuchBucket"):
        world.main.put_object(Bucket="conform-missing", Key="foo", Body=b"bar")
    assert status_of(world.main.put_object(Bucket=bucket, Key="foo", Body=b"bar")) == 200


@pytest.mark.parametrize("tells_length", [True, False])
def test_a_body_in_chunks_of_http_has_to_tell_its_length(world: World, bucket: str, *, tells_length: bool) -> None:
    headers = {"transfer-encoding": "chunked", "content-encoding": "aws-chunked"}
    if tells_length:
        headers["x-amz-decoded-content-length"] = "3"
    head = sign_head(
        KEYS,
        "PUT",
        f"127.0.0.1:{world.server.port}",
        f"/{bucket}/foo",
        headers=headers,
        payload="STREAMING-UNSIGNED-PAYLOAD-TRAILER",
    ).head.decode()
    framed = b"3\r\nbar\r\n0\r\n\r\n"
    reply = exchange(world, head, b"%x\r\n%s\r\n0\r\n\r\n" % (len(framed), framed))
    assert (reply.status, reply.code) == ((200, "") if tells_length else (411, "MissingContentLength"))
    if tells_length:
        assert body_of(world.main, bucket, "foo") == b"bar"
