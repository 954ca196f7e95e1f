"""Fuzz target for whole requests: the S3 service in process, over a store in dicts, answering recorded requests that were changed.

A case is one to three requests, sent to a store that is the same before each case. What must hold: no exception and no 500; nothing
is waited for; replies that no value of a client's can split, with well-formed bodies; no open transfer is left; and who did not sign
gets nothing done.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import logging
from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any, Final, cast

from fakes import ManualClock
from fakes_store import FakeStore
from fuzz_framing import StepBody, finish
from fuzz_message import PATHS, Message, MessageMutator, parse_message, recorded_messages
from fuzz_settings import SETTINGS
from fuzz_signatures import ALICE, RULES, signed
from fuzz_signing import NOW_MS, signed_chunks, unsigned_chunks
from s3_driver import all_headers

from kvobj.api import xml
from kvobj.api.checksums import HEADERS
from kvobj.api.chunk_headers import PARENT_HEADER, PIN_HEADER
from kvobj.api.exchange import S3Settings
from kvobj.api.message import Reply, RequestHead
from kvobj.api.object_store import ObjectStore
from kvobj.api.service import S3Service
from kvobj.catalog.memory_namespaces import MemoryNamespaces
from kvobj.catalog.namespace_protocol import NamespaceUsage
from kvobj.catalog.rows import BucketKind, BucketRow, Durability, UserRow
from kvobj.codec.checksums import Digester

SEPARATOR: Final = b"\n#then\n"
_BOB: Final = UserRow("bob", "Bob", "AKBOB", "bob secret")
_STATUSES: Final = frozenset({200, 204, 206, 304, 307, 400, 403, 404, 405, 409, 411, 412, 413, 415, 416, 417, 422, 501})
_NOT_SENT: Final = frozenset({b"content-length", b"transfer-encoding", PARENT_HEADER.encode(), PIN_HEADER.encode()})
_BUCKETS: Final = (b"/bucket",) * 7 + (b"/open",) * 3 + (b"/chunks", b"/chunks", b"/bobs", b"/new-one")
_OBJECTS: Final = (
    b"/bucket/object", b"/bucket/object", b"/bucket/whole", b"/bucket/a%2Fb", b"/bucket/folder/one", b"/bucket/new", b"/chunks/live", b"/chunks/new",
    b"/open/object", b"/open/object", b"/open/kept/key", b"/bobs/key", b"/chunks/ns/" + b"11" * 32,
)  # fmt: skip
_MANY: Final = bytes(5 << 20)
_DIGEST_OF_HELLO: Final = base64.b64encode(hashlib.sha256(b"hello").digest()).decode()
_DIGEST_OF_MANY: Final = base64.b64encode(hashlib.sha256(_MANY).digest()).decode()
_ETAG: Final = hashlib.md5(b"hello", usedforsecurity=False).hexdigest().encode()
_ETAG_OF_MANY: Final = hashlib.md5(_MANY, usedforsecurity=False).hexdigest().encode()
_SOURCES: Final = (
    b"/bucket/object",
    b"bucket/a%2Fb",
    b"/bucket/folder/%C3%BC?versionId=null",
    b"/chunks/live",
    b"/bucket/whole",
)
_PART: Final = b"<Part><PartNumber>%d</PartNumber><ETag>%s</ETag></Part>"
_COMPLETE: Final = b"<CompleteMultipartUpload>" + _PART % (1, _ETAG) + b"</CompleteMultipartUpload>"
_COMPLETE_BOTH: Final = _COMPLETE.replace(_PART % (1, _ETAG), _PART % (1, _ETAG_OF_MANY) + _PART % (2, _ETAG))
_COMPLETE_CHECKED: Final = b"<CompleteMultipartUpload>%s</CompleteMultipartUpload>" % b"".join(
    (_PART % (number, etag)).replace(b"</Part>", b"<ChecksumSHA256>%s</ChecksumSHA256></Part>" % digest.encode())
    for number, etag, digest in ((1, _ETAG_OF_MANY, _DIGEST_OF_MANY), (2, _ETAG, _DIGEST_OF_HELLO))
)
# A bucket that lets others in: what may be read and written there by whom is decided by documents.
_OPEN_SETTINGS: Final = {
    "policy": b'{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Principal":"*","Action":["s3:GetObject*","s3:ListBucket"],"Resource":'
    b'["arn:aws:s3:::open","arn:aws:s3:::open/*"]},{"Effect":"Deny","Principal":"*","Action":"s3:DeleteObject","Resource":"arn:aws:s3:::open/kept/*"}]}',
    "cors": b"<CORSConfiguration><CORSRule><AllowedOrigin>https://example.com</AllowedOrigin><AllowedMethod>GET</AllowedMethod><AllowedMethod>PUT</AllowedMethod>"
    b"<AllowedHeader>*</AllowedHeader><ExposeHeader>etag</ExposeHeader></CORSRule></CORSConfiguration>",
    "lifecycle": b"<LifecycleConfiguration><Rule><ID>i</ID><Status>Enabled</Status><Filter/><Expiration><Days>3</Days></Expiration><AbortIncompleteMultipartUpload>"
    b"<DaysAfterInitiation>1</DaysAfterInitiation></AbortIncompleteMultipartUpload></Rule></LifecycleConfiguration>",
    "tagging": b"<Tagging><TagSet><Tag><Key>a</Key><Value>b c</Value></Tag></TagSet></Tagging>",
}
# What is in the store before each case, as requests: uploads with and without an algorithm, both kinds of buckets.
_BEFORE: Final[tuple[tuple[str, str, dict[str, str]], ...]] = (
    ("PUT", "/bucket/object", {"x-amz-meta-colour": "blue", "content-type": "text/plain", "x-amz-checksum-crc32": "NhCmhg=="}),
    ("PUT", "/bucket/a%2Fb", {}),
    ("PUT", "/bucket/folder/one", {}),
    ("PUT", "/bucket/folder/%C3%BC", {}),
    ("PUT", "/chunks/live", {}),
    ("POST", "/bucket/parts?uploads", {"x-amz-checksum-algorithm": "CRC32"}),
    ("PUT", "/bucket/parts?partNumber=1&uploadId=UP1", {"x-amz-checksum-crc32": "NhCmhg=="}),
    ("POST", "/bucket/parts?uploads", {}),
    ("PUT", "/bucket/parts?partNumber=1&uploadId=UP2", {"x-amz-checksum-sha256": _DIGEST_OF_MANY}),
    ("PUT", "/bucket/parts?partNumber=2&uploadId=UP2", {"x-amz-checksum-sha256": _DIGEST_OF_HELLO}),
    ("POST", "/chunks/live?uploads", {}),
    ("POST", "/bucket/whole?uploads", {"x-amz-checksum-algorithm": "SHA256"}),
    ("PUT", "/bucket/whole?partNumber=1&uploadId=UP4", {"x-amz-checksum-sha256": _DIGEST_OF_MANY}),
    ("PUT", "/bucket/whole?partNumber=2&uploadId=UP4", {"x-amz-checksum-sha256": _DIGEST_OF_HELLO}),
    ("POST", "/bucket/whole?uploadId=UP4", {}),
    ("PUT", "/open", {}),
    ("PUT", "/open/object", {"x-amz-tagging": "a=b", "x-amz-acl": "public-read"}),
    *(("PUT", f"/open?{name}", {}) for name in _OPEN_SETTINGS),
    ("PUT", "/chunks/live?partNumber=1&uploadId=UP3", {}),
)  # fmt: skip


class Defects(logging.Handler):
    """Keeps the exceptions that the service met and logged."""

    def __init__(self) -> None:
        super().__init__()
        self.met: list[BaseException] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info is not None and record.exc_info[1] is not None:
            self.met.append(record.exc_info[1])


class ServiceTarget:
    """`S3Service.handle`."""

    name = "service"
    modules = (
        "kvobj/api/service.py",
        "kvobj/api/exchange.py",
        "kvobj/api/multipart.py",
        "kvobj/api/deletes.py",
        "kvobj/api/buckets.py",
        "kvobj/api/copies.py",
        "kvobj/api/listing.py",
        "kvobj/api/objects_read.py",
        "kvobj/api/objects_write.py",
    )

    def __init__(self) -> None:
        self._pool = recorded_messages()
        self._bodies = [message.body for message in self._pool if message.body[:1] in (b"<", b"{")]
        self._bodies += [
            _COMPLETE,
            _COMPLETE.replace(b"<ETag>", b"<ChecksumSHA256>x</ChecksumSHA256><ETag>"),
            b"hello",
            b"",
        ]
        self._defects = Defects()
        log = logging.getLogger("fuzz.service")
        log.handlers.clear()  # of a target before this one
        log.propagate = False
        log.addHandler(self._defects)
        clock = ManualClock(now_ms=NOW_MS)
        self._store = FakeStore(now_ms=clock.now_ms)
        catalog = self._store.catalog
        catalog.user_rows = {"alice": ALICE, "bob": _BOB}
        for name, owner, kind in (
            ("bucket", "alice", "ordinary"),
            ("bobs", "bob", "ordinary"),
            ("chunks", "alice", "kv"),
        ):
            catalog.bucket_rows[name] = BucketRow(name, BucketKind(kind), owner, 0, Durability.MEMORY)
        # The fakes know no chains (those are tested over the real store): nothing is declared, and neither parents nor pins are named.
        vars(catalog)["namespaces"] = MemoryNamespaces(lambda *_: None, lambda *_: NamespaceUsage(0, 0))
        ids = (f"UP{number}" for number in itertools.count(1))
        store = cast("ObjectStore", self._store)  # it has the verbs that the S3 layer uses
        self._service = S3Service(
            store, S3Settings(host_rules=RULES), clock=clock, log=log, upload_ids=lambda _: next(ids)
        )
        for method, target, headers in _BEFORE:
            fields = tuple((name.encode(), value.encode()) for name, value in {"host": "127.0.0.1", **headers}.items())
            body = _MANY if _DIGEST_OF_MANY in headers.values() else b"hello" if method == "PUT" else b""
            body = _OPEN_SETTINGS.get(target.removeprefix("/open?"), b"" if target == "/open" else body)
            body = _COMPLETE_CHECKED if target.endswith("=UP4") and method == "POST" else body
            reply, _ = self._send(signed(Message(method.encode(), target.encode(), fields, body), b"header"))
            assert reply.status in (200, 204), (method, target, reply)
        catalog.objects["bobs", "key"] = catalog.objects["bucket", "object"]
        self._before = {name: _copied(value) for name, value in self._state()}
        self._blobs_before = dict(self._store.blobs)

    def _state(self) -> list[tuple[str, Any]]:
        return [(name, value) for name, value in vars(self._store.catalog).items() if isinstance(value, dict)]

    def seeds(self) -> list[bytes]:
        return [replace(message, notes=(b"sign header", b"frame", b"digests")).encode() for message in self._pool]

    def make(self, random: Random) -> bytes:
        mutator = MessageMutator(random, self._pool, self._bodies)
        messages = []
        for _ in range(1 if random.random() < 0.6 else random.randint(2, 3)):
            message = self._adapted(random, random.choice(self._pool))
            if random.random() < 0.85:
                message = mutator.change(message, most=3)
            notes = [b"sign " + random.choice((b"header",) * 8 + (b"query", b"nothing"))]
            if random.random() < 0.9:
                notes.append(b"frame")
            if random.random() < 0.8:
                notes.append(b"digests")
            if random.random() < 0.06:
                notes.append(b"chunked")
            if random.random() < 0.03:
                notes.append(b"short")
            messages.append(replace(message, notes=tuple(notes)).encode())
        return SEPARATOR.join(messages)

    @staticmethod
    def _adapted(random: Random, message: Message) -> Message:
        """The request, of something that is there."""
        path, mark, query = message.target.partition(b"?")
        level = min(2, path.strip(b"/").count(b"/") + (path != b"/"))
        if random.random() < 0.85:
            path = (b"/", random.choice(_BUCKETS), random.choice(PATHS if random.random() < 0.15 else _OBJECTS))[level]
        upload = random.choice((b"UP1", b"UP2", b"UP3"))
        if b"uploadId=" in query and random.random() < 0.9:
            path = b"/chunks/live" if upload == b"UP3" else b"/bucket/parts"
            front, _, rest = query.partition(b"uploadId=")
            query = front + b"uploadId=" + upload + rest[rest.find(b"&") :] * (b"&" in rest)
        body = message.body
        if message.method == b"POST" and b"uploadId" in query and random.random() < 0.7:
            body = _COMPLETE_BOTH if upload == b"UP2" else _COMPLETE
        name = query.partition(b"=")[0]
        if message.method == b"PUT" and name in SETTINGS and random.random() < 0.7:
            body = random.choice(SETTINGS[name])
        fields = tuple(
            (each, random.choice(_SOURCES)) if each == b"x-amz-copy-source" and random.random() < 0.7 else (each, value)
            for each, value in message.fields
        )
        return replace(message, target=path + mark + query, fields=fields, body=body)

    def run(self, case: bytes) -> str:
        catalog = self._store.catalog
        for name, value in self._before.items():
            setattr(catalog, name, _copied(value))
        self._store.blobs = dict(self._blobs_before)
        self._store.open_transfers = 0
        statuses: Counter[int] = Counter()
        last = 0
        for piece in case.split(SEPARATOR):
            message = parse_message(piece)
            if message is None:
                return "no case"
            how = next((note[5:] for note in message.notes if note.startswith(b"sign ")), b"header")
            message = replace(message, fields=tuple(field for field in message.fields if field[0] not in _NOT_SENT))
            ready = _framed(message) if b"frame" in message.notes else message
            ready = _with_right_digests(ready) if b"digests" in message.notes else ready
            if how in (b"header", b"query"):
                ready = _framed_again(signed(ready, how), how)
            before = _copied(dict(self._state())) if how == b"nothing" else None
            reply, body = self._send(ready)
            self._check(ready, reply, body)
            last = reply.status
            statuses[last] += 1
            is_unsigned = ready.field(b"authorization") is None and b"X-Amz-Signature" not in ready.target
            if before is not None and is_unsigned and sum(statuses.values()) == 1:
                assert dict(self._state()) == before, "an anonymous request changed something"
        return str(last)

    def _send(self, message: Message) -> tuple[Reply, bytes]:
        fields = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in message.fields]
        length: int | None = len(message.body)
        if b"short" in message.notes:
            length = len(message.body) + 5
        if b"chunked" in message.notes and message.body:
            length = None
            fields.append(("transfer-encoding", "chunked"))
        elif message.body or message.method in (b"PUT", b"POST"):
            fields.append(("content-length", str(length)))
        head = RequestHead(
            message.method.decode("latin-1"), message.target.decode("latin-1"), tuple(fields), "REQUEST", "127.0.0.1"
        )
        body = StepBody(message.body, length=length, first=7, step=1 << 16)
        self._defects.met.clear()
        reply = finish(self._service.handle(head, body))
        if self._defects.met:
            raise AssertionError("a defect") from self._defects.met[0]
        if isinstance(reply.body, bytes):
            return reply, reply.body
        stream = reply.body
        data = finish(drain(stream))
        assert stream.length in (None, len(data))
        finish(stream.aclose())
        return reply, data

    def _check(self, message: Message, reply: Reply, body: bytes) -> None:
        assert reply.status in _STATUSES, reply
        assert self._store.open_transfers == 0, "a transfer is open"
        for name, value in all_headers(reply):
            assert name == name.lower(), name
            (name + value).encode("latin-1")
            assert not {"\r", "\n", "\0"}.intersection(name + value), (name, value)
        names = [name for name, _ in all_headers(reply)]
        assert "x-amz-request-id" in names
        assert len(names) == len(set(names)) or set(_repeated(names)) <= {"vary"}, names
        if message.method == b"HEAD" or reply.status in (204, 304):
            assert not body
        elif reply.status >= 400:
            kind = dict(reply.headers)["content-type"]
            if kind == "application/xml":
                _check_error(body)
            elif kind == "application/json":
                assert "code" in json.dumps(json.loads(body)).lower()
        elif dict(reply.headers).get("content-type") == "application/xml" and body.startswith(b"<?xml"):
            _check_xml(body)


def _repeated(names: list[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


async def drain(stream: Any) -> bytes:  # noqa: ANN401 - a BodyStream
    return b"".join([bytes(view) async for view in stream.views()])


def _copied(value: Any) -> Any:  # noqa: ANN401 - rows are values, only the dicts around them change
    return {key: _copied(each) for key, each in value.items()} if isinstance(value, dict) else value


def _check_xml(body: bytes) -> str:
    root = body.split(b"<", 3)[2].partition(b">")[0].partition(b" ")[0].decode()
    if b"&#x" not in body and b"\xef\xbf\xbe" not in body:  # what no XML can hold is told nevertheless
        xml.parse(body, root=root)
    return root


def _check_error(body: bytes) -> None:
    assert _check_xml(body) == "Error"
    assert b"<Code>" in body
    assert b"<RequestId>REQUEST</RequestId>" in body


def _framed(message: Message) -> Message:
    """The body as payload, in the framing and with the trailer that the headers announce."""
    mode = message.field(b"x-amz-content-sha256") or b""
    if not mode.startswith(b"STREAMING-"):
        return message
    fields = tuple(field for field in message.fields if field[0] != b"x-amz-decoded-content-length")
    payload = b"hello" if b"chunk-signature" in message.body or b"\r\n0\r\n" in message.body else message.body
    length = (b"x-amz-decoded-content-length", b"%d" % len(payload))
    return replace(message, fields=(*fields, length), body=payload)


def _with_right_digests(message: Message) -> Message:
    """The body's own digests in place of those that are announced for it; those of Complete tell of the object."""
    if not message.body or (b"uploadId" in message.target and message.method == b"POST"):
        return message
    fields = []
    for name, value in message.fields:
        if name == b"content-md5" or name.decode("latin-1") in HEADERS:
            algorithm = "md5" if name == b"content-md5" else HEADERS[name.decode()].lower()
            fields.append((name, digest_of(message.body, algorithm).encode()))
        else:
            fields.append((name, value))
    return replace(message, fields=tuple(fields))


def digest_of(data: bytes, algorithm: str) -> str:
    """In base64, as headers tell it."""
    digester = Digester(frozenset({algorithm}))
    digester.update(memoryview(data))
    return digester.base64(algorithm)


def _framed_again(message: Message, how: bytes) -> Message:
    """A signed message's payload in its framing: chunk signatures begin with the request's."""
    mode = message.field(b"x-amz-content-sha256") or b""
    if b"frame" not in message.notes or not mode.startswith(b"STREAMING-"):
        return message
    payload = message.body
    pieces = [payload[at : at + 8192] for at in range(0, len(payload), 8192)]
    named = (message.field(b"x-amz-trailer") or b"").decode("latin-1")
    trailers = [(named, digest_of(payload, HEADERS[named].lower()))] if named in HEADERS else []
    if mode.startswith(b"STREAMING-UNSIGNED"):
        return replace(message, body=unsigned_chunks(pieces, trailers))
    signature = (message.field(b"authorization") or b"").rpartition(b"Signature=")[2]
    if how == b"query":
        signature = message.target.rpartition(b"X-Amz-Signature=")[2]
    with_trailer = mode.endswith(b"-TRAILER")
    return replace(
        message,
        body=signed_chunks(pieces, seed=signature.decode("latin-1"), trailers=trailers if with_trailer else None),
    )
