"""What a reader says it takes, and which of a chunk's representations it is given for that."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobj.api.accepting import parse_accept, parse_accepted, representation_headers
from kvobj.api.errors import S3Error
from kvobj.catalog.rows import BlobRef, Durability, LossyCopy, ObjectRow
from kvobj.store.representation import STORED, Accepted, choose, lossy_text, plain_only, takes_raw
from kvobj.tiers.coded_blobs import CodedBlob

PLAIN = BlobRef(b"a" * 16, 1000, 1280, b"d" * 32)
ROW = ObjectRow("b", "k", (PLAIN,), 1000, "kv0123-1", 0, "alice", Durability.LOCAL, digest=b"d" * 32)
COPY = LossyCopy(b"c" * 16, 1000, 300, b"e" * 32, "eq:83/1", 0.0625)
LOSSY = msgspec.structs.replace(ROW, lossy=COPY)
X3 = CodedBlob("x3", 1000, 700)
XA = CodedBlob("xa", 1000, 650)


def accept(value: str) -> tuple[Accepted, ...] | None:
    return parse_accept({"x-kvobj-accept": value})


def chosen(row: ObjectRow, lies: list[CodedBlob | None], value: str) -> ObjectRow | None:
    accepted = accept(value)
    assert accepted is not None
    return choose(row, lies, accepted)


def blob_of(row: ObjectRow | None) -> BlobRef:
    assert row is not None
    return row.blobs[0]


def test_codecs_are_told_by_preset_or_own_name_in_any_case_and_unknown_ones_are_left_out() -> None:
    assert parse_accept({}) is None
    assert accept("raw") is None
    assert accept("x3, RAW") == (Accepted("x3"), Accepted("raw"))
    assert accept(" eq4 ; max-error=0.07 ,raw;max-error=1e-2") == (Accepted("eq:83/1", 0.07), Accepted("raw", 0.01))
    assert accept("eq:83/1") == (Accepted("eq:83/1"),)
    assert accept("x9,zp") == (Accepted("zp"),)


@pytest.mark.parametrize(
    "value", ["", ",", "x3;level=9", "eq4;max-error=", "eq4;max-error=-1", "eq4;max-error=nan", "a b"]
)
def test_what_is_no_list_of_codecs_is_refused(value: str) -> None:
    with pytest.raises(S3Error) as refusal:
        accept(value)
    assert refusal.value.code == "InvalidArgument"


def test_more_codecs_than_there_can_be_are_refused() -> None:
    assert parse_accepted(["raw"] * 64) is not None
    with pytest.raises(ValueError, match="list of codecs"):
        parse_accepted(["raw"] * 65)


@given(st.text(max_size=200))
def test_no_header_makes_anything_but_codecs_or_a_refusal(value: str) -> None:
    try:
        accepted = accept(value)
    except S3Error:
        return
    assert accepted is None or all(each.max_error is None or each.max_error >= 0 for each in accepted)


def test_a_frame_that_lies_in_a_codec_that_is_taken_is_given_as_it_lies() -> None:
    blob = blob_of(chosen(ROW, [X3], "x3, xa, raw"))
    assert (blob.codec, blob.plain_bytes, blob.blob_id) == (STORED + "x3", 700, PLAIN.blob_id)
    assert chosen(ROW, [XA], "x3") is None


def test_plain_bytes_in_memory_come_before_a_frame_in_a_slower_tier() -> None:
    assert chosen(ROW, [None, X3], "x3, raw") is ROW
    assert blob_of(chosen(ROW, [None, X3], "x3")).codec == STORED + "x3"
    assert chosen(ROW, [X3], "raw, xa") is ROW


def test_lossless_bytes_come_before_a_lossy_copy() -> None:
    assert chosen(LOSSY, [None], "eq4;max-error=0.07, raw") is LOSSY
    assert blob_of(chosen(LOSSY, [], "eq4;max-error=0.07, raw")).codec == STORED + "eq:83/1"


def test_a_lossy_copy_is_given_to_who_takes_its_codec_and_its_error() -> None:
    blob = blob_of(chosen(LOSSY, [], "eq4"))
    assert (blob.blob_id, blob.plain_bytes) == (COPY.blob_id, COPY.frame_bytes)
    assert blob_of(chosen(LOSSY, [], "eq4;max-error=0.0625")).blob_id == COPY.blob_id
    assert chosen(LOSSY, [], "eq4;max-error=0.06") is None
    assert chosen(LOSSY, [], "eq57") is None
    assert chosen(LOSSY, [], "raw, x3") is None
    assert chosen(ROW, [], "eq4, raw") is None


def test_raw_with_a_bound_takes_what_a_lossy_copy_decodes_to() -> None:
    blob = blob_of(chosen(LOSSY, [], "raw;max-error=0.07"))
    assert (blob.blob_id, blob.codec, blob.plain_bytes, blob.digest) == (COPY.blob_id, "raw", 1000, COPY.digest)
    assert chosen(LOSSY, [], "raw;max-error=0.01") is None


def test_every_representation_has_an_etag_of_its_own_and_none_but_the_plain_has_checksums() -> None:
    asked: tuple[tuple[ObjectRow, list[CodedBlob | None], str], ...] = (
        (LOSSY, [None], "raw, x3"),
        (LOSSY, [X3], "x3"),
        (LOSSY, [XA], "xa"),
        (LOSSY, [], "eq4"),
    )
    rows = [chosen(row, list(lies), value) for row, lies, value in asked]
    rows.append(chosen(LOSSY, [], "raw;max-error=1"))
    etags = {row.etag for row in rows if row is not None}
    assert len(etags) == len(rows)
    assert all(etag.count("-") == 1 and etag.endswith("-1") for etag in etags)  # see `commit.kv_etag`


def test_a_reply_says_what_its_bytes_are() -> None:
    frame = chosen(LOSSY, [], "eq4")
    assert frame is not None
    assert lossy_text(frame) == "eq4;max-error=0.0625"
    assert representation_headers(frame) == [
        ("vary", "x-kvobj-accept"),
        ("x-kvobj-codec", "eq4"),
        ("x-kvobj-lossy", "eq4;max-error=0.0625"),
        ("x-kvobj-lossy-digest", COPY.digest.hex()),
    ]
    assert representation_headers(LOSSY) == [("vary", "x-kvobj-accept"), ("x-kvobj-codec", "raw")]
    assert lossy_text(LOSSY) is None


def test_an_object_of_several_blobs_is_only_plain() -> None:
    several = msgspec.structs.replace(ROW, blobs=(PLAIN, PLAIN))
    assert chosen(several, [], "x3, raw") is several
    assert chosen(several, [], "x3") is None


def test_a_part_of_a_chunk_is_of_its_plain_bytes() -> None:
    accepted = accept("x3, raw;max-error=1")
    assert accepted is not None
    assert takes_raw(accepted)
    assert plain_only(accepted) == (Accepted("raw", 1.0),)
