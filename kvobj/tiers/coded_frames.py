"""A plain blob as a frame of another codec, and back: what a tier holds of it may be smaller than what readers are given.

Blocking functions over buffers, for a pool; they release the GIL where it matters. Tensor codecs come from `kvobj.tensors`, which
may have no kernel library on this machine: `unusable` says so before anything is tried. What is decoded is checked against the
digest in its frame's header, so wrong bytes never leave here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from blake3 import blake3

from kvobj.codec.codec import codec_named
from kvobj.codec.frame import (
    CODEC_RAW,
    CODEC_ZP,
    HEADER_BYTES,
    KIND_BYTES,
    block_crcs,
    parse_frame,
    raw_frame_bytes,
    raw_payload_offset,
    seal_raw,
)
from kvobj.errors import FrameCorruptError
from kvobj.tensors import codecs as tensor_codecs
from kvobj.tensors.codec_names import PRESETS, CodecName
from kvobj.tensors.form import TensorForm
from kvobj.tensors.frame import TensorFrame
from kvobj.tensors.profiles import Profile

_KIND_AT: Final = 9
_F32_MAX: Final = 3.4028234663852886e38
_SPOKEN: Final = {codec: preset for preset, codec in PRESETS.items()}


@dataclass(frozen=True, slots=True)
class Coding:
    """How a blob is to be encoded: a codec, and the tensor that its plain bytes are where the codec needs one. `fingerprint`:
    the first 16 bytes of the namespace's. `profile` and the chunk's `first_position` in its sequence are for codecs that need
    them."""

    codec: str
    form: TensorForm | None = None
    fingerprint: bytes = bytes(16)
    element_bytes: int = 1
    profile: Profile | None = None
    first_position: int = 0

    @property
    def is_lossy(self) -> bool:
        """Whether decoding gives other bytes than were encoded."""
        return is_lossy(self.codec)


@dataclass(frozen=True, slots=True)
class CodedHead:
    """What a coded frame's head says of it. `digest` is BLAKE3 of what it decodes to; `max_error` bounds the absolute error of
    any value, 0.0 where it is lossless; `tensor` is None for a frame of bytes (`raw`, `zp`)."""

    codec: str
    plain_bytes: int
    digest: bytes
    max_error: float = 0.0
    tensor: TensorFrame | None = None


def is_lossy(codec: str) -> bool:
    """Whether the codec of this name gives back other bytes than it was given."""
    return codec not in (CODEC_RAW, CODEC_ZP) and CodecName.parse(codec).kind.is_lossy


def needs_profile(codec: str) -> bool:
    """Whether a frame in this codec cannot be written or read without a profile."""
    return codec not in (CODEC_RAW, CODEC_ZP) and CodecName.parse(codec).kind.needs_profile


def own_name(codec: str) -> str:
    """The codec as frames name it, whether it was said so or by a preset's name. ValueError for one that does not exist."""
    return codec if codec in (CODEC_RAW, CODEC_ZP) else str(CodecName.parse(codec))


def spoken_name(codec: str) -> str:
    """The codec as people say it: its preset's name where it has one."""
    return _SPOKEN.get(codec, codec)


def unusable(coding: Coding) -> str | None:
    """Why this machine, or this tensor, cannot be encoded so; None: it can."""
    if coding.codec in (CODEC_RAW, CODEC_ZP):
        return None
    if coding.form is None:
        return "no tensor layout"
    return _unavailable(coding.codec) or tensor_codecs.refusal(coding.codec, coding.form)


@lru_cache(maxsize=64)
def _unavailable(codec: str) -> str | None:
    return tensor_codecs.unavailable(codec)


def coded_bound(coding: Coding, plain_bytes: int) -> int:
    """The most bytes that `encode_coded` can write."""
    if coding.form is None or coding.codec in (CODEC_RAW, CODEC_ZP):
        return raw_frame_bytes(plain_bytes)
    return tensor_codecs.encode_bound(coding.codec, coding.form)


def encode_coded(plain: memoryview, into: memoryview, coding: Coding, *, digest: bytes) -> int:
    """Write the blob's frame to the front of `into`, at least `coded_bound` long, and return its length. `digest` is BLAKE3 of
    `plain`."""
    if coding.form is None or coding.codec in (CODEC_RAW, CODEC_ZP):
        codec = codec_named(coding.codec)
        return codec.encode(plain, into, digest=digest, element_bytes=coding.element_bytes)
    return tensor_codecs.encode_frame(
        plain,
        into,
        codec=coding.codec,
        form=coding.form,
        digest=None if coding.is_lossy else digest,
        fingerprint=coding.fingerprint,
        first_position=coding.first_position,
        profile=coding.profile,
    )


def is_coarser(codec: str, than: str) -> bool:
    """Whether a frame in the second codec can be demoted to the first: both on one ladder of `eq`, the first further down."""
    if not {codec, than}.isdisjoint((CODEC_RAW, CODEC_ZP)) or needs_profile(codec):
        return False
    coarse, fine = CodecName.parse(codec), CodecName.parse(than)
    return (coarse.kind, coarse.base_step) == (fine.kind, fine.base_step) and coarse.rung > fine.rung


def demoted_bound(head: CodedHead, codec: str) -> int:
    """The most bytes that `demote_coded` can write of a frame with this head. `FrameCorruptError` for one of no tensor."""
    if head.tensor is None:
        raise FrameCorruptError("a frame of bytes has no coarser steps", codec=head.codec)
    return tensor_codecs.encode_bound(codec, head.tensor.form)


def demote_coded(frame: memoryview, into: memoryview, codec: str) -> int:
    """The same blob in a coarser codec of the same ladder, from its frame alone: the bytes that `encode_coded` would have given."""
    head = tensor_codecs.parse_tensor_frame(frame, len(frame))
    return tensor_codecs.demote(frame, head, into, codec=codec)


def is_of_bytes(head: memoryview) -> bool:
    """Whether the frame that begins so is one of plain bytes (`raw`, `zp`) and no tensor's. Says nothing of the rest."""
    return len(head) > _KIND_AT and head[_KIND_AT] == KIND_BYTES


def head_of(head: memoryview, frame_bytes: int) -> CodedHead:
    """Read and check a frame's head, of whatever kind. `FrameCorruptError`."""
    if len(head) < HEADER_BYTES:
        raise FrameCorruptError("frame shorter than its header", head_bytes=len(head))
    if is_of_bytes(head):
        header = parse_frame(head, frame_bytes)
        return CodedHead(header.codec, header.plain_bytes, header.digest)
    tensor = tensor_codecs.parse_tensor_frame(head, frame_bytes)
    error = tensor.certificate.max_error
    return CodedHead(tensor.codec, tensor.form.plain_bytes, tensor.digest, min(error, _F32_MAX), tensor)


def decode_coded(frame: memoryview, into: memoryview, profile: Profile | None = None) -> None:
    """Make a sealed `raw` frame of a whole frame of any codec in the front of `into`, which has room for it (`raw_frame_bytes`).

    Block checksums and the digest of the whole are checked. `FrameCorruptError`; `InvalidRequestError` without the `profile` that
    the frame names.
    """
    head = head_of(frame, len(frame))
    offset = raw_payload_offset(head.plain_bytes)
    plain = into[offset : offset + head.plain_bytes]
    if head.tensor is not None:
        tensor_codecs.decode_frame(frame, head.tensor, plain, profile=profile)
    else:
        _decode_bytes(frame, plain)
    digest = blake3(plain, max_threads=1).digest()
    if digest != head.digest:
        raise FrameCorruptError("frame digest mismatch", codec=head.codec)
    seal_raw(into, plain_bytes=head.plain_bytes, digest=digest, block_crcs=block_crcs(plain))


def _decode_bytes(frame: memoryview, plain: memoryview) -> None:
    header = parse_frame(frame, len(frame))
    codec = codec_named(header.codec)
    for block in range(header.block_count):
        encoded = frame[header.offset(block) : header.end(block)]
        header.check_block(block, encoded)
        start, stop = header.plain_span(block)
        codec.decode_block(header, block, encoded, plain[start:stop])


def layers_over(tensor: TensorFrame, start: int, stop: int) -> range | None:
    """The layers that the plain bytes `[start, stop)` lie in; None where layers are not contiguous in the declared order."""
    form = tensor.form
    if not form.is_layer_major or start >= stop:
        return None
    layer_bytes = form.plain_bytes // form.layers
    return range(start // layer_bytes, -(-stop // layer_bytes))


def decode_coded_layers(  # noqa: PLR0917 - runs on a pool, positionally
    encoded: memoryview,
    offset: int,
    tensor: TensorFrame,
    layers: range,
    into: memoryview,
    profile: Profile | None = None,
) -> None:
    """The plain bytes of some layers to `into`; `encoded` is the frame from its byte `offset` on. `FrameCorruptError`."""
    tensor_codecs.decode_layers(encoded, tensor, layers, into, offset=offset, profile=profile)
