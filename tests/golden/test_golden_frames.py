"""Frames of every released format version stay readable for ever. A golden file is added, never changed.

`frames/NAME.frame` is a frame as some version wrote it; its plain bytes are made by `PLAIN[NAME]`. Frames of `raw` are
canonical, so today's writer must also make the very same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
from blake3 import blake3

from kvobj.codec.codec import codec_named
from kvobj.codec.frame import parse_frame

FRAMES = Path(__file__).parent / "frames"


def noise(size_bytes: int) -> bytes:
    return hashlib.shake_128(b"kvobj golden frame").digest(size_bytes)


def words(size_bytes: int) -> bytes:
    """Half noise, half not: two-byte elements with a constant high byte."""
    low = noise(size_bytes // 2)
    return bytes(byte for each in low for byte in (each, 0x3F))[:size_bytes]


PLAIN: dict[str, Callable[[], bytes]] = {
    "raw-1-empty": lambda: b"",
    "raw-1-small": lambda: noise(1000),
    "raw-1-two-blocks": lambda: bytes(256 * 1024) + noise(100),
    "zp-1-empty": lambda: b"",
    "zp-1-one-byte-elements": lambda: b"kvobj " * 10_000,
    "zp-1-two-byte-elements": lambda: words(20_000) + b"!",
    "zp-1-four-byte-elements": lambda: bytes(256 * 1024) + b"\x00\x01\x02\x03" * 5000 + noise(3),
    "zp-1-noise-is-raw": lambda: noise(3000),
}


@pytest.mark.parametrize("name", sorted(PLAIN))
def test_a_golden_frame_decodes_to_its_plain_bytes(name: str) -> None:
    frame = memoryview((FRAMES / f"{name}.frame").read_bytes())
    plain = PLAIN[name]()
    header = parse_frame(frame, len(frame))
    assert header.codec == name.partition("-")[0]
    assert header.digest == blake3(plain).digest()
    decoded = bytearray(header.plain_bytes)
    for block in range(header.block_count):
        encoded = frame[header.offset(block) : header.end(block)]
        header.check_block(block, encoded)
        start, stop = header.plain_span(block)
        codec_named(header.codec).decode_block(header, block, encoded, memoryview(decoded)[start:stop])
    assert decoded == plain


@pytest.mark.parametrize("name", sorted(name for name in PLAIN if name.startswith("raw")))
def test_a_raw_frame_is_written_the_same_today(name: str) -> None:
    plain = PLAIN[name]()
    codec = codec_named("raw")
    frame = bytearray(codec.encode_bound(len(plain)))
    codec.encode(memoryview(plain), memoryview(frame), digest=blake3(plain).digest())
    assert frame == (FRAMES / f"{name}.frame").read_bytes()


def test_every_golden_file_is_read_by_this_test() -> None:
    assert {path.name for path in FRAMES.iterdir()} == {f"{name}.frame" for name in PLAIN}
