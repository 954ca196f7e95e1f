"""The checking of one frame, or of some blocks of it, from the front as its bytes come: pure but for the order it
must keep.

Blocks are checked by their crc32c. With the digest, the plain bytes are hashed along, while they are in the cache,
and the last block counts as checked only if the BLAKE3 of all of them is the header's.
"""

from __future__ import annotations

from blake3 import blake3

from kvobj.arena import PinnedFrame
from kvobj.codec.codec import codec_named
from kvobj.codec.frame import BLOCK_PLAIN_BYTES, FrameHeader
from kvobj.errors import FrameCorruptError


class FrameCheck:
    """One pass over consecutive `blocks`. One `verify` at a time, on any thread; the rest belongs to the event loop."""

    __slots__ = ("_codec", "_hasher", "_header", "_next", "_stop", "_with_digest", "is_finished")

    def __init__(self, header: FrameHeader, blocks: range, *, with_digest: bool) -> None:
        self._header = header
        self._next = blocks.start
        self._stop = blocks.stop
        # The digest of a tensor is of what all of its blocks decode to together: who decodes it checks that (`coded`).
        is_of_bytes = header.tensor is None
        self._codec = codec_named(header.codec) if is_of_bytes else None
        self._hasher = blake3() if with_digest and is_of_bytes else None
        self._with_digest = with_digest
        self.is_finished = False

    @property
    def has_digest(self) -> bool:
        """Whether the whole is checked, and its digest along where that is of its blocks' bytes in order."""
        return self._with_digest

    @property
    def has_blocks_left(self) -> bool:
        """Whether a block is left to check; an empty blob has none, but a digest."""
        return self._next < self._stop

    @property
    def next_end(self) -> int:
        """The encoded byte that the next block ends before."""
        return self._header.end(self._next)

    @property
    def checked_to(self) -> int:
        """The encoded byte that the checked blocks end before."""
        return self._header.end(self._next - 1) if self._next else self._header.payload_offset

    def blocks_ready(self, frame: PinnedFrame, blocks_max: int) -> range:
        """The next blocks whose bytes are in `frame` already, at most `blocks_max`."""
        stop = min(self._stop, self._next + blocks_max)
        if frame.progress is not None:
            filled = frame.progress.filled + frame.origin
            while stop > self._next and self._header.end(stop - 1) > filled:
                stop -= 1
        return range(self._next, stop)

    def plain_bytes(self, blocks: range) -> int:
        """How many plain bytes the blocks hold: what their checking costs."""
        return min(len(blocks) * BLOCK_PLAIN_BYTES, self._header.plain_bytes)

    def verify(self, blocks: range, view: memoryview, view_start: int) -> None:
        """Check the next `blocks`, whose frame's encoded bytes from `view_start` on are in `view`.

        Raises `FrameCorruptError` for a block or, with the last, a digest that is not what the header says.
        """
        header = self._header
        for block in blocks:
            encoded = view[header.offset(block) - view_start : header.end(block) - view_start]
            header.check_block(block, encoded)
            if self._hasher is not None:
                self._hasher.update(encoded if header.is_raw(block) else self._decoded(block, encoded))
        self._next = blocks.stop
        if self._next < self._stop:
            return
        if self._hasher is not None and self._hasher.digest() != header.digest:
            raise FrameCorruptError("frame digest mismatch", codec=header.codec)
        self.is_finished = True

    def _decoded(self, block: int, encoded: memoryview) -> memoryview:
        start, stop = self._header.plain_span(block)
        plain = memoryview(bytearray(stop - start))
        assert self._codec is not None
        self._codec.decode_block(self._header, block, encoded, plain)
        return plain
