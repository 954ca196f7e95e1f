"""Signs requests with AWS Signature Version 4, in the Authorization header, for the service `s3`.

Pure: the time is an argument. Source: Amazon S3 API Reference, "Authenticating Requests (AWS Signature Version 4)"; the path is
encoded once, S3 style, and neither normalised nor encoded twice. Written apart from the server's verifier, so that each checks the
other.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import quote

from kvobj.client.credentials import Credentials

UNSIGNED_PAYLOAD: Final = "UNSIGNED-PAYLOAD"
EMPTY_SHA256: Final = hashlib.sha256(b"").hexdigest()

_ALGORITHM: Final = "AWS4-HMAC-SHA256"


def encoded_path(path: str) -> str:
    """A path as it goes on the wire and into the signature: each byte of its UTF-8 but the unreserved ones and `/` as %XX."""
    return quote(path, safe="/~")


def encoded_query(query: Sequence[tuple[str, str]]) -> str:
    """A query string, sorted by encoded name and value as the signature wants it."""
    pairs = sorted((quote(name, safe="~"), quote(value, safe="~")) for name, value in query)
    return "&".join(f"{name}={value}" for name, value in pairs)


def signed_headers(
    credentials: Credentials,
    *,
    method: str,
    path: str,
    query: Sequence[tuple[str, str]],
    headers: Mapping[str, str],
    payload_sha256: str,
    region: str,
    timestamp: str,
) -> dict[str, str]:
    """The given headers (lower-case names, `host` among them) with the three that sign all of them.

    `path` is not yet encoded; `timestamp` is `YYYYMMDDTHHMMSSZ`; `payload_sha256` is hex or `UNSIGNED_PAYLOAD`.
    """
    signed = {**headers, "x-amz-date": timestamp, "x-amz-content-sha256": payload_sha256}
    names = sorted(signed)
    canonical_request = "\n".join(
        [
            method,
            encoded_path(path),
            encoded_query(query),
            *(f"{name}:{' '.join(signed[name].split())}" for name in names),
            "",
            ";".join(names),
            payload_sha256,
        ]
    )
    scope = f"{timestamp[:8]}/{region}/s3/aws4_request"
    digest = hashlib.sha256(canonical_request.encode()).hexdigest()
    string_to_sign = f"{_ALGORITHM}\n{timestamp}\n{scope}\n{digest}"
    key = ("AWS4" + credentials.secret_key).encode()
    for step in (timestamp[:8], region, "s3", "aws4_request"):
        key = _hmac(key, step)
    signature = _hmac(key, string_to_sign).hex()
    signed["authorization"] = (
        f"{_ALGORITHM} Credential={credentials.access_key}/{scope}, SignedHeaders={';'.join(names)}, Signature={signature}"
    )
    return signed


def _hmac(key: bytes, text: str) -> bytes:
    return hmac.new(key, text.encode(), hashlib.sha256).digest()
