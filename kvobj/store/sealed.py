"""A sealed frame's header is where the digest of a chunk is kept until its row has it."""

from __future__ import annotations

import msgspec

from kvobj.arena import PinnedFrame
from kvobj.catalog.rows import ObjectRow
from kvobj.codec.frame import frame_head_bytes, parse_frame


def with_header_digest(row: ObjectRow, frame: PinnedFrame) -> ObjectRow:
    """The single-blob row with the digest that its sealed frame's header holds."""
    (blob,) = row.blobs
    digest = parse_frame(frame.view[: frame_head_bytes(blob.plain_bytes)], blob.frame_bytes).digest
    return msgspec.structs.replace(row, blobs=(msgspec.structs.replace(blob, digest=digest),), digest=digest)
