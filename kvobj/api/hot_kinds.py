"""Kinds of requests, known by the bytes of their heads, for `hot_requests`: what a head said that went the way of all requests, the
next one of its kind says too, whose bytes are the same but for what is of each request alone.

That is the target; time and signature where they are in the header; a body's checksum that is announced there; and the id that
SDKs give each call, which nobody here looks at: where it is signed, as by aws-sdk-cpp, it is put into what the signature is of.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from kvobj.api.checksums import Announced
from kvobj.api.credential import CredentialParser, Signer
from kvobj.api.hot_reads import wants_checksums
from kvobj.api.message import RequestHead
from kvobj.api.operations import GetObject, PutObject
from kvobj.api.request import Target
from kvobj.api.sigv4 import UNSIGNED, PayloadMode, canonical_request
from kvobj.catalog.rows import Durability, WriteCondition
from kvobj.store.requests import AT_ONCE_BYTES_MAX

STAMP_CHARACTERS: Final = 16
DIGEST_DIGITS: Final = 64
_END: Final = b"\r\n\r\n"
_LINE_END: Final = "\n"
_BEFORE_SIGNATURE: Final = b"Signature="
_CALL_ID_FIELD: Final = "amz-sdk-invocation-id"
_CALL_ID_CHARACTERS: Final = 36
# Of a UUID. Nothing that ends a field may be passed over.
_CALL_ID: Final = re.compile(rb"[0-9A-Fa-f\-]{36}").match
_FIELD_BYTES_MAX: Final = 2048
"""Of the fields by which a kind is remembered."""
_LENGTHS_MAX: Final = 64
_ALIKE_MAX: Final = 4
"""Kinds of one method and length."""
_UNUSED_MAX: Final = 64
_NEXT_TRY: Final = 256
"""Where so many kinds were learned and have not come again, one request in this many is learned from: most such heads never come
twice. Each kind that does come again makes room for another."""


@dataclass(frozen=True, slots=True)
class KindOfPut:
    """What a kind's fields say of the object that is written."""

    size_bytes: int
    durability: Durability | None
    headers: dict[str, str]
    condition: WriteCondition | None
    announced: Announced
    algorithms: frozenset[str]
    payload_mode: PayloadMode

    @property
    def is_long(self) -> bool:
        """Whether it is not stored at once, or there is more to be done with its body than that."""
        return (
            self.size_bytes > AT_ONCE_BYTES_MAX
            or self.payload_mode is not PayloadMode.UNSIGNED
            or bool(self.algorithms)
        )


class Cut(NamedTuple):
    """Where a value is that differs: in the fields, and in what is signed of them, from behind the query."""

    at: int
    text_at: int
    characters: int

    def value(self, request: bytes, at: int) -> str:
        """It, of fields that begin there. `UnicodeDecodeError` where it is no ASCII."""
        begin = at + self.at
        return request[begin : begin + self.characters].decode("ascii")


@dataclass(frozen=True, slots=True)
class Signed:
    """Who signed, and the canonical request from behind its query; in the header's form cut at the time, and where time and
    signature are. In a URL's form only which headers were signed counts."""

    signer: Signer
    text: tuple[str, str]
    stamp_at: int = -1
    signature_at: int = -1
    checksum: Cut | None = None
    """Where the body's checksum is, in the header's form."""
    call_id: Cut | None = None
    """Where the call's id is that is signed, in the header's form."""

    @property
    def is_in_header(self) -> bool:
        """Else it is in the target."""
        return self.stamp_at >= 0

    def text_of(self, request: bytes, at: int, stamp: str) -> str:
        """The canonical request from behind its query, of fields that begin there and are of this kind: with what they say where
        kinds differ. In the header's form."""
        front = self.text[0]
        for cut in (self.checksum, self.call_id):
            if cut is not None:
                front = f"{front[: cut.text_at]}{cut.value(request, at)}{front[cut.text_at + cut.characters :]}"
        return f"{front}{stamp}{self.text[1]}"


@dataclass(slots=True)
class Kind:
    """What heads of one kind say. `pieces`: their fields up to the blank line, but for what differs, each with where it begins.
    Nothing changes but `came_again`: whether one was answered from its bytes."""

    method: str
    operation: str
    pieces: tuple[tuple[int, bytes], ...]
    call_id_at: int
    """Where the call's id is; -1: it has none, or one that is to be the same, since it is signed in a URL or of no known form."""
    fields: dict[str, str]
    body_bytes: int
    """Of what comes with it; -1: it is not answered from its bytes."""
    with_checksums: bool
    signed: Signed
    put: KindOfPut | None
    came_again: bool = False

    def is_of(self, request: bytes, at: int) -> bool:
        """Whether the fields that begin there are of this kind; their length is."""
        starts_with = request.startswith  # in a loop: a generator costs more than all of this
        for begin, piece in self.pieces:
            if not starts_with(piece, at + begin):
                return False
        return self.call_id_at < 0 or _CALL_ID(request, at + self.call_id_at) is not None


class HotKinds:
    """The kinds that are known, within bounds. Event-loop-only."""

    __slots__ = ("_by_length", "_credentials", "_seen", "_unused")

    def __init__(self, credentials: CredentialParser) -> None:
        self._credentials = credentials
        self._by_length: dict[tuple[bytes, int], list[Kind]] = {}
        self._unused = 0
        self._seen = 0

    def of(self, method: bytes, length: int) -> Sequence[Kind]:
        """Those whose fields are so many bytes, up to and with the blank line."""
        return self._by_length.get((method, length), ())

    def note(self, kind: Kind) -> None:
        """One of the kind came again."""
        if not kind.came_again:
            kind.came_again = True
            self._unused = max(self._unused - 1, 0)

    def learn(
        self, head: RequestHead, target: Target, fields: dict[str, str], put: KindOfPut | None, *, is_presigned: bool
    ) -> None:
        """Remember what a head says whose signature, and all else, is known to be right; unless its kind is known, there is too
        much of it, or too many were learned that have not come again."""
        self._seen += 1
        if self._unused >= _UNUSED_MAX and self._seen % _NEXT_TRY:
            return
        tail = head.raw.partition(b"\r\n")[2]
        if not 0 < len(tail) <= _FIELD_BYTES_MAX:
            return
        method = head.method.encode()
        alike = self._by_length.get((method, len(tail)))
        if alike is not None and any(kind.is_of(tail, 0) for kind in alike):
            return
        kind = self._kind(head, target, fields, tail, put, is_presigned=is_presigned)
        if kind is None:
            return
        # Kinds that are forgotten count on: that they did not come again is what this is about.
        self._unused = min(self._unused + 1, _UNUSED_MAX)
        if alike is None:
            if len(self._by_length) >= _LENGTHS_MAX:
                del self._by_length[_first_unused(self._by_length)]
            alike = self._by_length[method, len(tail)] = []
        if len(alike) >= _ALIKE_MAX:
            del alike[_last_unused(alike)]
        alike.insert(0, kind)

    def _kind(
        self,
        head: RequestHead,
        target: Target,
        fields: dict[str, str],
        tail: bytes,
        put: KindOfPut | None,
        *,
        is_presigned: bool,
    ) -> Kind | None:
        if len(fields) != len(head.headers):
            return None
        credential = self._credentials.parse(fields, target)
        if credential is None or is_presigned is (target.presigned is None):
            return None
        content_hash = fields.get("x-amz-content-sha256", UNSIGNED)
        text = canonical_request(head.method, target, fields, credential, content_hash).decode("latin-1")
        signed = Signed(credential.signer, (f"\n{text.split(_LINE_END, 3)[3]}", ""))
        if not is_presigned:
            in_header = _in_header(signed, tail, stamp=fields.get("x-amz-date", ""), signature=credential.signature)
            if in_header is not None and put is not None and put.announced.value is not None:
                in_header = _with_checksum(in_header, tail, put.announced)
            if in_header is None or target.raw_query:
                return None
            signed = in_header
        call_id_at = _call_id_at(tail)
        if call_id_at >= 0 and _CALL_ID_FIELD in credential.signer.signed_names:
            signed = _with_call_id(signed, call_id_at, fields[_CALL_ID_FIELD])
            call_id_at = -1 if signed.call_id is None else call_id_at
        return Kind(
            method=head.method,
            operation=(GetObject if put is None else PutObject).__name__,
            pieces=_around(tail, _differing(signed, call_id_at)),
            call_id_at=call_id_at,
            fields=fields,
            body_bytes=0 if put is None else -1 if put.is_long else put.size_bytes,
            with_checksums=wants_checksums(fields),
            signed=signed,
            put=put,
        )


def _first_unused(by_length: dict[tuple[bytes, int], list[Kind]]) -> tuple[bytes, int]:
    """The length that was learned first of those of which no kind came again; of all, if there is none."""
    for length, alike in by_length.items():
        if not any(kind.came_again for kind in alike):
            return length
    return next(iter(by_length))


def _last_unused(alike: list[Kind]) -> int:
    """Where the oldest kind is that did not come again; the oldest of all, if there is none."""
    return next((at for at in reversed(range(len(alike))) if not alike[at].came_again), -1)


def _lines(tail: bytes) -> Iterator[tuple[str, int, bytes]]:
    """Each field: its name, where its value begins, and that."""
    position = 0
    for line in tail[: -len(_END)].split(b"\r\n"):
        name, _, value = line.partition(b": ")
        yield name.lower().decode("latin-1"), position + len(line) - len(value), value
        position += len(line) + 2


def _in_header(signed: Signed, tail: bytes, *, stamp: str, signature: str) -> Signed | None:
    """The signature of the header's form, whose time is a header of its own."""
    stamp_at = signature_at = -1
    for name, at, value in _lines(tail):
        if name == "x-amz-date" and len(value) == STAMP_CHARACTERS:
            stamp_at = at
        elif name == "authorization":
            before, found, last = value.partition(_BEFORE_SIGNATURE)
            if last == signature.encode() and len(last) == DIGEST_DIGITS:
                signature_at = at + len(before) + len(found)
    before_stamp, found_stamp, behind = signed.text[0].partition(f"\nx-amz-date:{stamp}\n")
    if stamp_at < 0 or signature_at < 0 or not found_stamp:
        return None
    text = (f"{before_stamp}\nx-amz-date:", f"\n{behind}")
    return Signed(signed.signer, text, stamp_at=stamp_at, signature_at=signature_at)


def _with_checksum(signed: Signed, tail: bytes, announced: Announced) -> Signed | None:
    """The same where the body's checksum differs, too, which is signed as it was sent."""
    wanted, value = f"x-amz-checksum-{announced.algorithm}".lower(), announced.value or ""
    for name, at, sent in _lines(tail):
        if name == wanted and sent == value.encode():
            text_at = signed.text[0].find(f"\n{name}:{value}\n")
            if text_at < 0:
                return None
            return replace(signed, checksum=Cut(at, text_at + len(name) + 2, len(value)))
    return None


def _with_call_id(signed: Signed, at: int, call_id: str) -> Signed:
    """The same where the call's id differs, too, which is signed as it was sent. In a URL's form, whose kinds are of many signers,
    it has to be the same."""
    text_at = signed.text[0].find(f"\n{_CALL_ID_FIELD}:{call_id}\n") if signed.is_in_header else -1
    if text_at < 0:
        return signed
    return replace(signed, call_id=Cut(at, text_at + len(_CALL_ID_FIELD) + 2, _CALL_ID_CHARACTERS))


def _call_id_at(tail: bytes) -> int:
    """Where the value is of the field that tells one call of an SDK from the next; -1: there is none of the one known form."""
    for name, at, value in _lines(tail):
        if name == _CALL_ID_FIELD and len(value) == _CALL_ID_CHARACTERS and _CALL_ID(value):
            return at
    return -1


def _differing(signed: Signed, call_id_at: int) -> list[tuple[int, int]]:
    """Where the values are that differ among requests of a kind, each with its length: time, signature, checksum, the call's id."""
    places: list[tuple[int, int]] = []
    if signed.is_in_header:
        places += [(signed.stamp_at, STAMP_CHARACTERS), (signed.signature_at, DIGEST_DIGITS)]
    if signed.checksum is not None:
        places.append((signed.checksum.at, signed.checksum.characters))
    if call_id_at >= 0:
        places.append((call_id_at, _CALL_ID_CHARACTERS))
    return sorted(places)


def _around(tail: bytes, places: list[tuple[int, int]]) -> tuple[tuple[int, bytes], ...]:
    """What is left of the fields without them, each piece with where it begins."""
    pieces: list[tuple[int, bytes]] = []
    begin = 0
    for at, length in places:
        pieces.append((begin, tail[begin:at]))
        begin = at + length
    pieces.append((begin, tail[begin:]))
    return tuple(pieces)
