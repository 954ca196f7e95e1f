"""HTTP/1.1 and SigV4 by hand over blocking sockets, so that tests can also say what no client library would say.

Independent of the server's own parser and signer on purpose: an error in one does not hide in the other.
Knows Content-Length replies, replies without a body, and chunked ones without extensions or trailers (kvobj sends none of
these, radosgw's listings are).
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import ssl
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self
from urllib.parse import quote

UNSIGNED: Final = "UNSIGNED-PAYLOAD"
_EMPTY_SHA256: Final = hashlib.sha256(b"").hexdigest()
_HEAD_LIMIT_BYTES: Final = 256 * 1024


@dataclass(frozen=True, slots=True)
class Credentials:
    """A key pair and the region it signs for."""

    access_key: str
    secret_key: str
    region: str = "us-east-1"


@dataclass(frozen=True, slots=True)
class RawReply:
    """A whole reply; header names are lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str:
        """The S3 error code in an XML error body, or the empty string."""
        _, found, rest = self.body.decode("utf-8", "replace").partition("<Code>")
        return rest.partition("</Code>")[0] if found else ""


def _hmac(key: bytes, text: str) -> bytes:
    return hmac.new(key, text.encode(), hashlib.sha256).digest()


def signing_key(credentials: Credentials, day: str, service: str = "s3") -> bytes:
    """The derived key of one day, region and service."""
    key = _hmac(("AWS4" + credentials.secret_key).encode(), day)
    for text in (credentials.region, service, "aws4_request"):
        key = _hmac(key, text)
    return key


def encode_key(key: str) -> str:
    """An object key as it stands in a request target."""
    return quote(key, safe="/-_.~")


def canonical_query(query: Mapping[str, str]) -> str:
    """The query string in SigV4's canonical form, which is also a legal target."""
    pairs = sorted((quote(name, safe="-_.~"), quote(value, safe="-_.~")) for name, value in query.items())
    return "&".join(f"{name}={value}" for name, value in pairs)


@dataclass(frozen=True, slots=True)
class SignedHead:
    """A request head ready to be sent, and what signed chunks need to go on from it."""

    head: bytes
    signature: str
    amz_date: str
    scope: str


def sign_head(
    credentials: Credentials,
    method: str,
    host: str,
    path: str,
    *,
    query: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
    payload: str | bytes | None = UNSIGNED,
    at: float | None = None,
) -> SignedHead:
    """Sign and write out a request head. `path` is percent-encoded already.

    `payload` is the value of x-amz-content-sha256, or the body itself to hash, or None for the empty body.
    """
    if payload is None:
        payload_hash = _EMPTY_SHA256
    else:
        payload_hash = payload if isinstance(payload, str) else hashlib.sha256(payload).hexdigest()
    amz_date = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(at if at is not None else time.time()))
    sent = {name.lower(): value for name, value in (headers or {}).items()}
    sent |= {"host": host, "x-amz-date": amz_date, "x-amz-content-sha256": payload_hash}
    names = sorted(
        name
        for name in sent
        if name in {"host", "content-type", "content-md5"} or name.startswith(("x-amz-", "x-kvobj-"))
    )
    query_string = canonical_query(query or {})
    canonical = "\n".join(
        [
            method,
            path,
            query_string,
            *(f"{name}:{' '.join(sent[name].split())}" for name in names),
            "",
            ";".join(names),
            payload_hash,
        ]
    )
    scope = f"{amz_date[:8]}/{credentials.region}/s3/aws4_request"
    digest = hashlib.sha256(canonical.encode("latin-1")).hexdigest()
    text = f"AWS4-HMAC-SHA256\n{amz_date}\n{scope}\n{digest}"
    signature = hmac.new(signing_key(credentials, amz_date[:8]), text.encode(), hashlib.sha256).hexdigest()
    sent["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={credentials.access_key}/{scope},"
        f"SignedHeaders={';'.join(names)},Signature={signature}"
    )
    target = f"{path}?{query_string}" if query_string else path
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in sent.items()), "", ""]
    return SignedHead("\r\n".join(lines).encode("latin-1"), signature, amz_date, scope)


def signed_chunks(credentials: Credentials, seed: SignedHead, chunks: Iterable[bytes]) -> bytes:
    """An aws-chunked body whose chunks are signed one after the other; the zero chunk is added."""
    key = signing_key(credentials, seed.amz_date[:8])
    previous = seed.signature
    out = bytearray()
    for chunk in (*chunks, b""):
        text = "\n".join(
            [
                "AWS4-HMAC-SHA256-PAYLOAD",
                seed.amz_date,
                seed.scope,
                previous,
                _EMPTY_SHA256,
                hashlib.sha256(chunk).hexdigest(),
            ]
        )
        previous = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
        out += f"{len(chunk):x};chunk-signature={previous}\r\n".encode() + chunk + b"\r\n"
    return bytes(out)


@dataclass(slots=True)
class RawConnection:
    """One keep-alive connection, with TLS where a context is given. Not thread-safe. Every wait ends after `timeout_seconds`
    with TimeoutError."""

    host: str
    port: int
    timeout_seconds: float = 30.0
    tls: ssl.SSLContext | None = None
    _socket: socket.socket = field(init=False, repr=False)
    _unread: bytearray = field(init=False, repr=False, default_factory=bytearray)

    def __post_init__(self) -> None:
        self._socket = socket.create_connection((self.host, self.port), timeout=self.timeout_seconds)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.tls is not None:
            try:
                self._socket = self.tls.wrap_socket(self._socket, server_hostname=self.host)
            except BaseException:
                self._socket.close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def local_port(self) -> int:
        """The client's own port."""
        return int(self._socket.getsockname()[1])

    def limit(self, timeout_seconds: float) -> None:
        """From here on every wait ends after so long."""
        self._socket.settimeout(timeout_seconds)

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._socket.close()

    def reset(self) -> None:
        """Vanish: close with a reset instead of a farewell."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        self._socket.close()

    def send(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of the bytes as they are."""
        self._socket.sendall(data)

    def is_closed_by_peer(self) -> bool:
        """Wait for the peer to close (True) or to send something unasked (False); TimeoutError if it does neither."""
        try:
            return self._socket.recv(1) == b""
        except ConnectionError:
            return True

    def read_reply(self, *, has_body: bool = True) -> RawReply:
        """Read one reply. ConnectionError if the peer closes before it is whole."""
        while (end := self._unread.find(b"\r\n\r\n")) < 0:
            if len(self._unread) > _HEAD_LIMIT_BYTES:
                raise ConnectionError("reply head too long")
            self._fill()
        lines = bytes(self._unread[:end]).decode("latin-1").split("\r\n")
        del self._unread[: end + 4]
        status = int(lines[0].split(" ", 2)[1])
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])
        }
        is_bodiless = not has_body or status in {204, 304}
        if headers.get("transfer-encoding", "").lower() == "chunked" and not is_bodiless:
            return RawReply(status, headers, self._read_chunks())
        length = 0 if is_bodiless else int(headers.get("content-length", "0"))
        return RawReply(status, headers, self._read_exactly(length))

    def _read_chunks(self) -> bytes:
        body = bytearray()
        while True:
            while (end := self._unread.find(b"\r\n")) < 0:
                self._fill()
            length = int(bytes(self._unread[:end]), 16)
            del self._unread[: end + 2]
            body += self._read_exactly(length)
            if self._read_exactly(2) != b"\r\n":
                raise ConnectionError("a chunk is not followed by a line end")
            if not length:
                return bytes(body)

    def _fill(self) -> None:
        received = self._socket.recv(256 * 1024)
        if not received:
            raise ConnectionError("the peer closed the connection")
        self._unread += received

    def _read_exactly(self, length: int) -> bytes:
        if len(self._unread) >= length:
            body = bytes(self._unread[:length])
            del self._unread[:length]
            return body
        buffer = bytearray(length)
        filled = len(self._unread)
        buffer[:filled] = self._unread
        self._unread.clear()
        view = memoryview(buffer)
        while filled < length:
            count = self._socket.recv_into(view[filled:])
            if not count:
                raise ConnectionError(f"the peer closed the connection in a body received={filled} length={length}")
            filled += count
        view.release()
        return bytes(buffer)


@dataclass(slots=True)
class RawS3:
    """Signed S3 requests over one raw connection at a time; reconnects after a reply that closes it."""

    host: str
    port: int
    credentials: Credentials
    timeout_seconds: float = 30.0
    tls: ssl.SSLContext | None = None
    _connection: RawConnection | None = field(init=False, repr=False, default=None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def authority(self) -> str:
        """What stands in the Host header."""
        return f"{self.host}:{self.port}"

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def connect(self) -> RawConnection:
        """A connection of the caller's own."""
        return RawConnection(self.host, self.port, self.timeout_seconds, self.tls)

    def head(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        payload: str | bytes | None = UNSIGNED,
    ) -> SignedHead:
        """A signed head for this server; `path` is not yet percent-encoded."""
        return sign_head(
            self.credentials, method, self.authority, encode_key(path), query=query, headers=headers, payload=payload
        )

    def request(
        self,
        method: str,
        path: str,
        body: bytes | memoryview = b"",
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        payload: str | bytes | None = UNSIGNED,
    ) -> RawReply:
        """One request and its reply. A ConnectionError means that what became of it is unknown."""
        sent = dict(headers or {})
        if body or method in {"PUT", "POST"}:
            sent.setdefault("content-length", str(len(body)))
        head = self.head(method, path, query=query, headers=sent, payload=payload).head
        if self._connection is None:
            self._connection = self.connect()
        try:
            if len(body) <= 64 * 1024:
                self._connection.send(head + bytes(body))
            else:
                self._connection.send(head)
                self._connection.send(body)
            reply = self._connection.read_reply(has_body=method != "HEAD")
        except OSError:
            self.close()
            raise
        if reply.headers.get("connection", "").lower() == "close":
            self.close()
        return reply
