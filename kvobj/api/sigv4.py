"""The one verifier of signatures, used on every route: SigV4 in the Authorization header and in presigned URLs.

Guarantees: what is verified is what arrived (raw target, raw header values); every header that can change a request's meaning is
signed; comparison takes constant time; an unknown access key costs the same work as a wrong secret; an unknown kind of
payload hash is refused. Does not authorise, and does not read bodies. Sources: S3 API reference, "Signature calculations",
and the published failures of other servers listed in docs/s3.md.
"""

from __future__ import annotations

import hmac
import re
from calendar import timegm
from dataclasses import dataclass
from email.utils import parsedate_tz
from enum import Enum
from hashlib import sha256
from time import gmtime, strftime
from typing import Final

from kvobj.api.credential import ALGORITHM, Credential, Signer
from kvobj.api.errors import S3Error
from kvobj.api.request import Target
from kvobj.catalog.rows import UserRow
from kvobj.clock import Clock

SKEW_SECONDS: Final = 900
UNSIGNED: Final = "UNSIGNED-PAYLOAD"
_KEY_CACHE_ENTRIES: Final = 1024
_DUMMY_SECRET: Final = "no such user: the work must not tell"  # noqa: S105 - is nobody's secret
_PRESIGNED_SIGNATURE: Final = "X-Amz-Signature"
_HEX_DIGEST: Final = re.compile(r"[0-9a-f]{64}\Z", re.ASCII).match
_STAMP: Final = re.compile(r"\d{8}T\d{6}Z\Z", re.ASCII).match
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


@dataclass(frozen=True, slots=True)
class ChunkSigning:
    """What the signatures of an aws-chunked body start from."""

    signing_key: bytes
    seed_signature: str
    stamp: str
    scope: str


class Authentication:
    """A verified identity. `payload_sha256` is the hex digest the body must have (None: not promised)."""

    __slots__ = ("chunk_signing", "is_presigned", "payload_mode", "payload_sha256", "user")

    def __init__(
        self,
        user: UserRow,
        payload_mode: PayloadMode,
        payload_sha256: str | None,
        chunk_signing: ChunkSigning | None,
        *,
        is_presigned: bool,
    ) -> None:
        self.user = user
        self.payload_mode = payload_mode
        self.payload_sha256 = payload_sha256
        self.chunk_signing = chunk_signing
        self.is_presigned = is_presigned


class SignatureVerifier:
    """Holds derived keys by (secret, day, region), bounded. Event-loop-only; every call is pure computation, some 15 µs."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._keys: dict[tuple[str, str, str], bytes] = {}
        self._midnights: dict[str, int] = {}

    def verify(
        self, credential: Credential, user: UserRow | None, *, method: str, target: Target, fields: dict[str, str]
    ) -> Authentication:
        """Check one request's signature, its time, and that all that matters is signed. Raises `S3Error`."""
        signer = credential.signer
        is_presigned = credential.stamp is not None
        content_hash = fields.get("x-amz-content-sha256")
        if content_hash is None:
            if not is_presigned:
                raise S3Error("MissingSecurityHeader", "The header x-amz-content-sha256 is missing.")
            content_hash = UNSIGNED
        mode = _payload_mode(content_hash)
        stamp = credential.stamp or _header_stamp(fields)
        if stamp[:8] != signer.day:
            raise S3Error("SignatureDoesNotMatch", "The credential's day is not the day of the request.")
        if is_presigned:
            self._check_validity(stamp, credential.expires_seconds)
        else:
            self._check_skew(stamp)
        _check_signed_headers(signer, fields, is_presigned=is_presigned)
        key = self._signing_key(_DUMMY_SECRET if user is None else user.secret_key, signer)
        request_hash = sha256(
            _canonical_request(
                method, target, fields, signer=signer, content_hash=content_hash, is_presigned=is_presigned
            )
        ).hexdigest()
        expected = hmac.digest(key, f"{ALGORITHM}\n{stamp}\n{signer.scope}\n{request_hash}".encode(), "sha256").hex()
        matches = hmac.compare_digest(expected, credential.signature)
        if user is None:
            raise S3Error("InvalidAccessKeyId", AWSAccessKeyId=signer.access_key)
        if not matches:
            raise S3Error("SignatureDoesNotMatch")
        if "x-amz-security-token" in fields:
            raise S3Error("InvalidToken")
        chunk_signing = None
        if mode in (PayloadMode.CHUNKS_SIGNED, PayloadMode.CHUNKS_SIGNED_TRAILER):
            chunk_signing = ChunkSigning(key, credential.signature, stamp, signer.scope)
        payload_sha256 = content_hash if mode is PayloadMode.HASHED else None
        return Authentication(user, mode, payload_sha256, chunk_signing, is_presigned=is_presigned)

    def _signing_key(self, secret: str, signer: Signer) -> bytes:
        name = (secret, signer.day, signer.region)
        key = self._keys.get(name)
        if key is None:
            key = f"AWS4{secret}".encode()
            for piece in (signer.day, signer.region, "s3", "aws4_request"):
                key = hmac.digest(key, piece.encode(), "sha256")
            if len(self._keys) >= _KEY_CACHE_ENTRIES:
                self._keys.clear()
            self._keys[name] = key
        return key

    def _seconds(self, stamp: str) -> int:
        day = stamp[:8]
        midnight = self._midnights.get(day)
        if midnight is None:
            if len(self._midnights) >= _KEY_CACHE_ENTRIES:
                self._midnights.clear()
            midnight = self._midnights[day] = timegm((int(day[:4]), int(day[4:6]), int(day[6:]), 0, 0, 0))
        return midnight + int(stamp[9:11]) * 3600 + int(stamp[11:13]) * 60 + int(stamp[13:15])

    def _check_skew(self, stamp: str) -> None:
        now_seconds = self._clock.now_ms() // 1000
        if abs(self._stamp_seconds(stamp) - now_seconds) > SKEW_SECONDS:
            raise S3Error(
                "RequestTimeTooSkewed",
                RequestTime=stamp,
                ServerTime=strftime("%Y-%m-%dT%H:%M:%SZ", gmtime(now_seconds)),
                MaxAllowedSkewMilliseconds=SKEW_SECONDS * 1000,
            )

    def _check_validity(self, stamp: str, expires_seconds: int) -> None:
        age_seconds = self._clock.now_ms() // 1000 - self._stamp_seconds(stamp)
        if age_seconds < -SKEW_SECONDS:
            raise S3Error("AccessDenied", "Request is not yet valid.")
        if age_seconds > expires_seconds:
            raise S3Error("AccessDenied", "Request has expired.")

    def _stamp_seconds(self, stamp: str) -> int:
        try:
            return self._seconds(stamp)
        except ValueError as error:
            raise S3Error("AccessDenied", "The request's date is not a date.") from error


def _payload_mode(content_hash: str) -> PayloadMode:
    if _HEX_DIGEST(content_hash):
        return PayloadMode.HASHED
    mode = _MODES.get(content_hash)
    if mode is None:
        raise S3Error(
            "InvalidArgument",
            "x-amz-content-sha256 must be UNSIGNED-PAYLOAD, a known STREAMING- value or a valid sha256 value.",
            ArgumentName="x-amz-content-sha256",
        )
    return mode


def _header_stamp(fields: dict[str, str]) -> str:
    stamp = fields.get("x-amz-date")
    if stamp is not None:
        if not _STAMP(stamp):
            raise S3Error("AccessDenied", "x-amz-date must be in the ISO8601 basic format.")
        return stamp
    parsed = parsedate_tz(fields.get("date", ""))
    if parsed is None:
        raise S3Error("AccessDenied", "AWS authentication requires a valid Date or x-amz-date header.")
    try:
        return strftime("%Y%m%dT%H%M%SZ", gmtime(timegm(parsed[:9]) - (parsed[9] or 0)))
    except (ValueError, OverflowError, OSError) as error:
        raise S3Error("AccessDenied", "The Date header is not a date.") from error


def _check_signed_headers(signer: Signer, fields: dict[str, str], *, is_presigned: bool) -> None:
    signed = signer.signed_headers
    for name in fields:
        if name in signed:
            continue
        # Unsigned, any of these could be added in flight and would change what the request does. A presigned URL's user
        # cannot know them when it is signed, which is why only its Content-Type and Content-MD5 may be free.
        if (
            name.startswith("x-amz-")
            or name in _IDENTITY_HEADERS
            or (not is_presigned and name in ("content-type", "content-md5"))
            or name == "host"
        ):
            raise S3Error(
                "AccessDenied",
                "There were headers present in the request which were not signed.",
                HeadersNotSigned=name,
            )


def _canonical_request(
    method: str, target: Target, fields: dict[str, str], *, signer: Signer, content_hash: str, is_presigned: bool
) -> bytes:
    lines = [
        method,
        target.canonical_path,
        target.canonical_query(without=_PRESIGNED_SIGNATURE if is_presigned else None),
    ]
    for name in signer.signed_headers:
        value = fields.get(name)
        if value is None:
            # A client may sign a header that an intermediary dropped (rclone behind a proxy): S3 takes it as empty.
            value = ""
        elif "  " in value or "\t" in value:
            value = " ".join(value.split())
        else:
            value = value.strip()
        lines.append(f"{name}:{value}")
    lines += ("", signer.signed_headers_text, content_hash)
    text = "\n".join(lines)
    try:
        return text.encode("latin-1")  # header values are bytes that were decoded as latin-1; all else is ASCII
    except UnicodeEncodeError as error:
        raise S3Error("SignatureDoesNotMatch") from error
