"""Drives `S3Service.handle` with requests that botocore signed: what a client puts on the wire, without sockets."""

from __future__ import annotations

import datetime as dt
import hashlib
import hmac
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import cast
from xml.etree import ElementTree as ET

from botocore.auth import S3SigV4Auth, S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from fakes_store import FakeStore

from kvobj.api.exchange import S3Settings
from kvobj.api.message import Reply, RequestHead
from kvobj.api.object_store import ObjectStore
from kvobj.api.service import S3Service
from kvobj.catalog.rows import UserRow
from kvobj.errors import IncompleteBodyError

ROOT = UserRow("root", "Root", "AKROOT", "root secret", is_root=True)
ALICE = UserRow("alice", "Alice", "AKALICE", "alice secret")
BOB = UserRow("bob", "Bob", "AKBOB", "bob secret")
HOST = "127.0.0.1:9000"


class WallClock:
    """Real wall time, since botocore signs with it; tests turn it by `offset_ms`."""

    def __init__(self) -> None:
        self.offset_ms = 0

    def now_ms(self) -> int:
        return int(dt.datetime.now(dt.UTC).timestamp() * 1000) + self.offset_ms

    def monotonic(self) -> float:
        return self.now_ms() / 1000


class FakeBody:
    """A request body: `length` as HTTP framed it, bytes that arrive in pieces of at most `step`."""

    def __init__(
        self, data: bytes = b"", *, chunked: bool = False, length: int | None = None, step: int = 1 << 20
    ) -> None:
        self._data = data
        self._position = 0
        self._step = step
        self._length = None if chunked else (len(data) if length is None else length)
        self.accepted = False
        self.awaits_continue = False

    @property
    def length(self) -> int | None:
        return self._length

    @property
    def unread_bytes(self) -> int:
        return len(self._data) - self._position

    def take_whole(self) -> bytes | None:
        is_here = self._length == len(self._data) <= self._step and not self._position
        if not is_here or self.awaits_continue:
            return None
        self.accepted = True
        self._position = len(self._data)
        return self._data

    async def accept(self) -> None:
        self.accepted = True

    async def read_some(self, limit: int) -> bytes:
        self.accepted = True
        piece = self._data[self._position : self._position + min(limit, self._step)]
        self._position += len(piece)
        return piece

    async def receive_into(self, buffer: memoryview, on_bytes: Callable[[int], None]) -> None:
        self.accepted = True
        filled = 0
        while filled < len(buffer):
            piece = await self.read_some(len(buffer) - filled)
            if not piece:
                raise IncompleteBodyError("the body ended early")
            buffer[filled : filled + len(piece)] = piece
            filled += len(piece)
            on_bytes(filled)


class MeanwhileBody(FakeBody):
    """A body in whose middle something else happens."""

    def __init__(self, data: bytes, meanwhile: Callable[[], Awaitable[object]]) -> None:
        super().__init__(data)
        self._meanwhile: Callable[[], Awaitable[object]] | None = meanwhile

    def take_whole(self) -> bytes | None:
        return None

    async def read_some(self, limit: int) -> bytes:
        meanwhile, self._meanwhile = self._meanwhile, None
        if meanwhile is not None:
            await meanwhile()
        return await super().read_some(limit)


def all_headers(reply: Reply) -> tuple[tuple[str, str], ...]:
    """All of its header fields: those that are ready, too."""
    pairs = [line.split(": ", 1) for line in reply.ready.split("\r\n")[:-1]]
    return (*reply.headers, *((name, value) for name, value in pairs))


@dataclass
class Answer:
    reply: Reply
    body: bytes
    request_body: FakeBody

    @property
    def status(self) -> int:
        return self.reply.status

    @property
    def headers(self) -> dict[str, str]:
        return dict(all_headers(self.reply))

    @property
    def xml(self) -> ET.Element:
        root = ET.fromstring(self.body)  # noqa: S314 - our own output
        for element in root.iter():
            element.tag = element.tag.rpartition("}")[2]
        return root

    @property
    def code(self) -> str | None:
        return self.xml.findtext("Code")

    def texts(self, path: str) -> list[str]:
        return [element.text or "" for element in self.xml.findall(path)]


class Driver:
    """One service over one store, and the requests of its users."""

    def __init__(
        self, *, store: ObjectStore | None = None, settings: S3Settings | None = None, clock: WallClock | None = None
    ) -> None:
        self.clock = clock or WallClock()
        self.fake = FakeStore(now_ms=self.clock.now_ms)
        self.fake.catalog.user_rows = {user.id: user for user in (ROOT, ALICE, BOB)}
        # The fake's catalog has the verbs that the S3 layer uses, and no others.
        fake = cast("ObjectStore", self.fake)
        self.store = store or fake
        self.service = S3Service(self.store, settings or S3Settings(), clock=self.clock, log=logging.getLogger("test"))
        self.request_ids = 0

    async def send(
        self,
        method: str,
        target: str,
        headers: Sequence[tuple[str, str]] = (),
        body: FakeBody | bytes = b"",
        *,
        with_length: bool = True,
    ) -> Answer:
        """Send exactly this, signed or not."""
        if isinstance(body, bytes):
            body = FakeBody(body)
        fields = [(name.lower(), value) for name, value in headers]
        if with_length and body.length is not None and not any(name == "content-length" for name, _ in fields):
            fields.append(("content-length", str(body.length)))
        body.awaits_continue = ("expect", "100-continue") in fields
        self.request_ids += 1
        head = RequestHead(method, target, tuple(fields), f"{self.request_ids:016X}", "127.0.0.1")
        reply = await self.service.handle(head, body)
        if isinstance(reply.body, bytes):
            return Answer(reply, reply.body, body)
        data = b"".join([bytes(view) async for view in reply.body.views()])
        assert reply.body.length in (None, len(data))
        await reply.body.aclose()
        return Answer(reply, data, body)

    async def request(
        self,
        method: str,
        target: str,
        *,
        body: FakeBody | bytes = b"",
        headers: dict[str, str] | None = None,
        user: UserRow = ALICE,
        host: str = HOST,
        payload: str | None = None,
        with_length: bool = True,
    ) -> Answer:
        """Send a request signed in its headers. `payload`: x-amz-content-sha256 (default: the body's digest)."""
        fields = sign(method, target, body, headers=headers, user=user, host=host, payload=payload)
        return await self.send(method, target, fields, body, with_length=with_length)

    async def put(self, target: str, data: bytes, **headers: str) -> Answer:
        return await self.request(
            "PUT", target, body=data, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )

    async def get(self, target: str, **headers: str) -> Answer:
        return await self.request("GET", target, headers={k.replace("_", "-"): v for k, v in headers.items()})


def sign(
    method: str,
    target: str,
    body: FakeBody | bytes = b"",
    *,
    headers: dict[str, str] | None = None,
    user: UserRow = ALICE,
    host: str = HOST,
    payload: str | None = None,
    region: str = "us-east-1",
) -> list[tuple[str, str]]:
    """The headers of a request as botocore signs them."""
    data = body if isinstance(body, bytes) else b""
    request = AWSRequest(
        method=method, url=f"http://{host}{target}", data=data, headers={"host": host, **(headers or {})}
    )
    request.headers["X-Amz-Content-SHA256"] = payload or hashlib.sha256(data).hexdigest()
    auth = S3SigV4Auth(Credentials(user.access_key, user.secret_key), "s3", region)
    auth.payload = lambda _: request.headers["X-Amz-Content-SHA256"]
    fixed = request.headers["X-Amz-Content-SHA256"]
    auth._modify_request_before_signing = lambda _request: None
    stamp = dt.datetime.now(dt.UTC).strftime("%Y%m%dT%H%M%SZ")
    request.context["timestamp"] = stamp
    request.headers["X-Amz-Date"] = stamp
    canonical = auth.canonical_request(request)
    assert canonical.endswith(fixed)
    auth._inject_signature_to_request(request, auth.signature(auth.string_to_sign(request, canonical), request))
    return [(name.lower(), value) for name, value in request.headers.items()]


def presign(
    method: str,
    target: str,
    *,
    user: UserRow = ALICE,
    expires_seconds: int = 60,
    host: str = HOST,
    region: str = "us-east-1",
) -> str:
    """A presigned target."""
    request = AWSRequest(method=method, url=f"http://{host}{target}", headers={"host": host})
    S3SigV4QueryAuth(Credentials(user.access_key, user.secret_key), "s3", region, expires=expires_seconds).add_auth(
        request
    )
    return str(request.url).removeprefix(f"http://{host}")


def seed_of(fields: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """(signature, stamp) of signed headers: what the chunk signatures start from."""
    names = dict(fields)
    return names["authorization"].rpartition("Signature=")[2], names["x-amz-date"]


def chunk_key(user: UserRow, stamp: str, region: str = "us-east-1") -> bytes:
    key = b"AWS4" + user.secret_key.encode()
    for piece in (stamp[:8], region, "s3", "aws4_request"):
        key = hmac.digest(key, piece.encode(), "sha256")
    return key


def signed_chunks(
    pieces: Sequence[bytes],
    *,
    user: UserRow,
    seed: str,
    stamp: str,
    trailer: tuple[str, str] | None = None,
    region: str = "us-east-1",
) -> bytes:
    """An aws-chunked body with chunk signatures, and a signed trailer if there is one."""
    key, scope, previous = chunk_key(user, stamp, region), f"{stamp[:8]}/{region}/s3/aws4_request", seed
    out = b""
    for piece in (*pieces, b""):
        digests = f"{hashlib.sha256(b'').hexdigest()}\n{hashlib.sha256(piece).hexdigest()}"
        text = f"AWS4-HMAC-SHA256-PAYLOAD\n{stamp}\n{scope}\n{previous}\n{digests}"
        previous = hmac.digest(key, text.encode(), "sha256").hex()
        out += f"{len(piece):x};chunk-signature={previous}\r\n".encode() + piece + (b"\r\n" if piece else b"")
    if trailer is not None:
        line = f"{trailer[0]}:{trailer[1]}"
        digest = hashlib.sha256(f"{line}\n".encode()).hexdigest()
        text = f"AWS4-HMAC-SHA256-TRAILER\n{stamp}\n{scope}\n{previous}\n{digest}"
        signature = hmac.digest(key, text.encode(), "sha256").hex()
        out += f"{line}\r\nx-amz-trailer-signature:{signature}\r\n".encode()
    return out + b"\r\n"


def unsigned_chunks(pieces: Sequence[bytes], trailers: Sequence[tuple[str, str]] = ()) -> bytes:
    """An aws-chunked body without signatures."""
    out = b"".join(f"{len(piece):x}\r\n".encode() + piece + b"\r\n" for piece in pieces)
    return out + b"0\r\n" + b"".join(f"{name}:{value}\r\n".encode() for name, value in trailers) + b"\r\n"
