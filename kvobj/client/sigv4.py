"""Signs requests with AWS Signature Version 4, in the Authorization header, for the service `s3`.

Pure: the time is an argument. Source: Amazon S3 API Reference, "Authenticating Requests (AWS Signature Version 4)"; the path is
encoded once, S3 style, and neither normalised nor encoded twice. Written apart from the server's verifier, so that each checks the
other.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple
from urllib.parse import quote

from kvobj.client.credentials import Credentials

UNSIGNED_PAYLOAD: Final = "UNSIGNED-PAYLOAD"
EMPTY_SHA256: Final = hashlib.sha256(b"").hexdigest()

_ALGORITHM: Final = "AWS4-HMAC-SHA256"
_PLAIN: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789/._~-"
_BLOCK_BYTES: Final = 64
_INNER: Final = bytes(byte ^ 0x36 for byte in range(256))
_OUTER: Final = bytes(byte ^ 0x5C for byte in range(256))
_UNBEGUN: Final = hashlib.sha256()
"""Copied, never updated: to make a new one has OpenSSL look the algorithm up, through memory that no cache holds after a large
read."""


def encoded_path(path: str) -> str:
    """A path as it goes on the wire and into the signature: each byte of its UTF-8 but the unreserved ones and `/` as %XX."""
    return quote(path, safe="/~") if path.encode().translate(None, _PLAIN) else path


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
    frame = SigningFrame.of(credentials, headers, payload_sha256=payload_sha256, region=region, timestamp=timestamp)
    signature = frame.signature(method, encoded_path(path), encoded_query(query))
    return {**frame.headers, "authorization": frame.authorization + signature}


class SigningFrame(NamedTuple):
    """What of a signature does not depend on method, path and query: the same for all reads of a second.

    `headers`: those given and the two that go with a signature; `authorization`: the third but for the signature at its end.
    """

    headers: dict[str, str]
    authorization: str
    canonical_fields: str
    text: str
    mac: Mac

    @classmethod
    def of(
        cls, credentials: Credentials, headers: Mapping[str, str], *, payload_sha256: str, region: str, timestamp: str
    ) -> SigningFrame:
        """Arguments as for `signed_headers`."""
        return _frame(credentials, tuple(headers.items()), payload_sha256, region, timestamp)

    def signature(self, method: str, path: str, query: str) -> str:
        """The signature in hex, of a request whose path and query are encoded."""
        canonical_request = f"{method}\n{path}\n{query}\n{self.canonical_fields}"
        hashing = _UNBEGUN.copy()
        hashing.update(canonical_request.encode())
        return self.mac.hex_of((self.text + hashing.hexdigest()).encode())


class Mac:
    """HMAC-SHA256 (RFC 2104) with one key, hashed once: `hmac` sets OpenSSL up anew for every text, which takes longer than all of
    the hashing, most of all where caches are cold. Thread-safe."""

    __slots__ = ("_inner", "_outer", "key")

    def __init__(self, key: bytes) -> None:
        if len(key) > _BLOCK_BYTES:
            raise ValueError(f"a key of {len(key)} bytes")
        self.key = key
        block = key.ljust(_BLOCK_BYTES, b"\0")
        self._inner = hashlib.sha256(block.translate(_INNER))
        self._outer = hashlib.sha256(block.translate(_OUTER))

    def hex_of(self, text: bytes) -> str:
        """The code of a text, in hex."""
        inner = self._inner.copy()
        inner.update(text)
        outer = self._outer.copy()
        outer.update(inner.digest())
        return outer.hexdigest()


@lru_cache(maxsize=64)
def _frame(
    credentials: Credentials, headers: tuple[tuple[str, str], ...], payload_sha256: str, region: str, timestamp: str
) -> SigningFrame:
    signed = {**dict(headers), "x-amz-date": timestamp, "x-amz-content-sha256": payload_sha256}
    names = sorted(signed)
    fields = [f"{name}:{' '.join(signed[name].split())}" for name in names]
    scope = f"{timestamp[:8]}/{region}/s3/aws4_request"
    return SigningFrame(
        headers=signed,
        canonical_fields="\n".join([*fields, "", ";".join(names), payload_sha256]),
        text=f"{_ALGORITHM}\n{timestamp}\n{scope}\n",
        mac=Mac(_signing_key(credentials.secret_key, timestamp[:8], region)),
        authorization=f"{_ALGORITHM} Credential={credentials.access_key}/{scope}, "
        f"SignedHeaders={';'.join(names)}, Signature=",
    )


@lru_cache(maxsize=16)
def _signing_key(secret_key: str, day: str, region: str) -> bytes:
    key = ("AWS4" + secret_key).encode()
    for step in (day, region, "s3", "aws4_request"):
        key = hmac.digest(key, step.encode(), "sha256")
    return key
