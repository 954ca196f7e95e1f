import msgspec
import pytest
from blake3 import blake3
from fakes_nvme import RECORD_KEY
from hypothesis import given
from hypothesis import strategies as st

from kvobj.errors import CorruptionError
from kvobj.ids import BlobId
from kvobj.tiers.nvme.directory import Place
from kvobj.tiers.nvme.log_entries import (
    BlobsRemoved,
    InlinePut,
    decode_entry,
    encode_inline_put,
    encode_removed,
)
from kvobj.tiers.nvme.record import (
    NAMES_BYTES_MAX,
    RECORD_BYTES,
    Record,
    decode_record,
    encode_record,
    is_record_of,
)
from kvobj.tiers.protocol import BlobNames

blob_ids = st.binary(min_size=16, max_size=16).map(BlobId)
numbers = st.integers(0, 2**63)
names = st.builds(BlobNames, bucket=st.text(max_size=15), key=st.text(max_size=256))
records = st.builds(
    Record,
    segment=st.integers(0, 2**32 - 1),
    offset=st.integers(0, 2**64 - 1),
    blob_id=blob_ids,
    frame_bytes=st.integers(0, 2**64 - 1),
    names=names,
)


def page_of(record: Record, key: bytes = RECORD_KEY) -> bytearray:
    page = bytearray(RECORD_BYTES)
    encode_record(record, key, memoryview(page))
    return page


@given(records)
def test_a_record_reads_back(record: Record) -> None:
    assert decode_record(memoryview(page_of(record)), RECORD_KEY) == record


@given(records, st.integers(0, RECORD_BYTES * 8 - 1))
def test_a_record_with_any_bit_flipped_is_none(record: Record, bit: int) -> None:
    page = page_of(record)
    page[bit // 8] ^= 1 << bit % 8
    assert decode_record(memoryview(page), RECORD_KEY) is None


@given(records)
def test_a_record_under_another_key_is_none(record: Record) -> None:
    assert decode_record(memoryview(page_of(record, bytes(32))), RECORD_KEY) is None


@given(
    records.map(lambda record: msgspec.structs.replace(record, names=BlobNames("b", record.names.key * 20))) | records
)
def test_a_page_ends_in_the_keyed_blake3_of_the_rest(record: Record) -> None:
    """Whoever works it out, and however much of the page is zeros."""
    fits = len((record.names.bucket + record.names.key).encode()) <= NAMES_BYTES_MAX
    if fits:
        page = page_of(record)
        assert page[-32:] == blake3(page[:-32], key=RECORD_KEY).digest()


@given(records, st.integers(0, RECORD_BYTES * 8 - 1))
def test_a_page_is_the_record_of_its_own_blob_alone(record: Record, bit: int) -> None:
    own = msgspec.structs.asdict(record)
    del own["names"]
    page = page_of(record)
    assert is_record_of(memoryview(page), RECORD_KEY, **own)
    for name, other in (
        ("segment", 2**32 - 1),
        ("offset", 2**64 - 1),
        ("frame_bytes", 2**64 - 1),
        ("blob_id", b"o" * 16),
    ):
        if own[name] != other:
            assert not is_record_of(memoryview(page), RECORD_KEY, **{**own, name: other})
    assert not is_record_of(memoryview(page), bytes(32), **own)
    page[bit // 8] ^= 1 << bit % 8
    assert not is_record_of(memoryview(page), RECORD_KEY, **own)


@given(st.binary(max_size=200))
def test_payload_that_poses_as_a_record_is_none(tail: bytes) -> None:
    page = page_of(Record(0, 0, BlobId(bytes(16)), 1, BlobNames("b", "k")))[:8] + tail
    assert decode_record(memoryview(page.ljust(RECORD_BYTES, b"\0")), RECORD_KEY) is None


def test_the_longest_names_fit_and_longer_ones_are_refused() -> None:
    fitting = Record(0, 0, BlobId(bytes(16)), 1, BlobNames("b" * 63, "k" * (NAMES_BYTES_MAX - 63)))
    assert decode_record(memoryview(page_of(fitting)), RECORD_KEY) == fitting
    with pytest.raises(ValueError, match="do not fit"):
        page_of(Record(0, 0, BlobId(bytes(16)), 1, BlobNames("b" * 64, "k" * (NAMES_BYTES_MAX - 63))))


@given(blob_ids, names, st.binary(max_size=1000))
def test_an_inline_entry_reads_back(blob_id: BlobId, blob_names: BlobNames, frame: bytes) -> None:
    decoded = decode_entry(encode_inline_put(blob_id, blob_names, frame))
    assert isinstance(decoded, InlinePut)
    assert (decoded.blob_id, decoded.names, bytes(decoded.frame)) == (blob_id, blob_names, frame)


@given(st.lists(blob_ids, max_size=20))
def test_a_removal_reads_back(removed: list[BlobId]) -> None:
    assert decode_entry(encode_removed(removed)) == BlobsRemoved(tuple(removed))


@given(st.integers(0, 0x3F) | st.integers(0x80, 0xFF), st.binary(max_size=50))
def test_entries_of_others_are_skipped(kind: int, rest: bytes) -> None:
    assert decode_entry(bytes([kind]) + rest) is None


@given(st.integers(0x40, 0x7F), st.binary(max_size=100))
def test_a_malformed_entry_is_corruption_or_nothing_worse(kind: int, rest: bytes) -> None:
    try:
        decoded = decode_entry(bytes([kind]) + rest)
    except CorruptionError:
        return
    assert isinstance(decoded, InlinePut | BlobsRemoved)


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**63), st.integers(0, 2**63), st.booleans())
def test_a_directory_row_reads_back(segment: int, offset: int, frame_bytes: int, inline: bool) -> None:  # noqa: FBT001
    place = Place(segment, offset, frame_bytes, inline)
    assert Place.decode(place.encode()) == place


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), numbers, numbers, st.booleans())))
def test_many_directory_rows_read_back_as_one_by_one(rows: list[tuple[int, int, int, bool]]) -> None:
    places = [Place(segment, offset, frame_bytes, inline) for segment, offset, frame_bytes, inline in rows]
    assert Place.decode_many([place.encode() for place in places]) == places


@pytest.mark.parametrize("bad", [b"", b"\x02" + bytes(20), bytes(20), bytes(22), bytes(42)])
def test_one_bad_row_among_many_is_corruption(bad: bytes) -> None:
    good = Place(1, 4096, 5000).encode()
    for rows in ([good, bad, good], [bad], [bad, good[:-1], good, good + b"\0"]):
        with pytest.raises(CorruptionError):
            Place.decode_many(rows)


@given(st.binary(max_size=40))
def test_any_other_row_is_corruption(row: bytes) -> None:
    try:
        place = Place.decode(row)
    except CorruptionError:
        return
    assert place.encode() == row
