"""GET and PUT of small objects in memory, as clients send them by the thousand: answered from their bytes, without the steps that
they do not need. What the head of a longer PUT says is known in the same way, and its body is received as any other (`write_of`).

What one client sends differs from one request to the next in its target, and where it is signed in the header, in time and
signature. What the rest of its head says was found out when the first one like it went the way of all requests
(`S3Service.handle`); it is remembered by its bytes, and the same bytes say the same again (`hot_kinds`). What may be otherwise
next time is looked at each time: target, checksum, signature and time, user, bucket, rights, row. Whatever is not as it should be
goes the way of all requests, which answers or refuses it.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import msgspec

from kvobj.api.checksums import HEADERS, Announced, check_value
from kvobj.api.credential import CredentialParser
from kvobj.api.exchange import Exchange
from kvobj.api.hot_kinds import DIGEST_DIGITS, STAMP_CHARACTERS, HotKinds, Kind, KindOfPut
from kvobj.api.hot_reads import PLAIN_FIELDS, HotReads, is_owners_alone
from kvobj.api.message import RepeatedAnswer, Reply, RequestHead, ready_fields
from kvobj.api.object_headers import write_headers
from kvobj.api.object_store import ObjectStore
from kvobj.api.request import Target, TargetParser
from kvobj.api.sigv4 import Authentication, PayloadMode, SignatureVerifier
from kvobj.api.users import UserDirectory
from kvobj.catalog.rows import BucketKind, BucketRow, Checksum, Durability, ObjectRow, UserRow
from kvobj.codec.checksums import Digester
from kvobj.errors import KvobjError
from kvobj.store.at_once import at_once
from kvobj.store.places import DEFAULT_NAMESPACE, ChunkPlace, check_size, default_namespace, place_of
from kvobj.store.requests import PutRequest

_LINE: Final = re.compile(rb"(GET|PUT) (/[A-Za-z0-9\-._~!$&'()*+,;=:@%/?]{1,1024}+) HTTP/1\.1\r\n").match
_LOOKS_LIKE: Final = re.compile(rb"(?:GET|PUT) /[^?/ ]{1,64}/").match
_END: Final = b"\r\n\r\n"
_LONG_MAX: Final = 2048
_LONG_CHARACTERS_MAX: Final = 1024
# What is stored with an object beside its bytes, by fields that say the same for each of them.
_STORED_FIELDS: Final = PLAIN_FIELDS - {"x-amz-checksum-mode"} | {"if-none-match", "x-kvobj-durability"}
# What else may be said of a body that comes behind its head.
_BODY_FIELDS: Final = HEADERS.keys() | {
    "content-encoding",
    "expect",
    "transfer-encoding",
    "x-amz-decoded-content-length",
    "x-amz-sdk-checksum-algorithm",
    "x-amz-trailer",
}
_BODY_MODES: Final = frozenset({PayloadMode.UNSIGNED, PayloadMode.CHUNKS_UNSIGNED_TRAILER})


class KnownWrite(NamedTuple):
    """A PUT of a known kind, all but its body. `fields` say what its own do but for time, signature, checksum and the call's
    id. Who sent it may do all with the bucket, which has no say in what is done."""

    target: Target
    fields: dict[str, str]
    authentication: Authentication
    request: PutRequest
    announced: Announced


class HotRequests:
    """Implements `message.RepeatedRequests`: nothing is laid aside. Event-loop-only."""

    __slots__ = (
        "_credentials",
        "_front",
        "_kinds",
        "_long",
        "_reads",
        "_store",
        "_targets",
        "_users",
        "_verifier",
    )

    def __init__(
        self,
        store: ObjectStore,
        reads: HotReads,
        *,
        users: UserDirectory,
        targets: TargetParser,
        credentials: CredentialParser,
        verifier: SignatureVerifier,
        host_id: str,
    ) -> None:
        self._store = store
        self._reads = reads
        self._users = users
        self._targets = targets
        self._credentials = credentials
        self._verifier = verifier
        self._front = f"\r\n{ready_fields([('x-amz-id-2', host_id)])}content-length: "
        self._kinds = HotKinds(credentials)
        # Targets whose objects were long: a hint that spares their next GET a look; it goes the way of all requests anyway.
        self._long: set[str] = set()

    @staticmethod
    def looks_like(request: bytes) -> object | None:
        """See `RepeatedRequests.looks_like`."""
        return _LOOKS_LIKE(request)

    # -- learning ------------------------------------------------------------------------------------------------

    def learn_read(
        self, head: RequestHead, target: Target, fields: dict[str, str], reply: Reply, *, is_presigned: bool
    ) -> None:
        """Remember what a GET or HEAD says that `HotReads` answered so."""
        if head.method != "GET":
            return
        if isinstance(reply.body, bytes):
            self._long.discard(head.target)  # it is another object by now
            self._kinds.learn(head, target, fields, None, is_presigned=is_presigned)
        elif len(head.target) <= _LONG_CHARACTERS_MAX:
            if len(self._long) >= _LONG_MAX:
                self._long.clear()
            self._long.add(head.target)

    def learn_write(self, exchange: Exchange, request: PutRequest, announced: Announced) -> None:
        """Remember what a PUT says that was stored, at once or as its body came."""
        fields, settings, authentication = exchange.fields, exchange.settings, exchange.authentication
        put = KindOfPut(
            request.size_bytes,
            request.durability,
            dict(request.headers),
            request.condition,
            announced,
            request.algorithms,
            authentication.payload_mode,
        )
        if (
            fields.keys() <= (_STORED_FIELDS | _BODY_FIELDS if put.is_long else _STORED_FIELDS)
            and authentication.payload_mode in _BODY_MODES
            # What `_asked` refuses each time is not worth its place.
            and (request.durability or request.bucket.durability) is Durability.MEMORY
            and is_owners_alone(request.bucket, authentication.user)
            and not settings.unsigned_payload_needs_tls
            and announced.md5 is None
            and (announced.value is None or not authentication.is_presigned)
        ):
            target = self._targets.parse(exchange.head.target, fields.get("host", ""))
            self._kinds.learn(exchange.head, target, fields, put, is_presigned=authentication.is_presigned)

    # -- answering -----------------------------------------------------------------------------------------------

    def answer(self, request: bytes, request_id: str, *, waited_ms: int) -> RepeatedAnswer | None:  # noqa: ARG002 - nothing waits here
        """See `RepeatedRequests.answer`."""
        found = _LINE(request)
        if found is None:
            return None
        at = found.end()
        end = request.find(_END, at) + len(_END)
        for kind in self._kinds.of(found[1], end - at):
            if len(request) == end + kind.body_bytes and kind.body_bytes >= 0 and kind.is_of(request, at):
                return self._answer(kind, found[2].decode(), request, at, request_id)
        return None

    def _answer(self, kind: Kind, raw_target: str, request: bytes, at: int, request_id: str) -> RepeatedAnswer | None:
        put = kind.put
        answer: tuple[str, bytes] | None = None
        asked: PutRequest | None = None
        try:
            target = self._targets.parse(raw_target, kind.fields["host"])
            if not target.key or target.parameters or (put is None and raw_target in self._long):
                return None
            user = self._user(kind, target, request, at)
            if user is None:
                return None
            self._kinds.note(kind)
            if put is None:
                answer = self._reads.short(target, user, with_checksums=kind.with_checksums)
            else:
                asked = self._asked(put, target, user)
        except (KvobjError, ValueError):  # the way of all requests meets it again, and tells the client or the log
            return None
        if asked is not None:
            # Behind the commit nothing may lead to a second one, which would meet the first: what fails here is the caller's.
            answer = self._write(asked, request[-kind.body_bytes :])
        if answer is None:
            return None
        said, body = answer
        ready = f"x-amz-request-id: {request_id}{self._front}{len(body)}\r\n{said}"
        log: dict[str, object] = {
            "bucket": target.bucket,
            "key": target.key,
            "user": user.id,
            "operation": kind.operation,
        }
        return RepeatedAnswer(kind.method, raw_target, kind.body_bytes, Reply(200, log=log, ready=ready), body)

    def write_of(self, head: RequestHead) -> KnownWrite | None:
        """What a PUT says whose body is still to come, if its head is of a known kind. None: it is to go the way of all requests,
        which tells what is wrong with it, if anything is."""
        if head.method != "PUT":
            return None
        request = head.raw
        at = request.find(b"\r\n") + 2
        for kind in self._kinds.of(b"PUT", len(request) - at):
            if kind.body_bytes < 0 and kind.is_of(request, at):
                try:
                    return self._known(kind, head.target, request, at)
                except (KvobjError, ValueError):
                    return None
        return None

    def _known(self, kind: Kind, raw_target: str, request: bytes, at: int) -> KnownWrite | None:
        put = kind.put
        assert put is not None
        target = self._targets.parse(raw_target, kind.fields["host"])
        if not target.key or target.parameters:
            return None
        announced, cut = put.announced, kind.signed.checksum
        if cut is not None and announced.algorithm is not None:
            value = cut.value(request, at)
            check_value(announced.algorithm, value)
            announced = msgspec.structs.replace(announced, value=value)
        user = self._user(kind, target, request, at)
        asked = None if user is None else self._asked(put, target, user)
        if user is None or asked is None:
            return None
        self._kinds.note(kind)
        is_presigned = not kind.signed.is_in_header
        authentication = Authentication(user, put.payload_mode, None, None, is_presigned=is_presigned)
        return KnownWrite(target, kind.fields, authentication, asked, announced)

    def _user(self, kind: Kind, target: Target, request: bytes, at: int) -> UserRow | None:
        """Whose signature it is. Raises `S3Error` where it is nobody's."""
        if not kind.signed.is_in_header:
            return self._user_of_url(kind, target)
        signed = kind.signed
        user = self._users.fresh(signed.signer.access_key)
        if user is None or target.raw_query:
            return None
        stamp_at, signature_at = at + signed.stamp_at, at + signed.signature_at
        stamp = request[stamp_at : stamp_at + STAMP_CHARACTERS].decode("ascii")
        signature = request[signature_at : signature_at + DIGEST_DIGITS].decode("ascii")
        canonical = f"{kind.method}\n{target.canonical_path}\n{signed.text_of(request, at, stamp)}"
        return (
            user if self._verifier.holds(signed.signer, user, stamp, canonical.encode("latin-1"), signature) else None
        )

    def _user_of_url(self, kind: Kind, target: Target) -> UserRow | None:
        """Whose presigned URL it is. Users and days share a kind, so that all but the headers is read from the URL."""
        presigned, credential = target.presigned, self._credentials.parse(kind.fields, target)
        if presigned is None or credential is None or credential.stamp is None:
            return None
        signer = credential.signer
        user = self._users.fresh(signer.access_key)
        if user is None or signer.signed_headers_text != kind.signed.signer.signed_headers_text:
            return None
        canonical = f"{kind.method}\n{target.canonical_path}\n{presigned.canonical}{kind.signed.text[0]}"
        holds = self._verifier.holds(
            signer,
            user,
            credential.stamp,
            canonical.encode("latin-1"),
            credential.signature,
            expires_seconds=credential.expires_seconds,
        )
        return user if holds else None

    def _asked(self, put: KindOfPut, target: Target, user: UserRow) -> PutRequest | None:
        """What is to be stored; None: it is not for here. Raises as `place_of` and `check_size`."""
        bucket = at_once(self._store.catalog.bucket(target.bucket))
        if bucket is None or not is_owners_alone(bucket, user):
            return None
        if (put.durability or bucket.durability) is not Durability.MEMORY:
            return None
        place: ChunkPlace | None = None
        if bucket.kind is BucketKind.KV:
            place = self._place(bucket, target.key)
            if place is None:
                return None
            check_size(place, put.size_bytes)
        return PutRequest(
            bucket,
            target.key,
            put.size_bytes,
            user.id,
            put.durability,
            put.headers,
            condition=put.condition,
            algorithms=put.algorithms,
            place=place,
        )

    def _write(self, request: PutRequest, body: bytes) -> tuple[str, bytes] | None:
        """Store it. What the reply says of it, as `ready_fields`, and the reply's body; None: nothing was stored. What it raises is
        a defect."""
        result = self._store.put_at_once(request, _Whole(body), _no_checksums)
        if result is None:
            return None
        row = result.row
        assert isinstance(row, ObjectRow)
        said = ready_fields(write_headers(row, request.bucket, existed=False, durability=result.durability))
        return f'etag: "{row.etag}"\r\n{said}', b""

    def _place(self, bucket: BucketRow, key: str) -> ChunkPlace | None:
        """Where a chunk belongs that says nothing but its key; None: that has to be waited for, or its first segment names no
        namespace, so that it is for who looks closer. Raises as `place_of`."""
        front, slash, _ = key.partition("/")
        if slash and front != DEFAULT_NAMESPACE:
            namespace = at_once(self._store.catalog.namespaces.namespace(bucket.name, front))
            return None if namespace is None else place_of(namespace, key)
        return place_of(default_namespace(bucket.name), key)


class _Whole:
    """A body that is here (`ingest.WholeSource`)."""

    __slots__ = ("_body",)

    def __init__(self, body: bytes) -> None:
        self._body = body

    def take_whole(self) -> bytes | None:
        return self._body


def _no_checksums(_: Digester) -> tuple[Checksum, ...]:
    return ()
