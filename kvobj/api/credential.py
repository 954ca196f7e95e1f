"""What a request says about who signed it and how: the Authorization header or the X-Amz-* query, parsed strictly.

Exactly one of the two may be there. Nothing is believed yet: `sigv4.py` checks the signature. Source: Amazon S3 API reference,
"Authenticating Requests (AWS Signature Version 4)".
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from kvobj.api.errors import S3Error
from kvobj.api.request import Target

ALGORITHM: Final = "AWS4-HMAC-SHA256"
MAX_EXPIRES_SECONDS: Final = 604_800
_CACHE_ENTRIES: Final = 1024

_AUTHORIZATION: Final = re.compile(
    r"AWS4-HMAC-SHA256 +Credential=([^,\s]+) *, *SignedHeaders=([^,\s]+) *, *\Z", re.ASCII
).match
_SIGNATURE: Final = re.compile(r"[0-9a-f]{64}\Z", re.ASCII).match
_STAMP: Final = re.compile(r"\d{8}T\d{6}Z\Z", re.ASCII).match
_DAY: Final = re.compile(r"\d{8}\Z", re.ASCII).match
_DIGITS: Final = re.compile(r"\d{1,7}\Z", re.ASCII).match
_V2_QUERY: Final = ("AWSAccessKeyId", "Signature")
_QUERY_NAMES: Final = (
    "X-Amz-Algorithm",
    "X-Amz-Credential",
    "X-Amz-Date",
    "X-Amz-Expires",
    "X-Amz-SignedHeaders",
    "X-Amz-Signature",
)


@dataclass(frozen=True, slots=True)
class Signer:
    """Who signed and what: the parts of the credential and the names of the signed headers, which are sorted."""

    access_key: str
    day: str
    region: str
    scope: str
    signed_headers: tuple[str, ...]
    signed_headers_text: str


@dataclass(frozen=True, slots=True)
class Credential:
    """A claim to be checked. `stamp` is the X-Amz-Date of a presigned request, None for the header's form."""

    signer: Signer
    signature: str
    stamp: str | None = None
    expires_seconds: int = 0


class CredentialParser:
    """Parses credentials and remembers the part of the header that a client repeats all day (bounded; 5 µs saved a request)."""

    __slots__ = ("_regions", "_remembered")

    def __init__(self, regions: frozenset[str]) -> None:
        self._regions = regions
        self._remembered: dict[str, Signer] = {}

    def parse(self, fields: dict[str, str], target: Target) -> Credential | None:
        """The request's one claim of identity, or None for an anonymous request. Raises `S3Error`."""
        header = fields.get("authorization")
        parameters = target.parameters
        in_query = bool(parameters) and any(name in parameters for name in (*_QUERY_NAMES, *_V2_QUERY))
        if header is not None:
            if in_query:
                raise S3Error("InvalidArgument", "Only one authentication mechanism is allowed.")
            return self._from_header(header)
        return self._from_query(target) if in_query else None

    def _from_header(self, header: str) -> Credential:
        front, separator, signature = header.partition("Signature=")
        signer = self._remembered.get(front)
        if signer is None:
            if not header.startswith(ALGORITHM + " "):
                raise S3Error("InvalidRequest", f"The authorization mechanism is not supported. Use {ALGORITHM}.")
            found = _AUTHORIZATION(front)
            if not separator or found is None:
                raise S3Error("AuthorizationHeaderMalformed")
            signer = self._signer(found[1], found[2], "AuthorizationHeaderMalformed")
            if len(self._remembered) >= _CACHE_ENTRIES:
                self._remembered.clear()
            self._remembered[front] = signer
        if not _SIGNATURE(signature):
            raise S3Error("AuthorizationHeaderMalformed")
        return Credential(signer, signature)

    def _from_query(self, target: Target) -> Credential:
        code = "AuthorizationQueryParametersError"
        names = [name for name, _ in target.query]
        parameters = target.parameters
        if any(name in parameters for name in _V2_QUERY):
            raise S3Error("InvalidRequest", f"The authorization mechanism is not supported. Use {ALGORITHM}.")
        if any(names.count(name) != 1 for name in _QUERY_NAMES):
            raise S3Error(code, "Query-string authentication needs each of its parameters exactly once.")
        if parameters["X-Amz-Algorithm"] != ALGORITHM:
            raise S3Error(code, f'X-Amz-Algorithm only supports "{ALGORITHM}".')
        stamp, expires, signature = (parameters[name] for name in ("X-Amz-Date", "X-Amz-Expires", "X-Amz-Signature"))
        if not _STAMP(stamp):
            raise S3Error(code, "X-Amz-Date must be in the ISO8601 long format.")
        if not _DIGITS(expires) or not 1 <= int(expires) <= MAX_EXPIRES_SECONDS:
            raise S3Error(code, f"X-Amz-Expires must be between 1 and {MAX_EXPIRES_SECONDS} seconds.")
        if not _SIGNATURE(signature):
            raise S3Error(code)
        if "X-Amz-Security-Token" in parameters:
            raise S3Error("InvalidToken")
        signer = self._signer(parameters["X-Amz-Credential"], parameters["X-Amz-SignedHeaders"], code)
        return Credential(signer, signature, stamp, int(expires))

    def _signer(self, credential: str, signed_headers: str, code: str) -> Signer:
        pieces = credential.rsplit("/", 4)
        if len(pieces) != 5 or not pieces[0]:  # noqa: PLR2004 - access key and the four parts of a scope
            raise S3Error(code)
        access_key, day, region, service, terminator = pieces
        if service != "s3" or terminator != "aws4_request" or not _DAY(day):
            raise S3Error(code, "The credential's scope is not a day, a region, s3 and aws4_request.")
        if region not in self._regions:
            expected = min(self._regions - {"us-east-1"}, default="us-east-1")
            raise S3Error(code, f"The region '{region}' is wrong; expecting '{expected}'.", Region=expected)
        names = tuple(signed_headers.split(";"))
        if signed_headers != signed_headers.lower() or list(names) != sorted(set(names)) or "host" not in names:
            raise S3Error(code, "SignedHeaders must be lower case, sorted, without repeats, and hold host.")
        return Signer(access_key, day, region, f"{day}/{region}/s3/aws4_request", names, signed_headers)
