"""What a codec is: a pure, thread-safe pair of functions between a blob's plain bytes and its frame.

Guarantees: lossless codecs only, never larger than `raw`, and no decode that allocates beyond the recorded plain
size. Does not check what it decodes: callers check a block's crc32c first and the digest of the whole after. Runs
wherever it is called; anything over 64 KiB belongs on a pool.
"""

from __future__ import annotations

from typing import Protocol

from kvobj.codec.frame import CODEC_RAW, CODEC_ZP, FrameHeader
from kvobj.codec.raw import RawCodec
from kvobj.codec.zp import ZpCodec


class Codec(Protocol):
    """Encodes plain bytes into a frame and decodes single blocks of it. Stateless; any thread may call it."""

    @property
    def name(self) -> str:
        """`raw` or `zp`: what rows and frame headers say."""
        ...

    def encode_bound(self, plain_bytes: int) -> int:
        """The most bytes that `encode` can write for so many plain bytes."""
        ...

    def encode(self, plain: memoryview, into: memoryview, *, digest: bytes, element_bytes: int = 1) -> int:
        """Write the whole frame of `plain` to the front of `into` and return its length.

        `into` is writable, at least `encode_bound(len(plain))` long and does not overlap `plain`; bytes past the
        returned length may have been written. `digest` is BLAKE3 of `plain`. `element_bytes` is the width of the
        elements that the plain bytes are made of: 1, 2 or 4 (1 when unknown). ValueError for a blob over
        `MAX_PLAIN_BYTES`.
        """
        ...

    def decode_block(self, header: FrameHeader, block: int, encoded: memoryview, into: memoryview) -> None:
        """Decode one block, given its encoded bytes, to `into`, which is exactly as long as the block's plain bytes.

        Raises `FrameCorruptError` when the encoded bytes decode to anything else than so many bytes.
        """
        ...


def codec_named(name: str) -> Codec:
    """The codec of this name; ValueError for one that does not exist."""
    match name:
        case "raw":
            return RawCodec()
        case "zp":
            return ZpCodec()
        case _:
            raise ValueError(f"unknown codec: {name} (known: {CODEC_RAW}, {CODEC_ZP})")
