"""SigV4 by the book and nothing else: what a mutated request is signed with, and what kvobj's canonical request is held against.

Independent of the server's verifier on purpose. Source: Amazon S3 API reference, "Create a signed AWS API request".
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence
from typing import Final
from urllib.parse import quote_from_bytes, unquote_to_bytes

ACCESS_KEY: Final = "AKALICE"
SECRET: Final = "alice secret"
STAMP: Final = "20260102T030405Z"
NOW_MS: Final = 1_767_323_045_000
SCOPE: Final = "20260102/us-east-1/s3/aws4_request"
EMPTY_SHA256: Final = hashlib.sha256(b"").hexdigest()

_CLAIMS: Final = tuple(
    f"X-Amz-{name}"
    for name in ("Algorithm", "Credential", "Date", "Expires", "SignedHeaders", "Signature", "Security-Token")
)
_SPACE: Final = " \t"
_SPACES: Final = re.compile(r"[ \t]+").sub

Fields = Sequence[tuple[str, str]]


def _derive_key() -> bytes:
    key = b"AWS4" + SECRET.encode()
    for piece in SCOPE.split("/"):
        key = hmac.digest(key, piece.encode(), "sha256")
    return key


SIGNING_KEY: Final = _derive_key()


def encode(raw: bytes) -> str:
    """UriEncode with the slash encoded."""
    return quote_from_bytes(raw, safe="~")


def decode(raw: str) -> bytes:
    """Percent-decode once."""
    return unquote_to_bytes(raw.encode("latin-1", "replace"))


def canonical_path(raw_path: str) -> str:
    """Each segment decoded once and encoded once."""
    return "/".join(encode(decode(segment)) for segment in raw_path.split("/"))


def canonical_query(raw_query: str, *, without: str | None = None) -> str:
    """Pairs encoded, then sorted by name and value."""
    pairs = []
    for piece in raw_query.split("&"):
        if piece:
            name, _, value = piece.partition("=")
            pairs.append((encode(decode(name)), encode(decode(value))))
    return "&".join(f"{name}={value}" for name, value in sorted(pairs) if name != without)


def canonical_request(method: str, target: str, fields: Fields, names: Iterable[str], content_hash: str) -> str:
    """The canonical request of raw parts: repeated headers joined by commas, values trimmed and inner spaces folded."""
    path, _, query = target.partition("?")
    lines = [method, canonical_path(path), canonical_query(query, without="X-Amz-Signature")]
    names = list(names)
    for name in names:
        joined = ",".join(value for found, value in fields if found == name)
        lines.append(f"{name}:{_SPACES(' ', joined.strip(_SPACE))}")
    return "\n".join([*lines, "", ";".join(names), content_hash])


def signature_of(canonical: str, stamp: str = STAMP) -> str:
    """The signature of a canonical request by `ACCESS_KEY`."""
    digest = hashlib.sha256(canonical.encode("latin-1", "replace")).hexdigest()
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{SCOPE}\n{digest}"
    return hmac.digest(SIGNING_KEY, text.encode(), "sha256").hex()


def sign_fields(
    method: str, target: str, fields: Fields, body: bytes, *, stamp: tuple[str, str] = ("x-amz-date", STAMP)
) -> list[tuple[str, str]]:
    """`fields` (lower-case names) signed in a header, everything that is there; the payload's mode is kept where one is named.

    `stamp`: in which header the time is told, and how.
    """
    kept = [(name, value) for name, value in fields if name not in ("authorization", "x-amz-date")]
    content_hash = next((value for name, value in kept if name == "x-amz-content-sha256"), None)
    if content_hash is None or len(content_hash) == len(EMPTY_SHA256):
        content_hash = hashlib.sha256(body).hexdigest()
        kept = [(name, value) for name, value in kept if name != "x-amz-content-sha256"]
        kept.append(("x-amz-content-sha256", content_hash))
    if stamp[0] == "date":
        kept = [(name, value) for name, value in kept if name != "date"]
    kept.append(stamp)
    names = sorted({name for name, _ in kept} - {"expect", "transfer-encoding", "connection", "user-agent"})
    canonical = canonical_request(method, target, kept, names, content_hash)
    signature = signature_of(canonical, stamp[1] if stamp[0] == "x-amz-date" else STAMP)
    kept.append(
        (
            "authorization",
            f"AWS4-HMAC-SHA256 Credential={ACCESS_KEY}/{SCOPE}, SignedHeaders={';'.join(names)}, Signature={signature}",
        )
    )
    return kept


def presign(method: str, target: str, fields: Fields) -> str:
    """`target` signed in its query, with the host alone as signed header."""
    path, _, query = target.partition("?")
    query = "&".join(piece for piece in query.split("&") if piece and not piece.startswith(_CLAIMS))
    parameters = (
        f"X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential={encode(f'{ACCESS_KEY}/{SCOPE}'.encode())}"
        f"&X-Amz-Date={STAMP}&X-Amz-Expires=600&X-Amz-SignedHeaders=host"
    )
    target = f"{path}?{query}{'&' if query else ''}{parameters}"
    canonical = canonical_request(method, target, fields, ["host"], "UNSIGNED-PAYLOAD")
    return f"{target}&X-Amz-Signature={signature_of(canonical)}"


def signed_chunks(pieces: Sequence[bytes], *, seed: str, trailers: Sequence[tuple[str, str]] | None = None) -> bytes:
    """An aws-chunked body with a signature a chunk, and a signed trailer unless `trailers` is None."""
    previous, out = seed, b""
    for piece in (*pieces, b""):
        text = f"AWS4-HMAC-SHA256-PAYLOAD\n{STAMP}\n{SCOPE}\n{previous}\n{EMPTY_SHA256}\n{hashlib.sha256(piece).hexdigest()}"
        previous = hmac.digest(SIGNING_KEY, text.encode(), "sha256").hex()
        out += f"{len(piece):x};chunk-signature={previous}\r\n".encode() + piece + (b"\r\n" if piece else b"")
    if trailers is not None:
        lines = "".join(f"{name}:{value}\n" for name, value in trailers)
        digest = hashlib.sha256(lines.encode()).hexdigest()
        text = f"AWS4-HMAC-SHA256-TRAILER\n{STAMP}\n{SCOPE}\n{previous}\n{digest}"
        signature = hmac.digest(SIGNING_KEY, text.encode(), "sha256").hex()
        out += lines.replace("\n", "\r\n").encode() + f"x-amz-trailer-signature:{signature}\r\n".encode()
    return out + b"\r\n"


def unsigned_chunks(pieces: Sequence[bytes], trailers: Sequence[tuple[str, str]] = ()) -> bytes:
    """An aws-chunked body without signatures."""
    out = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return out + b"0\r\n" + b"".join(f"{name}:{value}\r\n".encode() for name, value in trailers) + b"\r\n"
