"""Complete, as arithmetic: which parts make the object, and whether S3 allows it. Pure.

Rules from the S3 API reference, CompleteMultipartUpload: parts ascend by number, each names the ETag its upload
returned, all but the last hold at least 5 MiB; the object's ETag is the MD5 of the parts' binary MD5s and `-N`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvobj.catalog.rows import PartInfo, PartRow
from kvobj.errors import EntityTooSmallError, InvalidPartError, InvalidPartOrderError

MINIMUM_PART_BYTES: Final = 5 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class CompletedPart:
    """One part as the client lists it in Complete. `etag` has no quotes; `checksums` are base64 by algorithm (CRC32 …)."""

    number: int
    etag: str
    checksums: Mapping[str, str] = field(default_factory=dict)


def choose_parts(
    uploaded: Sequence[PartRow], wanted: Sequence[CompletedPart], *, enforce_minimum: bool = True
) -> list[PartRow]:
    """The uploaded parts that the client lists, in its order.

    Raises InvalidPartError (none listed, unknown part, other ETag or checksum), InvalidPartOrderError, EntityTooSmallError.
    """
    if not wanted:
        raise InvalidPartError("no part was listed")
    by_number = {part.number: part for part in uploaded}
    chosen: list[PartRow] = []
    last_number = 0
    for want in wanted:
        if want.number <= last_number:
            raise InvalidPartOrderError("parts are not in ascending order", part_number=want.number)
        last_number = want.number
        part = by_number.get(want.number)
        if part is None or part.etag != want.etag:
            raise InvalidPartError("part was not uploaded with this etag", part_number=want.number, etag=want.etag)
        for algorithm, value in want.checksums.items():
            stored = part.checksum
            if stored is not None and stored.algorithm == algorithm and stored.value != value:
                raise InvalidPartError("part has another checksum", part_number=want.number, algorithm=algorithm)
        chosen.append(part)
    if enforce_minimum:
        for part in chosen[:-1]:
            if part.size_bytes < MINIMUM_PART_BYTES:
                raise EntityTooSmallError(
                    "a part other than the last is too small",
                    part_number=part.number,
                    etag=part.etag,
                    size_bytes=part.size_bytes,
                    minimum_bytes=MINIMUM_PART_BYTES,
                )
    return chosen


def multipart_etag(etags: Sequence[str]) -> str:
    """The ETag of an object made of parts with these ETags, in the form S3 gives it. ValueError where one is not hexadecimal."""
    joined = hashlib.md5(usedforsecurity=False)
    for etag in etags:
        joined.update(bytes.fromhex(etag))
    return f"{joined.hexdigest()}-{len(etags)}"


def part_infos(parts: Sequence[PartRow]) -> tuple[PartInfo, ...]:
    """What the object's row remembers of its parts."""
    return tuple(PartInfo(number=part.number, size_bytes=part.size_bytes, checksum=part.checksum) for part in parts)
