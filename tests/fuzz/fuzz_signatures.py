"""Fuzz targets for who signed a request: target, headers, credential and signature; and the canonical request against botocore's.

What must hold: only typed refusals; what is verified is signed by the book, with all that matters among the signed headers; what
the book says is signed is not refused as wrongly signed; and whatever botocore signs is verified.
"""

from __future__ import annotations

import re
from random import Random
from types import SimpleNamespace
from typing import Final
from urllib.parse import quote

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from fakes import ManualClock
from fuzz_framing import require_refusal
from fuzz_message import Message, MessageMutator, parse_message, recorded_messages
from fuzz_mutation import AWKWARD
from fuzz_signing import (
    ACCESS_KEY,
    NOW_MS,
    SCOPE,
    SECRET,
    STAMP,
    canonical_path,
    canonical_query,
    canonical_request,
    presign,
    sign_fields,
    signature_of,
)

from kvobj.api.credential import CredentialParser
from kvobj.api.errors import S3Error, describe
from kvobj.api.message import RequestHead
from kvobj.api.query_headers import with_query_headers
from kvobj.api.request import HostRules, Target, encode_key, parse_fields, parse_target
from kvobj.api.sigv4 import Authentication, SignatureVerifier, anonymous_authentication, check_payload_is_signed
from kvobj.catalog.rows import UserRow
from kvobj.errors import KvobjError

RULES: Final = HostRules(hosts={"data.example.com": "data"}, domains=("localhost", "s3.example.com"))
OTHER_RULES: Final = HostRules(hosts={"bucket.localhost": "bucket"}, default_bucket="bucket")
HTTP_DATE: Final = "Fri, 02 Jan 2026 03:04:05 GMT"
_TWISTS: Final = (
    (b"AKALICE", b"AKNOBODY"), (b"AKALICE", b""), (b"AKALICE", b"a/b"), (b"20260102", b"20260103"), (b"20260102", b"20261399"), (b"20260102", b"x"),
    (b"us-east-1", b"eu-west-1"), (b"us-east-1", b"mars-1"), (b"/s3/", b"/iam/"), (b"aws4_request", b"aws5"), (b"T030405Z", b"T020405Z"),
    (b"T030405Z", b"T050405Z"), (b"T030405Z", b"T999999Z"), (b"AWS4-HMAC-SHA256 ", b"AWS "), (b"AWS4-HMAC-SHA256 ", b"AWS AK:"),
    (b"AWS4-HMAC-SHA256", b"AWS4-ECDSA-P256-SHA256"), (b"AWS4-HMAC-SHA256 ", b"Bearer "), (b"Expires=600", b"Expires=-1"), (b"Expires=600", b"Expires=0"),
    (b"Expires=600", b"Expires=604801"), (b"Expires=600", b"Expires=x"), (b"X-Amz-", b"x-amz-"), (b"SignedHeaders=", b"SignedHeaders=a;A;"),
    (b", ", b","), (b", ", b" , "), (b"Signature=", b"Signature=0"), (b"Credential=", b"Credential=x,Credential="), (b", Signed", b", x=y, Signed"),
    (HTTP_DATE.encode(), STAMP.encode()), (b"Jan", b"Feb"),
)  # fmt: skip
ALICE: Final = UserRow("alice", "Alice", ACCESS_KEY, SECRET)
_AUTHORIZATION: Final = re.compile(
    rf"AWS4-HMAC-SHA256 Credential={ACCESS_KEY}/{SCOPE}, SignedHeaders=([^,\s]+), Signature=([0-9a-f]{{64}})", re.ASCII
).fullmatch


class Door:
    """What every request passes before its operation is looked for: the same calls as in `S3Service`, in the same order."""

    def __init__(self) -> None:
        self._parser = CredentialParser(frozenset({"us-east-1", "eu-west-1"}))
        self._verifiers = [SignatureVerifier(ManualClock(now_ms=NOW_MS), explain=explain) for explain in (False, True)]

    def enter(self, head: RequestHead) -> tuple[Authentication, Target, dict[str, str]]:
        """Who it is, and where to."""
        fields = parse_fields(head)
        rules = OTHER_RULES if len(head.headers) % 5 == 0 else RULES
        target = parse_target(head.target, fields.get("host", ""), rules)
        credential = self._parser.parse(fields, target)
        if credential is None:
            authentication = anonymous_authentication(fields)
        else:
            user = ALICE if credential.signer.access_key == ACCESS_KEY else None
            verifier = self._verifiers[len(head.target) % 2]
            authentication = verifier.verify(credential, user, method=head.method, target=target, fields=fields)
            if authentication.is_presigned:
                fields = with_query_headers(fields, target)
        return authentication, target, fields


def head_of(message: Message) -> RequestHead:
    """A message as the HTTP layer hands it over."""
    fields = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in message.fields)
    return RequestHead(message.method.decode("latin-1"), message.target.decode("latin-1"), fields, "R", "127.0.0.1")


def signed(message: Message, how: bytes) -> Message:
    """`message` signed in its header, in its query or not at all."""
    fields = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in message.fields]
    method, target = message.method.decode("latin-1"), message.target.decode("latin-1")
    if how in (b"header", b"date"):
        stamp = ("x-amz-date", STAMP) if how == b"header" else ("date", HTTP_DATE)
        fields = sign_fields(method, target, fields, message.body, stamp=stamp)
    elif how == b"query":
        fields = [(name, value) for name, value in fields if name not in ("authorization", "x-amz-date")]
        fields = [(name, value) for name, value in fields if not name.startswith(("x-amz-", "x-kvobj-"))]
        target = presign(method, target, fields)
    encoded = tuple((name.encode("latin-1"), value.encode("latin-1")) for name, value in fields)
    return Message(message.method, target.encode("latin-1"), encoded, message.body, message.notes)


class SignatureTarget:
    """Requests that are changed before they are signed, after, or both."""

    name = "signatures"
    modules = (
        "kvobj/api/request.py",
        "kvobj/api/credential.py",
        "kvobj/api/sigv4.py",
        "kvobj/api/query_headers.py",
    )

    def __init__(self) -> None:
        self._pool = recorded_messages()
        self._door = Door()

    def seeds(self) -> list[bytes]:
        """Each request as it was recorded (by an unknown user, of another day), and signed anew in its header and in its query."""
        return [signed(message, how).encode() for message in self._pool for how in (b"header", b"query", b"as it is")]

    def make(self, random: Random) -> bytes:
        mutator = MessageMutator(random, self._pool, [])
        message = random.choice(self._pool)
        if random.random() < 0.6:
            message = mutator.change(message, most=3)
        message = signed(message, random.choice((b"header", b"header", b"date", b"query", b"query", b"as it is")))
        if random.random() < 0.5:
            message = mutator.change(message, most=3)
        case = message.encode()
        if random.random() < 0.25:
            case = case.replace(*random.choice(_TWISTS))
        return case

    def run(self, case: bytes) -> str:
        message = parse_message(case)
        if message is None:
            return "no case"
        head = head_of(message)
        try:
            authentication, target, _ = self._door.enter(head)
            if len(head.headers) % 4 == 0:
                check_payload_is_signed(authentication)
        except KvobjError as error:
            require_refusal(error)
            code = describe(error)[0]
            if code == "SignatureDoesNotMatch" and self._is_signed_by_the_book(head, strictly=True):
                raise AssertionError("a right signature is refused") from error
            return code
        if authentication.is_anonymous:
            assert "authorization" not in dict(head.headers) or not head.header("authorization")
            return "anonymous"
        assert authentication.user is ALICE
        self._check_round_trip(target)
        if authentication.is_presigned:
            return "presigned"
        assert self._is_signed_by_the_book(head, strictly=False), "a wrong signature is taken"
        return "signed"

    @staticmethod
    def _is_signed_by_the_book(head: RequestHead, *, strictly: bool) -> bool:
        """Whether it is signed in its header as the documentation has it, and covers what changes a request's meaning.

        `strictly`: in the one form that every server has to take; else its parts may be spaced and ordered otherwise.
        """
        header, content_hash = head.header("authorization") or "", head.header("x-amz-content-sha256")
        if content_hash is None or not head.target.startswith("/"):
            return False
        if strictly and (_AUTHORIZATION(header) is None or head.header("x-amz-date") != STAMP):
            return False
        stamp = head.header("x-amz-date") or head.header("date")
        parts = dict(
            part.strip(" \t").split("=", 1) for part in header[len("AWS4-HMAC-SHA256 ") :].split(",") if "=" in part
        )
        # Signed is the value with its spaces folded, and a date says the same with more of them.
        if (
            " ".join((stamp or "").split()) not in (STAMP, HTTP_DATE)
            or parts.get("Credential") != f"{ACCESS_KEY}/{SCOPE}"
        ):
            return False
        names = parts.get("SignedHeaders", "").split(";")
        must = {name for name, _ in head.headers if name == "host" or name.startswith("x-amz-")}
        if not must.issubset(names) or names != sorted(set(names)):
            return False
        canonical = canonical_request(head.method, head.target, head.headers, names, content_hash)
        return signature_of(canonical) == parts.get("Signature")

    @staticmethod
    def _check_round_trip(target: Target) -> None:
        if target.key and "\0" not in target.key:
            again = parse_target(f"/b-1/{encode_key(target.key)}", "", RULES)
            assert again.key == target.key


class CanonicalTarget:
    """Well-formed requests of any names and values, signed by botocore: every one is verified, however it is spelled."""

    name = "canonical"
    modules = ("kvobj/api/request.py", "kvobj/api/sigv4.py")
    _TEXTS: Final = (
        "a", "key", "/", "//", "a b", "+", "%", "%2F", "%41", "~", "-._", "ü", "鍵", "🔑", "é", "e\u0301", "'", '"', "<&>", "=", "?", "#", "\\",
        "|", "^", "`", "{}", "[]", "@:", ";", ",", "$", "!", "*", "()", "A" * 40, "\t", "\x01", "\x7f", "\x80", "\xa0", "\u2028", "\ufffd",
        *(piece.decode() for piece in AWKWARD if piece.isascii() and b"\0" not in piece and len(piece) < 100 and b".." not in piece),
    )  # fmt: skip
    _HEADER_TEXTS: Final = ("a", " ", "  ", "\t", ",", "ü", '"', "a=b", "x" * 50, ";", "\xff")

    def __init__(self) -> None:
        self._door = Door()
        self._auth = S3SigV4Auth(Credentials(ACCESS_KEY, SECRET), "s3", "us-east-1")

    def seeds(self) -> list[bytes]:
        return [self.make(Random(number)) for number in range(20)]

    def make(self, random: Random) -> bytes:
        def text(texts: tuple[str, ...], most: int) -> str:
            return "".join(random.choice(texts) for _ in range(random.randrange(most)))

        # The host is followed by a bucket, so that any key is one.
        path = "/bucket/" + quote(text(self._TEXTS, 8), safe=random.choice(("/~", "~", "/", "/~!*'()", "/~:@$,;+")))
        if random.random() < 0.2:
            path = path.replace("%2B", "%2b").replace("a", "%61")
        safe = random.choice(("~", "", "~+/:@!$'(),*;"))
        pairs = [
            quote(text(self._TEXTS, 4) or "p", safe=safe)
            + random.choice(("=", "=", ""))
            + quote(text(self._TEXTS, 4), safe=safe)
            for _ in range(random.randrange(5))
        ]
        fields = [
            ("x-amz-meta-" + text(("a", "b", "-", "_", "1"), 5) + "z", text(self._HEADER_TEXTS, 6))
            for _ in range(random.randrange(5))
        ]
        fields += [(random.choice(("accept-encoding", "content-type", "range")), text(self._HEADER_TEXTS, 4))]
        encoded = tuple((name.encode(), value.strip(" \t").encode("latin-1")) for name, value in fields)
        method = random.choice((b"GET", b"PUT", b"HEAD", b"POST", b"DELETE"))
        return Message(method, (path + ("?" + "&".join(pairs) if pairs else "")).encode(), encoded, b"").encode()

    def run(self, case: bytes) -> str:
        message = parse_message(case)
        if message is None or not message.target.startswith(b"/bucket/"):
            return "no case"
        head = head_of(message)
        if any(name in ("host", "authorization") for name, _ in head.headers):
            return "no case"
        fields = [
            *head.headers,
            ("host", "127.0.0.1:9000"),
            ("x-amz-content-sha256", "UNSIGNED-PAYLOAD"),
            ("x-amz-date", STAMP),
        ]
        # botocore takes a URL that is encoded its own way; what is sent may spell the same otherwise.
        path, mark, query = head.target.partition("?")
        url = f"http://127.0.0.1:9000{canonical_path(path)}{mark}{canonical_query(query)}"
        request = AWSRequest(method=head.method, url=url)
        for name, value in fields:
            request.headers.add_header(name, value)
        request.context = {"timestamp": STAMP, "signing": {}}
        self._auth.payload = lambda _request: "UNSIGNED-PAYLOAD"
        canonical = self._auth.canonical_request(
            SimpleNamespace(url=request.url, method=head.method, params=None, headers=request.headers)
        )
        names = sorted({name for name, _ in fields})
        assert canonical == canonical_request(head.method, head.target, fields, names, "UNSIGNED-PAYLOAD"), (
            "not botocore's"
        )
        signature = signature_of(canonical)
        claim = f"AWS4-HMAC-SHA256 Credential={ACCESS_KEY}/{SCOPE}, SignedHeaders={';'.join(names)}, Signature="
        received = (*fields, ("authorization", claim + signature))
        try:
            self._door.enter(RequestHead(head.method, head.target, received, "R", "127.0.0.1"))
        except S3Error as error:
            if error.code not in ("InvalidURI", "KeyTooLongError", "InvalidArgument"):
                raise AssertionError("botocore's request is refused") from error
            return error.code
        return "verified"
