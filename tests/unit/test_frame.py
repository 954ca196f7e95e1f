"""Frames: what is written is read back, and whatever else is there is refused, harmless, or fails its block's checksum."""

from __future__ import annotations

import hashlib
import struct

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvobj.codec.checksums import crc32c
from kvobj.codec.codec import codec_named
from kvobj.codec.frame import (
    BLOCK_PLAIN_BYTES,
    FRAME_ALIGNMENT,
    HEADER_BYTES,
    MAX_HEAD_BYTES,
    MAX_PLAIN_BYTES,
    FrameHeader,
    block_crcs,
    frame_head_bytes,
    has_header,
    one_block_frame,
    parse_frame,
    raw_frame_bytes,
    raw_payload_offset,
    seal_raw,
)
from kvobj.errors import FrameCorruptError

CODECS = ["raw", "zp"]
SIZES = [0, 1, 255, 4096, BLOCK_PLAIN_BYTES - 1, BLOCK_PLAIN_BYTES, BLOCK_PLAIN_BYTES + 1, 3 * BLOCK_PLAIN_BYTES + 77]


def plain_of(size_bytes: int, *, period: int = 1 << 62) -> bytes:
    """Bytes that repeat after `period`, so that zp finds something to do in some."""
    unit = hashlib.shake_128(b"plain").digest(min(size_bytes, period))
    return (unit * (size_bytes // len(unit) + 1))[:size_bytes] if unit else b""


def encode(codec: str, plain: bytes, *, element_bytes: int = 1) -> bytearray:
    frame = bytearray(codec_named(codec).encode_bound(len(plain)))
    digest = blake3(plain).digest()
    length = codec_named(codec).encode(memoryview(plain), memoryview(frame), digest=digest, element_bytes=element_bytes)
    del frame[length:]
    return frame


def decode(frame: bytes | bytearray) -> bytes:
    """Decode as a careful reader does: header, then each block's checksum, then the block."""
    view = memoryview(frame)
    header = parse_frame(view, len(frame))
    plain = bytearray(header.plain_bytes)
    for block in header.blocks_for(0, header.plain_bytes):
        encoded = view[header.offset(block) : header.end(block)]
        header.check_block(block, encoded)
        start, stop = header.plain_span(block)
        codec_named(header.codec).decode_block(header, block, encoded, memoryview(plain)[start:stop])
    return bytes(plain)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("size_bytes", SIZES)
@pytest.mark.parametrize("period", [1 << 62, 64])
def test_a_frame_decodes_to_what_was_encoded(codec: str, size_bytes: int, period: int) -> None:
    plain = plain_of(size_bytes, period=period)
    frame = encode(codec, plain)
    header = parse_frame(memoryview(frame), len(frame))
    assert (header.codec, header.plain_bytes, header.frame_bytes) == (codec, size_bytes, len(frame))
    assert header.digest == blake3(plain).digest()
    assert decode(frame) == plain
    assert len(frame) <= raw_frame_bytes(size_bytes)


@pytest.mark.parametrize("size_bytes", SIZES)
def test_a_raw_payload_is_contiguous_and_its_blocks_are_aligned(size_bytes: int) -> None:
    plain = plain_of(size_bytes)
    frame = encode("raw", plain)
    offset = raw_payload_offset(size_bytes)
    assert bytes(frame[offset:]) == plain
    header = parse_frame(memoryview(frame), len(frame))
    assert header.payload_offset == offset
    for block in range(header.block_count):
        assert header.offset(block) == offset + block * BLOCK_PLAIN_BYTES
        assert header.offset(block) % FRAME_ALIGNMENT == 0
        assert header.is_raw(block)


def test_sealing_in_place_gives_the_frame_that_encoding_gives() -> None:
    plain = plain_of(2 * BLOCK_PLAIN_BYTES + 9)
    frame = bytearray(b"\xff" * raw_frame_bytes(len(plain)))
    payload = memoryview(frame)[raw_payload_offset(len(plain)) :]
    payload[:] = plain
    seal_raw(memoryview(frame), plain_bytes=len(plain), digest=blake3(plain).digest(), block_crcs=block_crcs(payload))
    assert frame == encode("raw", plain)


@pytest.mark.parametrize("size_bytes", [1, 255, 256, 4096, BLOCK_PLAIN_BYTES])
def test_a_frame_of_one_block_is_the_same_made_in_one_piece(size_bytes: int) -> None:
    plain = plain_of(size_bytes)
    assert one_block_frame(plain, blake3(plain).digest()) == encode("raw", plain)


def test_the_header_has_its_fields_where_the_format_says() -> None:
    plain = plain_of(BLOCK_PLAIN_BYTES + 5)
    frame = bytes(encode("zp", plain, element_bytes=2))
    assert frame[:4] == b"KVOF"
    assert frame[4:6] == b"\x01\x01"
    assert frame[6:8] == b"\x01\x00"
    assert frame[8:12] == b"\x01\x04\x00\x00"
    assert struct.unpack_from("<QI", frame, 12) == (len(plain), BLOCK_PLAIN_BYTES)
    assert frame[24:80] == bytes(56)
    assert frame[80:112] == blake3(plain).digest()
    assert frame[112:120] == bytes(8)
    assert struct.unpack_from("<I", frame, 120) == (2,)
    assert HEADER_BYTES == 128


def test_the_largest_blob_has_the_largest_head() -> None:
    assert frame_head_bytes(MAX_PLAIN_BYTES) <= MAX_HEAD_BYTES == raw_payload_offset(MAX_PLAIN_BYTES)
    assert raw_frame_bytes(MAX_PLAIN_BYTES) - MAX_PLAIN_BYTES < MAX_PLAIN_BYTES // 1000


def test_more_than_the_largest_blob_is_refused_by_writer_and_reader() -> None:
    with pytest.raises(ValueError, match="at most"):
        seal_raw(
            memoryview(bytearray(1 << 16)), plain_bytes=MAX_PLAIN_BYTES + 1, digest=bytes(32), block_crcs=[0] * 513
        )


FRAMES = {
    (codec, period): bytes(encode(codec, plain_of(2 * BLOCK_PLAIN_BYTES + 1000, period=period), element_bytes=2))
    for codec in CODECS
    for period in (1 << 62, 1000)
}


@given(
    which=st.sampled_from(sorted(FRAMES)),
    where=st.one_of(st.integers(0, 8 * 300), st.integers(0, 8 * 3_000_000)),
)
def test_a_flipped_bit_is_refused_or_harmless(which: tuple[str, int], where: int) -> None:
    original = FRAMES[which]
    frame = bytearray(original)
    frame[where // 8 % len(frame)] ^= 1 << where % 8
    try:
        plain = decode(frame)
    except FrameCorruptError:
        return
    header = parse_frame(memoryview(original), len(original))
    at = where // 8 % len(frame)
    assert plain == decode(original)
    assert all(not header.offset(block) <= at < header.end(block) for block in range(header.block_count))
    assert at >= header.head_bytes


def test_every_flipped_bit_of_header_and_directory_is_found() -> None:
    original = FRAMES["zp", 1000]
    header = parse_frame(memoryview(original), len(original))
    for at in range(header.payload_offset):
        for bit in range(8):
            frame = bytearray(original)
            frame[at] ^= 1 << bit
            with pytest.raises(FrameCorruptError):
                decode(frame)


@given(head=st.binary(max_size=600), frame_bytes=st.integers(0, 1 << 40))
def test_arbitrary_bytes_are_refused(head: bytes, frame_bytes: int) -> None:
    with pytest.raises(FrameCorruptError):
        parse_frame(memoryview(head), frame_bytes)


@given(
    plain_bytes=st.integers(0, 1 << 64 - 1),
    entries=st.integers(0, (1 << 32) - 1),
    fields=st.tuples(*[st.integers(0, 3)] * 5),
    directory=st.binary(max_size=200),
    frame_bytes=st.integers(0, 1 << 40),
)
def test_a_header_with_a_right_checksum_and_wrong_numbers_is_refused(
    plain_bytes: int, entries: int, fields: tuple[int, ...], directory: bytes, frame_bytes: int
) -> None:
    version, codec_id, dtype, kind, flags = fields
    body = struct.pack(
        "<4sBBHBBHQI56s32s8sI",
        b"KVOF", version, 1, codec_id, dtype, kind + 2, flags, plain_bytes % (1 << 64), BLOCK_PLAIN_BYTES, bytes(56),
        bytes(32), bytes(8), entries,
    )  # fmt: skip
    head = body + struct.pack("<I", crc32c(memoryview(body))) + directory
    try:
        header = parse_frame(memoryview(head), frame_bytes)
    except FrameCorruptError:
        return
    assert header.plain_bytes == plain_bytes <= MAX_PLAIN_BYTES


@pytest.mark.parametrize("codec", CODECS)
@given(cut=st.integers(1, 3_000_000))
def test_a_truncated_frame_is_refused(codec: str, cut: int) -> None:
    frame = FRAMES[codec, 1000]
    short = frame[: len(frame) - 1 - cut % (len(frame) - 1)]
    with pytest.raises(FrameCorruptError):
        parse_frame(memoryview(short), len(short))


def header_of(codec: str) -> tuple[FrameHeader, int]:
    frame = FRAMES[codec, 1000]
    return parse_frame(memoryview(frame), len(frame)), len(frame)


@pytest.mark.parametrize("codec", CODECS)
@given(data=st.data())
def test_blocks_for_a_plain_range_are_those_that_hold_it(codec: str, data: st.DataObject) -> None:
    header, _ = header_of(codec)
    start = data.draw(st.integers(0, header.plain_bytes))
    stop = data.draw(st.integers(start, header.plain_bytes))
    blocks = header.blocks_for(start, stop)
    spans = [header.plain_span(block) for block in range(header.block_count)]
    assert list(blocks) == [n for n, (low, high) in enumerate(spans) if low < stop and start < high and start < stop]


@pytest.mark.parametrize("codec", CODECS)
@given(data=st.data())
def test_blocks_over_an_encoded_range_cover_it(codec: str, data: st.DataObject) -> None:
    header, frame_bytes = header_of(codec)
    start = data.draw(st.integers(0, frame_bytes - 1))
    stop = data.draw(st.integers(start + 1, frame_bytes))
    blocks = header.blocks_over(start, stop)
    for block in range(header.block_count):
        if header.offset(block) < stop and start < header.end(block):
            assert block in blocks
    if blocks:
        first, last = header.encoded_span(blocks)
        assert first <= max(start, header.payload_offset)
        assert first < stop
        assert all(byte in range(first, last) or is_padding(header, byte) for byte in (start, stop - 1))


def is_padding(header: FrameHeader, byte: int) -> bool:
    return all(not header.offset(n) <= byte < header.end(n) for n in range(header.block_count))


def test_a_range_that_is_none_is_refused() -> None:
    header, _ = header_of("raw")
    for start, stop in ((-1, 1), (2, 1), (0, header.plain_bytes + 1)):
        with pytest.raises(ValueError, match="no range"):
            header.blocks_for(start, stop)


def test_a_header_is_told_from_what_lay_there_before_it() -> None:
    frame = memoryview(bytearray(raw_frame_bytes(10)))
    assert not has_header(frame)
    seal_raw(frame, plain_bytes=10, digest=bytes(32), block_crcs=[0])
    assert has_header(frame)
    for byte in range(128):
        frame[byte] ^= 1
        assert not has_header(frame)
        frame[byte] ^= 1
    assert not has_header(frame[:127])
