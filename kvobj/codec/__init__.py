"""Frames, the codecs that make them, and the checksums of the data path. Pure: no I/O, no clock, no event loop."""

from kvobj.codec.checksums import ALGORITHMS, Digester, blake3_digest, combine_crc, crc32c
from kvobj.codec.codec import Codec, codec_named
from kvobj.codec.frame import (
    BLOCK_PLAIN_BYTES,
    FRAME_ALIGNMENT,
    HEADER_BYTES,
    MAX_PLAIN_BYTES,
    FrameHeader,
    block_crcs,
    frame_head_bytes,
    parse_frame,
    raw_frame_bytes,
    raw_payload_offset,
    seal_raw,
)

__all__ = [
    "ALGORITHMS",
    "BLOCK_PLAIN_BYTES",
    "FRAME_ALIGNMENT",
    "HEADER_BYTES",
    "MAX_PLAIN_BYTES",
    "Codec",
    "Digester",
    "FrameHeader",
    "blake3_digest",
    "block_crcs",
    "codec_named",
    "combine_crc",
    "crc32c",
    "frame_head_bytes",
    "parse_frame",
    "raw_frame_bytes",
    "raw_payload_offset",
    "seal_raw",
]
