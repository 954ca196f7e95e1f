"""Tensor frames decoded straight into device memory, and encoded from it: many chunks in one launch, on a stream of their own.

The codecs and their orchestration are those of `kvobj.tensors`; here is what the CPU's container does block by block, done for all
blocks of all chunks of a batch at once. On a `HostDevice` the very same code runs over the CPU's kernels, so it is tested without
a GPU. Frames are the same bytes wherever they are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Final, TypeVar

from blake3 import blake3

from kvobj.errors import FrameCorruptError, InvalidRequestError
from kvobj.gpu.copies import settled
from kvobj.gpu.device import CopyKind, Device, Stream
from kvobj.gpu.gaps import aligned
from kvobj.gpu.lane import DEADLINE_SECONDS, Lane
from kvobj.tensors.block_order import BlockOrder
from kvobj.tensors.certificate import Certificate
from kvobj.tensors.checksums import crc32c
from kvobj.tensors.codec_names import FLAG_POST_ROPE, CodecName
from kvobj.tensors.codec_protocol import (
    STAYS_RAW,
    BlockError,
    BlockToDecode,
    BlockToEncode,
    Coding,
    EncodedLength,
    Profile,
)
from kvobj.tensors.decoding import coding_of
from kvobj.tensors.device_blake3 import digests as device_digests
from kvobj.tensors.form import TensorForm
from kvobj.tensors.frame import Block, BlockPlaces, TensorFrame, tensor_frame_bound, write_tensor_head
from kvobj.tensors.kernels.host_memory import address_of
from kvobj.tensors.kernels.launcher import Address, Launcher
from kvobj.tensors.registry import codec_named, refusal

BATCH_BYTES: Final = 256 * 2**20
"""Plain bytes of one launch: beyond, kernels gain nothing, and working memory on the device is a few times this."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class FrameToDecode:
    """A whole frame in host memory, or at the device address `at`; `head` parsed of it; and the device address (16-aligned)
    that its plain bytes go to, in the declared order. `is_checked`: the blocks' checksums are known to be right; on the device
    they are not looked at."""

    frame: memoryview | None
    head: TensorFrame
    to: int
    profile: Profile | None = None
    is_checked: bool = False
    at: int = 0


@dataclass(frozen=True, slots=True)
class ChunkToEncode:
    """Plain bytes of a form at a device address (16-aligned), and the host memory that the frame goes to, `tensor_frame_bound`
    long.

    `digest` spares a lossless codec the hashing. Codecs with profiles are not encoded here.
    """

    plain: int
    form: TensorForm
    codec: str
    into: memoryview
    digest: bytes | None = None
    fingerprint: bytes = bytes(16)
    first_position: int = 0
    is_post_rope: bool = True


class DeviceCodecs:
    """Decodes and encodes on one device. Addresses stay valid, and memory unused by others, until a call has ended.

    `hashes_there`: whether digests are taken on the device (None: on a GPU), or on the host, which needs all decoded bytes there.
    """

    def __init__(
        self,
        device: Device,
        *,
        batch_bytes: int = BATCH_BYTES,
        deadline_seconds: float = DEADLINE_SECONDS,
        hashes_there: bool | None = None,
    ) -> None:
        self._device = device
        self._hashes_there = device.kind == "cuda" if hashes_there is None else hashes_there
        self._batch_bytes = batch_bytes
        self._launcher: Launcher | None = None
        self._lane = Lane(device.new_stream(), name="codecs", deadline_seconds=deadline_seconds)
        if device.kind == "cuda":
            # Kernels are compiled from now on, not only when the first batch comes, which is told what fails.
            self._lane.submit(self._on, 0)

    async def decode(self, frames: Sequence[FrameToDecode]) -> list[FrameCorruptError | None]:
        """Decode frames to their addresses. For each what is wrong with it, or None; of a corrupt one what lies at its address is
        undefined. The digest is not checked. Errors of `Lane.submit`; `UnavailableError` for a codec that is not here."""
        return await _waited(*self.begin_decode(frames))

    def begin_decode(
        self, frames: Sequence[FrameToDecode]
    ) -> tuple[Future[None], Callable[[], list[FrameCorruptError | None]]]:
        """As `decode`, for threads: once the future is done, the function gives the answers."""
        answers: list[FrameCorruptError | None] = []

        def work(stream: Stream) -> None:
            batch = _Batch(self._on(stream), stream, hashes_there=self._hashes_there)
            for frames_of_one in _in_batches(frames, lambda each: each.head.plain_bytes, self._batch_bytes):
                answers.extend(batch.decode(frames_of_one))

        future = self._lane.submit(work, sum(each.head.plain_bytes for each in frames))
        return future, lambda: answers

    async def encode(self, chunks: Sequence[ChunkToEncode]) -> list[int]:
        """Encode chunks; the length of each frame. `InvalidRequestError` for a form that a codec refuses, before anything is done;
        errors of `Lane.submit`; `UnavailableError` for a codec that is not here."""
        return await _waited(*self.begin_encode(chunks))

    def begin_encode(self, chunks: Sequence[ChunkToEncode]) -> tuple[Future[None], Callable[[], list[int]]]:
        """As `encode`, for threads: once the future is done, the function gives the lengths."""
        for chunk in chunks:
            _check(chunk)
        lengths: list[int] = []

        def work(stream: Stream) -> None:
            batch = _Batch(self._on(stream), stream, hashes_there=self._hashes_there)
            for chunks_of_one in _in_batches(chunks, lambda each: each.form.plain_bytes, self._batch_bytes):
                lengths.extend(batch.encode(chunks_of_one))

        future = self._lane.submit(work, sum(chunk.form.plain_bytes for chunk in chunks))
        return future, lambda: lengths

    def close(self) -> None:
        """Finish what was accepted. Idempotent. Blocks."""
        self._lane.close()

    def _on(self, stream: Stream) -> Launcher:
        if self._launcher is None:
            self._launcher = self._device.launcher(stream)
        return self._launcher


class _Batch:
    """What one launch does. On the lane's thread."""

    def __init__(self, launcher: Launcher, stream: Stream, *, hashes_there: bool) -> None:
        self._launcher = launcher
        self._stream = stream
        self._hashes_there = hashes_there

    # -- decoding --------------------------------------------------------------------------------------------------------
    def decode(self, frames: Sequence[FrameToDecode]) -> list[FrameCorruptError | None]:
        answers = [None if each.is_checked else _checksum_problem(each) for each in frames]
        sound = [at for at, answer in enumerate(answers) if answer is None]
        places = self._uploaded([frames[at] for at in sound])
        groups: dict[tuple[str, Coding], list[tuple[int, Address]]] = {}
        for at, place in zip(sound, places, strict=True):
            each = frames[at]
            groups.setdefault((each.head.codec, coding_of(each.head, each.profile)), []).append((at, place))
        for (codec, coding), members in groups.items():
            for at, problem in self._decode_alike(codec, coding, [(at, frames[at], place) for at, place in members]):
                answers[at] = answers[at] or problem
        return answers

    def _uploaded(self, frames: Sequence[FrameToDecode]) -> list[Address]:
        start = self._launcher.scratch("batch-frames", sum(aligned(len(each.frame or b"")) for each in frames))
        places: list[Address] = []
        for each in frames:
            if each.frame is None:
                places.append(Address(each.at))
                continue
            self._stream.copy(start, address_of(each.frame), len(each.frame), CopyKind.TO_DEVICE)
            places.append(start)
            start = start.after(aligned(len(each.frame)))
        return places

    def _decode_alike(
        self, codec: str, coding: Coding, members: Sequence[tuple[int, FrameToDecode, Address]]
    ) -> Iterator[tuple[int, FrameCorruptError | None]]:
        form = coding.form
        order = BlockOrder(self._launcher, form)
        room = _Room(self._launcher, "batch-values", form.block_bytes, form.blocks * len(members))
        blocks: list[BlockToDecode] = []
        owners: list[tuple[int, Address]] = []
        for at, each, place in members:
            tensor = Address(each.to)
            for number, block in enumerate(each.head.blocks):
                encoded, start = place.after(block.offset), order.block_at(tensor, number)
                if block.is_raw:
                    order.from_raw(encoded, tensor, number)
                    continue
                values = start if order.is_in_place(start) else room.next()
                blocks.append(BlockToDecode(number, encoded, block.length, values))
                owners.append((at, tensor))
        statuses = codec_named(codec).decode(self._launcher, coding, blocks) if blocks else []
        for block_of, (at, tensor), status in zip(blocks, owners, statuses, strict=True):
            if status:
                yield at, FrameCorruptError("block does not decode", block=block_of.number, codec=codec, status=status)
            elif block_of.plain != order.block_at(tensor, block_of.number):
                order.from_head_major(block_of.plain, tensor, block_of.number)

    # -- encoding --------------------------------------------------------------------------------------------------------
    def encode(self, chunks: Sequence[ChunkToEncode]) -> list[int]:
        lengths = [0] * len(chunks)
        groups: dict[tuple[str, Coding], list[int]] = {}
        for at, chunk in enumerate(chunks):
            key = (str(CodecName.parse(chunk.codec)), Coding(chunk.form, chunk.first_position))
            groups.setdefault(key, []).append(at)
        for (codec, coding), members in groups.items():
            encoded = self._encode_alike(codec, coding, [chunks[at] for at in members])
            for at, length in zip(members, encoded, strict=True):
                lengths[at] = length
        return lengths

    def _encode_alike(self, codec: str, coding: Coding, chunks: Sequence[ChunkToEncode]) -> list[int]:
        found, form = codec_named(codec), coding.form
        is_lossy = CodecName.parse(codec).kind.is_lossy
        count = form.blocks * len(chunks)
        order = BlockOrder(self._launcher, form)
        values = _Room(self._launcher, "batch-values", form.block_bytes, count)
        slots = _Room(self._launcher, "batch-slots", max(found.slot_bytes(form), form.block_bytes), count)
        decoded = _Room(self._launcher, "batch-decoded", form.block_bytes, count if is_lossy else 0)
        blocks: list[BlockToEncode] = []
        for chunk in chunks:
            for number in range(form.blocks):
                start = order.block_at(Address(chunk.plain), number)
                if not order.is_in_place(start):
                    start = values.next()
                    order.to_head_major(Address(chunk.plain), number, start)
                blocks.append(BlockToEncode(number, start, slots.next(), decoded.next() if is_lossy else None))
        lengths = found.encode(self._launcher, coding, blocks)
        digests = self._digests(form, chunks, order, blocks, lengths)
        made: list[int] = []
        for at, chunk in enumerate(chunks):
            own = slice(at * form.blocks, (at + 1) * form.blocks)
            head = TensorFrame(
                codec=found.name,
                form=form,
                digest=digests[at],
                certificate=_certificate(form, lengths[own]),
                blocks=(),
                frame_bytes=0,
                fingerprint=chunk.fingerprint,
                first_position=chunk.first_position,
                flags=found.flags | (FLAG_POST_ROPE if chunk.is_post_rope and form.kind != "v" else 0),
            )
            made.append(self._frame(chunk.into, head, order, blocks[own], lengths[own]))
        return made

    def _frame(
        self,
        into: memoryview,
        head: TensorFrame,
        order: BlockOrder,
        blocks: Sequence[BlockToEncode],
        lengths: Sequence[EncodedLength],
    ) -> int:
        """Bring one chunk's blocks to their places on the host and write the head in front of them."""
        places = BlockPlaces(head.form)
        spans: list[tuple[int, int, bool]] = []
        for block, encoded in zip(blocks, lengths, strict=True):
            is_raw = _stays_raw(encoded, head.form)
            length = head.form.block_bytes if is_raw else encoded.length
            if is_raw:
                order.raw_of_head_major(block.plain, block.slot)
            end, offset = places.end, places.add(length)
            into[end:offset] = bytes(offset - end)
            self._stream.copy(address_of(into[offset : offset + length]), block.slot, length, CopyKind.TO_HOST)
            spans.append((offset, length, is_raw))
        self._stream.wait()
        found = tuple(Block(at, length, crc32c(into[at : at + length]), is_raw) for at, length, is_raw in spans)
        write_tensor_head(into, replace(head, blocks=found, frame_bytes=places.end))
        return places.end

    def _digests(
        self,
        form: TensorForm,
        chunks: Sequence[ChunkToEncode],
        order: BlockOrder,
        blocks: Sequence[BlockToEncode],
        lengths: Sequence[EncodedLength],
    ) -> list[bytes]:
        """For each chunk BLAKE3 of what its frame decodes to, in the declared order."""
        is_lossy = blocks[0].decoded is not None
        known = [None if is_lossy else chunk.digest for chunk in chunks]
        sources = [Address(chunk.plain) for chunk in chunks]
        if is_lossy:
            room = _Room(self._launcher, "batch-declared", form.plain_bytes, len(chunks))
            sources = [room.next() for _ in chunks]
            for at, (block, encoded) in enumerate(zip(blocks, lengths, strict=True)):
                values = block.plain if _stays_raw(encoded, form) else block.decoded
                assert values is not None, "a lossy codec says what a block decodes to"
                order.from_head_major(values, sources[at // form.blocks], block.number)
        asked = [source for source, digest in zip(sources, known, strict=True) if digest is None]
        if self._hashes_there:
            found = iter(device_digests(self._launcher, asked, form.plain_bytes))
        else:
            found = (self._hashed_here(source, form.plain_bytes) for source in asked)
        return [next(found) if digest is None else digest for digest in known]

    def _hashed_here(self, source: Address, size_bytes: int) -> bytes:
        plain = memoryview(bytearray(size_bytes))
        self._launcher.download(source, plain)
        return blake3(plain).digest()


def _stays_raw(encoded: EncodedLength, form: TensorForm) -> bool:
    return encoded.length == STAYS_RAW or encoded.length >= form.block_bytes


class _Room:
    """Scratch for so many pieces of one size, handed out one after the other."""

    __slots__ = ("_at", "_step")

    def __init__(self, launcher: Launcher, slot: str, size_bytes: int, count: int) -> None:
        self._step = aligned(size_bytes)
        self._at = launcher.scratch(slot, self._step * count) if count else Address(0)

    def next(self) -> Address:
        at = self._at
        self._at = at.after(self._step)
        return at


def _check(chunk: ChunkToEncode) -> None:
    kind = CodecName.parse(chunk.codec).kind
    problem = "needs a profile of the model" if kind.needs_profile else refusal(chunk.codec, chunk.form)
    if problem is not None:
        raise InvalidRequestError(f"codec {chunk.codec}: {problem}", codec=chunk.codec)
    if len(chunk.into) < tensor_frame_bound(chunk.form) or chunk.into.readonly:
        raise ValueError(f"a frame of this form takes {tensor_frame_bound(chunk.form)} bytes of room")


def _checksum_problem(each: FrameToDecode) -> FrameCorruptError | None:
    if each.frame is None:
        return None
    for number, block in enumerate(each.head.blocks):
        view = each.frame[block.offset : block.offset + block.length]
        if len(view) != block.length or crc32c(view) != block.crc:
            return FrameCorruptError("block checksum mismatch", block=number, codec=each.head.codec)
    return None


def _certificate(form: TensorForm, lengths: Sequence[EncodedLength]) -> Certificate:
    certificate = Certificate()
    for step in zip_longest(*(length.errors for length in lengths)):
        sides: tuple[list[BlockError], list[BlockError]] = ([], [])
        for number, error in enumerate(step):
            if error is not None:
                sides[1 if form.kind == "v" else number % form.kinds].append(error)
        certificate = certificate.after(*sides)
    return certificate


def _in_batches(items: Sequence[_T], size_of: Callable[[_T], int], most: int) -> Iterator[list[_T]]:
    batch: list[_T] = []
    size_bytes = 0
    for item in items:
        if batch and size_bytes + size_of(item) > most:
            yield batch
            batch, size_bytes = [], 0
        batch.append(item)
        size_bytes += size_of(item)
    if batch:
        yield batch


async def _waited(future: Future[None], answers: Callable[[], list[_T]]) -> list[_T]:
    await settled(future)
    return answers()
