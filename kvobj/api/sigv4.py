"""The one verifier of signatures, used on every route: SigV4 in the Authorization header and in presigned URLs.

Guarantees: what is verified is what arrived (raw target, raw header values); every header that can change a request's meaning is
signed; comparison takes constant time; an unknown access key costs the same work as a wrong secret; an unknown kind of
payload hash is refused. Does not authorise, and does not read bodies. Sources: S3 API reference, "Signature calculations",
and the published failures of other servers (tests/security/test_published_cases.py).
"""

from __future__ import annotations

import hmac
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from hashlib import sha256
from time import gmtime, strftime
from typing import Final

from kvobj.api.conditions import parse_http_date
from kvobj.api.credential import ALGORITHM, IS_STAMP, Credential, Signer
from kvobj.api.errors import S3Error
from kvobj.api.request import Target
from kvobj.catalog.rows import UserRow
from kvobj.clock import Clock

SKEW_SECONDS: Final = 900
UNSIGNED: Final = "UNSIGNED-PAYLOAD"
_KEY_CACHE_ENTRIES: Final = 1024
_SIGNED_URLS: Final = 4096
_SIGNED_URL_CHARACTERS: Final = 1024
_DUMMY_SECRET: Final = "no such user: the work must not tell"  # noqa: S105 - is nobody's secret
_BLOCK_BYTES: Final = 64
_INNER_PAD: Final = bytes(byte ^ 0x36 for byte in range(256))
_OUTER_PAD: Final = bytes(byte ^ 0x5C for byte in range(256))
_HEX_DIGEST: Final = re.compile(r"[0-9a-f]{64}\Z", re.ASCII).match
_MANY_SPACES: Final = re.compile(r"[ \t]+").sub
_NO_DATE: Final = "AWS authentication requires a valid Date or x-amz-date header"
_LAST_SECONDS: Final = 253_402_300_800  # the year 10000: no stamp has room for it
_IDENTITY_HEADERS: Final = frozenset(
    f"x-kvobj-{name}" for name in ("namespace", "parent", "part", "tokens", "bucket-kind")
)


class PayloadMode(Enum):
    """How x-amz-content-sha256 says that the body is protected. What is in no line here is refused."""

    HASHED = "a digest in hex"
    UNSIGNED = UNSIGNED
    CHUNKS_SIGNED = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"
    CHUNKS_SIGNED_TRAILER = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER"
    CHUNKS_UNSIGNED_TRAILER = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"

    @property
    def is_chunked(self) -> bool:
        """The body is framed as aws-chunked."""
        return self not in (PayloadMode.HASHED, PayloadMode.UNSIGNED)


_MODES: Final = {mode.value: mode for mode in PayloadMode if mode is not PayloadMode.HASHED}
_SIGNED_MODES: Final = (PayloadMode.CHUNKS_SIGNED, PayloadMode.CHUNKS_SIGNED_TRAILER)


@dataclass(frozen=True, slots=True)
class ChunkSigning:
    """What the signatures of an aws-chunked body start from."""

    signing_key: bytes = field(repr=False)
    seed_signature: str
    stamp: str
    scope: str


ANONYMOUS: Final = UserRow(id="", display_name="", access_key="", secret_key="")
"""Who signs nothing. No user and no owner has the id "", so that this one owns nothing."""


class Authentication:
    """A verified identity, or `ANONYMOUS`. `payload_sha256` is the hex digest the body must have (None: not promised), `stamp` the
    time that was signed (None: nothing was)."""

    __slots__ = ("chunk_signing", "is_presigned", "payload_mode", "payload_sha256", "stamp", "user")

    def __init__(
        self,
        user: UserRow,
        payload_mode: PayloadMode,
        payload_sha256: str | None,
        chunk_signing: ChunkSigning | None,
        *,
        is_presigned: bool,
        stamp: str | None = None,
    ) -> None:
        self.user = user
        self.payload_mode = payload_mode
        self.payload_sha256 = payload_sha256
        self.chunk_signing = chunk_signing
        self.is_presigned = is_presigned
        self.stamp = stamp

    @property
    def is_anonymous(self) -> bool:
        """Nobody signed the request: it may do what is granted to everyone."""
        return self.user is ANONYMOUS


def anonymous_authentication(fields: dict[str, str]) -> Authentication:
    """What a request without credentials is taken for. A digest that it promises must hold all the same.

    Raises `S3Error` for a token or chunk signatures: both claim an identity that nothing proves.
    """
    if "x-amz-security-token" in fields:
        raise S3Error("InvalidToken")
    content_hash = fields.get("x-amz-content-sha256", UNSIGNED)
    mode = _payload_mode(content_hash)
    if mode in _SIGNED_MODES:
        raise S3Error("InvalidRequest", f"{content_hash} needs a signed request.")
    return Authentication(
        ANONYMOUS, mode, content_hash if mode is PayloadMode.HASHED else None, None, is_presigned=False
    )


def check_payload_is_signed(authentication: Authentication) -> None:
    """Raise `S3Error` InvalidRequest where a signature covers the headers only, so that the body could be changed in flight.

    Who is anonymous signs nothing, and is not concerned.
    """
    mode = authentication.payload_mode
    if mode in (PayloadMode.UNSIGNED, PayloadMode.CHUNKS_UNSIGNED_TRAILER) and not authentication.is_anonymous:
        raise S3Error("InvalidRequest", f"{mode.value} is taken over TLS only.")


class _SigningKey:
    """A derived key, and HMAC-SHA-256 (RFC 2104) under it from states that have taken the key in already: to look the algorithm up
    and to take the key in costs three quarters of a short text's."""

    __slots__ = ("_inner", "_outer", "key")

    def __init__(self, key: bytes) -> None:
        """`key`: 32 bytes, as all that are derived."""
        padded = key.ljust(_BLOCK_BYTES, b"\0")
        self.key = key
        self._inner = sha256(padded.translate(_INNER_PAD))
        self._outer = sha256(padded.translate(_OUTER_PAD))

    def sign(self, text: bytes) -> str:
        """In hex."""
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(text)
        outer.update(inner.digest())
        return outer.hexdigest()


class SignatureVerifier:
    """Holds derived keys by (secret, day, region), bounded. Event-loop-only; every call is pure computation, some 10 µs.

    `explain`: a mismatch tells the string to sign and the canonical request, never the signature that was expected.
    """

    def __init__(self, clock: Clock, *, explain: bool = False) -> None:
        self._clock = clock
        self._explain = explain
        self._keys: dict[tuple[str, str, str], _SigningKey] = {}
        self._midnights: dict[str, int] = {}
        self._latest: tuple[str, int] = ("", 0)
        self._signed_urls: set[tuple[str, ...]] = set()

    def verify(
        self, credential: Credential, user: UserRow | None, *, method: str, target: Target, fields: dict[str, str]
    ) -> Authentication:
        """Check one request's signature, its time, and that all that matters is signed. Raises `S3Error`."""
        signer = credential.signer
        content_hash = _content_hash(credential, fields)
        mode = _payload_mode(content_hash)
        stamp = credential.stamp
        is_presigned = stamp is not None
        if stamp is None:
            stamp = _header_stamp(fields)
            self._check_skew(stamp)
        else:
            self._check_validity(stamp, credential.expires_seconds)
        if stamp[:8] != signer.day:
            raise _another_day(stamp, signer, is_presigned=is_presigned)
        _check_signed_headers(signer, fields, is_presigned=is_presigned)
        url = None if user is None else _url_of(user, signer, method, target, fields, content_hash)
        if url not in self._signed_urls:
            self._check_signature(credential, user, method, target, fields, content_hash, stamp)
            self._remember(url)
        assert user is not None
        if "x-amz-security-token" in fields:
            raise S3Error("InvalidToken")
        chunk_signing = None
        if mode in _SIGNED_MODES:
            key = self._signing_key(user.secret_key, signer).key
            chunk_signing = ChunkSigning(key, credential.signature, stamp, signer.scope)
        payload_sha256 = content_hash if mode is PayloadMode.HASHED else None
        return Authentication(user, mode, payload_sha256, chunk_signing, is_presigned=is_presigned, stamp=stamp)

    def holds(
        self,
        signer: Signer,
        user: UserRow,
        stamp: str,
        canonical: bytes,
        signature: str,
        *,
        expires_seconds: int | None = None,
    ) -> bool:
        """Whether a signature is that of this canonical request, of which the stamp is a part. For who knows that all else that
        `verify` asks for is so. `expires_seconds`: of a presigned one; None: it is in the header. Raises `S3Error` where its time
        is not now."""
        if (stamp != self._latest[0] and not IS_STAMP(stamp)) or stamp[:8] != signer.day:
            return False
        if expires_seconds is None:
            self._check_skew(stamp)
        else:
            self._check_validity(stamp, expires_seconds)
        text = _string_to_sign(signer, stamp, canonical)
        return hmac.compare_digest(self._signing_key(user.secret_key, signer).sign(text.encode()), signature)

    def _check_signature(  # noqa: PLR0917 - what is signed
        self,
        credential: Credential,
        user: UserRow | None,
        method: str,
        target: Target,
        fields: dict[str, str],
        content_hash: str,
        stamp: str,
    ) -> None:
        """Raise `S3Error` where there is no such user, or another signature."""
        signer = credential.signer
        key = self._signing_key(_DUMMY_SECRET if user is None else user.secret_key, signer)
        canonical = canonical_request(method, target, fields, credential, content_hash)
        string_to_sign = _string_to_sign(signer, stamp, canonical)
        expected = key.sign(string_to_sign.encode())
        matches = hmac.compare_digest(expected, credential.signature)
        if user is None:
            raise S3Error("InvalidAccessKeyId", AWSAccessKeyId=signer.access_key)
        if not matches:
            explanation = (
                {"StringToSign": string_to_sign, "CanonicalRequest": canonical.decode("latin-1")}
                if self._explain
                else {}
            )
            raise S3Error(
                "SignatureDoesNotMatch",
                AWSAccessKeyId=signer.access_key,
                SignatureProvided=credential.signature,
                **explanation,
            )

    def _remember(self, url: tuple[str, ...] | None) -> None:
        if url is not None:
            if len(self._signed_urls) >= _SIGNED_URLS:
                self._signed_urls.clear()
            self._signed_urls.add(url)

    def _signing_key(self, secret: str, signer: Signer) -> _SigningKey:
        name = (secret, signer.day, signer.region)
        found = self._keys.get(name)
        if found is None:
            key = f"AWS4{secret}".encode()
            for piece in (signer.day, signer.region, "s3", "aws4_request"):
                key = hmac.digest(key, piece.encode(), "sha256")
            if len(self._keys) >= _KEY_CACHE_ENTRIES:
                self._keys.clear()
            found = self._keys[name] = _SigningKey(key)
        return found

    def _seconds(self, stamp: str) -> int:
        latest, seconds = self._latest
        if stamp == latest:
            return seconds
        day = stamp[:8]
        midnight = self._midnights.get(day)
        if midnight is None:
            try:
                midnight = int(datetime(int(day[:4]), int(day[4:6]), int(day[6:]), tzinfo=UTC).timestamp())
            except ValueError as error:
                raise S3Error("AccessDenied", _NO_DATE) from error
            if len(self._midnights) >= _KEY_CACHE_ENTRIES:
                self._midnights.clear()
            self._midnights[day] = midnight
        seconds = midnight + int(stamp[9:11]) * 3600 + int(stamp[11:13]) * 60 + int(stamp[13:15])
        self._latest = (stamp, seconds)
        return seconds

    def _check_skew(self, stamp: str) -> None:
        now_seconds = self._clock.now_ms() // 1000
        if abs(self._seconds(stamp) - now_seconds) > SKEW_SECONDS:
            raise S3Error(
                "RequestTimeTooSkewed",
                RequestTime=stamp,
                ServerTime=_iso_seconds(now_seconds),
                MaxAllowedSkewMilliseconds=SKEW_SECONDS * 1000,
            )

    def _check_validity(self, stamp: str, expires_seconds: int) -> None:
        now_ms = self._clock.now_ms()
        begin_seconds = self._seconds(stamp)
        if begin_seconds - now_ms // 1000 > SKEW_SECONDS:
            raise S3Error(
                "AccessDenied",
                "Request is not yet valid",
                **{"X-Amz-Date": stamp, "ServerTime": _iso_seconds(now_ms // 1000)},
            )
        end_seconds = begin_seconds + expires_seconds
        if now_ms > end_seconds * 1000 or not expires_seconds:
            raise S3Error(
                "AccessDenied",
                "Request has expired",
                **{
                    "X-Amz-Expires": expires_seconds,
                    "Expires": _iso_seconds(end_seconds),
                    "ServerTime": _iso_seconds(now_ms // 1000),
                },
            )


def _url_of(  # noqa: PLR0917 - what is signed
    user: UserRow, signer: Signer, method: str, target: Target, fields: dict[str, str], content_hash: str
) -> tuple[str, ...] | None:
    """All that a presigned URL's signature depends on, and the signature: what was found of it once holds for good, while its time,
    its user, and the headers beside it are looked at each time. None where other headers are signed, or nothing is presigned: no
    such request comes twice."""
    raw_query = target.raw_query
    if target.presigned is None or signer.signed_headers_text != "host" or len(raw_query) > _SIGNED_URL_CHARACTERS:
        return None
    return user.secret_key, method, target.raw_path, raw_query, fields.get("host", ""), content_hash


def _content_hash(credential: Credential, fields: dict[str, str]) -> str:
    """What the request says of its payload. A presigned one may say it in its query, and need not."""
    in_header = fields.get("x-amz-content-sha256")
    if credential.stamp is None:
        if in_header is None:
            raise S3Error("InvalidRequest", "Missing required header for this request: x-amz-content-sha256")
        return in_header
    in_query = credential.content_sha256
    if in_query is not None and in_header is not None and in_query != in_header:
        raise S3Error("InvalidArgument", "x-amz-content-sha256 was sent twice.", ArgumentName="x-amz-content-sha256")
    return in_query or in_header or UNSIGNED


def _payload_mode(content_hash: str) -> PayloadMode:
    if _HEX_DIGEST(content_hash):
        return PayloadMode.HASHED
    mode = _MODES.get(content_hash)
    if mode is None:
        raise S3Error(
            "InvalidArgument",
            "x-amz-content-sha256 must be UNSIGNED-PAYLOAD, STREAMING-UNSIGNED-PAYLOAD-TRAILER, "
            "STREAMING-AWS4-HMAC-SHA256-PAYLOAD, STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER or a valid sha256 value.",
            ArgumentName="x-amz-content-sha256",
            ArgumentValue=content_hash,
        )
    return mode


def _header_stamp(fields: dict[str, str]) -> str:
    """The time of a request, which goes into what is signed: x-amz-date, else Date as an HTTP date or in ISO 8601."""
    stamp = fields.get("x-amz-date")
    if stamp is None:
        stamp = fields.get("date", "")
        if not IS_STAMP(stamp):
            seconds = parse_http_date(stamp)
            if seconds is None or not 0 <= seconds < _LAST_SECONDS:
                raise S3Error("AccessDenied", _NO_DATE)
            return strftime("%Y%m%dT%H%M%SZ", gmtime(seconds))
    elif not IS_STAMP(stamp):
        raise S3Error("AccessDenied", _NO_DATE)
    return stamp


def _iso_seconds(seconds: int) -> str:
    return strftime("%Y-%m-%dT%H:%M:%SZ", gmtime(seconds))


def _another_day(stamp: str, signer: Signer, *, is_presigned: bool) -> S3Error:
    text = f'Invalid credential date "{signer.day}". This date is not the same as X-Amz-Date: "{stamp[:8]}".'
    if is_presigned:
        return S3Error("AuthorizationQueryParametersError", text)
    return S3Error("AuthorizationHeaderMalformed", f"The authorization header is malformed; {text}")


def _check_signed_headers(signer: Signer, fields: dict[str, str], *, is_presigned: bool) -> None:
    # Unsigned, any of these could be added in flight and would change what the request does. Content-Type is none of them, as S3
    # has it: Amazon's SDKs for JavaScript (version 2) and PHP leave it out, and so does minio-go where it signs chunks; and
    # x-amz-content-sha256 is part of what is signed anyway. A presigned URL's user cannot know Content-MD5 when it is signed.
    unsigned = [
        name
        for name in fields.keys() - signer.signed_names
        if (name.startswith("x-amz-") and (is_presigned or name != "x-amz-content-sha256"))
        or name in _IDENTITY_HEADERS
        or name == "host"
        or (not is_presigned and name == "content-md5")
    ]
    if unsigned:
        raise S3Error(
            "AccessDenied",
            "There were headers present in the request which were not signed",
            HeadersNotSigned=", ".join(sorted(unsigned)),
        )


def _string_to_sign(signer: Signer, stamp: str, canonical: bytes) -> str:
    return f"{ALGORITHM}\n{stamp}\n{signer.scope}\n{sha256(canonical).hexdigest()}"


def canonical_request(
    method: str, target: Target, fields: dict[str, str], credential: Credential, content_hash: str
) -> bytes:
    """What a signature is of (SigV4, "canonical request"). Raises `S3Error` where no such text can have been signed."""
    lines = [method, target.canonical_path, target.canonical_query(without=credential.signature_parameter)]
    signer = credential.signer
    for name in signer.signed_headers:
        # A client may sign a header that an intermediary dropped (rclone behind a proxy): S3 takes it as empty.
        value = fields.get(name, "").strip(" \t")
        if "  " in value or "\t" in value:
            value = _MANY_SPACES(" ", value)
        lines.append(f"{name}:{value}")
    lines += ("", signer.signed_headers_text, content_hash)
    text = "\n".join(lines)
    try:
        return text.encode("latin-1")  # header values are bytes that were decoded as latin-1; all else is ASCII
    except UnicodeEncodeError as error:
        raise S3Error("SignatureDoesNotMatch", AWSAccessKeyId=signer.access_key) from error
