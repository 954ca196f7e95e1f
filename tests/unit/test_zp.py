"""zp: any bytes at any element width come back, nothing grows past raw, and no hostile block makes it allocate or crash."""

from __future__ import annotations

import struct

import pytest
import zstandard
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvobj.codec.codec import codec_named
from kvobj.codec.frame import BLOCK_PLAIN_BYTES, parse_frame, raw_frame_bytes
from kvobj.errors import FrameCorruptError

ZP = codec_named("zp")
WIDTHS = st.sampled_from([1, 2, 4])


def encode(plain: bytes, element_bytes: int) -> bytes:
    frame = bytearray(ZP.encode_bound(len(plain)))
    length = ZP.encode(memoryview(plain), memoryview(frame), digest=blake3(plain).digest(), element_bytes=element_bytes)
    return bytes(frame[:length])


def decode(frame: bytes) -> bytes:
    header = parse_frame(memoryview(frame), len(frame))
    plain = bytearray(header.plain_bytes)
    for block in range(header.block_count):
        start, stop = header.plain_span(block)
        encoded = memoryview(frame)[header.offset(block) : header.end(block)]
        ZP.decode_block(header, block, encoded, memoryview(plain)[start:stop])
    return bytes(plain)


@given(plain=st.binary(max_size=2000), repeats=st.integers(1, 400), element_bytes=WIDTHS)
def test_any_bytes_come_back(plain: bytes, repeats: int, element_bytes: int) -> None:
    plain *= repeats
    frame = encode(plain, element_bytes)
    assert decode(frame) == plain
    assert len(frame) <= raw_frame_bytes(len(plain))
    assert parse_frame(memoryview(frame), len(frame)).element_bytes == element_bytes


def test_planes_find_what_plain_zstd_does_not() -> None:
    noise = blake3(b"noise").digest(length=100_000)
    plain = bytes(byte for each in noise for byte in (each, 0x3F))
    assert len(encode(plain, 2)) < 0.55 * len(plain)
    assert len(encode(plain, 2)) < len(encode(plain, 1)) * 0.95


def test_noise_is_kept_as_it_is() -> None:
    plain = blake3(b"noise").digest(length=BLOCK_PLAIN_BYTES + 100)
    frame = encode(plain, 2)
    header = parse_frame(memoryview(frame), len(frame))
    assert all(header.is_raw(block) for block in range(header.block_count))
    assert frame[header.payload_offset :] == plain


@given(encoded=st.binary(max_size=400), element_bytes=WIDTHS, plain_bytes=st.integers(0, 5000))
def test_arbitrary_blocks_are_refused_or_decode_to_their_size(
    encoded: bytes, element_bytes: int, plain_bytes: int
) -> None:
    header = header_of(element_bytes)
    into = bytearray(plain_bytes)
    try:
        ZP.decode_block(header, 0, memoryview(encoded), memoryview(into))
    except FrameCorruptError:
        return
    assert len(into) == plain_bytes


@given(data=st.data(), element_bytes=WIDTHS)
def test_a_changed_block_never_crashes_the_decoder(data: st.DataObject, element_bytes: int) -> None:
    frame = encode(b"some plain text, again and again. " * 300, element_bytes)
    header = parse_frame(memoryview(frame), len(frame))
    encoded = bytearray(frame[header.offset(0) : header.end(0)])
    for _ in range(data.draw(st.integers(1, 3))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    into = bytearray(header.plain_bytes)
    try:
        ZP.decode_block(header, 0, memoryview(encoded), memoryview(into))
    except FrameCorruptError:
        return


def header_of(element_bytes: int):  # type: ignore[no-untyped-def]  # noqa: ANN201
    frame = encode(bytes(5000), element_bytes)
    return parse_frame(memoryview(frame), len(frame))


def test_a_plane_that_claims_to_be_huge_is_refused_before_it_is_decompressed() -> None:
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(64 * 1024 * 1024))
    encoded = struct.pack("<I", len(bomb)) + bomb
    with pytest.raises(FrameCorruptError, match="claims another length"):
        ZP.decode_block(header_of(1), 0, memoryview(encoded), memoryview(bytearray(5000)))


def test_bytes_behind_the_planes_are_refused() -> None:
    frame = encode(bytes(5000), 2)
    header = parse_frame(memoryview(frame), len(frame))
    encoded = frame[header.offset(0) : header.end(0)] + b"x"
    with pytest.raises(FrameCorruptError):
        ZP.decode_block(header, 0, memoryview(encoded), memoryview(bytearray(5000)))


def test_an_unknown_codec_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="x3"):
        codec_named("x3")
