"""Writing tensor frames on a CPU: a few blocks at a time, so that what they need stays in the cache, a large one to its very place.

A block's place follows from the lengths of those before it, so a block alone never moves once it is encoded. The digest of a lossy
frame is taken of what the codec says that each block decodes to, while that is in the cache, where the declared order keeps blocks
together.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import zip_longest
from typing import cast

from blake3 import blake3

from kvobj.errors import FrameCorruptError, InvalidRequestError
from kvobj.tensors.block_order import BlockOrder, batch_of
from kvobj.tensors.certificate import Certificate
from kvobj.tensors.checksums import crc32c
from kvobj.tensors.codec_names import CodecName
from kvobj.tensors.codec_protocol import (
    STAYS_RAW,
    BlockError,
    BlockToDemote,
    BlockToEncode,
    Coding,
    DemotingCodec,
    TensorCodec,
)
from kvobj.tensors.form import TensorForm
from kvobj.tensors.frame import Block, BlockPlaces, aligned, tensor_frame_bound
from kvobj.tensors.kernels.host_launcher import HostLauncher
from kvobj.tensors.kernels.host_memory import address_of
from kvobj.tensors.kernels.launcher import Address


def room_for(codec: TensorCodec, form: TensorForm) -> int:
    """Room that a `FrameWriter` needs: the largest frame, and what the last block's slot may take beyond its plain size."""
    return tensor_frame_bound(form) + max(0, codec.slot_bytes(form) - form.block_bytes)


class FrameWriter:
    """Writes the blocks of one frame into `into`, which has `room_for` bytes, is 16-byte aligned and overlaps no input.

    Blocks come in order, each by `encode` or `demote`; then all about them is known. It is no frame until its head is written. One
    thread's.
    """

    __slots__ = (
        "_at", "_batch", "_codec", "_coding", "_decoded", "_errors", "_into", "_launcher", "_order", "_places", "blocks",
    )  # fmt: skip

    def __init__(self, launcher: HostLauncher, codec: TensorCodec, coding: Coding, into: memoryview) -> None:
        self._launcher = launcher
        self._codec = codec
        self._coding = coding
        self._order = BlockOrder(launcher, coding.form)
        self._into = into
        self._at = address_of(into)
        self._batch = batch_of(coding.form)
        self._places = BlockPlaces(coding.form)
        self._errors: list[tuple[BlockError, ...]] = []
        is_lossy = CodecName.parse(codec.name).kind.is_lossy
        self._decoded = _DecodedDigest(launcher, coding.form, self._order) if is_lossy else None
        self.blocks: list[Block] = []

    @property
    def frame_bytes(self) -> int:
        """The frame's length so far."""
        return self._places.end

    def encode_tensor(self, tensor: Address) -> None:
        """Encode all blocks of the tensor in the declared order that is at this address, outside of `into`."""
        form, step = self._coding.form, aligned(self._coding.plain_bytes)
        for first in range(0, form.blocks, self._batch):
            spare = self._launcher.scratch("blocks-values", self._batch * step)
            numbers = range(first, min(first + self._batch, form.blocks))
            self.encode([self._order.head_major(tensor, at, spare.after((at - first) * step)) for at in numbers])

    def encode(self, blocks: Sequence[Address], *, skip_steps: int = 0) -> None:
        """Encode the next blocks, a few, whose values are at these addresses, in [head][token][dim] order.

        `skip_steps`: so many first steps of coding are counted in the certificate already.
        """
        first = len(self.blocks)
        rooms = [self._room(at, alone=len(blocks) == 1) for at in range(len(blocks))]
        asked = [
            BlockToEncode(first + at, values, slot, decoded)
            for at, (values, (slot, decoded)) in enumerate(zip(blocks, rooms, strict=True))
        ]
        for block, encoded in zip(asked, self._codec.encode(self._launcher, self._coding, asked), strict=True):
            self._errors.append(encoded.errors[skip_steps:])
            place = self._next_place()
            if not self._shrinks(encoded.length):
                self._order.raw_of_head_major(block.plain, place)
                self._add(self._coding.plain_bytes, block.plain, is_raw=True)
                continue
            if block.slot != place:
                ctypes.memmove(int(place), int(block.slot), encoded.length)
            self._add(encoded.length, block.decoded, is_raw=False)

    def demote(self, finer: str, encoded: Address, length: int) -> None:
        """Encode the next block anew from its encoded bytes in a frame of the codec `finer`.

        `FrameCorruptError` where those are no block. `InvalidRequestError` where it shrank at the finer step and does not at this
        one: the values that direct coding would store are gone. No data that was seen does that.
        """
        slot, decoded = self._room(0, alone=True)
        assert decoded is not None, "only lossy codecs have a ladder"
        number = len(self.blocks)
        codec = cast("DemotingCodec", self._codec)
        block = BlockToDemote(number, encoded, length, slot, decoded)
        (demoted,) = codec.demote(self._launcher, self._coding, finer, [block])
        if demoted is None:
            raise FrameCorruptError("block does not decode", block=number, codec=finer)
        if not self._shrinks(demoted.length):
            raise InvalidRequestError("a block does not shrink at the coarser step", block=number, codec=codec.name)
        self._errors.append(demoted.errors)
        self._add(demoted.length, decoded, is_raw=False)

    def certificate(self, start: Certificate) -> Certificate:
        """`start`, and what the blocks' steps add to it."""
        certificate, form = start, self._coding.form
        for step in zip_longest(*self._errors):
            sides: tuple[list[BlockError], list[BlockError]] = ([], [])
            for number, error in enumerate(step):
                if error is not None:
                    sides[1 if form.kind == "v" else number % form.kinds].append(error)
            certificate = certificate.after(*sides)
        return certificate

    def digest(self) -> bytes:
        """BLAKE3 of what the blocks decode to, in the declared order; of a lossy codec."""
        assert self._decoded is not None, "of a lossless codec the plain bytes are the decoded ones"
        return self._decoded.digest()

    def _shrinks(self, length: int) -> bool:
        return length != STAYS_RAW and length < self._coding.plain_bytes

    def _next_place(self) -> Address:
        """Where the next block goes. The gap in front of it is zero from here on."""
        offset, end = self._places.next_offset(), self._places.end
        self._into[end:offset] = bytes(offset - end)
        return self._at.after(offset)

    def _room(self, at: int, *, alone: bool) -> tuple[Address, Address | None]:
        """Where the block `at` of a batch is encoded to, and where what it decodes to goes. One alone goes to its very place."""
        launcher, form = self._launcher, self._coding.form
        step = aligned(form.block_bytes)
        decoded = None
        if self._decoded is not None:
            decoded = launcher.scratch("blocks-decoded", self._batch * step).after(at * step)
        if alone:
            return self._next_place(), decoded
        step = aligned(self._codec.slot_bytes(form))
        return launcher.scratch("blocks-encoded", self._batch * step).after(at * step), decoded

    def _add(self, length: int, decoded: Address | None, *, is_raw: bool) -> None:
        offset = self._places.add(length)
        self.blocks.append(Block(offset, length, crc32c(self._into[offset : offset + length]), is_raw))
        if self._decoded is not None:
            assert decoded is not None, "a lossy codec gives what a block decodes to"
            self._decoded.add(decoded)


class _DecodedDigest:
    """BLAKE3 of a tensor in its declared order, from its blocks in [head][token][dim] order: as they come where the declared order
    keeps blocks together, else of a copy of the whole."""

    __slots__ = ("_blocks", "_form", "_hasher", "_launcher", "_order", "_whole")

    def __init__(self, launcher: HostLauncher, form: TensorForm, order: BlockOrder) -> None:
        self._launcher = launcher
        self._form = form
        self._order = order
        self._blocks = 0
        self._hasher = blake3()
        self._whole = None if form.is_block_major else bytearray(form.plain_bytes)

    def add(self, values: Address) -> None:
        """Take the next block."""
        number, form = self._blocks, self._form
        self._blocks += 1
        if self._whole is not None:
            self._order.from_head_major(values, address_of(memoryview(self._whole)), number)
            return
        if not form.is_head_major:
            declared = self._launcher.scratch("block-declared", form.block_bytes)
            self._order.within_block(values, declared)
            values = declared
        self._hasher.update(memoryview((ctypes.c_ubyte * form.block_bytes).from_address(values)).cast("B"))

    def digest(self) -> bytes:
        """The digest, after the last block."""
        if self._whole is not None:
            self._hasher.update(self._whole)
        return self._hasher.digest()
