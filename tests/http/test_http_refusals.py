"""Whatever the HTTP layer answers by itself is S3 XML with a request id, a line in the log, and the end of the connection."""

from __future__ import annotations

import json
from xml.etree import ElementTree as ET

import pytest
from http_peers import HOST_ID, Answer, echo, serving

from kvobj.api.http import HttpSettings
from kvobj.api.message import Reply, RequestBody, RequestHead

NEXT = b"GET /next HTTP/1.1\r\nHost: h\r\n\r\n"


def put(*fields: bytes) -> bytes:
    """A PUT with these further fields, as they are."""
    return b"\r\n".join([b"PUT /b/k HTTP/1.1", b"Host: h", *fields, b"", b""])


def line(request_line: bytes) -> bytes:
    return request_line + b"\r\nHost: h\r\n\r\n"


REFUSED = {
    # Two answers to where the body ends (RFC 9112 §6.3).
    "both lengths": (put(b"Content-Length: 5", b"Transfer-Encoding: chunked"), 400, "BadRequest"),
    "both lengths, the other way": (put(b"Transfer-Encoding: chunked", b"Content-Length: 5"), 400, "BadRequest"),
    "two lengths": (put(b"Content-Length: 5", b"Content-Length: 6"), 400, "BadRequest"),
    "the same length twice": (put(b"Content-Length: 5", b"content-length: 5"), 400, "BadRequest"),
    "a list of lengths": (put(b"Content-Length: 5, 5"), 400, "BadRequest"),
    "a signed length": (put(b"Content-Length: +5"), 400, "BadRequest"),
    "a negative length": (put(b"Content-Length: -5"), 400, "BadRequest"),
    "a hexadecimal length": (put(b"Content-Length: 0x5"), 400, "BadRequest"),
    "an empty length": (put(b"Content-Length:"), 400, "BadRequest"),
    "an endless length": (put(b"Content-Length: 99999999999999999999"), 400, "BadRequest"),
    "a length beyond 64 bits": (put(b"Content-Length: 18446744073709551617"), 400, "BadRequest"),
    "chunked twice": (put(b"Transfer-Encoding: chunked, chunked"), 400, "BadRequest"),
    "chunked in two fields": (put(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"), 400, "BadRequest"),
    "almost chunked": (put(b"Transfer-Encoding: xchunked"), 400, "BadRequest"),
    "identity": (put(b"Transfer-Encoding: identity"), 400, "BadRequest"),
    "identity, then chunked": (put(b"Transfer-Encoding: identity", b"Transfer-Encoding: chunked"), 400, "BadRequest"),
    "chunked, then identity": (put(b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity"), 400, "BadRequest"),
    "compressed and chunked": (put(b"Transfer-Encoding: gzip, chunked"), 400, "BadRequest"),
    "chunked with a parameter": (put(b"Transfer-Encoding: chunked;q=1"), 400, "BadRequest"),
    "an empty coding": (put(b"Transfer-Encoding:"), 400, "BadRequest"),
    "a list with an empty member": (put(b"Transfer-Encoding: ,chunked"), 400, "BadRequest"),
    "a vertical tab before chunked": (put(b"Transfer-Encoding:\x0bchunked"), 400, "BadRequest"),
    "chunked under HTTP/1.0": (
        b"PUT /b/k HTTP/1.0\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n",
        400,
        "BadRequest",
    ),
    # Fields that two parsers could read differently (RFC 9112 §5, RFC 9110 §5.5).
    "Host twice": (put(b"Host: i"), 400, "BadRequest"),
    "the same Host twice": (put(b"host: h"), 400, "BadRequest"),
    "no Host": (b"PUT /b/k HTTP/1.1\r\n\r\n", 400, "BadRequest"),
    "other fields than Host alone": (b"GET /b/k HTTP/1.1\r\nUser-Agent: x\r\n\r\n", 400, "BadRequest"),
    "a Host of two words": (b"PUT /b/k HTTP/1.1\r\nHost: a b\r\n\r\n", 400, "BadRequest"),
    "a Host with a path": (b"PUT /b/k HTTP/1.1\r\nHost: a/b\r\n\r\n", 400, "BadRequest"),
    "a Host with a user": (b"PUT /b/k HTTP/1.1\r\nHost: a@b\r\n\r\n", 400, "BadRequest"),
    "a space before the colon": (put(b"X : y"), 400, "BadRequest"),
    "a tab before the colon": (put(b"Content-Length\t: 5"), 400, "BadRequest"),
    "a space before the first field": (b"PUT /b/k HTTP/1.1\r\n Host: h\r\n\r\n", 400, "BadRequest"),
    "a folded field": (put(b"X: y", b" z"), 400, "BadRequest"),
    "a field without a name": (put(b": y"), 400, "BadRequest"),
    "a field without a colon": (put(b"X"), 400, "BadRequest"),
    "a name with a parenthesis": (put(b"X(y): z"), 400, "BadRequest"),
    "a name that is no ASCII": (put(b"X\xff: y"), 400, "BadRequest"),
    "a bare CR in a value": (put(b"X: y\rz"), 400, "BadRequest"),
    "a bare LF in a value": (put(b"X: y\nz"), 400, "BadRequest"),
    "a bare LF that ends a field": (put(b"X: y\nContent-Length: 5"), 400, "BadRequest"),
    "bare LFs alone": (b"GET / HTTP/1.1\nHost: h\n\n", 400, "BadRequest"),
    "a NUL in a value": (put(b"X: y\0z"), 400, "BadRequest"),
    "a control character in a value": (put(b"X: \x01"), 400, "BadRequest"),
    "a DEL in a value": (put(b"X: \x7f"), 400, "BadRequest"),
    # Request lines (RFC 9112 §3).
    "two spaces": (line(b"GET  /b/k HTTP/1.1"), 400, "BadRequest"),
    "a space in the target": (line(b"GET /b/k x HTTP/1.1"), 400, "BadRequest"),
    "a space after the version": (line(b"GET /b/k HTTP/1.1 "), 400, "BadRequest"),
    "another protocol": (line(b"DESCRIBE /b/k RTSP/1.0"), 400, "BadRequest"),
    "a TLS hello": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "BadRequest"),
    "an SSH hello": (b"SSH-2.0-OpenSSH_9.2\r\n", 400, "BadRequest"),
    "a fragment": (line(b"GET /b/k#x HTTP/1.1"), 400, "InvalidURI"),
    "a NUL in the target": (line(b"GET /b/k\0 HTTP/1.1"), 400, "InvalidURI"),
    "a control character in the target": (line(b"GET /b/\x01 HTTP/1.1"), 400, "InvalidURI"),
    "UTF-8 in the target": (line(b"GET /b/\xc3\xa9 HTTP/1.1"), 400, "InvalidURI"),
    "no UTF-8 in the target": (line(b"GET /b/\xff HTTP/1.1"), 400, "InvalidURI"),
    "a target without a slash": (line(b"GET b/k HTTP/1.1"), 400, "InvalidURI"),
    "authority form": (line(b"GET h:80 HTTP/1.1"), 400, "InvalidURI"),
    "asterisk form": (line(b"OPTIONS * HTTP/1.1"), 400, "InvalidURI"),
    "absolute form of no HTTP": (line(b"GET ftp://h/ HTTP/1.1"), 400, "InvalidURI"),
    "absolute form without a server": (line(b"GET http:///b/k HTTP/1.1"), 400, "InvalidURI"),
    "absolute form of another server": (line(b"GET http://other/b/k HTTP/1.1"), 400, "BadRequest"),
    "absolute form of another port": (line(b"GET http://h:81/b/k HTTP/1.1"), 400, "BadRequest"),
    "absolute form with a user": (line(b"GET http://u@h/b/k HTTP/1.1"), 400, "BadRequest"),
    "a method nobody knows": (line(b"FROBNICATE /b/k HTTP/1.1"), 405, "MethodNotAllowed"),
    "a method in lower case": (line(b"get /b/k HTTP/1.1"), 405, "MethodNotAllowed"),
    "CONNECT": (line(b"CONNECT h:1 HTTP/1.1"), 405, "MethodNotAllowed"),
    "the preface of HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, "HttpVersionNotSupported"),
    "HTTP/2 in a request line": (line(b"GET /b/k HTTP/2.0"), 505, "HttpVersionNotSupported"),
    "HTTP/1.2": (line(b"GET /b/k HTTP/1.2"), 505, "HttpVersionNotSupported"),
    "HTTP/0.9 by name": (line(b"GET /b/k HTTP/0.9"), 505, "HttpVersionNotSupported"),
    "HTTP/0.9": (b"GET /b/k\r\n\r\n", 505, "HttpVersionNotSupported"),
    # Bounds.
    "a long request line": (line(b"GET /b/" + b"k" * 9000 + b" HTTP/1.1"), 414, "RequestURITooLong"),
    "an endless request line": (b"GET /b/" + b"k" * 20_000, 414, "RequestURITooLong"),
    "a long field": (put(b"X: " + b"y" * 41_000), 400, "RequestHeaderSectionTooLarge"),
    "endless fields": (b"PUT /b/k HTTP/1.1\r\n" + b"X: y\r\n" * 9000, 400, "RequestHeaderSectionTooLarge"),
    "too many fields": (put(*[b"X: y"] * 100), 400, "RequestHeaderSectionTooLarge"),
}


def check_error(answer: Answer, status: int, code: str, log_line: str) -> dict[str, str]:
    """The shape of every refusal; returns the elements of its XML."""
    elements = {element.tag: element.text or "" for element in ET.fromstring(answer.body)}  # noqa: S314
    assert (answer.status, elements["Code"]) == (status, code)
    assert answer.headers["content-type"] == "application/xml"
    assert elements["Message"]
    assert elements["RequestId"] == answer.headers["x-amz-request-id"] == "REQUEST1"
    assert elements["HostId"] == answer.headers["x-amz-id-2"] == HOST_ID
    logged = json.loads(log_line)
    assert (logged["request_id"], logged["status"], logged["error"]) == ("REQUEST1", status, code)
    assert logged["cause"]
    return elements


@pytest.mark.parametrize("name", list(REFUSED))
async def test_what_is_not_plain_http_is_refused_in_s3s_words_and_nothing_after_it_is_served(name: str) -> None:
    request, status, code = REFUSED[name]
    async with serving(echo) as served:
        peer = await served.connect()
        await peer.send(request + NEXT)
        peer.writer.write_eof()
        answer = await peer.answer()
        assert answer.headers["connection"] == "close"
        assert await peer.rest() == b""
        (logged,) = served.lines
        check_error(answer, status, code, logged)


async def test_a_refusal_names_method_and_resource_as_far_as_they_were_read() -> None:
    async with serving(echo) as served:
        peer = await served.connect()
        await peer.send(b"PUT /b/k?X-Amz-Signature=abc HTTP/1.1\r\nHost: h\r\nHost: h\r\n\r\n")
        elements = check_error(await peer.answer(), 400, "BadRequest", served.lines[0])
        assert elements["Resource"] == "/b/k"
        assert "Host" in elements["Message"]
        logged = json.loads(served.lines[0])
        assert (logged["method"], logged["target"]) == ("PUT", "/b/k?X-Amz-Signature=-")


async def test_a_method_that_is_not_known_is_told_which_are() -> None:
    async with serving(echo) as served:
        peer = await served.connect()
        await peer.send(line(b"FROBNICATE /b/k HTTP/1.1"))
        answer = await peer.answer()
        assert "PUT" in answer.headers["allow"]
        assert check_error(answer, 405, "MethodNotAllowed", served.lines[0])["Method"] == "FROBNICATE"


async def test_a_refused_head_request_gets_a_status_and_no_body() -> None:
    async with serving(echo) as served:
        peer = await served.connect()
        await peer.send(b"HEAD /b/k HTTP/1.1\r\nHost: h\r\nX : y\r\n\r\n")
        peer.writer.write_eof()
        reply = await peer.rest()
        assert reply.startswith(b"HTTP/1.1 400 ")
        assert reply.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    "fields",
    [
        (b"Upgrade: h2c", b"Connection: Upgrade, HTTP2-Settings", b"HTTP2-Settings: AAMAAABkAAQAAP__"),
        (b"Upgrade: websocket", b"Connection: Upgrade"),
        (b"Upgrade: TLS/1.2", b"Connection: Upgrade"),
    ],
)
async def test_an_upgrade_is_not_taken_and_the_request_served_as_it_is(fields: tuple[bytes, ...]) -> None:
    async with serving(echo) as served:
        peer = await served.connect()
        await peer.send(put(*fields, b"Content-Length: 5") + b"hello" + NEXT)
        assert (await peer.answer()).body == b"hello"
        assert (await peer.answer()).headers["x-target"] == "/next"


@pytest.mark.parametrize(
    ("request_bytes", "target"),
    [
        (b"GET http://h HTTP/1.1\r\nHost: h\r\n\r\n", "/"),
        (b"GET http://h?a HTTP/1.1\r\nHost: h\r\n\r\n", "/?a"),
        (b"GET HTTP://H:9/b//k%2F?a=http://x/ HTTP/1.1\r\nHost: h:9\r\n\r\n", "/b//k%2F?a=http://x/"),
        (b"GET https://h/b/k HTTP/1.0\r\n\r\n", "/b/k"),
        (b"\r\n\r\nGET //h/k HTTP/1.1\r\nHost:\r\n\r\n", "//h/k"),
    ],
)
async def test_targets_in_absolute_form_are_taken_where_they_name_this_host(request_bytes: bytes, target: str) -> None:
    async with serving(echo) as served:
        peer = await served.connect()
        await peer.send(request_bytes)
        assert (await peer.answer()).headers["x-target"] == target


async def test_host_is_what_an_absolute_target_says_where_http_10_sends_none() -> None:
    hosts: list[str | None] = []

    async def handle(head: RequestHead, _body: RequestBody) -> Reply:
        hosts.append(head.header("host"))
        return Reply(200)

    async with serving(handle) as served:
        peer = await served.connect()
        await peer.send(b"GET http://bucket.h/k HTTP/1.0\r\n\r\n")
        await peer.answer()
    assert hosts == ["bucket.h"]


async def test_a_busy_server_says_so_in_s3s_words_and_keeps_the_connection() -> None:
    async with serving(echo, HttpSettings(sweep_seconds=3600.0, handler_requests=1, queued_requests=0)) as served:
        gate = served.server._serving.gate
        assert await gate.enter()
        peer = await served.connect()
        await peer.send(NEXT)
        answer = await peer.answer()
        check_error(answer, 503, "SlowDown", served.lines[0])
        assert answer.headers["retry-after"] == "1"
        gate.leave()
        await peer.send(NEXT)
        assert (await peer.answer()).status == 200


async def test_a_handler_that_fails_is_an_internal_error_in_s3s_words() -> None:
    async def handle(_head: RequestHead, _body: RequestBody) -> Reply:
        raise RuntimeError("a defect")

    async with serving(handle) as served:
        peer = await served.connect()
        await peer.send(NEXT)
        answer = await peer.answer()
        lines = [text for text in served.lines if text.startswith("{")]
        check_error(answer, 500, "InternalError", lines[0])
        assert b"a defect" not in answer.body
