"""Reads a whole frame from a tier and checks everything there is to check: for scrubs and fsck, not for the read path."""

from __future__ import annotations

from blake3 import blake3

from kvobj.codec.codec import codec_named
from kvobj.codec.frame import HEADER_BYTES, MAX_HEAD_BYTES, parse_frame, raw_frame_bytes
from kvobj.errors import FrameCorruptError
from kvobj.ids import BlobId
from kvobj.tensors.checksums import crc32c
from kvobj.tensors.frame import TensorFrame
from kvobj.tiers.coded_frames import decode_coded, head_of, is_of_bytes
from kvobj.tiers.protocol import Tier


async def read_and_check(tier: Tier, blob_id: BlobId, *, plain_bytes: int, digest: bytes | None) -> str | None:
    """What is wrong with the blob in this tier, or None: header, block checksums, decoded bytes, BLAKE3.

    `digest` is what the catalog knows, None where it does not know it yet. Errors of the medium propagate.
    """
    frame = await tier.get(blob_id)
    if frame is None:
        return "gone"
    try:
        await frame.complete()
        return check_frame(frame.view, plain_bytes=plain_bytes, digest=digest)
    finally:
        frame.release()


def check_frame(frame: memoryview, *, plain_bytes: int, digest: bytes | None) -> str | None:
    """What is wrong with a whole frame, or None. Pure; seconds per GiB: belongs on a pool beside a running server."""
    try:
        if not is_of_bytes(frame[:HEADER_BYTES]):
            return _check_tensor(frame, plain_bytes=plain_bytes, digest=digest)
        header = parse_frame(frame[:MAX_HEAD_BYTES], len(frame))
        if header.plain_bytes != plain_bytes:
            return "another size"
        codec = codec_named(header.codec)
        hasher = blake3()
        for block in range(header.block_count):
            encoded = frame[header.offset(block) : header.end(block)]
            header.check_block(block, encoded)
            start, stop = header.plain_span(block)
            plain = memoryview(bytearray(stop - start))
            codec.decode_block(header, block, encoded, plain)
            hasher.update(plain)
    except FrameCorruptError as error:
        return str(error)
    found = hasher.digest()
    if found != header.digest or (digest is not None and found != digest):
        return "digest mismatch"
    return None


def _check_tensor(frame: memoryview, *, plain_bytes: int, digest: bytes | None) -> str | None:
    head = head_of(frame[:MAX_HEAD_BYTES], len(frame))
    if head.plain_bytes != plain_bytes:
        return "another size"
    if digest is not None and head.digest != digest:
        return "digest mismatch"
    if head.tensor is not None and head.tensor.profile_digest is not None:
        return _check_blocks(frame, head.tensor)  # its profile is another object: what lies here is checked
    decode_coded(frame, memoryview(bytearray(raw_frame_bytes(plain_bytes))))
    return None


def _check_blocks(frame: memoryview, tensor: TensorFrame) -> str | None:
    for block in tensor.blocks:
        if crc32c(frame[block.offset : block.offset + block.length]) != block.crc:
            return "block checksum mismatch"
    return None
