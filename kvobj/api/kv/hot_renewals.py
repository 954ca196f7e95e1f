"""The renewal of a session that releases nothing, as holders send it all the time: answered from its bytes, without the steps that
it does not need.

A client's renewals differ in five places: session, time, the body with its digest, and the signature. What the rest of a head
says was found out when the first one like it went the way of all requests (`sessions.Sessions.renew`); it is remembered by its
bytes, and the same bytes around other values say the same. What may be otherwise next time is looked at each time: signature and
time, user, bucket, digest, session. Whatever is not as it should be goes the way of all requests, which refuses it. One
right behind another costs 60 to 90 µs of a core so, 170 to 200 by that way.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Final, Protocol

import msgspec

from kvobj.api.credential import CredentialParser, Signer
from kvobj.api.exchange import Exchange, Header
from kvobj.api.kv.bodies import Format, encode, reply_format, request_format
from kvobj.api.kv.sessions import RenewalJson, RenewalMsgpack, renewal_digest
from kvobj.api.message import RepeatedAnswer, Reply, RequestHead, ready_fields
from kvobj.api.object_store import ObjectStore
from kvobj.api.operations import RenewSession
from kvobj.api.request import TargetParser
from kvobj.api.sigv4 import PayloadMode, SignatureVerifier, canonical_request
from kvobj.api.users import UserDirectory
from kvobj.catalog.lease_protocol import Renewal
from kvobj.catalog.rows import BucketKind
from kvobj.clock import Clock, boot_ms
from kvobj.errors import KvobjError
from kvobj.store.at_once import at_once

_ID_DIGITS: Final = 32
_DIGEST_DIGITS: Final = 64
_STAMP_CHARACTERS: Final = 16
_read_json: Final = msgspec.json.Decoder(RenewalJson).decode
_read_msgpack: Final = msgspec.msgpack.Decoder(RenewalMsgpack).decode
_LOOKS_LIKE: Final = re.compile(rb"PUT /[^ ?\r\n]{1,64}\?sessions=[0-9a-f]{32} ").match
_BEFORE_ID: Final = b"?sessions="
_BEFORE_DIGEST: Final = b"\r\nx-amz-content-sha256: "
_BEFORE_STAMP: Final = b"\r\nx-amz-date: "
_BEFORE_SIGNATURE: Final = b"Signature="
_END: Final = b"\r\n\r\n"
_REMEMBERED: Final = 256
_AROUND_BYTES_MAX: Final = 2048
"""Of the bytes by which a kind is remembered; kvobj's own client sends some 400."""
_BODY_BYTES_MAX: Final = 256
"""A renewal that releases nothing has 60 to 160, and only such are answered here."""
# No other field has a say in what a renewal does.
_TAKEN: Final = frozenset(
    {
        "accept",
        "accept-encoding",
        "authorization",
        "content-length",
        "content-type",
        "host",
        "user-agent",
        "x-amz-content-sha256",
        "x-amz-date",
    }
)


class RenewsAtOnce(Protocol):
    """Who has the sessions, in this process."""

    def renew_at_once(
        self,
        session_id: bytes,
        *,
        user: str,
        bucket: str,
        as_of: int,
        pins: int,
        pins_digest: bytes,
        now_boot_ms: int,
    ) -> Renewal | None:
        """See `Leases.renew_at_once`."""
        ...


_Around = tuple[bytes, bytes, bytes, bytes, bytes]
_Cut = tuple[_Around, bytes, bytes, bytes, bytes, bytes]
"""A request, cut where renewals differ: what lies in its head before, between and behind those places; session, time, digest and
signature; the body."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What heads of one kind say. `signed`: the canonical request, cut at session, digest, time and digest."""

    bucket: str
    path: str
    signer: Signer
    signed: tuple[str, str, str, str, str]
    body_bytes: int
    read: Callable[[bytes], RenewalJson | RenewalMsgpack]
    reply_format: Format
    ready: str


class HotRenewals:
    """Implements `message.RepeatedRequests`. Event-loop-only."""

    __slots__ = (
        "_clock",
        "_credentials",
        "_host_id",
        "_known",
        "_log",
        "_renews",
        "_store",
        "_targets",
        "_told",
        "_users",
        "_verifier",
    )

    def __init__(
        self,
        store: ObjectStore,
        renews: RenewsAtOnce,
        *,
        users: UserDirectory,
        targets: TargetParser,
        credentials: CredentialParser,
        verifier: SignatureVerifier,
        clock: Clock,
        host_id: str,
        log: logging.Logger,
    ) -> None:
        """`clock` is the one that leases go by."""
        self._clock = clock
        self._store = store
        self._renews = renews
        self._users = users
        self._targets = targets
        self._credentials = credentials
        self._verifier = verifier
        self._host_id: Header = ("x-amz-id-2", host_id)
        self._known: dict[tuple[bytes, ...], _Known] = {}
        self._log = log
        self._told: set[type[Exception]] = set()

    @property
    def looks_like(self) -> Callable[[bytes], object | None]:
        """See `RepeatedRequests.looks_like`."""
        return _LOOKS_LIKE

    def learning(self, handle: Callable[[Exchange, RenewSession], Awaitable[Reply]]) -> Callable[..., Awaitable[Reply]]:
        """The handler of all renewals, from which those are learned that are answered here from then on."""

        async def handled(exchange: Exchange, operation: RenewSession) -> Reply:
            reply = await handle(exchange, operation)
            if exchange.authentication.payload_mode is PayloadMode.HASHED and not exchange.authentication.is_presigned:
                self._learn(exchange.head, exchange.fields)
            return reply

        return handled

    def _learn(self, head: RequestHead, fields: dict[str, str]) -> None:
        """Remember what a head says that was answered with 200: that its signature and all else is right is known."""
        lines = "".join([f"{name}: {value}\r\n" for name, value in head.headers])
        cut = _cut(f"{head.method} {head.target} HTTP/1.1\r\n{lines}\r\n".encode("latin-1"))
        if cut is None or cut[0] in self._known:
            return
        around = cut[0]
        if sum(map(len, around)) > _AROUND_BYTES_MAX:
            return
        target = self._targets.parse(head.target, fields.get("host", ""))
        credential = self._credentials.parse(fields, target)
        if credential is None:
            return
        session, stamp, digest, signature = (value.decode("latin-1") for value in cut[1:5])
        if (
            len(fields) != len(head.headers)
            or not fields.keys() <= _TAKEN
            or target.key
            or target.query != [("sessions", session)]
            or fields["x-amz-content-sha256"] != digest
            or fields["x-amz-date"] != stamp
            or credential.signature != signature
            or not fields.get("content-length", "").isdigit()
            or int(fields["content-length"]) > _BODY_BYTES_MAX
            # It must be these very places that count: another field may hold what looks like the signature.
            or any(value in piece for value in cut[1:5] for piece in around)
        ):
            return
        text = canonical_request(head.method, target, fields, credential, digest).decode("latin-1")
        signed = _cut_text(text, (session, digest, stamp, digest))
        if signed is None:
            return
        if len(self._known) >= _REMEMBERED:
            self._known.clear()
        replied = reply_format(fields)
        self._known[around] = _Known(
            bucket=target.bucket,
            path=around[0].decode("latin-1").partition(" ")[2],
            signer=credential.signer,
            signed=signed,
            body_bytes=int(fields["content-length"]),
            read=_read_msgpack if request_format(fields) is Format.MSGPACK else _read_json,
            reply_format=replied,
            ready=ready_fields([self._host_id, ("content-type", replied.value)]),
        )

    def answer(self, request: bytes, request_id: str, *, waited_ms: int) -> RepeatedAnswer | None:
        """See `RepeatedRequests.answer`."""
        cut = _cut(request)
        known = None if cut is None else self._known.get(cut[0])
        if cut is None or known is None or len(cut[5]) != known.body_bytes:
            return None
        try:
            return self._answer(cut, known, request_id, waited_ms)
        except (KvobjError, ValueError, msgspec.MsgspecError):
            return None  # what is wrong with the request the way of all requests meets again, and tells the client
        except Exception as error:  # noqa: BLE001 - told once, and the other way answers
            # The other way may well answer, so that nobody would ever hear of a defect that is here alone.
            if type(error) not in self._told:
                self._told.add(type(error))
                self._log.exception("renewals are answered the long way", extra={"request_id": request_id})
            return None

    def _answer(self, cut: _Cut, known: _Known, request_id: str, waited_ms: int) -> RepeatedAnswer | None:
        _, raw_session, raw_stamp, raw_digest, raw_signature, body = cut
        signer, signed = known.signer, known.signed
        user = self._users.fresh(signer.access_key)
        bucket = at_once(self._store.catalog.bucket(known.bucket))
        session, stamp, digest = raw_session.decode(), raw_stamp.decode(), sha256(body).hexdigest()
        if user is None or bucket is None or bucket.kind is not BucketKind.KV or raw_digest.decode() != digest:
            return None
        text = f"{signed[0]}{session}{signed[1]}{digest}{signed[2]}{stamp}{signed[3]}{digest}{signed[4]}"
        if not self._verifier.holds(signer, user, stamp, text.encode("latin-1"), raw_signature.decode()):
            return None
        session_id, asked = _id_of(session), known.read(body)
        if session_id is None or asked.release:
            return None
        renewal = self._renews.renew_at_once(
            session_id,
            user=user.id,
            bucket=known.bucket,
            as_of=asked.as_of,
            pins=asked.pins,
            pins_digest=renewal_digest(asked.pins_digest),
            now_boot_ms=boot_ms(self._clock) - waited_ms,
        )
        if renewal is None:
            return None
        document = encode({"ttl_ms": renewal.ttl_ms, "reclaim": renewal.reclaim}, known.reply_format)
        ready = f"x-amz-request-id: {request_id}\r\n{known.ready}content-length: {len(document)}\r\n"
        log: dict[str, object] = {
            "bucket": known.bucket,
            "key": "",
            "user": user.id,
            "operation": RenewSession.__name__,
        }
        return RepeatedAnswer("PUT", known.path + session, known.body_bytes, Reply(200, log=log, ready=ready), document)


def _cut(request: bytes) -> _Cut | None:
    """None for what has not the shape of a renewal. The places are looked for in the order in which clients send them."""
    at = request.find(_BEFORE_ID) + len(_BEFORE_ID)
    session_end = at + _ID_DIGITS
    stamp_at = request.find(_BEFORE_STAMP, session_end) + len(_BEFORE_STAMP)
    stamp_end = stamp_at + _STAMP_CHARACTERS
    digest_at = request.find(_BEFORE_DIGEST, stamp_end) + len(_BEFORE_DIGEST)
    digest_end = digest_at + _DIGEST_DIGITS
    signature_at = request.find(_BEFORE_SIGNATURE, digest_end) + len(_BEFORE_SIGNATURE)
    signature_end = signature_at + _DIGEST_DIGITS
    body_at = request.find(_END, signature_end) + len(_END)
    # What was not found is at -1, so that its place is before the one in front of it.
    if not len(_BEFORE_ID) <= at < session_end < stamp_at < digest_at < signature_at < signature_end < body_at:
        return None
    return (
        (
            request[:at],
            request[session_end:stamp_at],
            request[stamp_end:digest_at],
            request[digest_end:signature_at],
            request[signature_end:body_at],
        ),
        request[at:session_end],
        request[stamp_at:stamp_end],
        request[digest_at:digest_end],
        request[signature_at:signature_end],
        request[body_at:],
    )


def _cut_text(text: str, values: tuple[str, str, str, str]) -> tuple[str, str, str, str, str] | None:
    """The text between the values, which come in this order and nowhere else."""
    pieces: list[str] = []
    rest = text
    for value in values:
        piece, found, rest = rest.partition(value)
        if not found:
            return None
        pieces.append(piece)
    if any(value in piece for value in values for piece in (*pieces, rest)):
        return None
    return pieces[0], pieces[1], pieces[2], pieces[3], rest


def _id_of(session: str) -> bytes | None:
    """A session's id has one spelling."""
    try:
        session_id = bytes.fromhex(session)
    except ValueError:
        return None
    return session_id if session_id.hex() == session else None
