"""Complete as arithmetic: which parts S3 lets an object be made of."""

from __future__ import annotations

import hashlib

import pytest

from kvobj.catalog.rows import BlobRef, Checksum, PartRow
from kvobj.errors import EntityTooSmallError, InvalidPartError, InvalidPartOrderError
from kvobj.store.multipart import MINIMUM_PART_BYTES, CompletedPart, choose_parts, multipart_etag, part_infos


def part(number: int, *, size_bytes: int = MINIMUM_PART_BYTES, checksum: Checksum | None = None) -> PartRow:
    etag = hashlib.md5(str(number).encode(), usedforsecurity=False).hexdigest()
    blob = BlobRef(blob_id=bytes(16), plain_bytes=size_bytes, frame_bytes=size_bytes, digest=None)
    return PartRow(
        upload_id="u", number=number, blobs=(blob,), size_bytes=size_bytes, etag=etag, modified_ms=0, checksum=checksum
    )


def wanted(row: PartRow, **checksums: str) -> CompletedPart:
    return CompletedPart(number=row.number, etag=row.etag, checksums=checksums)


def test_listed_parts_are_taken_in_order_and_others_left_out() -> None:
    rows = [part(1), part(2), part(7)]
    assert choose_parts(rows, [wanted(rows[0]), wanted(rows[2])]) == [rows[0], rows[2]]


def test_the_last_part_may_be_small_and_no_other() -> None:
    small = part(1, size_bytes=MINIMUM_PART_BYTES - 1)
    assert choose_parts([small], [wanted(small)]) == [small]
    with pytest.raises(EntityTooSmallError, match="part_number=1"):
        choose_parts([small, part(2)], [wanted(small), wanted(part(2))])


def test_an_empty_list_is_refused() -> None:
    with pytest.raises(InvalidPartError):
        choose_parts([part(1)], [])


@pytest.mark.parametrize("numbers", [(2, 1), (1, 1)])
def test_numbers_that_do_not_ascend_are_refused(numbers: tuple[int, int]) -> None:
    rows = [part(1), part(2)]
    with pytest.raises(InvalidPartOrderError):
        choose_parts(rows, [wanted(part(number)) for number in numbers])


def test_an_unknown_number_or_another_etag_is_refused() -> None:
    with pytest.raises(InvalidPartError):
        choose_parts([part(1)], [wanted(part(3))])
    with pytest.raises(InvalidPartError):
        choose_parts([part(1)], [CompletedPart(number=1, etag="0" * 32)])


def test_a_checksum_that_differs_from_the_stored_one_is_refused() -> None:
    row = part(1, checksum=Checksum(algorithm="CRC32", value="AAAAAA=="))
    assert choose_parts([row], [wanted(row, CRC32="AAAAAA==")]) == [row]
    with pytest.raises(InvalidPartError):
        choose_parts([row], [wanted(row, CRC32="BBBBBB==")])


def test_the_etag_is_the_md5_of_the_parts_md5s_and_their_number() -> None:
    rows = [part(1), part(2)]
    joined = hashlib.md5(b"".join(bytes.fromhex(row.etag) for row in rows), usedforsecurity=False).hexdigest()
    assert multipart_etag([row.etag for row in rows]) == f"{joined}-2"


def test_part_infos_keep_number_size_and_checksum() -> None:
    row = part(4, size_bytes=9, checksum=Checksum(algorithm="CRC32", value="AAAAAA=="))
    (info,) = part_infos([row])
    assert (info.number, info.size_bytes, info.checksum) == (4, 9, row.checksum)
