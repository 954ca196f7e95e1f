"""Fuzz target for what is answered from its bytes (`HotRequests`, `HotReads`), beside the way of all requests.

A case is some requests as they come over the wire, and what else happens between them, sent to two services: one that answers from
their bytes what it can, and knows the heads of longer PUTs by them, and one that forgets them all, over a store that gives it nothing
at once. What must hold: both answer alike,
field by field, and leave the same behind; and what is answered from its bytes is one whole request that is read as any other.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any, Final, cast
from uuid import UUID

from fakes import ManualClock
from fakes_store import FakeStore
from fuzz_framing import StepBody, finish
from fuzz_message import FIELDS, Message
from fuzz_mutation import Mutator
from fuzz_service import SEPARATOR, Defects, digest_of, drain
from fuzz_signatures import ALICE, RULES
from fuzz_signing import NOW_MS, STAMP, presign, sign_fields, unsigned_chunks

from kvobj.api.chunk_headers import PARENT_HEADER, PIN_HEADER
from kvobj.api.exchange import S3Settings
from kvobj.api.http.limits import HttpSettings
from kvobj.api.http.request_head import HeadError, HeadReader, ParsedHead
from kvobj.api.message import Reply, RequestHead
from kvobj.api.object_store import ObjectStore
from kvobj.api.service import S3Service
from kvobj.catalog.memory_namespaces import MemoryNamespaces
from kvobj.catalog.namespace_protocol import NamespaceUsage
from kvobj.catalog.rows import BucketKind, BucketRow, Checksum, Durability, UserRow
from kvobj.codec.checksums import Digester
from kvobj.errors import KvobjError
from kvobj.store.at_once import at_once
from kvobj.store.ingest import WholeSource
from kvobj.store.reader import HotRead
from kvobj.store.requests import AT_ONCE_BYTES_MAX, PutRequest, PutResult
from kvobj.store.whole_writes import check_write_condition

_LATER: Final = b"#later "
_HOST: Final = ("host", "127.0.0.1:9000")
_UNSIGNED: Final = ("x-amz-content-sha256", "UNSIGNED-PAYLOAD")
_STAMPS: Final = (STAMP, STAMP, "20260102T030355Z", "20260102T025000Z", "20260102T031904Z", "20260102T024904Z")
_TARGETS: Final = (
    "/bucket/object", "/bucket/object", "/bucket/a%2Fb", "/bucket/%C3%BC", "/bucket//x", "/bucket/a+b%20c", "/bucket/~", "/open/object", "/chunks/live",
    "/chunks/default/" + "11" * 16, "/chunks/other/" + "11" * 16, "/bobs/key", "/local/object", "/nobody/key", "/bucket/", "/bucket",
    "/bucket/object?versionId=null", "/bucket/object?acl", "/bucket/object?x-id=GetObject", "/bucket/" + "k" * 1024, "/bucket/%00", "/bucket/../x",
)  # fmt: skip
_LENGTHS: Final = (1, 5, 5, 5, 5, 5, 5, 5, 300, 300, 300, 4096, 4096, 4096, AT_ONCE_BYTES_MAX, AT_ONCE_BYTES_MAX + 1, 0)
_POLICY: Final = b"""{"Version":"2012-10-17","Statement":[{"Effect":"Deny","Principal":"*","Action":"s3:%s","Resource":"arn:aws:s3:::bucket/*"}]}"""
_RULES: Final = (
    b"<LifecycleConfiguration><Rule><ID>i</ID><Status>Enabled</Status><Filter/><Expiration><Days>3</Days></Expiration></Rule>"
    b"</LifecycleConfiguration>"
)
# What changes who may do what, or what is there, and goes the way of all requests.
_CHANGES: Final = (
    ("PUT", "/bucket?policy", _POLICY % b"GetObject"),
    ("PUT", "/bucket?policy", _POLICY % b"PutObject"),
    ("DELETE", "/bucket?policy", b""),
    ("PUT", "/bucket?lifecycle", _RULES),
    ("DELETE", "/bucket?lifecycle", b""),
    ("DELETE", "/bucket/object", b""),
    ("PUT", "/bucket/object?tagging", b"<Tagging><TagSet><Tag><Key>a</Key><Value>b</Value></Tag></TagSet></Tagging>"),
    ("HEAD", "/bucket/object", b""),
    ("DELETE", "/chunks/live", b""),
)
_CHECKSUMS: Final = ("", "", "", "crc64nvme", "crc32", "sha256", "+crc64nvme", "+crc32")
_SAID: Final[tuple[tuple[str, str], ...]] = (
    ("if-none-match", "*"),
    ("content-type", "text/plain"),
    ("x-kvobj-durability", "local"),
    ("x-kvobj-durability", "memory"),
    ("x-amz-checksum-mode", "ENABLED"),
    ("x-amz-meta-a", "b"),
    ("range", "bytes=1-3"),
    ("user-agent", "aws-sdk/1.0"),
    ("amz-sdk-invocation-id", "0-1"),
    ("amz-sdk-invocation-id", "00112233-4455-6677-8899-aabbccddeeff"),
    ("accept", "*/*"),
    ("x-forwarded-for", "1.2.3.4"),
    ("connection", "keep-alive"),
    ("connection", "close"),
)
_CALL_ID_FIELD: Final = "amz-sdk-invocation-id"
_NO_CALL_IDS: Final = tuple(
    text.ljust(len(str(UUID(int=0))), "x")
    for text in (
        "x\r\nrange: bytes=1-3\r\nuser-agent: ",
        "x\nrange: bytes=1-3\nuser-agent: ",
        "x\r\nif-none-match: *\r\naccept: ",
        "x\r\nconnection: close\r\naccept: ",
        "x\r\n\r\n",
        "",
    )
)
"""As long as one, of other letters."""
# The fakes know no chains and no pins (those are tested over the real store).
_NOT_HERE: Final = frozenset({PARENT_HEADER, PIN_HEADER})


class _AtOnceStore(FakeStore):
    """Has all it holds of class `memory` at hand, and stores small bodies of that class in one step, as the real store does."""

    def put_at_once(
        self, request: PutRequest, source: WholeSource, check: Callable[[Digester], tuple[Checksum, ...]]
    ) -> PutResult | None:
        bucket, condition = request.bucket, request.condition
        durability = request.durability or bucket.durability
        if durability is not Durability.MEMORY or not 0 < request.size_bytes <= AT_ONCE_BYTES_MAX:
            return None
        live = self.catalog.objects.get((bucket.name, request.key))
        if bucket.kind is BucketKind.KV and (
            live is not None or (condition is not None and condition.if_none_match is None)
        ):
            return None
        try:
            if condition is not None:
                check_write_condition(live, condition, key=request.key)
            body = source.take_whole()
            if body is None:
                return None
            digester = Digester(request.algorithms | {"md5", "blake3"})
            digester.update(memoryview(body))
            checksums = check(digester) if request.algorithms else ()
        except KvobjError:  # the way of all requests refuses it too
            return None
        return self.commit(request, body, digester, checksums, durability)

    def read_hot(self, bucket: BucketRow, key: str, *, only_short: bool = False) -> HotRead | None:
        row = at_once(self.look_up(bucket.name, key))
        if row is None or row.durability is not Durability.MEMORY or not row.size_bytes:
            return None
        if only_short and row.size_bytes > AT_ONCE_BYTES_MAX:
            return None
        return HotRead(row, b"".join(self.blobs[ref.blob_id] for ref in row.blobs))

    def look_up_hot(self, bucket: BucketRow, key: str) -> HotRead | None:
        row = at_once(self.look_up(bucket.name, key))
        return None if row is None else HotRead(row, b"")


class _WholeBody(StepBody):
    """Lies here whole."""

    def take_whole(self) -> bytes | None:
        return self._data


class _Forgetful(dict[Any, Any]):
    """Keeps nothing."""

    def __setitem__(self, key: object, value: object) -> None:
        """It is forgotten."""


class _World:
    """A service and its store, as it is before each case. `learns`: what comes again is known by its bytes."""

    def __init__(self, kind: type[FakeStore], clock: ManualClock, log: logging.Logger, *, learns: bool) -> None:
        self.store = kind(now_ms=clock.now_ms)
        catalog = self.store.catalog
        catalog.user_rows = {"alice": ALICE, "bob": UserRow("bob", "Bob", "AKBOB", "bob secret")}
        for name, owner, bucket_kind, durability in (
            ("bucket", "alice", BucketKind.ORDINARY, Durability.MEMORY),
            ("open", "alice", BucketKind.ORDINARY, Durability.MEMORY),
            ("local", "alice", BucketKind.ORDINARY, Durability.LOCAL),
            ("bobs", "bob", BucketKind.ORDINARY, Durability.MEMORY),
            ("chunks", "alice", BucketKind.KV, Durability.MEMORY),
        ):
            catalog.bucket_rows[name] = BucketRow(name, bucket_kind, owner, 0, durability)
        vars(catalog)["namespaces"] = MemoryNamespaces(lambda *_: None, lambda *_: NamespaceUsage(0, 0))
        self.service = S3Service(
            cast("ObjectStore", self.store),
            S3Settings(host_rules=RULES),
            clock=clock,
            log=log,
            upload_ids=lambda _: "UP1",
        )
        if not learns:
            self.service.hot._kinds._by_length = _Forgetful()

    def state(self) -> dict[str, Any]:
        """What the catalog holds."""
        return {name: value for name, value in vars(self.store.catalog).items() if isinstance(value, dict)}

    def handle(self, head: RequestHead, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """By the way of all requests."""
        reply = finish(self.service.handle(head, _WholeBody(body, length=len(body), first=7, step=1 << 16)))
        assert self.store.open_transfers == 0, "a transfer is open"
        if isinstance(reply.body, bytes):
            return _told(reply, reply.body)
        data = finish(drain(reply.body))
        finish(reply.body.aclose())
        return _told(reply, data)


class RepeatedTarget:
    """`HotRequests.answer`, taught by `S3Service.handle`."""

    name = "repeated"
    modules = ("kvobj/api/hot_requests.py", "kvobj/api/hot_kinds.py", "kvobj/api/hot_reads.py")

    def __init__(self) -> None:
        self._defects = Defects()
        self._log = logging.getLogger("fuzz.repeated")
        self._log.handlers.clear()  # of a target before this one
        self._log.propagate = False
        self._log.addHandler(self._defects)
        self._loop = asyncio.new_event_loop()
        self._loop.close()  # the parser wants one, and never runs anything on it
        self._http = HttpSettings()
        self._names: dict[str, str] = {}

    def seeds(self) -> list[bytes]:
        """Each form, written and read until it comes from its bytes, and each thing that changes in between."""
        cases = []
        cases.append(
            SEPARATOR.join(
                [
                    _wire(method, "/bucket/object", body, call=((_CALL_ID_FIELD, call_id),), signed_id=call_id)
                    for call_id in ("00112233-4455-6677-8899-AABBCCDDEEFF", str(UUID(int=1)), str(UUID(int=2)))
                    for method, body in (("PUT", b"hello"), ("GET", b""))
                ]
            )
        )
        for form in ("header", "query"):
            for change in (None, *_CHANGES):
                for target in ("/bucket/object", "/chunks/live"):
                    pieces = [_wire("PUT", target, b"hello", form=form), _wire("GET", target, b"", form=form)] * 2
                    pieces += [] if change is None else [_wire(*change)]
                    cases.append(SEPARATOR.join([*pieces, *pieces]))
            pieces = [
                _wire("PUT", "/bucket/object", b"hello", form=form),
                _wire("GET", "/bucket/object", b"", form=form),
            ] * 2
            cases += [
                SEPARATOR.join(
                    [_wire("PUT", target, body, checksum=checksum) for body in (b"hello", b"hallo", b"hullo")]
                )
                for checksum in ("", "crc64nvme", "+crc32")
                for target in ("/bucket/object", "/local/object", "/chunks/live")
                if form == "header"
            ]
            cases += [SEPARATOR.join([*pieces, _LATER + later, *pieces]) for later in (b"500000", b"901000")]
        return cases

    def make(self, random: Random) -> bytes:
        mutator = Mutator(random)
        body = random.randbytes(1) * random.choice(_LENGTHS)
        form = random.choice(("header", "header", "header", "query"))
        checksum = random.choice(_CHECKSUMS) if body and form == "header" else ""
        said = [random.choice(_SAID) for _ in range(random.choice((0, 0, 0, 1, 1, 2)))]
        if random.random() < 0.1:
            name = random.choice(tuple(FIELDS))
            said.append((name.decode("latin-1"), random.choice(FIELDS[name]).decode("latin-1")))
        target = random.choice(_TARGETS) if random.random() < 0.3 else random.choice(("/bucket/object", "/chunks/live"))
        # SDKs give each call an id of its own, which boto3's do not sign, and others do.
        has_id = random.random() < 0.5
        signs_id, same_id = has_id and random.random() < 0.5, random.random() < 0.2
        signed_id = _call_id(random) if signs_id else ""
        first = _call(random, has_id=has_id, signed_id=signed_id)
        pieces = [_wire("PUT", target, body, form=form, said=said, checksum=checksum, call=first, signed_id=signed_id)]
        for _ in range(random.randint(2, 6)):
            choice = random.random()
            if choice < 0.05:
                pieces.append(_LATER + b"%d" % random.choice((1000, 10_000, 600_000, 899_000, 901_000)))
                continue
            if choice < 0.13:
                pieces.append(_wire(*random.choice(_CHANGES)))
                continue
            method = random.choice(("PUT", "GET", "GET"))
            asked = target if random.random() < 0.8 else random.choice(_TARGETS)
            stamp = random.choice(_STAMPS) if random.random() < 0.3 else STAMP
            more = said if random.random() < 0.9 else []
            signed_id = _call_id(random) if signs_id and not same_id else signed_id
            call = _call(random, has_id=has_id, signed_id=signed_id)
            if method == "GET":
                piece = _wire(method, asked, b"", form=form, said=more, stamp=stamp, call=call, signed_id=signed_id)
            else:  # its checksum is another each time
                sent = body if random.random() < 0.5 else random.randbytes(1) * len(body)
                piece = _wire(
                    method,
                    asked,
                    sent,
                    form=form,
                    said=more,
                    stamp=stamp,
                    checksum=checksum,
                    call=call,
                    signed_id=signed_id,
                )
            choice = random.random()
            if choice < 0.25:
                piece = mutator.change(piece, pieces, most=2)
            elif choice < 0.3:
                piece += random.choice((b"x", b"\r\n", pieces[0]))
            elif choice < 0.32:
                piece = piece[: random.randrange(len(piece))]
            pieces.append(piece)
        return SEPARATOR.join(pieces)

    def run(self, case: bytes) -> str:
        clock = ManualClock(now_ms=NOW_MS)
        here, there = (
            _World(kind, clock, self._log, learns=kind is _AtOnceStore) for kind in (_AtOnceStore, FakeStore)
        )
        known: Counter[str] = Counter()
        last = "nothing"
        for piece in case.split(SEPARATOR):
            if piece.startswith(_LATER):
                milliseconds = piece[len(_LATER) :]
                clock.advance(
                    min(int(milliseconds), 10**9) / 1000 if milliseconds.isdigit() and len(milliseconds) < 12 else 0
                )
                continue
            last = self._send(piece, here, there)
            known[last] += 1
        return ", ".join([f"{known[way]} {way}" for way in ("answered", "known") if known[way]]) or last

    def _send(self, piece: bytes, here: _World, there: _World) -> str:
        hot = here.service.hot
        self._defects.met.clear()
        answer = None if hot.looks_like(piece) is None else hot.answer(piece, "REQUEST", waited_ms=0)
        head, rest = self._read(piece)
        if answer is not None:
            assert head is not None, "what is no head is answered"
            assert head.length == len(rest) == answer.bytes_in, "another body is answered"
            assert (head.method, head.target) == (answer.method, answer.target)
            assert head.keep_alive, "whoever wants the connection closed is answered"
        if head is None or head.length is None or head.length > len(rest) or _NOT_HERE & dict(head.headers).keys():
            assert answer is None
            return "unread"
        rest = rest[: head.length]
        request = RequestHead(head.method, head.target, head.headers, "REQUEST", "127.0.0.1", raw=head.raw)
        is_known = answer is None and hot.write_of(request) is not None
        ordinary = there.handle(request, rest)
        mine = here.handle(request, rest) if answer is None else _told(answer.reply, answer.body)
        if self._defects.met:
            raise AssertionError("a defect") from self._defects.met[0]
        assert mine == ordinary, f"the two ways answer otherwise: {mine} for {ordinary}"[:2000]
        assert here.state() == there.state(), "the two ways leave another state"
        assert here.store.blobs == there.store.blobs, "the two ways store other bytes"
        return "answered" if answer is not None else "known" if is_known else str(ordinary[0])

    def _read(self, data: bytes) -> tuple[ParsedHead | None, bytes]:
        try:
            return HeadReader(self._loop, self._http, names=self._names).feed(data)
        except HeadError:
            return None, b""


def _call_id(random: Random) -> str:
    """One call's id. Now and then it is of no known form, and may be signed so."""
    call_id = str(UUID(bytes=random.randbytes(16)))
    choice = random.random()
    if choice < 0.1:
        return call_id.upper()
    return call_id if choice > 0.15 else random.choice(("0-1", "", call_id + "0", "x" * len(call_id), "-" * 36))


def _call(random: Random, *, has_id: bool, signed_id: str) -> Sequence[tuple[str, str]]:
    """What an SDK says of a call. Now and then in place of its id what would end the field, and begin others; of the `signed_id`, if
    there is one, another, though that one is signed."""
    if not has_id:
        return ()
    call_id = signed_id if signed_id and random.random() < 0.8 else _call_id(random)
    if random.random() < (0.1 if signed_id else 0.25):
        call_id = random.choice(_NO_CALL_IDS)
    return ((_CALL_ID_FIELD, call_id), ("amz-sdk-request", "attempt=1"))


def _wire(
    method: str,
    target: str,
    body: bytes,
    *,
    form: str = "header",
    said: Iterable[tuple[str, str]] = (),
    stamp: str = STAMP,
    checksum: str = "",
    call: Sequence[tuple[str, str]] = (),
    signed_id: str = "",
) -> bytes:
    """A request as a client sends it, signed in its header or in its target. `checksum`: of the body, by the algorithm's name; behind
    a `+` in a trailer. `call`: fields that are not signed; but in the header's form the call's id, if there is a `signed_id`: that is
    signed, whichever is sent."""
    fields = [_HOST, *dict(said).items()]
    if signed_id and form == "header":
        fields = [*((name, value) for name, value in fields if name != _CALL_ID_FIELD), (_CALL_ID_FIELD, signed_id)]
        fields.append(("amz-sdk-request", "attempt=1"))
    name = f"x-amz-checksum-{checksum.lstrip('+')}"
    digest = digest_of(body, checksum.lstrip("+")) if checksum else ""
    mode = _UNSIGNED
    if checksum.startswith("+"):
        mode = ("x-amz-content-sha256", "STREAMING-UNSIGNED-PAYLOAD-TRAILER")
        fields += [
            ("x-amz-trailer", name),
            ("x-amz-decoded-content-length", str(len(body))),
            ("content-encoding", "aws-chunked"),
        ]
        pieces = [body[at : at + 8192] for at in range(0, len(body), 8192)]
        body = unsigned_chunks(pieces, [(name, digest)])
    elif checksum:
        fields.append((name, digest))
    if form == "query":
        fields = [(name, value) for name, value in fields if not name.startswith("x-")]
        target = presign(method, target, fields)
    else:
        fields = sign_fields(method, target, [*fields, mode], body, stamp=("x-amz-date", stamp))
    if body or method == "PUT":
        fields.append(("content-length", str(len(body))))
    if signed_id and form == "header":
        fields = [(name, dict(call)[name] if name == _CALL_ID_FIELD else value) for name, value in fields]
    names = dict(fields).keys()
    fields += [(name, value) for name, value in call if name not in names]
    encoded = tuple((name.encode("latin-1"), value.encode("latin-1")) for name, value in fields)
    return Message(method.encode(), target.encode("latin-1"), encoded, body).encode()


def _told(reply: Reply, body: bytes) -> tuple[int, dict[str, str], bytes]:
    """What a client sees of a reply, whichever way it was made."""
    fields = dict(reply.headers)
    for line in reply.ready.splitlines():
        name, _, value = line.partition(": ")
        assert name.lower() not in fields, name
        fields[name.lower()] = value
    fields.pop("content-length", None)  # the others' is written with their head
    return reply.status, fields, body
