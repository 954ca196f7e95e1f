"""Cross-origin rules: put, got and deleted; what a browser's requests and preflights are told, presigned ones too."""

from __future__ import annotations

from typing import Any

import pytest
from raw_http import RawConnection, RawReply
from s3_worlds import World, refused, status_of


def rule(methods: tuple[str, ...], origins: tuple[str, ...], **more: object) -> dict[str, Any]:
    return {"AllowedMethods": list(methods), "AllowedOrigins": list(origins), **more}


def put_rules(world: World, bucket: str, *rules: dict[str, Any]) -> None:
    world.main.put_bucket_cors(Bucket=bucket, CORSConfiguration={"CORSRules": list(rules)})


def ask(world: World, method: str, target: str, **headers: str) -> RawReply:
    """A request without a signature; underscores of the headers' names are hyphens."""
    lines = [f"{method} {target} HTTP/1.1", f"host: 127.0.0.1:{world.server.port}", "content-length: 0"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    with RawConnection("127.0.0.1", world.server.port) as connection:
        connection.send("\r\n".join([*lines, "", ""]).encode())
        return connection.read_reply()


def told(reply: RawReply) -> tuple[int, str | None, str | None]:
    """The status, and what a browser is told of origins and methods."""
    headers = reply.headers
    return reply.status, headers.get("access-control-allow-origin"), headers.get("access-control-allow-methods")


@pytest.fixture
def public(world: World) -> str:
    """A bucket that everybody may list, with rules for several forms of origins."""
    bucket = world.bucket(ACL="public-read")
    put_rules(
        world,
        bucket,
        rule(("GET",), ("*suffix",)),
        rule(("GET",), ("start*end",)),
        rule(("GET",), ("prefix*",)),
        rule(("PUT",), ("*.put",)),
    )
    return bucket


def test_rules_are_put_got_and_deleted(world: World, bucket: str) -> None:
    client = world.main
    with refused(404, "NoSuchCORSConfiguration"):
        client.get_bucket_cors(Bucket=bucket)
    wanted = [
        rule(
            ("GET", "PUT"), ("*.get", "*.put"), AllowedHeaders=["x-*"], ExposeHeaders=["etag"], MaxAgeSeconds=5, ID="a"
        ),
        rule(("DELETE",), ("*",)),
    ]
    put_rules(world, bucket, *wanted)
    assert client.get_bucket_cors(Bucket=bucket)["CORSRules"] == wanted
    for _ in range(2):
        assert status_of(client.delete_bucket_cors(Bucket=bucket)) == 204
    with refused(404, "NoSuchCORSConfiguration"):
        client.get_bucket_cors(Bucket=bucket)


@pytest.mark.parametrize(
    "wrong",
    [rule(("PATCH",), ("*",)), rule(("GET",), ("*.a.*",)), rule(("GET",), ("*",), ExposeHeaders=["x-*"])],
)
def test_rules_that_s3_does_not_take_are_refused(world: World, bucket: str, wrong: dict[str, Any]) -> None:
    with refused(400, "InvalidRequest"):
        put_rules(world, bucket, wrong)


@pytest.mark.parametrize(
    ("origin", "fits"),
    [
        (None, False),
        ("foo.suffix", True),
        ("foo.bar", False),
        ("foo.suffix.get", False),
        ("startend", True),
        ("start1end", True),
        ("start12end", True),
        ("0start12end", False),
        ("prefix", True),
        ("prefix.suffix", True),
        ("bla.prefix", False),
        ("foo.put", False),
    ],
)
def test_a_page_may_read_a_listing_where_its_origin_fits(
    world: World, public: str, origin: str | None, *, fits: bool
) -> None:
    reply = ask(world, "GET", f"/{public}", **({} if origin is None else {"origin": origin}))
    assert told(reply) == ((200, origin, "GET") if fits else (200, None, None))


@pytest.mark.parametrize(
    ("method", "headers", "expected"),
    [
        ("GET", {"origin": "foo.suffix"}, (404, "foo.suffix", "GET")),
        ("PUT", {"origin": "foo.suffix", "access_control_request_method": "GET"}, (403, "foo.suffix", "GET")),
        ("PUT", {"origin": "foo.suffix", "access_control_request_method": "PUT"}, (403, None, None)),
        ("PUT", {"origin": "foo.suffix", "access_control_request_method": "DELETE"}, (403, None, None)),
        ("PUT", {"origin": "foo.suffix"}, (403, None, None)),
        ("PUT", {"origin": "foo.put"}, (403, "foo.put", "PUT")),
    ],
)
def test_a_page_may_read_refusals_where_its_origin_fits(
    world: World, public: str, method: str, headers: dict[str, str], expected: tuple[int, str | None, str | None]
) -> None:
    assert told(ask(world, method, f"/{public}/bar", **headers)) == expected


@pytest.mark.parametrize(
    ("origin", "method", "expected"),
    [
        (None, None, (400, None, None)),
        ("foo.suffix", None, (400, None, None)),
        ("bla", None, (400, None, None)),
        ("foo.suffix", "GET", (200, "foo.suffix", "GET")),
        ("foo.bar", "GET", (403, None, None)),
        ("foo.suffix.get", "GET", (403, None, None)),
        ("startend", "GET", (200, "startend", "GET")),
        ("start12end", "GET", (200, "start12end", "GET")),
        ("0start12end", "GET", (403, None, None)),
        ("prefix", "GET", (200, "prefix", "GET")),
        ("bla.prefix", "GET", (403, None, None)),
        ("foo.put", "GET", (403, None, None)),
        ("foo.put", "PUT", (200, "foo.put", "PUT")),
    ],
)
@pytest.mark.parametrize("key", ["", "/bar"])
def test_a_preflight_is_answered_by_the_rules(
    world: World,
    public: str,
    key: str,
    *,
    origin: str | None,
    method: str | None,
    expected: tuple[int, str | None, str | None],
) -> None:
    headers = {"origin": origin, "access_control_request_method": method}
    reply = ask(world, "OPTIONS", f"/{public}{key}", **{name: value for name, value in headers.items() if value})
    assert told(reply) == expected


def test_any_origin_is_told_as_a_star(world: World) -> None:
    bucket = world.bucket(ACL="public-read")
    put_rules(world, bucket, rule(("GET",), ("*",)))
    assert told(ask(world, "GET", f"/{bucket}")) == (200, None, None)
    assert told(ask(world, "GET", f"/{bucket}", origin="example.origin")) == (200, "*", "GET")


@pytest.mark.parametrize(
    ("allowed", "asked", "status"),
    [
        ([], "x-amz-meta-header2", 403),
        (["x-amz-meta-header1"], "x-amz-meta-header2", 403),
        (["x-amz-meta-header2"], "X-Amz-Meta-Header2", 200),
        (["x-amz-*"], "x-amz-meta-header2, x-amz-date", 200),
        (["*"], "anything", 200),
    ],
)
def test_every_header_that_a_page_would_send_has_to_be_allowed(
    world: World, bucket: str, allowed: list[str], asked: str, status: int
) -> None:
    put_rules(world, bucket, rule(("GET",), ("*",), AllowedHeaders=allowed, ExposeHeaders=["x-amz-meta-header1"]))
    reply = ask(
        world,
        "OPTIONS",
        f"/{bucket}/bar",
        origin="example.origin",
        access_control_request_method="GET",
        access_control_request_headers=asked,
    )
    assert reply.status == status
    assert reply.headers.get("access-control-expose-headers") == ("x-amz-meta-header1" if status == 200 else None)


@pytest.mark.parametrize(
    ("operation", "method", "more"),
    [("get_object", "GET", {}), ("put_object", "PUT", {}), ("put_object", "PUT", {"ACL": "private"})],
)
def test_a_preflight_of_a_presigned_url_is_answered_by_the_rules(
    world: World, bucket: str, operation: str, method: str, more: dict[str, str]
) -> None:
    place = {"Bucket": bucket, "Key": "foo"}
    world.main.put_object(**place, Body=b"bar")
    url = world.main.generate_presigned_url(operation, Params={**place, **more}, ExpiresIn=100_000)
    target = url.removeprefix(world.server.endpoint)
    assert ask(world, "OPTIONS", target).status == 400
    put_rules(world, bucket, rule((method,), ("example",)))
    reply = ask(world, "OPTIONS", target, origin="example", access_control_request_method=method)
    assert told(reply) == (200, "example", method)
