"""Codec `raw`: the plain bytes behind a header and a directory, contiguous, so that they are served as they lie."""

from __future__ import annotations

from kvobj.codec.frame import (
    CODEC_RAW,
    FrameHeader,
    block_crcs,
    raw_frame_bytes,
    raw_payload_offset,
    seal_raw,
)
from kvobj.errors import FrameCorruptError


class RawCodec:
    """See `kvobj.codec.codec.Codec`. Receivers that place the payload themselves use `seal_raw` and copy nothing."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """See `Codec.name`."""
        return CODEC_RAW

    def encode_bound(self, plain_bytes: int) -> int:
        """See `Codec.encode_bound`; here it is the exact length."""
        return raw_frame_bytes(plain_bytes)

    def encode(self, plain: memoryview, into: memoryview, *, digest: bytes, element_bytes: int = 1) -> int:
        """See `Codec.encode`. The element width is not recorded: it means nothing here, and frames are canonical."""
        del element_bytes
        offset = raw_payload_offset(len(plain))
        payload = into[offset : offset + len(plain)]
        payload[:] = plain
        seal_raw(into, plain_bytes=len(plain), digest=digest, block_crcs=block_crcs(payload))
        return offset + len(plain)

    def decode_block(self, header: FrameHeader, block: int, encoded: memoryview, into: memoryview) -> None:
        """See `Codec.decode_block`."""
        if len(encoded) != len(into):
            raise FrameCorruptError("block of the wrong length", block=block, codec=header.codec, length=len(encoded))
        into[:] = encoded
