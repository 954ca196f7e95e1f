"""The frame of a tensor: header, directory of blocks, blocks (`formats.md`, "Tensor frames"), container version 1.

Guarantees: canonical, so whatever `parse_tensor_frame` accepts has every offset, length and flag where the writer put it; a flipped
bit anywhere is refused here, fails its block's crc32c, or lies in padding that nobody reads. Parsing never raises anything but
`FrameCorruptError` and never allocates by a number it read. Does not check blocks nor the digest, and knows no names.

Blocks are layer-major at multiples of 256. Layers are gathered in *groups*, each the fewest consecutive layers that take 1 MiB or
more; each group but the first starts at a multiple of 4,096, the first right behind the head. All of it follows from the lengths.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, cast

from kvobj.errors import FrameCorruptError
from kvobj.ids import DIGEST_BYTES
from kvobj.tensors.certificate import Certificate
from kvobj.tensors.checksums import crc32c
from kvobj.tensors.codec_names import BY_NUMBER, FLAG_POST_ROPE, CodecName
from kvobj.tensors.form import ORDERS, Dtype, Kind, TensorForm

FRAME_ALIGNMENT: Final = 256
GROUP_ALIGNMENT: Final = 4096
GROUP_BYTES: Final = 1 << 20
HEADER_BYTES: Final = 128
DIRECTORY_ENTRY_BYTES: Final = 12
FINGERPRINT_BYTES: Final = 16
MAX_BLOCKS: Final = 512
"""So that a tensor frame's head is never longer than that of the largest `raw` frame."""
MAX_TENSOR_BYTES: Final = 128 * 1024 * 1024
"""Plain bytes of the largest blob, which a tensor frame is the encoding of."""

MAGIC: Final = b"KVOF"
CONTAINER_VERSION: Final = 1
RAW_FLAG: Final = 1 << 31
_LENGTH_MASK: Final = RAW_FLAG - 1

_KIND_NUMBERS: Final = {"kv": 0, "k": 1, "v": 2, "mla": 3}
_KIND_NAMES: Final = {number: kind for kind, number in _KIND_NUMBERS.items()}
_DTYPE_NUMBERS: Final = {
    "bf16": 0x10, "fp16": 0x11, "fp8_e4m3": 0x12, "fp8_e5m2": 0x13, "fp32": 0x14, "int8": 0x15, "uint8": 0x16,
}  # fmt: skip
"""Append only; 0 to 2 are the unnamed element widths of kind bytes."""
_DTYPE_NAMES: Final = {number: dtype for dtype, number in _DTYPE_NUMBERS.items()}
_ORDER_SHIFT: Final = 8
_ORDER_MASK: Final = 0x7F << _ORDER_SHIFT

_HEADER: Final = struct.Struct("<4sBBHBBHHHHHIII16s32s32s8sII")
_CRC_AT: Final = HEADER_BYTES - 4
_U32: Final = struct.Struct("<I")
_NO_PROFILE: Final = bytes(DIGEST_BYTES)
_U16_MAX: Final = (1 << 16) - 1
_U32_MAX: Final = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class Block:
    """A directory entry. `offset` counts from the frame's start; `is_raw`: the block's values as they are, [token][head][dim]."""

    offset: int
    length: int
    crc: int
    is_raw: bool


@dataclass(frozen=True, slots=True)
class TensorFrame:
    """A tensor frame's header and directory, checked. Immutable and detached from the buffer it was parsed from.

    `codec` is the codec's own name (`eq:83/1`, not `eq4`), `digest` BLAKE3 of the *decoded* bytes in the declared order,
    `profile_digest` None where no profile is named. Block b is layer b // kinds, kind b % kinds.
    """

    codec: str
    form: TensorForm
    digest: bytes
    certificate: Certificate
    blocks: tuple[Block, ...]
    frame_bytes: int
    fingerprint: bytes
    first_position: int = 0
    rope_id: int = 0
    flags: int = FLAG_POST_ROPE
    profile_digest: bytes | None = None

    @property
    def head_bytes(self) -> int:
        """Header and directory, before padding."""
        return tensor_head_bytes(self.form)

    @property
    def plain_bytes(self) -> int:
        """What the frame decodes to."""
        return self.form.plain_bytes

    @property
    def codec_name(self) -> CodecName:
        """The codec, taken apart."""
        return CodecName.parse(self.codec)

    @property
    def is_lossy(self) -> bool:
        """Whether the decoded bytes are others than what was encoded."""
        return self.codec_name.kind.is_lossy

    @property
    def is_post_rope(self) -> bool:
        """Whether keys are held after rotary position embedding."""
        return bool(self.flags & FLAG_POST_ROPE)

    def blocks_of(self, layers: range) -> range:
        """The blocks of consecutive layers. ValueError if these are no layers of it, or none."""
        if layers.step != 1 or not 0 <= layers.start < layers.stop <= self.form.layers:
            raise ValueError(f"{layers} are no layers of {self.form.layers}")
        return range(layers.start * self.form.kinds, layers.stop * self.form.kinds)

    def layers_span(self, layers: range) -> tuple[int, int]:
        """Half-open range of the frame's bytes that hold consecutive layers: all that their decoding takes besides the head."""
        blocks = self.blocks_of(layers)
        last = self.blocks[blocks[-1]]
        return self.blocks[blocks[0]].offset, last.offset + last.length


def aligned(size_bytes: int, alignment: int = FRAME_ALIGNMENT) -> int:
    """`size_bytes` rounded up to a multiple of `alignment`."""
    return -(-size_bytes // alignment) * alignment


def tensor_head_bytes(form: TensorForm) -> int:
    """Header and directory, before padding: what `parse_tensor_frame` needs to see of a frame."""
    return HEADER_BYTES + DIRECTORY_ENTRY_BYTES * form.blocks


def tensor_frame_bound(form: TensorForm) -> int:
    """The most bytes that a frame of this form can have: every block RAW, as many groups as its bytes can make."""
    blocks = form.blocks * aligned(form.block_bytes)
    groups = min(form.layers, 1 + blocks // GROUP_BYTES)
    return aligned(tensor_head_bytes(form)) + blocks + (groups - 1) * (GROUP_ALIGNMENT - FRAME_ALIGNMENT)


def form_refusal(form: TensorForm) -> str | None:
    """Why no frame can hold this form; None if one can."""
    if form.blocks > MAX_BLOCKS:
        return f"a tensor frame has at most {MAX_BLOCKS} blocks, and this form {form.blocks}"
    if form.plain_bytes > MAX_TENSOR_BYTES:
        return f"a tensor frame has at most {MAX_TENSOR_BYTES} plain bytes, and this form {form.plain_bytes}"
    for name, size in (("kv_heads", form.kv_heads), ("head_dim", form.head_dim)):
        if size > _U16_MAX:
            return f"a tensor frame has {name} up to {_U16_MAX}, and this form {size}"
    return None


class BlockPlaces:
    """Where the blocks of a frame lie, found block by block from their lengths: for writers, who learn them in order."""

    __slots__ = ("_block", "_group_start", "_kinds", "end")

    def __init__(self, form: TensorForm) -> None:
        self._kinds = form.kinds
        self._block = 0
        self._group_start = self.end = aligned(tensor_head_bytes(form))

    def next_offset(self) -> int:
        """Where the next block goes."""
        return aligned(self.end, GROUP_ALIGNMENT if self._begins_group() else FRAME_ALIGNMENT)

    def add(self, length: int) -> int:
        """Place the next block, of so many bytes; returns its offset. `end` is one past it, and in the end the frame's length."""
        offset = self.next_offset()
        if self._begins_group():
            self._group_start = offset
        self._block += 1
        self.end = offset + length
        return offset

    def _begins_group(self) -> bool:
        return self._block % self._kinds == 0 and self.end - self._group_start >= GROUP_BYTES


def write_tensor_head(frame: memoryview, head: TensorFrame) -> None:
    """Write header, directory and the zero padding up to the first block into the front of `frame`.

    For the container: the blocks are those of the form, where `BlockPlaces` puts them. ValueError for what a header cannot say.
    """
    refusal = form_refusal(head.form)
    if refusal is not None:
        raise ValueError(refusal)
    if len(head.fingerprint) != FINGERPRINT_BYTES:
        raise ValueError(f"a frame names {FINGERPRINT_BYTES} bytes of a fingerprint, got {len(head.fingerprint)}")
    if not 0 <= head.first_position <= _U32_MAX:
        raise ValueError(f"first position {head.first_position} is not from 0 to {_U32_MAX}")
    form, name = head.form, head.codec_name
    words: list[int] = []
    for block in head.blocks:
        words += (block.offset // FRAME_ALIGNMENT, block.length | (RAW_FLAG if block.is_raw else 0), block.crc)
    # The header comes last: a process that is killed in between leaves no header, and so no frame.
    struct.pack_into(f"<{len(words)}I", frame, HEADER_BYTES, *words)
    head_bytes = tensor_head_bytes(form)
    frame[head_bytes : aligned(head_bytes)] = bytes(aligned(head_bytes) - head_bytes)
    _HEADER.pack_into(
        frame, 0, MAGIC, CONTAINER_VERSION, name.kind.revision, name.kind.number, _DTYPE_NUMBERS[form.dtype],
        _KIND_NUMBERS[form.kind], head.flags | form.order_index << _ORDER_SHIFT, form.layers, form.kv_heads,
        form.head_dim, name.step_index, form.tokens, head.first_position, head.rope_id, head.fingerprint,
        head.profile_digest or _NO_PROFILE, head.digest, head.certificate.pack(), len(head.blocks), 0,
    )  # fmt: skip
    _U32.pack_into(frame, _CRC_AT, crc32c(frame[:_CRC_AT]))


def parse_tensor_frame(head: memoryview, frame_bytes: int) -> TensorFrame:
    """Read and check the header and directory of a tensor frame that is `frame_bytes` long.

    `head` is the frame from its start, header and directory at least; padding in front of the first block is checked as far as it
    is there. Nothing of `head` is kept. Raises `FrameCorruptError`, which names a version, codec, revision, dtype or kind that this
    reader does not know, or the field that is not canonical.
    """
    if len(head) < HEADER_BYTES:
        raise FrameCorruptError("frame shorter than its header", head_bytes=len(head))
    (
        magic, version, revision, codec_number, dtype_number, kind_number, flags, layers, kv_heads, head_dim, step_index,
        tokens, first_position, rope_id, fingerprint, profile, digest, certificate, entries, crc,
    ) = _HEADER.unpack_from(head)  # fmt: skip
    if magic != MAGIC:
        raise FrameCorruptError("not a frame")
    if crc != crc32c(head[:_CRC_AT]):
        raise FrameCorruptError("frame header checksum mismatch")
    name = _codec_of(version, codec_number, revision, step_index)
    dtype, kind = _DTYPE_NAMES.get(dtype_number), _KIND_NAMES.get(kind_number)
    if dtype is None or kind is None:
        raise FrameCorruptError("tensor frame of an unknown dtype or kind", dtype=dtype_number, kind=kind_number)
    order = (flags & _ORDER_MASK) >> _ORDER_SHIFT
    try:
        form = TensorForm(
            cast("Kind", kind), cast("Dtype", dtype), layers, kv_heads, head_dim, tokens, ORDERS[order % len(ORDERS)]
        )
        bounds = Certificate.unpack(certificate)
    except ValueError as error:
        raise FrameCorruptError("tensor frame header is not canonical", problem=str(error)) from error
    problem = (
        form_refusal(form)
        or _flags_problem(name, flags, kind, order)
        or _profile_problem(name, profile, rope_id)
        or _certificate_problem(name, kind, bounds)
        or (f"{entries} directory entries" if entries != form.blocks else None)
    )
    if problem:
        raise FrameCorruptError("tensor frame header is not canonical", problem=problem)
    return TensorFrame(
        codec=str(name),
        form=form,
        digest=digest,
        certificate=bounds,
        blocks=_directory(head, form, frame_bytes),
        frame_bytes=frame_bytes,
        fingerprint=fingerprint,
        first_position=first_position,
        rope_id=rope_id,
        flags=flags & ~_ORDER_MASK,
        profile_digest=None if profile == _NO_PROFILE else profile,
    )


def _codec_of(version: int, number: int, revision: int, step_index: int) -> CodecName:
    if version != CONTAINER_VERSION:
        raise FrameCorruptError("frame of an unknown container version", version=version)
    kind = BY_NUMBER.get(number)
    if kind is None:
        raise FrameCorruptError("tensor frame of an unknown codec", codec_id=number)
    if revision != kind.revision:
        raise FrameCorruptError("tensor frame of an unknown codec revision", codec=kind.name, revision=revision)
    name = CodecName.from_header(number, step_index)
    if name is None:
        raise FrameCorruptError("tensor frame header is not canonical", codec=kind.name, step_index=step_index)
    return name


def _flags_problem(name: CodecName, flags: int, kind: str, order: int) -> str | None:
    plain = flags & ~_ORDER_MASK
    if plain & ~FLAG_POST_ROPE != name.kind.flags or (kind == "v" and plain & FLAG_POST_ROPE):
        return f"flags {plain:#x}"
    return f"order {order}" if order >= len(ORDERS) else None


def _profile_problem(name: CodecName, profile: bytes, rope_id: int) -> str | None:
    if name.kind.needs_profile != (profile != _NO_PROFILE):
        return "profile"
    return f"rope id {rope_id}" if rope_id and not name.kind.needs_profile else None


def _certificate_problem(name: CodecName, kind: str, bounds: Certificate) -> str | None:
    absent = [bounds.max_error_k, bounds.relative_l2_k] if kind == "v" else []
    absent += [bounds.max_error_v, bounds.relative_l2_v] if kind in {"k", "mla"} else []
    if any(absent) or (not name.kind.is_lossy and bounds != Certificate()):
        return "certificate"
    return None


def _directory(head: memoryview, form: TensorForm, frame_bytes: int) -> tuple[Block, ...]:
    """The directory, whose blocks must follow each other as `BlockPlaces` puts them and end where the frame ends."""
    head_bytes = tensor_head_bytes(form)
    if len(head) < head_bytes:
        raise FrameCorruptError("frame shorter than its directory", head_bytes=len(head), entries=form.blocks)
    padding = head[head_bytes : aligned(head_bytes)]
    if bytes(padding) != bytes(len(padding)):
        raise FrameCorruptError("frame padding is not zero")
    words: Sequence[int] = struct.unpack_from(f"<{3 * form.blocks}I", head, HEADER_BYTES)
    places, plain_bytes = BlockPlaces(form), form.block_bytes
    blocks: list[Block] = []
    for offset, recorded, crc in zip(words[0::3], words[1::3], words[2::3], strict=True):
        length, is_raw = recorded & _LENGTH_MASK, recorded >= RAW_FLAG
        # A block that does not shrink is RAW, so a length tells the flag and the flag bounds the length.
        legal = length == plain_bytes if is_raw else 0 < length < plain_bytes
        if not legal or places.add(length) != offset * FRAME_ALIGNMENT:
            raise FrameCorruptError("tensor frame directory is not canonical", block=len(blocks), length=length)
        blocks.append(Block(offset * FRAME_ALIGNMENT, length, crc, is_raw))
    if places.end != frame_bytes:
        raise FrameCorruptError("tensor frame directory is not canonical", end=places.end, frame_bytes=frame_bytes)
    return tuple(blocks)
