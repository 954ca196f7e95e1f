"""The forms in which clients send a PUT's body, as bytes made beforehand: what goes over the wire, without a client's cost.

Plain bodies whose digest the client signs or does not, and aws-chunked ones with a CRC64NVME trailer, sized by Content-Length or
inside `Transfer-Encoding: chunked`. Beside them how fast one core makes each digest: no body can be faster than the one it asks
for.
"""

from __future__ import annotations

import base64
import hashlib
import mmap
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from awscrt import checksums  # type: ignore[import-untyped]
from blake3 import blake3

if TYPE_CHECKING:
    from collections.abc import Callable

KIB: Final = 1024
MIB: Final = 1024 * KIB
UNSIGNED: Final = "UNSIGNED-PAYLOAD"
UNSIGNED_TRAILER: Final = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"
_SPEED_BYTES: Final = 64 * MIB
_SPEED_SECONDS: Final = 0.2


@dataclass(frozen=True, slots=True)
class PayloadForm:
    """One form. `chunk_bytes`: the aws-chunked chunks, 0 for none; `piece_bytes`: the chunks of Transfer-Encoding around them, 0
    for a Content-Length, -1 for one around each aws-chunked chunk."""

    name: str
    chunk_bytes: int = 0
    piece_bytes: int = 0
    is_hashed: bool = False
    is_presigned: bool = False
    has_crc_header: bool = False

    def encoded(self, payload: bytes) -> bytes:
        """What follows the head."""
        if not self.chunk_bytes:
            return payload
        chunks = [b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in _cut(payload, self.chunk_bytes)]
        chunks.append(b"0\r\nx-amz-checksum-crc64nvme:%b\r\n\r\n" % crc64nvme(payload).encode())
        if not self.piece_bytes:
            return b"".join(chunks)
        pieces = chunks if self.piece_bytes < 0 else _cut(b"".join(chunks), self.piece_bytes)
        return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"

    def headers(self, payload: bytes, encoded: bytes) -> dict[str, str]:
        """The headers that say so, beside the signature's own."""
        if not self.chunk_bytes:
            crc = {"x-amz-checksum-crc64nvme": crc64nvme(payload)} if self.has_crc_header else {}
            return {"content-length": str(len(payload))} | crc
        framing = {"transfer-encoding": "chunked"} if self.piece_bytes else {"content-length": str(len(encoded))}
        return framing | {
            "content-encoding": "aws-chunked",
            "x-amz-decoded-content-length": str(len(payload)),
            "x-amz-trailer": "x-amz-checksum-crc64nvme",
        }

    def content_sha256(self, payload: bytes) -> str:
        """What the client signs as its payload's digest."""
        if self.is_hashed:
            return hashlib.sha256(payload).hexdigest()
        return UNSIGNED_TRAILER if self.chunk_bytes else UNSIGNED


def _chunked(name: str, chunk_bytes: int) -> tuple[PayloadForm, PayloadForm]:
    return (
        PayloadForm(f"aws-chunked {name}", chunk_bytes),
        PayloadForm(f"aws-chunked {name} in chunked", chunk_bytes, piece_bytes=-1),
    )


FORMS: Final = (
    PayloadForm("crc64nvme header", has_crc_header=True),
    *_chunked("64 KiB", 64 * KIB),
    *_chunked("1 MiB", MIB),
    *_chunked("8 MiB", 8 * MIB),
    PayloadForm("aws-chunked 1 MiB in 16 KiB, as boto3", MIB, piece_bytes=16 * KIB),
    PayloadForm("sha256 signed", is_hashed=True),
    PayloadForm("presigned", is_presigned=True),
)


def _cut(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


def crc64nvme(payload: bytes) -> str:
    """As S3 prints it."""
    return base64.b64encode(checksums.crc64nvme(payload).to_bytes(8, "big")).decode()


def digest_speeds() -> dict[str, float]:
    """Bytes a second of CPU time that one thread digests, over 64 MiB that no cache holds; and, as `copy`, that it copies."""
    source, sink = mmap.mmap(-1, _SPEED_BYTES), mmap.mmap(-1, _SPEED_BYTES)
    view, other = memoryview(source), memoryview(sink)
    view[:] = bytes(range(256)) * (_SPEED_BYTES // 256)
    other[:] = view

    def copy() -> None:
        other[:] = view

    work: dict[str, Callable[[], object]] = {
        "copy": copy,
        "crc32": lambda: checksums.crc32(view),
        "crc32c": lambda: checksums.crc32c(view),
        "crc64nvme": lambda: checksums.crc64nvme(view),
        "blake3": lambda: blake3(view).digest(),
        "sha256": lambda: hashlib.sha256(view).digest(),
        "md5": lambda: hashlib.md5(view, usedforsecurity=False).digest(),
    }
    return {name: _speed(once) for name, once in work.items()}


def _speed(once: Callable[[], object]) -> float:
    best = 0.0
    spent = 0.0
    while spent < _SPEED_SECONDS:
        started = time.thread_time()
        once()
        seconds = time.thread_time() - started
        spent += seconds
        best = max(best, _SPEED_BYTES / seconds)
    return best
