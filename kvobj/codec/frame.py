"""The frame: a blob's self-describing, checkable encoding (header, directory of blocks, blocks), container version 1.

Guarantees: a frame is canonical (one legal value for every field), so whatever `parse_frame` accepts has every
offset, length and flag where the writer put it, and a flipped bit anywhere is refused here, fails its block's crc32c
(also one in the directory's entry of the block, which nothing else checks), or lies in padding that nobody reads.
Parsing never raises anything but `FrameCorruptError` and never allocates by a number it read. Does not check blocks
(that is `FrameHeader.check_block`) nor the digest, and knows no names: those stand beside the frame.

Frames of tensors (kinds 0 to 3) are read here too, as headers of the same shape; `kvobj.tensors` writes and decodes them.

Little-endian throughout. Layout of the 128-byte header for kind *bytes*: magic 4, container version 1, codec revision
1, codec id 2, dtype 1, kind 1, flags 2, plain size 8, block plain size 4, zeros 56, BLAKE3 of the plain bytes 32,
zeros 8, directory entries 4, crc32c of the 124 bytes before 4.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from kvobj.codec.checksums import crc32c
from kvobj.errors import FrameCorruptError
from kvobj.ids import DIGEST_BYTES
from kvobj.tensors.frame import TensorFrame, parse_tensor_frame

FRAME_ALIGNMENT: Final = 256
BLOCK_PLAIN_BYTES: Final = 256 * 1024
HEADER_BYTES: Final = 128
DIRECTORY_ENTRY_BYTES: Final = 12
MAX_PLAIN_BYTES: Final = 128 * 1024 * 1024
"""A blob's largest plain size; larger objects are several blobs."""

MAGIC: Final = b"KVOF"
CONTAINER_VERSION: Final = 1
KIND_BYTES: Final = 4
"""Kind field: 0 KV pair, 1 K only, 2 V only, 3 MLA latent, 4 bytes. Those below are tensors."""

CODEC_RAW: Final = "raw"
CODEC_ZP: Final = "zp"
_CODEC_IDS: Final = {CODEC_RAW: 0x00, CODEC_ZP: 0x01}
_CODEC_NAMES: Final = {number: name for name, number in _CODEC_IDS.items()}
CODEC_REVISION: Final = 1

ELEMENT_BYTES_BY_DTYPE: Final = {0: 1, 1: 2, 2: 4}
"""Dtype field of kind bytes: elements of no named type, by width. Append only; named types get other numbers."""
_DTYPES_BY_ELEMENT_BYTES: Final = {width: number for number, width in ELEMENT_BYTES_BY_DTYPE.items()}

_HEADER: Final = struct.Struct("<4sBBHBBHQI56s32s8sII")
_ONE_BLOCK_HEAD: Final = struct.Struct(f"{_HEADER.format}III{FRAME_ALIGNMENT - HEADER_BYTES - DIRECTORY_ENTRY_BYTES}x")
_ZEROS_56: Final = bytes(56)
_ZEROS_8: Final = bytes(8)
_CRC_AT: Final = HEADER_BYTES - 4
_U32: Final = struct.Struct("<I")
_RAW_FLAG: Final = 1 << 31
_LENGTH_MASK: Final = _RAW_FLAG - 1
_UNITS_PER_FULL_BLOCK: Final = BLOCK_PLAIN_BYTES // FRAME_ALIGNMENT


def aligned(size_bytes: int) -> int:
    """`size_bytes` rounded up to `FRAME_ALIGNMENT`."""
    return -(-size_bytes // FRAME_ALIGNMENT) * FRAME_ALIGNMENT


def block_count(plain_bytes: int) -> int:
    """How many blocks hold `plain_bytes`; none for an empty blob."""
    return -(-plain_bytes // BLOCK_PLAIN_BYTES)


def frame_head_bytes(plain_bytes: int) -> int:
    """Header and directory, before padding: what `parse_frame` needs to see of a frame."""
    return HEADER_BYTES + DIRECTORY_ENTRY_BYTES * block_count(plain_bytes)


@lru_cache(maxsize=1024)
def raw_payload_offset(plain_bytes: int) -> int:
    """Where the plain bytes start in a `raw` frame; block i is at this + i * `BLOCK_PLAIN_BYTES`."""
    return aligned(frame_head_bytes(plain_bytes))


def raw_frame_bytes(plain_bytes: int) -> int:
    """Length of a `raw` frame, which is also the most that any codec here makes of so many plain bytes."""
    return raw_payload_offset(plain_bytes) + plain_bytes


MAX_HEAD_BYTES: Final = raw_payload_offset(MAX_PLAIN_BYTES)
"""So many leading bytes of any frame hold its header, directory and the padding in front of its first block: of a tensor's too,
whose blocks are no more (`kvobj.tensors.frame.MAX_BLOCKS`)."""


def block_crcs(payload: memoryview) -> list[int]:
    """The crc32c of each block of a `raw` payload, in order. For pools: 9 µs a block."""
    return [crc32c(payload[start : start + BLOCK_PLAIN_BYTES]) for start in range(0, len(payload), BLOCK_PLAIN_BYTES)]


@dataclass(frozen=True, slots=True)
class EncodedBlock:
    """A directory entry to be written: where the block is in the frame and whether it holds plain bytes."""

    offset: int
    length: int
    crc: int
    is_raw: bool


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """A frame's header and directory, checked. Immutable and detached from the buffer it was parsed from.

    `digest` is BLAKE3 of the plain bytes, `frame_bytes` the whole frame's length, `head_bytes` that of header and
    directory before padding. Block numbers count from zero; a wrong one raises IndexError.

    `tensor` says more where the frame is a tensor's, else it is None. Then `codec` is a codec of `kvobj.tensors`, `digest` that of
    what the frame decodes to, and blocks hold no ranges of the plain bytes.
    """

    codec: str
    element_bytes: int
    plain_bytes: int
    digest: bytes
    frame_bytes: int
    _offsets: Sequence[int]
    _lengths: Sequence[int]
    _crcs: Sequence[int]
    tensor: TensorFrame | None = None

    @property
    def head_bytes(self) -> int:
        """Header and directory, before padding."""
        return HEADER_BYTES + DIRECTORY_ENTRY_BYTES * len(self._lengths)

    @property
    def payload_offset(self) -> int:
        """Where the first block starts (or would)."""
        return aligned(self.head_bytes)

    @property
    def block_count(self) -> int:
        """How many blocks there are."""
        return len(self._lengths)

    def offset(self, block: int) -> int:
        """First encoded byte of a block, counted from the frame's start."""
        return self._offsets[block] * FRAME_ALIGNMENT

    def length(self, block: int) -> int:
        """Encoded bytes of a block."""
        return self._lengths[block] & _LENGTH_MASK

    def end(self, block: int) -> int:
        """One past the last encoded byte of a block."""
        return self._offsets[block] * FRAME_ALIGNMENT + (self._lengths[block] & _LENGTH_MASK)

    def crc(self, block: int) -> int:
        """The crc32c recorded for a block's encoded bytes."""
        return self._crcs[block]

    def is_raw(self, block: int) -> bool:
        """Whether a block holds plain bytes."""
        return self._lengths[block] >= _RAW_FLAG

    def plain_span(self, block: int) -> tuple[int, int]:
        """Half-open range of the plain bytes that a block decodes to; ValueError for a tensor's frame."""
        if self.tensor is not None:
            raise ValueError(f"a block of {self.codec} is no range of the plain bytes")
        start = block * BLOCK_PLAIN_BYTES
        return start, min(start + BLOCK_PLAIN_BYTES, self.plain_bytes)

    def blocks_for(self, plain_start: int, plain_stop: int) -> range:
        """The blocks that hold the plain bytes `[plain_start, plain_stop)`; ValueError if it has no such range, or is a
        tensor's."""
        if self.tensor is not None:
            raise ValueError(f"a range of plain bytes is no range of blocks of {self.codec}")
        if not 0 <= plain_start <= plain_stop <= self.plain_bytes:
            raise ValueError(f"[{plain_start}, {plain_stop}) is no range of {self.plain_bytes} plain bytes")
        if plain_start == plain_stop:
            return range(0)
        return range(plain_start // BLOCK_PLAIN_BYTES, block_count(plain_stop))

    def encoded_span(self, blocks: range) -> tuple[int, int]:
        """Half-open range of the encoded bytes of consecutive blocks; (0, 0) for none."""
        if not blocks:
            return 0, 0
        return self.offset(blocks[0]), self.end(blocks[-1])

    def blocks_over(self, start: int, stop: int) -> range:
        """The blocks that have a part in the encoded bytes `[start, stop)`; the padding behind one counts to it."""
        first = max(0, bisect_right(self._offsets, start // FRAME_ALIGNMENT) - 1)
        last = bisect_left(self._offsets, -(-stop // FRAME_ALIGNMENT))
        return range(first, last)

    def blocks_named_in(self, start: int, stop: int) -> range:
        """The blocks whose directory entries have a part in the encoded bytes `[start, stop)`."""
        first = max(0, (start - HEADER_BYTES) // DIRECTORY_ENTRY_BYTES)
        last = min(len(self._lengths), -(-(stop - HEADER_BYTES) // DIRECTORY_ENTRY_BYTES))
        return range(first, max(first, last))

    def check_block(self, block: int, encoded: memoryview) -> None:
        """Check a block's encoded bytes against its crc32c; `FrameCorruptError` if they are others."""
        if len(encoded) != self.length(block) or crc32c(encoded) != self._crcs[block]:
            raise FrameCorruptError("block checksum mismatch", block=block, codec=self.codec)


def write_head(
    frame: memoryview,
    *,
    codec: str,
    element_bytes: int,
    plain_bytes: int,
    digest: bytes,
    blocks: Iterable[EncodedBlock],
) -> None:
    """Write header, directory and the zero padding up to the first block into the front of `frame`.

    For codecs. The blocks must be those of `plain_bytes`, laid out one after another at `FRAME_ALIGNMENT`.
    """
    words: list[int] = []
    for block in blocks:
        words += (block.offset // FRAME_ALIGNMENT, block.length | (_RAW_FLAG if block.is_raw else 0), block.crc)
    _write_head(frame, words, codec=codec, element_bytes=element_bytes, plain_bytes=plain_bytes, digest=digest)


def _write_head(
    frame: memoryview, words: Sequence[int], *, codec: str, element_bytes: int, plain_bytes: int, digest: bytes
) -> None:
    """`write_head`, with the three words of each directory entry."""
    if len(digest) != DIGEST_BYTES:
        raise ValueError(f"a digest has {DIGEST_BYTES} bytes, got {len(digest)}")
    if not 0 <= plain_bytes <= MAX_PLAIN_BYTES:
        raise ValueError(f"a blob has at most {MAX_PLAIN_BYTES} plain bytes, got {plain_bytes}")
    entries = block_count(plain_bytes)
    if len(words) != 3 * entries:
        raise ValueError(f"{plain_bytes} plain bytes are {entries} blocks, got {len(words) // 3}")
    head_bytes = frame_head_bytes(plain_bytes)
    # The header comes last: a process that is killed in between leaves no header, and so no frame.
    struct.pack_into(f"<{len(words)}I", frame, HEADER_BYTES, *words)
    frame[head_bytes : aligned(head_bytes)] = bytes(aligned(head_bytes) - head_bytes)
    _HEADER.pack_into(
        frame, 0, MAGIC, CONTAINER_VERSION, CODEC_REVISION, _CODEC_IDS[codec], _DTYPES_BY_ELEMENT_BYTES[element_bytes],
        KIND_BYTES, 0, plain_bytes, BLOCK_PLAIN_BYTES, _ZEROS_56, digest, _ZEROS_8, entries, 0,
    )  # fmt: skip
    _U32.pack_into(frame, _CRC_AT, crc32c(frame[:_CRC_AT]))


def seal_raw(frame: memoryview, *, plain_bytes: int, digest: bytes, block_crcs: Sequence[int]) -> None:
    """Write header and directory in place in front of a `raw` payload, which is already at `raw_payload_offset`.

    `digest` is BLAKE3 of the payload, `block_crcs` what `block_crcs()` gives for it. Only the bytes in front of the
    payload are written, so readers of the payload may go on meanwhile.
    """
    # Column by column: a value for each block costs a chunk of 32 MiB 100 µs with the interpreter's lock.
    count = len(block_crcs)
    words = [0] * (3 * count)
    first, step = raw_payload_offset(plain_bytes) // FRAME_ALIGNMENT, BLOCK_PLAIN_BYTES // FRAME_ALIGNMENT
    words[::3] = range(first, first + step * count, step)
    words[1::3] = [BLOCK_PLAIN_BYTES | _RAW_FLAG] * count
    words[2::3] = block_crcs
    if count:
        words[-2] = (plain_bytes - (count - 1) * BLOCK_PLAIN_BYTES) | _RAW_FLAG
    _write_head(frame, words, codec=CODEC_RAW, element_bytes=1, plain_bytes=plain_bytes, digest=digest)


def one_block_frame(payload: bytes, digest: bytes) -> bytearray:
    """A whole `raw` frame of a payload of one block, as `seal_raw` leaves it: for who moves it to its place in one piece."""
    head = bytearray(
        _ONE_BLOCK_HEAD.pack(
            MAGIC, CONTAINER_VERSION, CODEC_REVISION, _CODEC_IDS[CODEC_RAW], _DTYPES_BY_ELEMENT_BYTES[1], KIND_BYTES, 0,
            len(payload), BLOCK_PLAIN_BYTES, _ZEROS_56, digest, _ZEROS_8, 1, 0,
            raw_payload_offset(1) // FRAME_ALIGNMENT, len(payload) | _RAW_FLAG, crc32c(memoryview(payload)),
        )
    )  # fmt: skip
    _U32.pack_into(head, _CRC_AT, crc32c(memoryview(head[:_CRC_AT])))
    head += payload
    return head


def has_header(frame: memoryview) -> bool:
    """Whether a frame's header stands at the front, by its magic and checksum: then its directory does too (`write_head`).

    Says nothing of the blocks. 2 µs, where `parse_frame` of a small frame takes 4 and of a large one 14.
    """
    if len(frame) < HEADER_BYTES or bytes(frame[: len(MAGIC)]) != MAGIC:
        return False
    (crc,) = _U32.unpack_from(frame, _CRC_AT)
    return bool(crc == crc32c(frame[:_CRC_AT]))


def parse_frame(head: memoryview, frame_bytes: int) -> FrameHeader:
    """Read and check the header and directory of a frame that is `frame_bytes` long.

    `head` is the frame from its start, at least `frame_head_bytes` of it, or `MAX_HEAD_BYTES` where it may be a tensor's; padding
    in front of the first block is checked as far as it is there. Nothing of `head` is kept. Raises `FrameCorruptError`, also for a
    version, revision, codec or kind that this reader does not know.
    """
    if len(head) < HEADER_BYTES:
        raise FrameCorruptError("frame shorter than its header", head_bytes=len(head))
    (
        magic, version, revision, codec_id, dtype, kind, flags, plain_bytes, block_bytes, zeros_56, digest, zeros_8,
        entries, crc,
    ) = _HEADER.unpack_from(head)  # fmt: skip
    if magic != MAGIC:
        raise FrameCorruptError("not a frame")
    if crc != crc32c(head[:_CRC_AT]):
        raise FrameCorruptError("frame header checksum mismatch")
    if kind < KIND_BYTES:
        return _tensor_header(parse_tensor_frame(head, frame_bytes))
    codec, element_bytes = _CODEC_NAMES.get(codec_id), ELEMENT_BYTES_BY_DTYPE.get(dtype)
    if version != CONTAINER_VERSION or revision != CODEC_REVISION or codec is None or kind != KIND_BYTES:
        raise FrameCorruptError(
            "frame of an unknown form", version=version, revision=revision, codec_id=codec_id, kind=kind
        )
    if (
        element_bytes is None
        or (codec == CODEC_RAW and element_bytes != 1)
        or flags
        or plain_bytes > MAX_PLAIN_BYTES
        or block_bytes != BLOCK_PLAIN_BYTES
        or zeros_56 != _ZEROS_56
        or zeros_8 != _ZEROS_8
        or entries != block_count(plain_bytes)
    ):
        raise FrameCorruptError("frame header is not canonical", codec=codec, plain_bytes=plain_bytes)
    words = _directory(head, entries)
    header = FrameHeader(
        codec=codec,
        element_bytes=element_bytes,
        plain_bytes=plain_bytes,
        digest=digest,
        frame_bytes=frame_bytes,
        _offsets=words[0::3],
        _lengths=words[1::3],
        _crcs=words[2::3],
    )
    _check_directory(header, header._offsets, header._lengths)  # noqa: SLF001 - one module
    return header


def _tensor_header(tensor: TensorFrame) -> FrameHeader:
    return FrameHeader(
        codec=tensor.codec,
        element_bytes=tensor.form.element_bytes,
        plain_bytes=tensor.plain_bytes,
        digest=tensor.digest,
        frame_bytes=tensor.frame_bytes,
        _offsets=tuple(block.offset // FRAME_ALIGNMENT for block in tensor.blocks),
        _lengths=tuple(block.length | (_RAW_FLAG if block.is_raw else 0) for block in tensor.blocks),
        _crcs=tuple(block.crc for block in tensor.blocks),
        tensor=tensor,
    )


def _directory(head: memoryview, entries: int) -> tuple[int, ...]:
    head_bytes = HEADER_BYTES + DIRECTORY_ENTRY_BYTES * entries
    if len(head) < head_bytes:
        raise FrameCorruptError("frame shorter than its directory", head_bytes=len(head), entries=entries)
    padding = head[head_bytes : aligned(head_bytes)]
    if bytes(padding) != bytes(len(padding)):
        raise FrameCorruptError("frame padding is not zero")
    return struct.unpack_from(f"<{3 * entries}I", head, HEADER_BYTES)


def _check_directory(header: FrameHeader, offsets: Sequence[int], lengths: Sequence[int]) -> None:
    """Refuse a directory whose blocks do not follow each other as codecs lay them out and end where the frame ends."""
    entries = len(lengths)
    first = header.payload_offset // FRAME_ALIGNMENT
    last_plain_bytes = header.plain_bytes - BLOCK_PLAIN_BYTES * (entries - 1)
    if header.codec == CODEC_RAW:
        # Whole sequences at once: a head of 128 blocks parses in 14 µs this way, in 36 one by one.
        legal = (
            header.frame_bytes == raw_frame_bytes(header.plain_bytes)
            and offsets == tuple(range(first, first + _UNITS_PER_FULL_BLOCK * entries, _UNITS_PER_FULL_BLOCK))
            and (
                not entries
                or (
                    lengths[-1] == _RAW_FLAG | last_plain_bytes
                    and lengths[:-1] == (_RAW_FLAG | BLOCK_PLAIN_BYTES,) * (entries - 1)
                )
            )
        )
    else:
        next_offset = end = header.payload_offset
        legal = True
        for block, (offset, recorded) in enumerate(zip(offsets, lengths, strict=True)):
            length = recorded & _LENGTH_MASK
            plain_bytes = BLOCK_PLAIN_BYTES if block < entries - 1 else last_plain_bytes
            # A block that does not shrink is RAW, so a length tells the flag and the flag bounds the length.
            shrunk = 0 < length < plain_bytes
            if offset * FRAME_ALIGNMENT != next_offset or (
                length != plain_bytes if recorded & _RAW_FLAG else not shrunk
            ):
                legal = False
                break
            end = next_offset + length
            next_offset = aligned(end)
        legal = legal and end == header.frame_bytes
    if not legal:
        raise FrameCorruptError("frame directory is not canonical", codec=header.codec, frame_bytes=header.frame_bytes)
