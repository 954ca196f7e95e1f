"""What a request says about who signed it and how: the Authorization header or the X-Amz-* query, parsed strictly.

Exactly one of the two may be there. Nothing is believed yet: `sigv4.py` checks the signature. Sources: Amazon S3 API reference,
"Authenticating Requests (AWS Signature Version 4)"; the messages are those that S3 sends, since people search for them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvobj.api.errors import S3Error
from kvobj.api.request import SIGNATURE_PARAMETER, PresignedQuery, Target

ALGORITHM: Final = "AWS4-HMAC-SHA256"
MAX_EXPIRES_SECONDS: Final = 604_800
_CACHE_ENTRIES: Final = 1024
_REMEMBERED_CHARACTERS: Final = 1024

_FRONT: Final = ALGORITHM + " "
_COMPONENTS: Final = frozenset({"Credential", "SignedHeaders", "Signature"})
_SIGNATURE: Final = re.compile(r"[0-9a-f]{64}\Z", re.ASCII).match
IS_STAMP: Final = re.compile(r"\d{8}T(?:[01]\d|2[0-3])[0-5]\d[0-5]\dZ\Z", re.ASCII).match
_DAY: Final = re.compile(r"\d{8}\Z", re.ASCII).match
_SECONDS: Final = re.compile(r"-?\d{1,18}\Z", re.ASCII).match
_ACCESS_KEY: Final = re.compile(r"[\x21-\x7e]{1,256}\Z", re.ASCII).match
# S3 takes these names in any case. Version 2's are exact, and common words otherwise.
_REQUIRED: Final = (
    "x-amz-algorithm",
    "x-amz-credential",
    "x-amz-date",
    "x-amz-expires",
    "x-amz-signedheaders",
    "x-amz-signature",
)
_TOKEN: Final = "x-amz-security-token"  # noqa: S105 - a parameter's name
_CLAIMS: Final = frozenset({*_REQUIRED, _TOKEN})
OWN_PARAMETERS: Final = _CLAIMS | {"x-amz-content-sha256"}
_V2_QUERY: Final = ("AWSAccessKeyId", "Signature")
_ONE_MECHANISM: Final = (
    "Only one auth mechanism allowed; only the X-Amz-Algorithm query parameter, Signature query string parameter "
    "or the Authorization header should be specified"
)
_IN_QUERY: Final = "AuthorizationQueryParametersError"
_UNSUPPORTED: Final = f"The authorization mechanism you have provided is not supported. Please use {ALGORITHM}."


@dataclass(frozen=True, slots=True)
class Signer:
    """Who signed and what: the parts of the credential and the names of the signed headers, which are sorted."""

    access_key: str
    day: str
    region: str
    scope: str
    signed_headers: tuple[str, ...]
    signed_headers_text: str
    signed_names: frozenset[str]


class Credential(NamedTuple):
    """A claim to be checked. The fields after `signature` are of a presigned request, and None in the header's form.

    `stamp` is X-Amz-Date, `content_sha256` X-Amz-Content-Sha256 where the query has it, `signature_parameter` the name under which
    the signature came, which alone is not signed.
    """

    signer: Signer
    signature: str
    stamp: str | None = None
    expires_seconds: int = 0
    content_sha256: str | None = None
    signature_parameter: str | None = None


class CredentialParser:
    """Parses credentials and remembers the part that a client repeats all day (bounded; 5 µs saved a request)."""

    __slots__ = ("_regions", "_remembered")

    def __init__(self, regions: frozenset[str]) -> None:
        self._regions = regions
        self._remembered: dict[str | tuple[str, str], Signer] = {}

    def parse(self, fields: dict[str, str], target: Target) -> Credential | None:
        """The request's one claim of identity, or None for an anonymous request. Raises `S3Error`."""
        header = fields.get("authorization")
        if target.presigned is not None:
            if header:
                raise S3Error("InvalidArgument", _ONE_MECHANISM, ArgumentName="Authorization")
            return self._from_presigned(target.presigned)
        if not target.query:
            return self._from_header(header) if header else None
        names = [name.lower() for name, _ in target.query]
        in_query = not _CLAIMS.isdisjoint(names)
        is_version_2 = any(name in target.parameters for name in _V2_QUERY)
        if header:
            if in_query or is_version_2:
                raise S3Error("InvalidArgument", _ONE_MECHANISM, ArgumentName="Authorization")
            return self._from_header(header)
        if is_version_2:
            raise S3Error("InvalidRequest", _UNSUPPORTED)
        return self._from_query(target, names) if in_query else None

    def _from_header(self, header: str) -> Credential:
        front, _, signature = header.partition("Signature=")
        signer = self._remembered.get(front)
        if signer is None:
            components = _components(header)
            signature = components["Signature"]
            signer = self._signer(
                components["Credential"],
                components["SignedHeaders"],
                "AuthorizationHeaderMalformed",
                "The authorization header is malformed; ",
            )
            if header == front + "Signature=" + signature:
                self._remember(front, signer)
        return Credential(signer, _signature_of(signer, signature))

    def _from_query(self, target: Target, names: list[str]) -> Credential:
        code = _IN_QUERY
        found: dict[str, str] = {}
        signature_parameter = ""
        for name, (raw_name, value) in zip(names, target.query, strict=True):
            if name in OWN_PARAMETERS:
                if name in found:
                    raise S3Error(code, f"The query parameter {raw_name} was sent more than once.")
                found[name] = value
                if name == "x-amz-signature":
                    signature_parameter = raw_name
        try:
            algorithm, credential, stamp, expires, signed_headers, signature = [found[name] for name in _REQUIRED]
        except KeyError:
            raise S3Error(
                code,
                "Query-string authentication version 4 requires the X-Amz-Algorithm, X-Amz-Credential, X-Amz-Signature, "
                "X-Amz-Date, X-Amz-SignedHeaders, and X-Amz-Expires parameters.",
            ) from None
        if _TOKEN in found:
            raise S3Error("InvalidToken")
        if algorithm != ALGORITHM:
            raise S3Error(code, f'X-Amz-Algorithm only supports "{ALGORITHM}"')
        presigned = PresignedQuery("", credential, stamp, expires, signed_headers, signature)
        return self._from_presigned(presigned, found.get("x-amz-content-sha256"), signature_parameter)

    def _from_presigned(
        self, query: PresignedQuery, content_sha256: str | None = None, signature_parameter: str = SIGNATURE_PARAMETER
    ) -> Credential:
        if not IS_STAMP(query.stamp):
            raise S3Error(_IN_QUERY, "X-Amz-Date must be in the ISO8601 Long Format \"yyyyMMdd'T'HHmmss'Z'\"")
        name = (query.credential, query.signed_headers)
        signer = self._remembered.get(name)
        if signer is None:
            signer = self._signer(*name, _IN_QUERY, "Error parsing the X-Amz-Credential parameter; ")
            self._remember(name, signer)
        signature = _signature_of(signer, query.signature)
        expires_seconds = _expires_seconds(query.expires, _IN_QUERY)
        return Credential(signer, signature, query.stamp, expires_seconds, content_sha256, signature_parameter)

    def _remember(self, name: str | tuple[str, str], signer: Signer) -> None:
        if len(signer.signed_headers_text) <= _REMEMBERED_CHARACTERS:
            if len(self._remembered) >= _CACHE_ENTRIES:
                self._remembered.clear()
            self._remembered[name] = signer

    def _signer(self, credential: str, signed_headers: str, code: str, front: str) -> Signer:
        pieces = credential.rsplit("/", 4)
        if len(pieces) != 5 or not _ACCESS_KEY(pieces[0]):  # noqa: PLR2004 - access key and the four parts of a scope
            raise S3Error(
                code,
                f'{front}the Credential is mal-formed; expecting "<YOUR-AKID>/YYYYMMDD/REGION/SERVICE/aws4_request".',
            )
        access_key, day, region, service, terminator = pieces
        if not _DAY(day):
            raise S3Error(
                code,
                f'{front}incorrect date format "{day}". This date in the credential must be in the format "yyyyMMdd".',
            )
        if terminator != "aws4_request":
            raise S3Error(code, f'{front}incorrect terminal "{terminator}". This endpoint uses "aws4_request".')
        if service != "s3":
            raise S3Error(code, f'{front}incorrect service "{service}". This endpoint belongs to "s3".')
        if region not in self._regions:
            expected = min(self._regions - {"us-east-1"}, default="us-east-1")
            raise S3Error(code, f"{front}the region '{region}' is wrong; expecting '{expected}'", Region=expected)
        names = tuple(signed_headers.split(";"))
        if signed_headers != signed_headers.lower() or list(names) != sorted(set(names)):
            raise S3Error(code, f"{front}SignedHeaders must be lower case, sorted and without repeats.")
        return Signer(
            access_key, day, region, f"{day}/{region}/s3/aws4_request", names, signed_headers, frozenset(names)
        )


def _components(header: str) -> dict[str, str]:
    """Credential, SignedHeaders and Signature of an Authorization header, in whatever order they came."""
    if not header.startswith(_FRONT):
        scheme, _, rest = header.partition(" ")
        if scheme.startswith("AWS4-") or (scheme == "AWS" and ":" in rest):
            raise S3Error("InvalidRequest", _UNSUPPORTED)
        if scheme == "AWS":
            raise S3Error("InvalidArgument", "AWS authorization header is invalid. Expected AwsAccessKeyId:signature")
        # What else was sent may be a secret of another service, so that it is not repeated.
        raise S3Error("InvalidArgument", "Unsupported Authorization Type", ArgumentName="Authorization")
    components: dict[str, str] = {}
    for piece in header[len(_FRONT) :].split(","):
        name, separator, value = piece.strip(" \t").partition("=")
        if not separator or not value or name in components or name not in _COMPONENTS or " " in value:
            raise S3Error(
                "AuthorizationHeaderMalformed",
                f'The authorization header is malformed; the authorization component "{name}" is malformed.',
            )
        components[name] = value
    if len(components) != len(_COMPONENTS):
        raise S3Error(
            "AuthorizationHeaderMalformed",
            "The authorization header is malformed; the authorization header requires three components: "
            "Credential, SignedHeaders, and Signature.",
        )
    return components


def _signature_of(signer: Signer, signature: str) -> str:
    """The signature in hex. What is no such thing matches nothing, whoever sent it."""
    if not _SIGNATURE(signature):
        raise S3Error("SignatureDoesNotMatch", AWSAccessKeyId=signer.access_key, SignatureProvided=signature)
    return signature


def _expires_seconds(value: str, code: str) -> int:
    """How long a presigned request holds; 0 is a number, though no request can meet it."""
    if not _SECONDS(value):
        raise S3Error(code, "X-Amz-Expires should be a number")
    seconds = int(value)
    if seconds < 0:
        raise S3Error(code, "X-Amz-Expires must be non-negative")
    if seconds > MAX_EXPIRES_SECONDS:
        raise S3Error(
            code,
            "X-Amz-Expires must be less than a week (in seconds); that is, the given X-Amz-Expires must be less than "
            f"{MAX_EXPIRES_SECONDS} seconds",
        )
    return seconds
