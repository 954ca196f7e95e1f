"""How objects are cut into blobs, and ranges into slices of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvobj.catalog.rows import BlobRef
from kvobj.codec.frame import raw_frame_bytes
from kvobj.store.reader import slices_of
from kvobj.store.split import BlobSplit

MIB = 2**20


@given(st.integers(0, 10_000), st.integers(1, 999))
def test_sizes_sum_to_the_object_and_none_is_over_the_bound(size_bytes: int, largest: int) -> None:
    sizes = BlobSplit(largest).sizes(size_bytes)
    assert sum(sizes) == size_bytes
    assert all(0 < size <= largest for size in sizes) or sizes == [0]


def test_the_largest_frame_fits_half_a_region() -> None:
    split = BlobSplit.for_tiers(arena_bytes=4096 * MIB, region_bytes=256 * MIB, segment_bytes=1024 * MIB)
    assert raw_frame_bytes(split.blob_plain_bytes_max) <= 128 * MIB
    small = BlobSplit.for_tiers(arena_bytes=64 * MIB, region_bytes=64 * MIB, segment_bytes=256 * MIB)
    assert raw_frame_bytes(small.blob_plain_bytes_max) <= 8 * MIB


def test_no_blob_is_larger_than_a_segment_can_take() -> None:
    split = BlobSplit.for_tiers(arena_bytes=4096 * MIB, region_bytes=256 * MIB, segment_bytes=4 * MIB)
    record_bytes = 4096
    assert raw_frame_bytes(split.blob_plain_bytes_max) + record_bytes <= 4 * MIB


@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.data())
def test_slices_are_exactly_the_range(sizes: list[int], data: st.DataObject) -> None:
    content = bytes(i % 251 for i in range(sum(sizes)))
    start = data.draw(st.integers(0, len(content)))
    stop = data.draw(st.integers(start, len(content)))
    blobs = [
        BlobRef(blob_id=bytes([i] * 16), plain_bytes=size, frame_bytes=0, digest=None) for i, size in enumerate(sizes)
    ]
    offsets = [sum(sizes[:i]) for i in range(len(sizes))]
    read = b"".join(
        content[offsets[part.blob.blob_id[0]] + part.start : offsets[part.blob.blob_id[0]] + part.stop]
        for part in slices_of(blobs, start, stop)
    )
    assert read == content[start:stop]
