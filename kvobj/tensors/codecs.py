"""Tensor codecs: a chunk's plain bytes to its frame and back, whole or by layers, on this machine's CPU.

    codec = "xa"
    if unavailable(codec) is None and refusal(codec, form) is None:
        frame = memoryview(bytearray(encode_bound(codec, form)))
        frame = frame[: encode_frame(plain, frame, codec=codec, form=form)]
        head = parse_tensor_frame(frame, len(frame))
        decode_frame(frame, head, plain)

Guarantees: equal input gives equal frames, on every machine and whichever library of kernels is in use. A block that a codec does
not shrink is stored as it is, so a frame is never larger than the plain bytes by more than its head, 255 bytes a block and 4 KiB a
MiB. A lossless codec gives back every bit. Reading never raises anything but `FrameCorruptError` for what a frame holds, and never
touches memory outside of what it was given.

All functions block, release the GIL inside kernels, keep only scratch of the calling thread (a few blocks) and may be called from
any thread: they belong on a pool. Names of codecs are those of `codec_names`; one that does not exist is a ValueError. Without the
CPU kernels all that encodes or decodes raises `UnavailableError`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from blake3 import blake3

from kvobj.errors import InvalidRequestError
from kvobj.tensors.block_order import CODE_ALIGNMENT, BlockOrder
from kvobj.tensors.certificate import Certificate
from kvobj.tensors.codec_names import FLAG_POST_ROPE, CodecName
from kvobj.tensors.codec_protocol import Coding, Profile
from kvobj.tensors.decoding import EncodedBlocks, coding_of, decode_blocks
from kvobj.tensors.encoding import FrameWriter, room_for
from kvobj.tensors.form import TensorForm
from kvobj.tensors.frame import Block, TensorFrame, parse_tensor_frame, write_tensor_head
from kvobj.tensors.kernels.host_launcher import host_launcher
from kvobj.tensors.kernels.host_memory import address_of
from kvobj.tensors.registry import codec_named, reading_codec, refusal, unavailable, usable_codec

__all__ = [
    "LOSSLESS",
    "LOSSY",
    "Block",
    "Certificate",
    "TensorForm",
    "TensorFrame",
    "decode_frame",
    "decode_layers",
    "demote",
    "encode_bound",
    "encode_frame",
    "is_lossy",
    "parse_tensor_frame",
    "refusal",
    "unavailable",
]

LOSSLESS: Final = frozenset({"x3", "xa"})
LOSSY: Final = frozenset({"f8", "eq57", "eq55", "eq4", "eq3", "h4", "ek"})
"""The presets; `eq:<base step in thousandths>/<rung>` names any other step."""


def is_lossy(codec: str) -> bool:
    """Whether a codec of this name or preset gives back other bytes than it was given."""
    return CodecName.parse(codec).kind.is_lossy


def encode_bound(codec: str, form: TensorForm) -> int:
    """Room that `encode_frame` and `demote` to this codec need; somewhat more than any frame takes."""
    return room_for(codec_named(codec), form)


def encode_frame(
    plain: memoryview,
    into: memoryview,
    *,
    codec: str,
    form: TensorForm,
    digest: bytes | None = None,
    fingerprint: bytes = bytes(16),
    first_position: int = 0,
    profile: Profile | None = None,
    is_post_rope: bool = True,
    rope_id: int = 0,
) -> int:
    """Write the frame of `plain` to the front of `into` and return its length.

    `plain` is the form's bytes in its declared order; `into` is writable, `encode_bound` long and does not overlap it; what lies
    behind the returned length may have been written. `digest`, BLAKE3 of `plain`, spares a lossless codec the hashing.
    Recorded: `fingerprint`, the first 16 bytes of the namespace's; `first_position`, the chunk's place in its sequence;
    `is_post_rope`, whether keys are held after rotary position embedding. `profile` and `rope_id` are for codecs that need them.
    `InvalidRequestError` for a form that `refusal` refuses, ValueError for buffers of the wrong length.
    """
    found = usable_codec(codec, form)
    if len(plain) != form.plain_bytes:
        raise ValueError(f"the form has {form.plain_bytes} plain bytes, got {len(plain)}")
    kind = CodecName.parse(codec).kind
    if kind.needs_profile and profile is None:
        raise InvalidRequestError(f"codec {codec}: needs a profile of the model", codec=codec)
    used = profile if kind.needs_profile else None
    coding = Coding(form, first_position, rope_id if kind.needs_profile else 0, used)
    room, plain_at = _Room(into, room_for(found, form)), address_of(plain)
    writer = FrameWriter(host_launcher(), found, coding, room.view)
    writer.encode_tensor(plain_at)
    if kind.is_lossy:
        digest = writer.digest()
    elif digest is None:
        digest = blake3(plain).digest()
    head = TensorFrame(
        codec=found.name,
        form=form,
        digest=digest,
        certificate=writer.certificate(Certificate()),
        blocks=tuple(writer.blocks),
        frame_bytes=writer.frame_bytes,
        fingerprint=fingerprint,
        first_position=first_position,
        rope_id=coding.rope_id,
        flags=kind.flags | (FLAG_POST_ROPE if is_post_rope and form.kind != "v" else 0),
        profile_digest=None if used is None else used.digest,
    )
    return room.finish(head)


def decode_frame(frame: memoryview, head: TensorFrame, into: memoryview, *, profile: Profile | None = None) -> None:
    """Decode a whole frame into `into`, as many bytes as the form has, in its declared order.

    `head` is what `parse_tensor_frame` made of it. The blocks' checksums are checked, the digest is not. `FrameCorruptError`, after
    which `into` is undefined; `InvalidRequestError` without the profile that the frame names.
    """
    decode_layers(frame, head, range(head.form.layers), into, offset=0, profile=profile)


def decode_layers(
    encoded: memoryview,
    head: TensorFrame,
    layers: range,
    into: memoryview,
    *,
    offset: int,
    profile: Profile | None = None,
) -> None:
    """Decode consecutive layers from their own bytes: `encoded` holds those of the frame from `offset` on, all of
    `head.layers_span(layers)` among them.

    `into` takes the plain bytes of those layers in the declared order: of a layer-major form one range of the whole's, else the
    ranges that `form.layer_spans` names, put together. Errors as of `decode_frame`; ValueError for layers that there are not.
    """
    found, coding = reading_codec(head), coding_of(head, profile)
    blocks = head.blocks_of(layers)
    plain_bytes = len(blocks) * head.form.block_bytes
    if len(into) != plain_bytes or into.readonly:
        raise ValueError(f"{len(layers)} layers have {plain_bytes} plain bytes, to be written to {len(into)}")
    decode_blocks(found, coding, EncodedBlocks(host_launcher(), encoded, head, offset), layers, into)


def demote(
    frame: memoryview, head: TensorFrame, into: memoryview, *, codec: str, profile: Profile | None = None
) -> int:
    """Write the frame of a coarser step to the front of `into` and return its length: the very bytes that encoding the original at
    that step gives, from the finer frame alone.

    `head` is that of `frame`; `codec` is further down the same ladder (`eq57` → `eq4`); `into` as of `encode_frame`. The blocks'
    checksums are checked. `FrameCorruptError`; `InvalidRequestError` where there is no such ladder.
    """
    found, coding = usable_codec(codec, head.form), coding_of(head, profile)
    name, finer = CodecName.parse(codec), head.codec_name
    if name.kind != finer.kind or name.base_step != finer.base_step or name.rung <= finer.rung:
        raise InvalidRequestError(f"{head.codec} is not demoted to {found.name}", codec=codec)
    launcher = host_launcher()
    room = _Room(into, room_for(found, head.form))
    writer = FrameWriter(launcher, found, coding, room.view)
    order, encoded = BlockOrder(launcher, head.form), EncodedBlocks(launcher, frame, head, 0)
    for number, block in enumerate(head.blocks):
        at = encoded.checked(number)
        if block.is_raw:
            # Not shrunk at the finer step, or not finite: coded as directly, of which the certificate has the first steps already.
            values = launcher.scratch("blocks-values", block.length)
            order.head_major_of_raw(at, values)
            writer.encode([values], skip_steps=finer.rung + 1)
        else:
            writer.demote(head.codec, at, block.length)
    return room.finish(
        replace(
            head,
            codec=found.name,
            digest=writer.digest(),
            certificate=writer.certificate(head.certificate),
            blocks=tuple(writer.blocks),
            frame_bytes=writer.frame_bytes,
        )
    )


class _Room:
    """Room for a frame, aligned for codecs: the caller's own where that is, else a copy is made in the end."""

    __slots__ = ("_into", "view")

    def __init__(self, into: memoryview, room_bytes: int) -> None:
        if len(into) < room_bytes or into.readonly:
            raise ValueError(f"writing this frame takes {room_bytes} bytes of room, got {len(into)}")
        self._into = into
        self.view = into[:room_bytes]
        if address_of(into) % CODE_ALIGNMENT:
            spare = memoryview(bytearray(room_bytes + CODE_ALIGNMENT))
            start = -address_of(spare) % CODE_ALIGNMENT
            self.view = spare[start : start + room_bytes]

    def finish(self, head: TensorFrame) -> int:
        """Write the head in front of the blocks; returns the frame's length."""
        write_tensor_head(self.view, head)
        if address_of(self.view) != address_of(self._into):
            self._into[: head.frame_bytes] = self.view[: head.frame_bytes]
        return head.frame_bytes
