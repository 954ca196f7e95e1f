"""Bodies, framings and heads that are wrong, and clients that vanish: no object, no extent, no pin is left behind.

Every case is sent over a raw socket to a real server. Afterwards the key is absent, the arena holds what it held before,
and the connection is closed or answers the next request as if nothing had been.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from module_paths import ModulePaths
from raw_http import UNSIGNED, RawConnection, RawReply, SignedHead, signed_chunks
from server_process import MIB, BucketSetting, ServerProcess, ServerSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

BODY = bytes(range(256)) * 1200  # 300 KiB: a segment blob, not an inline one
UNSIGNED_TRAILER = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"
SIGNED_STREAM = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"
BUCKETS = ("plain", "chunks")


@pytest.fixture(scope="module")
def server(module_paths: ModulePaths) -> Iterator[ServerProcess]:
    settings = ServerSettings(
        dram_bytes=64 * MIB,
        buckets=(BucketSetting("plain"), BucketSetting("chunks", "kv", "memory")),
        sections={"limits": {"header_timeout": '"1 s"', "progress_timeout": '"1 s"'}},
    )
    with ServerProcess(module_paths.mktemp("bad-input"), settings) as running:
        yield running


@dataclass(frozen=True, slots=True)
class BadPut:
    """A PUT that must be refused: what is sent after a signed head, and the answer that S3 gives."""

    name: str
    status: int
    code: str
    payload: str | bytes = UNSIGNED
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = BODY
    frame: Callable[[ServerProcess, SignedHead], bytes] | None = None


def chunk(data: bytes, *, size: int | None = None, end: bytes = b"\r\n") -> bytes:
    return f"{len(data) if size is None else size:x}\r\n".encode() + data + end


def streamed(body: bytes, decoded: int = len(BODY), trailer: str | None = None) -> dict[str, str]:
    headers = {
        "content-encoding": "aws-chunked",
        "content-length": str(len(body)),
        "x-amz-decoded-content-length": str(decoded),
    }
    return headers | ({"x-amz-trailer": trailer} if trailer else {})


def unsigned_stream(
    name: str, status: int, code: str, body: bytes, *, decoded: int = len(BODY), trailer: str | None = None
) -> BadPut:
    return BadPut(name, status, code, UNSIGNED_TRAILER, streamed(body, decoded, trailer), body)


CRC32 = base64.b64encode(zlib.crc32(BODY).to_bytes(4, "big")).decode()
WRONG_CRC32 = base64.b64encode(zlib.crc32(b"other").to_bytes(4, "big")).decode()
END = b"0\r\n\r\n"

BAD_PUTS = (
    BadPut("a wrong MD5", 400, "BadDigest", headers={"content-md5": "1B2M2Y8AsgTpgAmY7PhCfg=="}),
    BadPut("an MD5 that is none", 400, "InvalidDigest", headers={"content-md5": "not base64!"}),
    BadPut("a wrong SHA-256", 400, "XAmzContentSHA256Mismatch", payload=b"other bytes"),
    BadPut("a payload mode that does not exist", 400, "InvalidArgument", payload="STREAMING-SOMETHING-ELSE"),
    BadPut("a wrong crc32", 400, "BadDigest", headers={"x-amz-checksum-crc32": WRONG_CRC32}),
    BadPut("a wrong crc32c", 400, "BadDigest", headers={"x-amz-checksum-crc32c": WRONG_CRC32}),
    BadPut("a crc32 that is none", 400, "InvalidRequest", headers={"x-amz-checksum-crc32": "short"}),
    unsigned_stream("a chunk size that is no number", 400, "", b"xyz\r\n" + BODY + b"\r\n" + END),
    unsigned_stream("a chunk without its line end", 400, "", chunk(BODY, end=b"xx") + END),
    unsigned_stream("a negative chunk size", 400, "", b"-5\r\nhello\r\n" + END, decoded=5),
    unsigned_stream("a chunk size line without end", 400, "", b"4" * 20_000, decoded=5),
    unsigned_stream("fewer bytes than were declared", 400, "IncompleteBody", chunk(BODY[:-1]) + END),
    unsigned_stream("more bytes than were declared", 400, "", chunk(BODY + b"x") + END),
    unsigned_stream("something after the end", 400, "", chunk(BODY) + END + b"more"),
    unsigned_stream("no end chunk", 400, "", chunk(BODY)),
    unsigned_stream(
        "a trailer that was announced and did not come",
        400,
        "MalformedTrailerError",
        chunk(BODY) + END,
        trailer="x-amz-checksum-crc32",
    ),
    unsigned_stream(
        "a trailer with a wrong checksum",
        400,
        "BadDigest",
        chunk(BODY) + b"0\r\nx-amz-checksum-crc32:" + WRONG_CRC32.encode() + b"\r\n\r\n",
        trailer="x-amz-checksum-crc32",
    ),
    unsigned_stream(
        "another trailer than announced",
        400,
        "MalformedTrailerError",
        chunk(BODY) + b"0\r\nx-amz-checksum-sha1:" + CRC32.encode() + b"\r\n\r\n",
        trailer="x-amz-checksum-crc32",
    ),
)


def send(server: ServerProcess, connection: RawConnection, path: str, bad: BadPut) -> None:
    with server.raw() as raw:
        headers = {"content-length": str(len(bad.body)), **bad.headers}
        head = raw.head("PUT", path, headers=headers, payload=bad.payload).head
    connection.send(head)
    with contextlib.suppress(ConnectionError):  # refused before all was sent: the reply is there or the end
        connection.send(bad.body)


def reply_or_close(connection: RawConnection) -> RawReply | None:
    try:
        return connection.read_reply()
    except ConnectionError:
        return None


def assert_absent(server: ServerProcess, path: str) -> None:
    with server.raw() as raw:
        assert raw.request("HEAD", path).status == 404
        listed = raw.request("GET", f"/{path.split('/')[1]}", query={"list-type": "2"}, payload=None)
        assert path.split("/", 2)[2].encode() not in listed.body


def assert_connection_clean_or_closed(server: ServerProcess, connection: RawConnection, last: RawReply | None) -> None:
    if last is None or last.headers.get("connection", "").lower() == "close":
        return
    with server.raw() as raw:
        head = raw.head("HEAD", "/plain").head
    try:
        connection.send(head)
        assert connection.read_reply(has_body=False).status == 200
    except ConnectionError:
        pass  # closed: also right


@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("bad", BAD_PUTS, ids=lambda bad: bad.name)
def test_a_bad_body_is_refused_and_leaves_nothing(server: ServerProcess, bucket: str, bad: BadPut) -> None:
    before = server.settled_occupancy()
    path = f"/{bucket}/bad"
    with server.raw() as raw:
        connection = raw.connect()
    with connection:
        send(server, connection, path, bad)
        reply = reply_or_close(connection)
        assert reply is not None, "an S3 error is expected, not a bare close"
        assert reply.status == bad.status, reply
        if bad.code:
            assert reply.code == bad.code, reply
        assert_connection_clean_or_closed(server, connection, reply)
    assert_absent(server, path)
    server.wait_for_occupancy(before)


@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("is_reset", [False, True], ids=["closes", "resets"])
@pytest.mark.parametrize("sent", [0, 1, 100_000, 8 * MIB - 1])
def test_a_client_that_vanishes_leaves_nothing(
    server: ServerProcess, bucket: str, *, sent: int, is_reset: bool
) -> None:
    before = server.settled_occupancy()
    path = f"/{bucket}/vanished"
    with server.raw() as raw:
        head = raw.head("PUT", path, headers={"content-length": str(8 * MIB)}).head
        connection = raw.connect()
    connection.send(head + bytes(sent))
    if is_reset:
        connection.reset()
    else:
        connection.close()
    server.wait_for_occupancy(before)
    assert_absent(server, path)


@pytest.mark.parametrize("bucket", BUCKETS)
def test_a_client_that_stalls_is_given_up(server: ServerProcess, bucket: str) -> None:
    before = server.settled_occupancy()
    path = f"/{bucket}/stalled"
    with server.raw() as raw:
        head = raw.head("PUT", path, headers={"content-length": str(8 * MIB)}).head
        connection = raw.connect()
    with connection:
        connection.send(head + bytes(MIB))
        last = reply_or_close(connection)
        assert last is None or last.status >= 400
        server.wait_for_occupancy(before)
    assert_absent(server, path)


def test_a_reader_that_vanishes_leaves_no_pin(server: ServerProcess) -> None:
    before = server.settled_occupancy()
    with server.raw() as raw:
        assert raw.request("PUT", "/plain/read", bytes(16 * MIB)).status == 200
        for _ in range(3):
            connection = raw.connect()
            connection.send(raw.head("GET", "/plain/read").head)
            connection.reset()
        assert raw.request("GET", "/plain/read").body == bytes(16 * MIB)
        assert raw.request("DELETE", "/plain/read").status == 204
    server.wait_for_occupancy(before)


def test_bytes_after_the_declared_length_are_no_part_of_the_body(server: ServerProcess) -> None:
    with server.raw() as raw:
        head = raw.head("PUT", "/plain/longer", headers={"content-length": "5"}).head
        connection = raw.connect()
    with connection:
        connection.send(head + b"12345" + b"garbage that is no request\r\n\r\n")
        assert connection.read_reply().status == 200
        last = reply_or_close(connection)
        assert last is None or last.status == 400
    with server.raw() as raw:
        assert raw.request("GET", "/plain/longer").body == b"12345"
        assert raw.request("DELETE", "/plain/longer").status == 204


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"y" * 100_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: y\r\n" % number for number in range(3000)) + b"\r\n",
        b"GET /" + b"z" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PUT /plain/x HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n12345",
        b"PUT /plain/x HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"PUT /plain/x HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"PUT /plain/x HTTP/1.1\r\nHost: a\r\nHost: b\r\nContent-Length: 0\r\n\r\n",
        b"not http at all\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    ],
    ids=[
        "long-header",
        "many-headers",
        "long-target",
        "two-lengths",
        "both-lengths",
        "negative-length",
        "two-hosts",
        "no-http",
        "tls",
    ],
)
def test_a_bad_head_is_refused_and_the_connection_closed(server: ServerProcess, head: bytes) -> None:
    with server.raw(timeout_seconds=10) as raw:
        connection = raw.connect()
    with connection:
        try:
            connection.send(head)
        except ConnectionError:
            return
        reply = reply_or_close(connection)
        if reply is not None:
            assert 400 <= reply.status < 500, reply
            assert connection.is_closed_by_peer()


def test_a_head_that_never_ends_is_given_up(server: ServerProcess) -> None:
    with server.raw(timeout_seconds=10) as raw, raw.connect() as connection:
        connection.send(b"GET / HTTP/1.1\r\nHost: x\r\n")
        last = reply_or_close(connection)
        assert last is None or last.status in {400, 408}


@pytest.mark.parametrize("position", [0, 1])
def test_a_signed_chunk_that_was_changed_is_refused(server: ServerProcess, position: int) -> None:
    before = server.settled_occupancy()
    chunks = (BODY[:200_000], BODY[200_000:])
    with server.raw() as raw:
        length = len(signed_chunks(raw.credentials, raw.head("PUT", "/plain/x"), chunks))
        headers = {
            "content-encoding": "aws-chunked",
            "content-length": str(length),
            "x-amz-decoded-content-length": str(len(BODY)),
        }
        head = raw.head("PUT", "/plain/forged", headers=headers, payload=SIGNED_STREAM)
        good = signed_chunks(raw.credentials, head, chunks)
        changed = bytearray(good)
        changed[good.index(chunks[position]) + 7] ^= 1
        with raw.connect() as connection:
            connection.send(head.head)
            connection.send(changed)
            reply = reply_or_close(connection)
            assert reply is None or (reply.status, reply.code) == (403, "SignatureDoesNotMatch")
    assert_absent(server, "/plain/forged")
    server.wait_for_occupancy(before)
    with server.raw() as raw, raw.connect() as connection:
        head = raw.head("PUT", "/plain/genuine", headers=headers, payload=SIGNED_STREAM)
        connection.send(head.head)
        connection.send(signed_chunks(raw.credentials, head, chunks))
        assert connection.read_reply().status == 200
        assert raw.request("GET", "/plain/genuine").body == BODY


@pytest.mark.parametrize("mode", [UNSIGNED, UNSIGNED_TRAILER, SIGNED_STREAM, hashlib.sha256(BODY).hexdigest()])
def test_no_payload_mode_gets_around_the_signature(server: ServerProcess, mode: str) -> None:
    with server.raw() as raw:
        body = chunk(BODY) + END if "STREAMING" in mode else BODY
        headers = streamed(body) if "STREAMING" in mode else {"content-length": str(len(body))}
        head = raw.head("PUT", "/plain/stolen", headers=headers, payload=mode)
        forged = head.head.replace(head.signature.encode(), b"0" * 64)
        with raw.connect() as connection:
            connection.send(forged)
            with contextlib.suppress(ConnectionError):
                connection.send(body)
            reply = reply_or_close(connection)
            assert reply is None or (reply.status, reply.code) == (403, "SignatureDoesNotMatch")
    assert_absent(server, "/plain/stolen")
