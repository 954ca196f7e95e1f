"""From the raw request target and the Host header to bucket, key and query: decoded once, never normalised.

Guarantees that the verifier of signatures and the handlers see the same decoded values, that `%2F`, `//`, `+` and dot segments
stay what they are, and that a name which climbs out of its bucket is refused. Knows no operation. Sources: SigV4 for S3
(canonical URI is encoded once, not normalised), S3 "Virtual hosting of buckets", design §8.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple
from urllib.parse import quote_from_bytes, unquote_to_bytes

from kvobj.api.errors import S3Error
from kvobj.api.message import RequestHead
from kvobj.catalog.rows import MAX_KEY_BYTES

MAX_QUERY_FIELDS: Final = 64
_REMEMBERED_HOSTS: Final = 256
_REMEMBERED_HOST_CHARACTERS: Final = 128
_REMEMBERED_TARGETS: Final = 2048
_REMEMBERED_TARGET_CHARACTERS: Final = 1024

_PLAIN_PATH: Final = re.compile(r"[A-Za-z0-9_.~/\-]*\Z").match
_PLAIN_VALUE: Final = re.compile(r"[A-Za-z0-9_.~\-]*\Z").match
# A query's piece that is encoded as SigV4 encodes: unreserved characters plain, all others as upper-case escapes.
_CANONICAL_PIECE: Final = re.compile(
    r"[A-Za-z0-9_.~\-]++=(?:[A-Za-z0-9_.~\-]++|%(?:[0189A-F][0-9A-F]|2[0-9A-CF]|3[A-F]|40|5[B-E]|60|7[BCDF]))*+\Z"
).match
# A query that is a signature and nothing else, as every SDK writes it but those that add parameters of their own: canonical as it
# stands, with the signature cut off.
_PRESIGNED: Final = re.compile(
    r"(X-Amz-Algorithm=AWS4-HMAC-SHA256"
    r"&X-Amz-Credential=((?:[A-Za-z0-9_.~\-]++|%2F)++)"
    r"&X-Amz-Date=([0-9TZ]{16})"
    r"&X-Amz-Expires=([0-9]{1,6})"
    r"&X-Amz-SignedHeaders=((?:[A-Za-z0-9_.~\-]++|%3B)++))"
    r"&X-Amz-Signature=([0-9a-f]{64})\Z"
).match
SIGNATURE_PARAMETER: Final = "X-Amz-Signature"
_BAD_ESCAPE: Final = re.compile(r"%(?![0-9A-Fa-f]{2})").search
_BUCKET_NAME: Final = re.compile(r"[a-z0-9][a-z0-9.\-]{1,61}[a-z0-9]\Z").match
_IP_ADDRESS: Final = re.compile(r"\d{1,3}(\.\d{1,3}){3}\Z").match
_SINGLE_HEADERS: Final = ("host", "authorization", "content-length", "x-amz-date", "x-amz-content-sha256")


@dataclass(frozen=True, slots=True)
class HostRules:
    """Where a Host header leads (design §8). Names are lower case and without ports.

    `hosts`: whole host → bucket. `domains`: suffixes whose leading labels name the bucket. `path_style`: hosts that are
    this server's own name. IP addresses are always path style. Any other host leads to `default_bucket`, if there is one.
    """

    hosts: Mapping[str, str] = field(default_factory=dict)
    domains: tuple[str, ...] = ()
    path_style: frozenset[str] = frozenset({"localhost"})
    default_bucket: str | None = None
    _known: dict[str, str | None] = field(default_factory=dict, init=False, compare=False, repr=False)

    def bucket_of(self, host: str) -> str | None:
        """The bucket that the host names, or None where the path names it. Short hosts are remembered: clients send few."""
        try:
            return self._known[host]
        except KeyError:
            bucket = self._bucket_of(host)
        if len(host) <= _REMEMBERED_HOST_CHARACTERS:
            if len(self._known) >= _REMEMBERED_HOSTS:
                self._known.clear()
            self._known[host] = bucket
        return bucket

    def _bucket_of(self, host: str) -> str | None:
        name = _without_port(host).lower().rstrip(".")
        if name in self.hosts:
            return self.hosts[name]
        for domain in self.domains:
            if name == domain:
                return None
            if name.endswith(domain) and name[-len(domain) - 1] == ".":
                return name[: -len(domain) - 1]
        if self.default_bucket is None or name in self.path_style or not name or ":" in name or _IP_ADDRESS(name):
            return None
        return self.default_bucket


class PresignedQuery(NamedTuple):
    """A query of a presigned URL's usual six parameters. `canonical` is what is signed; the values are decoded, not checked."""

    canonical: str
    credential: str
    stamp: str
    expires: str
    signed_headers: str
    signature: str


class Target:
    """A request target, taken apart. `bucket` is "" at the service's root, `key` is "" at a bucket's.

    `canonical_path` and `canonical_query(…)` are what SigV4 signs. `query` holds decoded pairs in the order they came. `presigned`
    is all of the query where that is a signature and nothing else: `query` and `parameters` are empty then, since no operation
    has any of its names.
    """

    __slots__ = ("bucket", "canonical_path", "key", "parameters", "presigned", "query", "raw_path", "raw_query")

    def __init__(self, raw_path: str, canonical_path: str, bucket: str, key: str, raw_query: str) -> None:
        self.raw_path = raw_path
        self.canonical_path = canonical_path
        self.bucket = bucket
        self.key = key
        self.raw_query = raw_query
        self.presigned = presigned = _presigned(raw_query) if raw_query else None
        self.query = query = parse_query(raw_query) if raw_query and presigned is None else []
        self.parameters: dict[str, str] = dict(query) if query else {}

    def canonical_query(self, *, without: str | None = None) -> str:
        """Pairs encoded, sorted by encoded name, then value; duplicates kept; every pair named `without` left out."""
        if self.presigned is not None and without == SIGNATURE_PARAMETER:
            return self.presigned.canonical
        if not self.raw_query:
            return ""
        query = self.query if self.presigned is None else parse_query(self.raw_query)
        pairs: list[tuple[str, str]] = []
        pieces = [piece for piece in self.raw_query.split("&") if piece]
        for piece, (name, value) in zip(pieces, query, strict=True):
            if name == without:
                continue
            if _CANONICAL_PIECE(piece):
                encoded_name, _, encoded_value = piece.partition("=")
                pairs.append((encoded_name, encoded_value))
            else:
                pairs.append((encode_value(name), encode_value(value)))
        pairs.sort()
        return "&".join([f"{name}={value}" for name, value in pairs])


def parse_fields(head: RequestHead) -> dict[str, str]:
    """All headers by name, repeats joined by a comma in order (RFC 9110 §5.3).

    Raises `S3Error` where one that must be single came twice: which of the two counts is how requests are smuggled.
    """
    fields = dict(head.headers)
    if len(fields) == len(head.headers):
        return fields
    fields.clear()
    for name, value in head.headers:
        if name in fields:
            if name in _SINGLE_HEADERS:
                raise S3Error("InvalidRequest", f"The header {name} was sent more than once.")
            fields[name] = f"{fields[name]},{value}"
        else:
            fields[name] = value
    return fields


def parse_target(target: str, host: str, rules: HostRules) -> Target:
    """Take the raw request target apart. Raises `S3Error` (InvalidURI, InvalidBucketName, KeyTooLongError)."""
    raw_path, _, raw_query = target.partition("?")
    if not raw_path.startswith("/"):
        raise S3Error("InvalidURI")
    if _PLAIN_PATH(raw_path):
        path = canonical = raw_path
    else:
        # Segment by segment: an encoded slash is signed as it was sent, though it names the same key.
        segments = [_decode_bytes(segment) for segment in raw_path.split("/")]
        canonical = "/".join([quote_from_bytes(segment, safe="~") for segment in segments])
        path = _utf8(b"/".join(segments))
    hosted = rules.bucket_of(host) if (rules.hosts or rules.domains or rules.default_bucket) else None
    if hosted is not None:
        bucket, key = hosted, path[1:]
    else:
        bucket, _, key = path[1:].partition("/")
        if not bucket and path != "/":
            raise S3Error("InvalidBucketName")
    if bucket:
        check_bucket_name(bucket)
    if key:
        check_key(key)
    return Target(raw_path, canonical, bucket, key, raw_query)


class TargetParser:
    """`parse_target`, which remembers targets that ask for an object and nothing else, as URLs that are used again do. Bounded."""

    __slots__ = ("_known", "_rules")

    def __init__(self, rules: HostRules) -> None:
        self._rules = rules
        self._known: dict[tuple[str, str], Target] = {}

    def parse(self, target: str, host: str) -> Target:
        """See `parse_target`. What it gives may be given again, and is nobody's to change."""
        known = self._known.get((target, host))
        if known is not None:
            return known
        parsed = parse_target(target, host, self._rules)
        if parsed.key and not parsed.query and len(target) + len(host) <= _REMEMBERED_TARGET_CHARACTERS:
            if len(self._known) >= _REMEMBERED_TARGETS:
                self._known.clear()
            self._known[target, host] = parsed
        return parsed


def _presigned(raw_query: str) -> PresignedQuery | None:
    found = _PRESIGNED(raw_query)
    if found is None:
        return None
    canonical, credential, stamp, expires, signed_headers, signature = found.groups()
    credential, signed_headers = credential.replace("%2F", "/"), signed_headers.replace("%3B", ";")
    return PresignedQuery(canonical, credential, stamp, expires, signed_headers, signature)


def parse_query(raw_query: str) -> list[tuple[str, str]]:
    """Decoded pairs in order. A name without `=` has the value "". `+` is a plus (SigV4), never a space."""
    pieces = raw_query.split("&")
    if len(pieces) > MAX_QUERY_FIELDS:
        raise S3Error("InvalidURI")
    pairs: list[tuple[str, str]] = []
    for piece in pieces:
        if piece:
            name, _, value = piece.partition("=")
            pairs.append((decode(name), decode(value)) if "%" in piece or not piece.isascii() else (name, value))
    return pairs


def decode(raw: str) -> str:
    """Percent-decode once, as UTF-8. Raises `S3Error` InvalidURI for a bad escape or bad UTF-8."""
    if "%" not in raw and raw.isascii():
        return raw
    return _utf8(_decode_bytes(raw))


def encode_value(value: str) -> str:
    """Percent-encode all but unreserved characters, upper-case hex: SigV4's UriEncode with the slash encoded."""
    return value if _PLAIN_VALUE(value) else quote_from_bytes(value.encode(), safe="~")


def encode_key(key: str) -> str:
    """Percent-encode a key for encoding-type=url: the slash stays. A space is `%20`: clients that decode `+` and clients that
    do not both get it back."""
    return key if _PLAIN_PATH(key) else quote_from_bytes(key.encode(), safe="/~")


def check_key(key: str) -> None:
    """Raise `S3Error` for a key that is too long, holds a NUL, or climbs out of its bucket by `..` segments.

    Keys are never file names here; but a proxy or a client that does normalise must not be led into another bucket.
    """
    if len(key) > MAX_KEY_BYTES or (not key.isascii() and len(key.encode()) > MAX_KEY_BYTES):
        raise S3Error("KeyTooLongError", Size=len(key.encode()), MaxSizeAllowed=MAX_KEY_BYTES)
    if "\0" in key:
        raise S3Error("InvalidURI")
    if ".." in key:
        depth = 0
        for segment in key.split("/"):
            depth += -1 if segment == ".." else segment not in ("", ".")
            if depth < 0:
                raise S3Error("InvalidURI")


def check_bucket_name(name: str) -> None:
    """Raise `S3Error` InvalidBucketName for what no bucket can be called, so that it never reaches the catalog.

    CreateBucket asks for more (`kvobj.config.bucket_name`); here one match a request (0.4 µs) is enough.
    """
    if not _BUCKET_NAME(name) or ".." in name:
        raise S3Error("InvalidBucketName", BucketName=name)


def _decode_bytes(raw: str) -> bytes:
    if _BAD_ESCAPE(raw):
        raise S3Error("InvalidURI")
    try:
        return unquote_to_bytes(raw.encode("latin-1"))
    except UnicodeEncodeError:
        return unquote_to_bytes(raw.encode("utf-8", "surrogateescape"))


def _utf8(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise S3Error("InvalidURI") from error


def _without_port(host: str) -> str:
    if host.startswith("["):  # an IPv6 literal keeps its colons, so that it is seen to be an address
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
