"""The cases of the fuzz: what is done to a sound frame, who reads it, and what came of it.

A case is made of the seed, the codec and its number alone. What must hold: damaged bytes are refused by a typed error or decode to
some values; lossless codecs give back whatever bytes they were given. What must not happen is the sanitizer's to see: every buffer
and all scratch are allocations of their own, exactly as long as they are said to be.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, Final, cast

from frame_fuzz.corpus import Sample, any_form, plain_of, samples
from frame_fuzz.damage import damaged, damaged_profile, other_form, reframed, with_damaged_head
from frame_fuzz.exact_memory import ExactLauncher, ExactMemory
from kvobj.errors import FrameCorruptError, InvalidRequestError
from kvobj.tensors import codecs
from kvobj.tensors.codec_names import RUNG_MAX, CodecName
from kvobj.tensors.codec_protocol import BlockToDecode, BlockToDemote, Coding, DemotingCodec
from kvobj.tensors.codecs import decode_frame, decode_layers, demote, encode_bound, encode_frame, parse_tensor_frame
from kvobj.tensors.form import TensorForm
from kvobj.tensors.profiles import Profile, ProfileError
from kvobj.tensors.registry import codec_named, refusal

PLAIN_MAX: Final = 1 << 20
"""Of frames that claim more values than this only the head is read: decoding them would be the same, slowly."""
_ENCODED_PLAIN_MAX: Final = 32 * 1024
_SHIFTS: Final = (0,) * 6 + (1, 2)
"""How far from an aligned address frames and plain bytes are; blocks by themselves always are at one."""


class Fuzz:
    """A codec's sound frames and the cases made of them. One thread."""

    def __init__(self, codec: str, *, seed: int, count: int) -> None:
        self.codec = codec
        self._seed = seed
        self._samples: Sequence[Sample] = samples(codec, seed=seed, count=count)

    def case(self, number: int) -> str:
        """Run a case; what came of it, in two words: what was done, what it led to."""
        generator = random.Random(f"{self._seed}/{self.codec}/{number}")
        sample = self._samples[generator.randrange(len(self._samples))]
        pick = generator.random()
        with _exact_scratch():
            if pick < 0.55:  # noqa: PLR2004 - shares of what a case is
                return _block_case(sample, generator)
            if pick < 0.8:  # noqa: PLR2004
                return _frame_case(sample, generator)
            if pick < 0.88:  # noqa: PLR2004
                return _read(with_damaged_head(sample.frame, generator), "head", sample, generator)
            if pick < 0.96:  # noqa: PLR2004
                return _read(damaged(sample.frame, generator), "bytes", sample, generator)
            return _encode_case(sample, generator)


@cache
def _launcher() -> ExactLauncher:
    return ExactLauncher()


@contextmanager
def _exact_scratch() -> Iterator[None]:
    """Frames too are coded in scratch of exactly its size."""
    module: Any = codecs
    usual = module.host_launcher
    module.host_launcher = _launcher
    try:
        yield
    finally:
        module.host_launcher = usual


def _block_case(sample: Sample, generator: random.Random) -> str:
    """A damaged block straight to the codec, read as what it is or as another form, or with a damaged profile."""
    coded = [number for number, block in enumerate(sample.head.blocks) if not block.is_raw]
    if not coded:
        return "block raw"
    number = generator.choice(coded)
    block = sample.head.blocks[number]
    encoded = damaged(sample.frame[block.offset : block.offset + block.length], generator)
    form, profile = sample.head.form, sample.profile
    if profile is not None and generator.random() < 0.2:  # noqa: PLR2004
        profile = _parsed(damaged_profile(profile.data, generator))
        if profile is None or not profile.fits(form):
            return "profile refused"
    if generator.random() < 0.1:  # noqa: PLR2004
        changed = other_form(form, generator)
        if refusal(sample.codec, changed) is None and (profile is None or profile.fits(changed)):
            form = changed
    if not 0 < len(encoded) < form.block_bytes:
        return "block none"
    memory, room = ExactMemory.of(encoded), ExactMemory(form.block_bytes)
    coding = Coding(form, sample.head.first_position, sample.head.rope_id, profile)
    to_decode = BlockToDecode(number, memory.address, len(encoded), room.address)
    (status,) = codec_named(sample.head.codec).decode(_launcher(), coding, [to_decode])
    if sample.head.codec_name.kind.name == "eq" and generator.random() < 0.3:  # noqa: PLR2004
        _demote_block(sample, form, memory, len(encoded))
    return "block refused" if status else "block decoded"


def _parsed(data: bytes) -> Profile | None:
    try:
        return Profile.parse(data)
    except ProfileError:
        return None


def _demote_block(sample: Sample, form: TensorForm, memory: ExactMemory, length: int) -> None:
    coarser = cast("DemotingCodec", codec_named(_coarser(sample.head.codec_name)))
    slot, decoded = ExactMemory(coarser.slot_bytes(form)), ExactMemory(form.block_bytes)
    block = BlockToDemote(0, memory.address, length, slot.address, decoded.address)
    coarser.demote(_launcher(), Coding(form), sample.head.codec, [block])


def _coarser(name: CodecName) -> str:
    return f"{name.kind.name}:{name.base_step}/{name.rung + 1}"


def _frame_case(sample: Sample, generator: random.Random) -> str:
    """A frame with a damaged block under sound checksums."""
    blocks = [sample.frame[block.offset : block.offset + block.length] for block in sample.head.blocks]
    which = generator.randrange(len(blocks))
    if not sample.head.blocks[which].is_raw:
        blocks[which] = damaged(blocks[which], generator)
    frame = reframed(sample.head, blocks)
    return "frame none" if frame is None else _read(frame, "frame", sample, generator)


def _read(frame: bytes, what: str, sample: Sample, generator: random.Random) -> str:
    """What a reader of frames does: the head, then all of it or some layers, sometimes a coarser frame."""
    shift = generator.choice(_SHIFTS)
    memory = ExactMemory.of(frame, shift=shift)
    try:
        head = parse_tensor_frame(memory.view, len(frame))
        if head.form.plain_bytes > PLAIN_MAX:
            return f"{what} large"
        if generator.random() < 0.2:  # noqa: PLR2004
            first = generator.randrange(head.form.layers)
            layers = range(first, generator.randint(first + 1, head.form.layers))
            start, end = head.layers_span(layers)
            part = ExactMemory.of(frame[start:end], shift=shift)
            room = ExactMemory(len(head.blocks_of(layers)) * head.form.block_bytes, shift=generator.choice(_SHIFTS))
            decode_layers(part.view, head, layers, room.view, offset=start, profile=sample.profile)
        else:
            room = ExactMemory(head.form.plain_bytes, shift=generator.choice(_SHIFTS))
            decode_frame(memory.view, head, room.view, profile=sample.profile)
        if head.codec_name.kind.name == "eq" and head.codec_name.rung < RUNG_MAX and generator.random() < 0.5:  # noqa: PLR2004
            coarser = _coarser(head.codec_name)
            into = ExactMemory(encode_bound(coarser, head.form))
            demote(memory.view, head, into.view, codec=coarser)
    except (FrameCorruptError, InvalidRequestError):
        return f"{what} refused"
    return f"{what} decoded"


def _encode_case(sample: Sample, generator: random.Random) -> str:
    """Whatever somebody puts, encoded and read again."""
    form = sample.head.form
    if sample.profile is None:
        form = any_form(generator)
        if refusal(sample.codec, form) is not None or form.plain_bytes > _ENCODED_PLAIN_MAX:
            return "encode none"
    else:
        form = replace(form, tokens=generator.randint(1, form.tokens))
    plain = damaged_values(plain_of(form, generator), generator)
    memory = ExactMemory.of(plain, shift=generator.choice(_SHIFTS))
    room = ExactMemory(encode_bound(sample.codec, form), shift=generator.choice(_SHIFTS))
    length = encode_frame(memory.view, room.view, codec=sample.codec, form=form, profile=sample.profile)
    frame, again = ExactMemory.of(bytes(room.view[:length])), ExactMemory(form.plain_bytes)
    head = parse_tensor_frame(frame.view, length)
    decode_frame(frame.view, head, again.view, profile=sample.profile)
    assert head.is_lossy or again.view == plain, "a lossless codec gave back other bytes"
    return "encode done"


def damaged_values(plain: bytes, generator: random.Random) -> bytes:
    """Values of which some are any bits, as many as there were."""
    if generator.random() < 0.5:  # noqa: PLR2004
        return plain
    changed = damaged(plain, generator)[: len(plain)]
    return changed + bytes(len(plain) - len(changed))
