"""Reading tensor frames on a CPU: whole, or a range of layers from its own bytes, a few blocks at a time straight to their places.

Each block's crc32c is checked before it is decoded. The digest of the whole is not: who must know hashes what came out.
"""

from __future__ import annotations

from kvobj.errors import FrameCorruptError, InvalidRequestError
from kvobj.tensors.block_order import CODE_ALIGNMENT, BlockOrder, batch_of
from kvobj.tensors.checksums import crc32c
from kvobj.tensors.codec_protocol import BlockToDecode, Coding, Profile, TensorCodec
from kvobj.tensors.frame import TensorFrame, aligned
from kvobj.tensors.kernels.host_launcher import HostLauncher
from kvobj.tensors.kernels.host_memory import address_of
from kvobj.tensors.kernels.launcher import Address


def coding_of(head: TensorFrame, profile: Profile | None) -> Coding:
    """What decoding a frame needs besides its blocks. `InvalidRequestError` without the very profile that it names."""
    named = head.profile_digest
    if named is not None and (profile is None or profile.digest != named):
        raise InvalidRequestError("the frame names a profile, which decoding it needs", profile=named.hex())
    return Coding(head.form, head.first_position, head.rope_id, None if named is None else profile)


class EncodedBlocks:
    """The blocks of a frame, of which `encoded` holds the bytes from `offset` on."""

    __slots__ = ("_at", "_encoded", "_offset", "head", "is_aligned", "launcher")

    def __init__(self, launcher: HostLauncher, encoded: memoryview, head: TensorFrame, offset: int) -> None:
        self.launcher = launcher
        self.head = head
        self._encoded = encoded
        self._offset = offset
        self._at = address_of(encoded)
        self.is_aligned = (self._at - offset) % CODE_ALIGNMENT == 0
        """Whether codecs can read the blocks where they are; else one at a time, since each is moved to the same place."""

    def checked(self, number: int) -> Address:
        """Where the block's encoded bytes are, aligned for codecs, their crc32c checked. `FrameCorruptError`."""
        block = self.head.blocks[number]
        start = block.offset - self._offset
        view = self._encoded[start : start + block.length] if start >= 0 else self._encoded[:0]
        if len(view) != block.length:
            raise FrameCorruptError("frame shorter than its blocks", block=number, codec=self.head.codec)
        if crc32c(view) != block.crc:
            raise FrameCorruptError("block checksum mismatch", block=number, codec=self.head.codec)
        if self.is_aligned:
            return self._at.after(start)
        moved = self.launcher.scratch("block-encoded", block.length)
        self.launcher.upload(moved, view)
        return moved


def decode_blocks(codec: TensorCodec, coding: Coding, blocks: EncodedBlocks, layers: range, into: memoryview) -> None:
    """Decode consecutive layers into `into`, their own plain bytes in the declared order.

    `FrameCorruptError`, after which `into` is undefined.
    """
    launcher, head = blocks.launcher, blocks.head
    form = head.form if len(layers) == head.form.layers else head.form.layers_only(layers)
    order, tensor = BlockOrder(launcher, form), address_of(into)
    batch, step = batch_of(form) if blocks.is_aligned else 1, aligned(form.block_bytes)
    numbers = head.blocks_of(layers)
    for first in range(0, len(numbers), batch):
        asked: list[BlockToDecode] = []
        spare = launcher.scratch("blocks-decoded", batch * step)
        for number in numbers[first : first + batch]:
            encoded, at = blocks.checked(number), number - numbers[0]
            if head.blocks[number].is_raw:
                order.from_raw(encoded, tensor, at)
                continue
            place = order.block_at(tensor, at)
            values = place if order.is_in_place(place) else spare.after(len(asked) * step)
            asked.append(BlockToDecode(number, encoded, head.blocks[number].length, values))
        for block, status in zip(asked, codec.decode(launcher, coding, asked) if asked else (), strict=True):
            if status:
                raise FrameCorruptError("block does not decode", block=block.number, codec=head.codec, status=status)
            at = block.number - numbers[0]
            if block.plain != order.block_at(tensor, at):
                order.from_head_major(block.plain, tensor, at)
