"""What a client says about its bytes: Content-MD5, x-amz-checksum-*, trailers, the signed payload digest; and checking it.

Guarantees that everything announced is compared before the commit, and that the stored checksum is one the server computed.
Makes composite and full-object checksums of multipart uploads. Source: S3 User Guide, "Checking object integrity".
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from kvobj.api.errors import S3Error
from kvobj.api.sigv4 import Authentication, PayloadMode
from kvobj.catalog.rows import Checksum, PartRow, UploadRow
from kvobj.codec.checksums import Digester, combine_crc

FULL_OBJECT: Final = "FULL_OBJECT"
COMPOSITE: Final = "COMPOSITE"
CHECKSUM_BYTES: Final = {
    "CRC32": 4,
    "CRC32C": 4,
    "CRC64NVME": 8,
    "SHA1": 20,
    "SHA256": 32,
    "SHA512": 64,
    "MD5": 16,
    "XXHASH64": 8,
    "XXHASH3": 8,
    "XXHASH128": 16,
}
_HEADER_FRONT: Final = "x-amz-checksum-"
HEADERS: Final = {f"{_HEADER_FRONT}{algorithm.lower()}": algorithm for algorithm in CHECKSUM_BYTES}
_OTHER_HEADERS: Final = frozenset({"x-amz-checksum-algorithm", "x-amz-checksum-type", "x-amz-checksum-mode"})


class Announced(msgspec.Struct, frozen=True):
    """What one body must turn out to be. `algorithm` is the S3 checksum to verify and store, or None; its base64 `value` is None
    where it comes in the trailer (`in_trailer`) or is the server's to compute."""

    md5: bytes | None
    payload_sha256: str | None
    algorithm: str | None
    value: str | None
    in_trailer: bool = False

    @property
    def digests(self) -> frozenset[str]:
        """The digests to compute over the body, by the names `Digester` has."""
        names: list[str] = []
        if self.md5 is not None:
            names.append("md5")
        if self.payload_sha256 is not None:
            names.append("sha256")
        if self.algorithm is not None:
            names.append(self.algorithm.lower())
        return frozenset(names)


def parse_announced(
    fields: Mapping[str, str], authentication: Authentication, *, default_algorithm: str | None = None
) -> Announced:
    """What the headers announce. `default_algorithm`: computed and stored where the client names none (multipart uploads).

    Raises `S3Error`: InvalidDigest, InvalidRequest for two checksums, an unknown one, or header and trailer together.
    """
    mode = authentication.payload_mode
    given = [
        (name, value) for name, value in fields.items() if name.startswith(_HEADER_FRONT) and name not in _OTHER_HEADERS
    ]
    trailer = fields.get("x-amz-trailer")
    has_trailer = mode in (PayloadMode.CHUNKS_SIGNED_TRAILER, PayloadMode.CHUNKS_UNSIGNED_TRAILER)
    if trailer is not None and (given or not has_trailer):
        raise S3Error("InvalidRequest", "x-amz-trailer excludes a checksum header and needs a payload with a trailer.")
    if len(given) > 1:
        raise S3Error("InvalidRequest", "Expecting a single x-amz-checksum- header.")
    algorithm, value, in_trailer = None, None, False
    if given:
        algorithm, value = _known_header(given[0][0]), given[0][1].strip()
        check_value(algorithm, value)
    elif trailer is not None:
        algorithm, in_trailer = _known_header(trailer.strip().lower()), True
    elif has_trailer:
        algorithm = default_algorithm or "CRC64NVME"
    else:
        algorithm = default_algorithm
    _check_named_algorithm(fields, algorithm, is_given=bool(given) or in_trailer)
    return Announced(_content_md5(fields), authentication.payload_sha256, algorithm, value, in_trailer)


def check_value(algorithm: str, value: str) -> None:
    """Raise `S3Error` InvalidRequest unless `value` is base64 of as many bytes as the algorithm has."""
    if len(_decoded(value) or b"") != CHECKSUM_BYTES[algorithm]:
        raise S3Error("InvalidRequest", f"Value for {_HEADER_FRONT}{algorithm.lower()} header is invalid.")


def check_trailers(announced: Announced, trailers: Mapping[str, str]) -> str | None:
    """The checksum value that the trailer brought, or None. Raises `S3Error` MalformedTrailerError unless it is the announced."""
    if not announced.in_trailer:
        if trailers:
            raise S3Error("MalformedTrailerError")
        return announced.value
    assert announced.algorithm is not None
    value = trailers.get(_HEADER_FRONT + announced.algorithm.lower())
    if value is None or len(trailers) != 1:
        raise S3Error("MalformedTrailerError")
    check_value(announced.algorithm, value)
    return value


def check_digests(announced: Announced, value: str | None, digester: Digester) -> tuple[Checksum, ...]:
    """Compare what was announced with what arrived; returns the checksum to store. `value`: from header or trailer.

    Raises `S3Error`: XAmzContentSHA256Mismatch, BadDigest.
    """
    if announced.payload_sha256 is not None:
        _check_payload(announced.payload_sha256, digester.hexdigest("sha256"))
    if announced.md5 is not None and announced.md5 != digester.digest("md5"):
        raise S3Error("BadDigest")
    if announced.algorithm is None:
        return ()
    computed = digester.base64(announced.algorithm.lower())
    if value not in (None, computed) and _decoded(value or "") != digester.digest(announced.algorithm.lower()):
        raise S3Error("BadDigest", f"The {announced.algorithm} you specified did not match the calculated checksum.")
    return (Checksum(announced.algorithm, computed, FULL_OBJECT),)


def _check_payload(announced: str, found: str) -> None:
    if not hmac.compare_digest(announced, found):
        raise S3Error("XAmzContentSHA256Mismatch", ClientComputedContentSHA256=announced, S3ComputedContentSHA256=found)


def check_document(announced: Announced, value: str | None, document: bytes | bytearray) -> None:
    """`check_digests` for a small body that is in memory."""
    if announced.md5 is None and announced.algorithm is None:  # as most are sent
        if announced.payload_sha256 is not None:
            _check_payload(announced.payload_sha256, hashlib.sha256(document).hexdigest())
        return
    digester = Digester(announced.digests)
    digester.update(memoryview(document))
    check_digests(announced, value, digester)


def checksum_headers(checksums: Iterable[Checksum]) -> list[tuple[str, str]]:
    """Reply headers that tell of stored checksums."""
    headers: list[tuple[str, str]] = []
    for checksum in checksums:
        headers.append((_HEADER_FRONT + checksum.algorithm.lower(), checksum.value))
        headers.append(("x-amz-checksum-type", checksum.type))
    return headers


def parse_upload_checksum(fields: Mapping[str, str]) -> tuple[str | None, str | None]:
    """Algorithm and type of CreateMultipartUpload. Raises `S3Error` for an unknown one or a type the algorithm cannot have."""
    algorithm = fields.get("x-amz-checksum-algorithm")
    kind = fields.get("x-amz-checksum-type")
    if algorithm is None:
        if kind is not None:
            raise S3Error("InvalidRequest", "x-amz-checksum-type needs x-amz-checksum-algorithm.")
        return None, None
    algorithm = algorithm.upper()
    if algorithm not in CHECKSUM_BYTES:
        raise S3Error("InvalidRequest", "Checksum algorithm provided is unsupported.")
    if kind is None:
        kind = FULL_OBJECT if algorithm == "CRC64NVME" else COMPOSITE
    return algorithm, checked_type(algorithm, kind)


def checked_type(algorithm: str, kind: str) -> str:
    """The type of a multipart upload's checksum, in capitals. Raises `S3Error` InvalidRequest for one the algorithm cannot have."""
    kind = kind.upper()
    possible = (
        (COMPOSITE, FULL_OBJECT)
        if algorithm in ("CRC32", "CRC32C")
        else ((FULL_OBJECT,) if algorithm == "CRC64NVME" else (COMPOSITE,))
    )
    if kind not in possible:
        raise S3Error(
            "InvalidRequest",
            f"The {kind} checksum type cannot be used with the {algorithm.lower()} checksum algorithm.",
        )
    return kind


def of_parts(upload: UploadRow, parts: Sequence[PartRow]) -> tuple[Checksum, ...]:
    """The checksum of the object that the parts make, or none where the upload named none or a part lacks its own."""
    algorithm = upload.checksum_algorithm
    if algorithm is None or not parts:
        return ()
    values: list[bytes] = []
    for part in parts:
        if part.checksum is None or part.checksum.algorithm != algorithm:
            return ()
        values.append(base64.b64decode(part.checksum.value))
    if upload.checksum_type == FULL_OBJECT:
        whole = values[0]
        for part, value in zip(parts[1:], values[1:], strict=True):
            whole = combine_crc(algorithm.lower(), whole, value, second_bytes=part.size_bytes)
        return (Checksum(algorithm, base64.b64encode(whole).decode(), FULL_OBJECT),)
    return (
        Checksum(
            algorithm, f"{base64.b64encode(_digest_of(algorithm, b''.join(values))).decode()}-{len(parts)}", COMPOSITE
        ),
    )


def _digest_of(algorithm: str, data: bytes) -> bytes:
    name = algorithm.lower()
    digester = Digester(frozenset({name}))
    digester.update(memoryview(data))
    return digester.digest(name)


def _known_header(name: str) -> str:
    algorithm = HEADERS.get(name)
    if algorithm is None:
        raise S3Error("InvalidRequest", "The checksum algorithm is unsupported, or the trailer is no checksum.")
    return algorithm


def _check_named_algorithm(fields: Mapping[str, str], algorithm: str | None, *, is_given: bool) -> None:
    named = fields.get("x-amz-sdk-checksum-algorithm")
    if named is None:
        return
    named = named.strip().upper()
    if named not in CHECKSUM_BYTES:
        raise S3Error("InvalidRequest", "Value for x-amz-sdk-checksum-algorithm header is invalid.")
    if is_given and named != algorithm:
        raise S3Error("InvalidRequest", "Value for x-amz-sdk-checksum-algorithm header does not match the checksum.")


def _content_md5(fields: Mapping[str, str]) -> bytes | None:
    value = fields.get("content-md5")
    if value is None:
        return None
    md5 = _decoded(value.strip())
    if md5 is None or len(md5) != hashlib.md5(usedforsecurity=False).digest_size:
        raise S3Error("InvalidDigest")
    return md5


def _decoded(value: str) -> bytes | None:
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        return None
