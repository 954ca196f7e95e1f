"""Records of chunks: what native code reads of rows and writes into replies is what the decoder and the encoder make of them."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvobj import native
from kvobj.catalog.chunk_heads import matched_chunk, matched_chunks
from kvobj.catalog.chunk_list import IdList, KeyList
from kvobj.catalog.chunk_records import (
    ChunkRecords,
    EncodedChunks,
    encode_chunks,
    live_blob_ids,
    scan_records,
)
from kvobj.catalog.encoding import encode_row
from kvobj.catalog.rows import BlobRef, Checksum, Durability, ObjectRow, ObjectState
from kvobj.store.chunk_values import ChunkDetail

pytestmark = pytest.mark.skipif(not native.status().is_loaded, reason="the native library is not built")

sizes = st.integers(0, 2**63 - 1)
digests = st.none() | st.binary(min_size=32, max_size=32)
texts = st.text(max_size=20)
blobs = st.builds(
    BlobRef,
    st.binary(min_size=16, max_size=16),
    sizes,
    sizes,
    digests,
    st.text(st.characters(codec="ascii", exclude_characters="\0"), max_size=15),
)
rows = st.builds(
    ObjectRow,
    bucket=texts,
    key=st.text(min_size=1, max_size=300),
    blobs=st.lists(blobs, min_size=1, max_size=3).map(tuple),
    size_bytes=sizes,
    etag=texts,
    modified_ms=sizes,
    owner=texts,
    durability=st.sampled_from(Durability),
    headers=st.dictionaries(texts, texts, max_size=20),
    checksums=st.lists(st.builds(Checksum, texts, texts, texts), max_size=2).map(tuple),
    digest=digests,
    sequence=st.integers(0, 2**64 - 1),
    parent=st.none() | texts,
    chain_sum=st.just(b"") | st.binary(min_size=16, max_size=16),
    tags=st.dictionaries(texts, st.text(max_size=300), max_size=2),
)


def plain_row(key: str, **fields: object) -> ObjectRow:
    row = ObjectRow(
        bucket="kv",
        key=key,
        blobs=(BlobRef(b"b" * 16, 100, 612, b"d" * 32),),
        size_bytes=100,
        etag="e",
        modified_ms=1,
        owner="main",
        durability=Durability.MEMORY,
        digest=b"d" * 32,
    )
    return msgspec.structs.replace(row, **fields)


@given(st.lists(rows, max_size=8))
def test_a_record_tells_what_the_decoder_tells(stored: list[ObjectRow]) -> None:
    page = scan_records([encode_row(row) for row in stored])
    assert page is not None
    found = ChunkRecords(KeyList([row.key for row in stored]), [page])
    assert list(found) == matched_chunks(encode_row(row) for row in stored)
    assert found.have_digests == all(row.digest is not None for row in stored)
    assert found.blob_ids() == [row.blobs[0].blob_id for row in stored]
    assert live_blob_ids([encode_row(row) for row in stored]) == (found.blob_ids() or None)


@given(
    st.lists(rows.map(lambda row: msgspec.structs.replace(row, digest=row.digest or b"x" * 32)), max_size=20),
    st.randoms(),
)
def test_an_encoded_list_is_the_one_that_objects_make(stored: list[ObjectRow], random: object) -> None:
    assume(sum(row.size_bytes for row in stored) < 2**64)
    tiers = [random.choice(["dram", "nvme", "home-of-14-by"]) for _ in stored]  # type: ignore[attr-defined]
    ids = [bytes([number]) * 32 for number in range(len(stored))]
    page = scan_records([encode_row(row) for row in stored])
    assert page is not None
    encoded = encode_chunks(ChunkRecords(IdList(b"".join(ids)), [page]), tiers)
    assert encoded is not None
    details = [
        ChunkDetail(name, row.size_bytes, row.digest, tier, row.blobs[0].codec)
        for name, row, tier in zip(ids, stored, tiers, strict=True)
    ]
    assert encoded.msgpack == msgspec.msgpack.encode(details)
    sums = {tier: sum(row.size_bytes for row, at in zip(stored, tiers, strict=True) if at == tier) for tier in tiers}
    assert encoded.size_by_tier == sums


@pytest.mark.parametrize("count", [0, 1, 15, 16, 4096, 65_535, 65_536])
def test_a_list_of_any_length_has_the_head_that_msgpack_gives_it(count: int) -> None:
    page = scan_records([encode_row(plain_row("k"))] * count)
    assert page is not None
    encoded = encode_chunks(ChunkRecords(IdList(bytes(32 * count)), [page]), ["nvme"] * count)
    assert isinstance(encoded, EncodedChunks)
    detail = ChunkDetail(bytes(32), 100, b"d" * 32, "nvme", "raw")
    assert encoded.msgpack == msgspec.msgpack.encode([detail] * count)


@pytest.mark.parametrize(
    "odd",
    [
        plain_row("k", state=ObjectState.CONDEMNED),
        plain_row("k", blobs=()),
        plain_row("k", blobs=(BlobRef(b"short", 1, 1, None),)),
        plain_row("k", blobs=(BlobRef(b"b" * 16, 1, 1, None, "a codec of a long name"),)),
        plain_row("k", digest=b"short"),
    ],
)
def test_a_row_of_another_form_or_a_hidden_one_is_left_to_the_decoder(odd: ObjectRow) -> None:
    values = [encode_row(plain_row("a")), encode_row(odd)]
    assert scan_records(values) is None
    expected = [plain_row("a")] if odd.state is ObjectState.CONDEMNED else [plain_row("a"), odd]
    assert matched_chunks(values) == [matched_chunk(row) for row in expected]


@given(st.binary(max_size=300) | st.builds(lambda row, cut: encode_row(row)[:cut], rows, st.integers(0, 200)))
def test_damaged_rows_are_refused_and_never_read_beyond_their_end(value: bytes) -> None:
    try:
        is_whole = bool(matched_chunks([value]))
    except msgspec.MsgspecError:
        is_whole = False
    assert scan_records([value]) is None or is_whole


def test_rows_that_are_not_there_are_refused() -> None:
    assert scan_records([encode_row(plain_row("a")), None]) is None


def test_chunks_whose_digest_is_not_known_yet_are_not_encoded() -> None:
    page = scan_records([encode_row(plain_row("a", digest=None))])
    assert page is not None
    assert encode_chunks(ChunkRecords(IdList(bytes(32)), [page]), ["nvme"]) is None


def test_chunks_that_replies_name_by_strings_are_not_encoded() -> None:
    page = scan_records([encode_row(plain_row("a"))])
    assert page is not None
    assert encode_chunks(ChunkRecords(KeyList(["a"]), [page]), ["nvme"]) is None
