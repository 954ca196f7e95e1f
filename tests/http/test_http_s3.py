"""What hostile clients try on the S3 port as a whole: the S3 service behind the HTTP layer, over real sockets."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import quote
from xml.etree import ElementTree as ET

import msgspec
import pytest
from http_peers import Answer, Peer, Served, serving
from s3_driver import Driver, presign, sign

from kvobj.api.exchange import S3Settings

CONTROL = ["a\r\nx-injected: b", "a\nx-injected: b", "a\rx-injected: b", "a\0b", "a\x1bb", "a\x7fb"]
OVERRIDES = ["content-type", "content-language", "expires", "cache-control", "content-disposition", "content-encoding"]


@asynccontextmanager
async def s3() -> AsyncIterator[tuple[Driver, Served, Peer]]:
    """A served S3 over fakes with a bucket and one object in it, and a connection."""
    driver = Driver(settings=S3Settings(host_id="HOST"))
    assert (await driver.request("PUT", "/bucket")).status == 200
    assert (await driver.put("/bucket/key", b"content")).status == 200
    async with serving(driver.service.handle) as served:
        yield driver, served, await served.connect()


def request(method: str, target: str, body: bytes = b"", **headers: str) -> bytes:
    """A signed request as bytes; header values may hold what no header may."""
    fields = sign(method, target, body, headers={name.replace("_", "-"): value for name, value in headers.items()})
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in fields)]
    return "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode("latin-1") + body


def code_of(answer: Answer) -> str:
    root = ET.fromstring(answer.body)  # noqa: S314 - our own output
    assert root.findtext("RequestId") == answer.headers["x-amz-request-id"]
    assert root.findtext("HostId") == answer.headers["x-amz-id-2"] == "HOST"
    return root.findtext("Code") or ""


@pytest.mark.parametrize("value", CONTROL)
@pytest.mark.parametrize("name", OVERRIDES)
async def test_no_override_splits_a_reply(name: str, value: str) -> None:
    async with s3() as (_, _, peer):
        target = f"/bucket/key?response-{name}={quote(value, safe='')}"
        for sent in (
            request("GET", target),
            f"GET {presign('GET', target)} HTTP/1.1\r\nHost: 127.0.0.1:9000\r\n\r\n".encode(),
        ):
            await peer.send(sent)
            answer = await peer.answer()
            assert "x-injected" not in answer.headers
            assert (answer.status, code_of(answer)) == (400, "InvalidArgument")


@pytest.mark.parametrize("value", CONTROL)
@pytest.mark.parametrize("name", ["x-amz-meta-a", "content-disposition", "x-amz-copy-source", "x-amz-acl"])
async def test_no_header_takes_a_line_end_or_a_control_character(name: str, value: str) -> None:
    async with s3() as (_, served, peer):
        plain = request("PUT", "/bucket/other", b"x", **{name.replace("-", "_"): "PLACE"})
        await peer.send(plain.replace(b"PLACE", value.encode("latin-1")))
        answer = await peer.answer()
        assert answer.status in (400, 403)  # where the line end makes a field of its own, the signature fails
        assert code_of(answer) in ("BadRequest", "SignatureDoesNotMatch", "AccessDenied")
        assert "x-injected" not in answer.headers
        assert json.loads(served.lines[-1])["request_id"] == answer.headers["x-amz-request-id"]


@pytest.mark.parametrize("place", ["metadata", "headers"])
@pytest.mark.parametrize("value", ["a\r\nx-injected: b", "a\nb", "a\0b", "\u0100"])
async def test_a_stored_value_that_could_split_a_reply_never_leaves(place: str, value: str) -> None:
    """As if an older version, or damage, had let it in."""
    async with s3() as (driver, _, peer):
        rows = driver.fake.catalog.objects
        (where,) = rows
        field = {"metadata": {"a": value}} if place == "metadata" else {"headers": {"content-type": value}}
        rows[where] = msgspec.structs.replace(rows[where], **field)
        await peer.send(request("GET", "/bucket/key") + request("GET", "/bucket/absent"))
        answer = await peer.answer()
        if place == "metadata" and value == "\u0100":
            assert answer.headers["x-amz-meta-a"].startswith("=?UTF-8?B?")
        else:
            assert (answer.status, code_of(answer)) == (500, "InternalError")
            assert "x-injected" not in answer.headers
        assert code_of(await peer.answer()) == "NoSuchKey"


@pytest.mark.parametrize("value", [b"\xff\xfe", b"\xc3", b"caf\xe9", b"\xed\xa0\x80", "café".encode()])
async def test_bytes_that_are_no_utf8_in_metadata_are_kept_or_refused_and_never_a_failure(value: bytes) -> None:
    async with s3() as (_, served, peer):
        sent = request("PUT", "/bucket/other", b"x", x_amz_meta_a=value.decode("latin-1"))
        await peer.send(sent)
        answer = await peer.answer()
        assert answer.status in (200, 400, 403)
        await peer.send(request("GET", "/bucket/other"))
        assert (await peer.answer()).status in (200, 404)
        assert all('"InternalError"' not in line for line in served.lines)


@pytest.mark.parametrize("target", ["/bucket/%ff", "/bucket/%c3%28", "/bucket/%00", "/bucket/%zz", "/bucket/%", "/%ff"])
async def test_targets_that_decode_to_no_text_are_refused(target: str) -> None:
    async with s3() as (_, _, peer):
        await peer.send(f"GET {target} HTTP/1.1\r\nHost: h\r\n\r\n".encode())
        answer = await peer.answer()
        assert (answer.status, code_of(answer)) == (400, "InvalidURI")


DOCUMENTS = {
    "an entity": (b'<!DOCTYPE a [<!ENTITY x "y">]><Delete><Object><Key>&x;</Key></Object></Delete>', "MalformedXML"),
    "nested entities": (
        b'<!DOCTYPE a [<!ENTITY x "yyyy"><!ENTITY z "&x;&x;&x;">]><Delete><Object><Key>&z;</Key></Object></Delete>',
        "MalformedXML",
    ),
    "a file": (
        b'<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]><Delete><Object><Key>&x;</Key></Object></Delete>',
        "MalformedXML",
    ),
    "UTF-16": ("<Delete><Object><Key>k</Key></Object></Delete>".encode("utf-16"), "MalformedXML"),
    "a NUL": (b"<Delete><Object><Key>\0</Key></Object></Delete>", "MalformedXML"),
    "depth": (b"<Delete>" + b"<Object>" * 100_000, "MalformedXML"),
    "elements": (b"<Delete>" + b"<Quiet/>" * 110_000 + b"</Delete>", "MalformedXML"),
    "a tag of a MiB": (b"<Delete " + b"a" * 1024 * 1024 + b"/>", "MalformedXML"),
    "size": (b"<Delete>" + b" " * 2 * 1024 * 1024 + b"</Delete>", "MaxMessageLengthExceeded"),
}


@pytest.mark.parametrize("name", list(DOCUMENTS))
async def test_a_hostile_document_is_refused(name: str) -> None:
    document, code = DOCUMENTS[name]
    async with s3() as (_, _, peer):
        await peer.send(request("POST", "/bucket?delete", document))
        answer = await peer.answer()
        assert (answer.status, code_of(answer)) == (400, code)


async def test_control_characters_in_names_come_back_as_references_or_encoded() -> None:
    async with s3() as (_, _, peer):
        await peer.send(request("PUT", "/bucket/a%01%3C%26%0D", b"x"))
        assert (await peer.answer()).status == 200
        await peer.send(request("GET", "/bucket?list-type=2&prefix=a"))
        assert b"<Key>a&#x1;&lt;&amp;&#xD;</Key>" in (await peer.answer()).body
        await peer.send(request("GET", "/bucket?list-type=2&prefix=a&encoding-type=url"))
        assert b"<Key>a%01%3C%26%0D</Key>" in (await peer.answer()).body
        await peer.send(request("GET", "/bucket/b%01%3C"))
        assert b"<Key>b&#x1;&lt;</Key>" in (await peer.answer()).body


async def test_a_signed_put_cannot_carry_a_second_request_in_its_body() -> None:
    hidden = request("DELETE", "/bucket/key")
    async with s3() as (_, served, peer):
        await peer.send(request("PUT", "/absent-bucket/key", hidden) + request("GET", "/bucket/key"))
        assert (await peer.answer()).status == 404
        assert (await peer.answer()).body == b"content"
        assert len(served.lines) == 2
