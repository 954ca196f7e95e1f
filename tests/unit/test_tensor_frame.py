"""Heads of tensor frames: what is written is read back, and whatever else is there is refused by name."""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobj.codec.checksums import crc32c
from kvobj.codec.frame import MAX_HEAD_BYTES, has_header, parse_frame
from kvobj.errors import FrameCorruptError
from kvobj.tensors import checksums
from kvobj.tensors.certificate import Certificate
from kvobj.tensors.codec_names import PRESETS, CodecName
from kvobj.tensors.codec_protocol import BlockError
from kvobj.tensors.form import ORDERS, Kind, TensorForm
from kvobj.tensors.frame import (
    FRAME_ALIGNMENT,
    GROUP_ALIGNMENT,
    GROUP_BYTES,
    HEADER_BYTES,
    MAX_BLOCKS,
    Block,
    BlockPlaces,
    TensorFrame,
    aligned,
    form_refusal,
    parse_tensor_frame,
    tensor_frame_bound,
    tensor_head_bytes,
    write_tensor_head,
)

SMALL = TensorForm(kind="kv", dtype="bf16", layers=3, kv_heads=2, head_dim=8, tokens=16, order=ORDERS[77])
KINDS: list[Kind] = ["kv", "k", "v", "mla"]
DIGEST = hashlib.sha256(b"decoded").digest()
PROFILE = hashlib.sha256(b"profile").digest()


def head_of(form: TensorForm, lengths: list[int], codec: str = "x3", **others: object) -> TensorFrame:
    """A head with blocks of these lengths where they belong, and checksums made up."""
    places = BlockPlaces(form)
    blocks = tuple(
        Block(places.add(length), length, 0x1000 + number, length == form.block_bytes)
        for number, length in enumerate(lengths)
    )
    name = CodecName.parse(codec)
    head = TensorFrame(
        codec=str(name),
        form=form,
        digest=DIGEST,
        certificate=Certificate(),
        blocks=blocks,
        frame_bytes=places.end,
        fingerprint=bytes(range(16)),
        first_position=4096,
        flags=name.kind.flags | (form.kind != "v"),
        profile_digest=PROFILE if name.kind.needs_profile else None,
    )
    return replace(head, **others)  # type: ignore[arg-type]


def packed(head: TensorFrame) -> bytearray:
    """The frame's head and the padding behind it."""
    frame = bytearray(b"\xff" * aligned(tensor_head_bytes(head.form)))
    write_tensor_head(memoryview(frame), head)
    return frame


def resealed(frame: bytearray) -> bytearray:
    """The frame with its header's checksum made right again."""
    struct.pack_into("<I", frame, HEADER_BYTES - 4, crc32c(memoryview(frame)[: HEADER_BYTES - 4]))
    return frame


SMALL_LENGTHS = [100, 512, 1, 300, 256, 511]
SMALL_HEAD = head_of(SMALL, SMALL_LENGTHS)


@st.composite
def heads(draw: st.DrawFn) -> TensorFrame:
    kind = draw(st.sampled_from(KINDS))
    sizes = st.integers(1, 9)
    form = TensorForm(
        kind=kind,
        dtype=draw(st.sampled_from(["bf16", "fp16", "fp32", "fp8_e4m3", "int8"])),
        layers=draw(sizes),
        kv_heads=1 if kind == "mla" else draw(sizes),
        head_dim=draw(sizes),
        tokens=draw(st.sampled_from([1, 7, 300, 20_000])),
        order=draw(st.sampled_from(ORDERS)),
    )
    lengths = [draw(st.integers(1, form.block_bytes)) for _ in range(form.blocks)]
    codec = draw(st.sampled_from(["x3", "xa", "f8", "eq57", "eq:4095/15", "eq4", "h4", "ek"]))
    head = head_of(form, lengths, codec)
    if not head.is_lossy:
        return head
    number = st.floats(0, 1000, width=16)
    keys, values = kind != "v", kind in {"kv", "v"}
    certificate = Certificate(*(draw(number) if side else 0.0 for side in (keys, keys, values, values)))
    return replace(head, certificate=Certificate.unpack(certificate.pack()))


@given(head=heads())
def test_a_head_is_read_back_as_it_was_written(head: TensorFrame) -> None:
    frame = packed(head)
    assert parse_tensor_frame(memoryview(frame), head.frame_bytes) == head
    assert parse_tensor_frame(memoryview(frame)[: tensor_head_bytes(head.form)], head.frame_bytes) == head
    assert head.frame_bytes <= tensor_frame_bound(head.form)


def test_the_header_has_its_fields_where_the_format_says() -> None:
    form = TensorForm("kv", "bf16", 2, 3, 8, 5, ORDERS[119])
    head = head_of(form, [200, 100, 240, 1], "eq4", certificate=Certificate(0.5, 0.25, 2.0, 1.0))
    frame = packed(head)
    assert frame[:8] == b"KVOF\x01\x01\x30\x00"
    assert frame[8:12] == bytes([0x10, 0, 0b11, 119])
    assert struct.unpack_from("<4H", frame, 12) == (2, 3, 8, 83 | 1 << 12)
    assert struct.unpack_from("<3I", frame, 20) == (5, 4096, 0)
    assert frame[32:48] == bytes(range(16))
    assert frame[48:80] == bytes(32)
    assert frame[80:112] == DIGEST
    assert frame[112:120].hex() == "003f" + "803e" + "0040" + "803f"
    assert struct.unpack_from("<I", frame, 120) == (4,)
    assert struct.unpack_from("<I", frame, 124) == (crc32c(memoryview(frame)[:124]),)
    raw = 1 << 31
    directory = [(1, 200, 0x1000), (2, 100, 0x1001), (3, 240 | raw, 0x1002), (4, 1, 0x1003)]
    assert list(struct.iter_unpack("<3I", frame[128:176])) == directory
    assert frame[176:] == bytes(80)


@pytest.mark.parametrize(
    ("kind", "number"), [("kv", 0), ("k", 1), ("v", 2), ("mla", 3)],
)  # fmt: skip
def test_kinds_and_dtypes_have_their_numbers(kind: str, number: int) -> None:
    dtypes = ["bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "fp32", "int8", "uint8"]
    for at, dtype in enumerate(dtypes):
        form = TensorForm(kind, dtype, 1, 1, 8, 4)  # type: ignore[arg-type]
        frame = packed(head_of(form, [1] * form.blocks))
        assert (frame[8], frame[9]) == (0x10 + at, number)


def test_blocks_lie_at_multiples_of_256_and_groups_of_a_mebibyte_at_multiples_of_4096() -> None:
    form = TensorForm("kv", "bf16", 7, 8, 128, 300)  # 600 KiB a block
    lengths = [500_001, 400_000, 100_000, 50_000, 600_000, 600_000, 1, 1, 1, 1, 1, 1, 2, 2]
    head = head_of(form, lengths)
    offsets = [block.offset for block in head.blocks]
    assert offsets[0] == aligned(tensor_head_bytes(form))
    groups = [0]
    for layer in range(1, form.layers):
        before = head.blocks[2 * layer - 1]
        end = before.offset + before.length
        begins = end - offsets[2 * groups[-1]] >= GROUP_BYTES
        assert offsets[2 * layer] == aligned(end, GROUP_ALIGNMENT if begins else FRAME_ALIGNMENT)
        groups += [layer] if begins else []
    assert groups == [0, 2, 3]
    for number in range(0, form.blocks, 2):
        assert offsets[number + 1] == aligned(offsets[number] + lengths[number])
    assert head.layers_span(range(2, 4)) == (offsets[4], offsets[7] + 1)


@pytest.mark.parametrize(
    ("offset", "value", "name"),
    [
        (0, b"KVOG", "not a frame"),
        (4, b"\x02", "container version"),
        (5, b"\x02", "codec revision"),
        (6, b"\x12\x00", "unknown codec"),
        (6, b"\x01\x00", "unknown codec"),
        (8, b"\x00", "dtype"),
        (8, b"\x17", "dtype"),
        (9, b"\x04", "kind"),
        (9, b"\x01", "directory entries"),
        (10, b"\x00", None),
        (10, b"\x02", "flags"),
        (10, b"\x05", "flags"),
        (10, b"\x09", "flags"),
        (11, b"\xcd", "flags"),
        (11, b"\x78", "order 120"),
        (12, b"\x00\x00", "layers"),
        (14, b"\x00\x00", "kv_heads"),
        (16, b"\x00\x00", "head_dim"),
        (18, b"\x53\x00", "step_index"),
        (20, bytes(4), "tokens"),
        (20, b"\xff\xff\xff\xff", "tokens"),
        (28, b"\x01", "rope id"),
        (48, b"\x01", "profile"),
        (112, b"\x01", "certificate"),
        (120, b"\x05", "directory entries"),
        (120, b"\xff\xff\xff\xff", "directory entries"),
    ],
)  # fmt: skip
def test_a_header_that_no_writer_makes_is_refused_by_name(offset: int, value: bytes, name: str | None) -> None:
    frame = packed(SMALL_HEAD)
    frame[offset : offset + len(value)] = value
    resealed(frame)
    if name is None:  # keys may be held before rotary position embedding
        assert not parse_tensor_frame(memoryview(frame), SMALL_HEAD.frame_bytes).is_post_rope
        return
    with pytest.raises(FrameCorruptError, match=name):
        parse_tensor_frame(memoryview(frame), SMALL_HEAD.frame_bytes)


@pytest.mark.parametrize(
    ("codec", "offset", "value", "name"),
    [
        ("eq4", 18, b"\x00\x10", "step_index"),
        ("eq4", 10, b"\x01", "flags"),
        ("eq4", 10, b"\x07", "flags"),
        ("eq4", 48, b"\x01", "profile"),
        ("eq4", 112, b"\x00\x80", "zero to infinity"),
        ("eq4", 118, b"\x81\x7f", "zero to infinity"),
        ("ek", 48, bytes(32), "profile"),
        ("f8", 10, b"\x03", "flags"),
        ("h4", 18, b"\x01", "step_index"),
    ],
)  # fmt: skip
def test_what_a_codec_does_not_say_is_refused_by_name(codec: str, offset: int, value: bytes, name: str) -> None:
    head = head_of(SMALL, SMALL_LENGTHS, codec)
    frame = packed(head)
    parse_tensor_frame(memoryview(frame), head.frame_bytes)
    frame[offset : offset + len(value)] = value
    with pytest.raises(FrameCorruptError, match=name):
        parse_tensor_frame(memoryview(resealed(frame)), head.frame_bytes)


@pytest.mark.parametrize(("kind", "offset"), [("v", 112), ("v", 114), ("k", 116), ("mla", 118)])
def test_a_certificate_for_a_side_that_there_is_not_is_refused(kind: str, offset: int) -> None:
    form = TensorForm(kind, "bf16", 1, 1, 8, 4)  # type: ignore[arg-type]
    head = head_of(form, [8], "f8")
    frame = packed(head)
    frame[offset + 1] = 0x3F
    with pytest.raises(FrameCorruptError, match="certificate"):
        parse_tensor_frame(memoryview(resealed(frame)), head.frame_bytes)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        (0, 0), (0, 2), (1, 0), (1, 513), (1, 512), (1, 1 << 31), (1, 1 << 31 | 100), (1, 1 << 31 | 513),
        (3, 3), (4, 513), (4, 512), (16, 510), (16, 512), (16, (1 << 31) - 1),
    ],
)  # fmt: skip
def test_a_directory_that_no_writer_makes_is_refused(word: int, value: int) -> None:
    frame = packed(SMALL_HEAD)
    assert struct.unpack_from("<3I", frame, HEADER_BYTES) == (1, 100, 0x1000)
    struct.pack_into("<I", frame, HEADER_BYTES + 4 * word, value)
    with pytest.raises(FrameCorruptError, match="directory"):
        parse_tensor_frame(memoryview(frame), SMALL_HEAD.frame_bytes)


@pytest.mark.parametrize("difference", [-1, 1, FRAME_ALIGNMENT, GROUP_ALIGNMENT])
def test_a_frame_of_another_length_than_its_blocks_is_refused(difference: int) -> None:
    with pytest.raises(FrameCorruptError, match="directory"):
        parse_tensor_frame(memoryview(packed(SMALL_HEAD)), SMALL_HEAD.frame_bytes + difference)


def test_padding_behind_the_directory_that_is_not_zero_is_refused() -> None:
    frame = packed(SMALL_HEAD)
    frame[tensor_head_bytes(SMALL)] = 1
    with pytest.raises(FrameCorruptError, match="padding"):
        parse_tensor_frame(memoryview(frame), SMALL_HEAD.frame_bytes)


@given(cut=st.integers(0, tensor_head_bytes(SMALL) - 1))
def test_a_head_cut_short_is_refused(cut: int) -> None:
    with pytest.raises(FrameCorruptError, match="shorter"):
        parse_tensor_frame(memoryview(packed(SMALL_HEAD))[:cut], SMALL_HEAD.frame_bytes)


@given(at=st.integers(0, 8 * tensor_head_bytes(SMALL) - 1))
def test_a_flipped_bit_in_a_head_is_refused_or_fails_a_checksum(at: int) -> None:
    frame = packed(SMALL_HEAD)
    frame[at // 8] ^= 1 << at % 8
    try:
        found = parse_tensor_frame(memoryview(frame), SMALL_HEAD.frame_bytes)
    except FrameCorruptError:
        return
    differs = [(one, other) for one, other in zip(found.blocks, SMALL_HEAD.blocks, strict=True) if one != other]
    ((one, other),) = differs  # whose checksum is another, or is no longer of as many bytes
    assert (one.crc, one.length) != (other.crc, other.length)
    assert (one.offset, one.is_raw) == (other.offset, other.is_raw)
    assert replace(found, blocks=SMALL_HEAD.blocks) == SMALL_HEAD


@given(
    body=st.binary(min_size=116, max_size=116),
    fields=st.tuples(st.sampled_from([0x10, 0x30, 0x40]), st.integers(0x10, 0x16), st.integers(0, 3)),
    directory=st.binary(max_size=240),
)
def test_any_bytes_under_a_right_checksum_are_a_frame_or_corrupt(
    body: bytes, fields: tuple[int, int, int], directory: bytes
) -> None:
    codec, dtype, kind = fields
    header = b"KVOF\x01\x01" + bytes([codec, 0, dtype, kind]) + body[:114]
    frame = resealed(bytearray(header + bytes(4) + directory))
    try:
        parse_tensor_frame(memoryview(frame), 1 << 20)
    except FrameCorruptError:
        return
    raise AssertionError("chance made a canonical frame")


def test_the_largest_head_is_no_longer_than_that_of_a_raw_frame() -> None:
    form = TensorForm("kv", "bf16", MAX_BLOCKS // 2, 1, 8, 4)
    assert form_refusal(form) is None
    assert aligned(tensor_head_bytes(form)) <= MAX_HEAD_BYTES
    assert form_refusal(replace(form, layers=form.layers + 1)) is not None


@pytest.mark.parametrize("change", [{"kv_heads": 1 << 16}, {"head_dim": 1 << 16}, {"tokens": 1 << 20, "head_dim": 64}])
def test_a_form_too_large_for_a_header_is_refused_before_anything_is_written(change: dict[str, int]) -> None:
    form = replace(SMALL, **change)  # type: ignore[arg-type]
    assert form_refusal(form) is not None
    frame = bytearray(b"\xff" * 1024)
    with pytest.raises(ValueError, match="tensor frame has"):
        write_tensor_head(memoryview(frame), replace(SMALL_HEAD, form=form))
    assert frame == b"\xff" * 1024


def test_tiers_read_a_tensor_frame_as_they_read_any() -> None:
    frame = packed(SMALL_HEAD)
    header = parse_frame(memoryview(frame), SMALL_HEAD.frame_bytes)
    assert header.tensor == SMALL_HEAD
    assert has_header(memoryview(frame))
    assert (header.codec, header.digest, header.frame_bytes) == ("x3", DIGEST, SMALL_HEAD.frame_bytes)
    assert (header.head_bytes, header.payload_offset) == (tensor_head_bytes(SMALL), SMALL_HEAD.blocks[0].offset)
    assert header.plain_bytes == SMALL.plain_bytes
    for number, block in enumerate(SMALL_HEAD.blocks):
        found = (header.offset(number), header.length(number), header.crc(number), header.is_raw(number))
        assert found == (block.offset, block.length, block.crc, block.is_raw)
        assert header.blocks_over(block.offset, block.offset + block.length) == range(number, number + 1)
    with pytest.raises(ValueError, match="no range"):
        header.plain_span(0)
    with pytest.raises(ValueError, match="no range"):
        header.blocks_for(0, 1)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_preset_is_a_codec_at_a_step(preset: str) -> None:
    name = CodecName.parse(preset)
    assert str(name) == PRESETS[preset]
    assert CodecName.from_header(name.kind.number, name.step_index) == name


@pytest.mark.parametrize(
    "name", ["raw", "zp", "eq", "x3:1/0", "eq:0/0", "eq:4096/0", "eq:83", "eq:083/0", "eq:83/16", "eq:83/01", ""]
)
def test_what_is_no_codec_has_no_name(name: str) -> None:
    with pytest.raises(ValueError, match="unknown tensor codec"):
        CodecName.parse(name)


@given(value=st.floats(0, 3.3e38))
def test_a_certificate_rounds_up_to_the_next_bf16(value: float) -> None:
    stored = Certificate.unpack(Certificate(max_error_k=value).pack()).max_error_k
    assert stored >= value
    (bits,) = struct.unpack("<H", Certificate(max_error_k=value).pack()[:2])
    if bits:
        assert struct.unpack(">f", struct.pack(">I", bits - 1 << 16))[0] < value
    assert Certificate(max_error_k=stored).pack() == Certificate(max_error_k=value).pack()


@pytest.mark.parametrize("value", [math.inf, math.nan, 3.4e38])
def test_what_no_bf16_bounds_is_infinite(value: float) -> None:
    assert Certificate.unpack(Certificate(value).pack()).max_error_k == math.inf


@given(steps=st.lists(st.tuples(*[st.floats(0, 100, width=32)] * 3), max_size=4))
def test_a_rung_adds_to_what_the_certificate_before_stored(steps: list[tuple[float, float, float]]) -> None:
    errors = [BlockError(largest, error, before) for largest, error, before in steps]
    base = Certificate().after(errors, [])
    again = base.after(errors, [])
    assert base == Certificate.unpack(base.pack())
    assert again.max_error_k >= base.max_error_k + max((error.max_error for error in errors), default=0.0)
    assert again.relative_l2_k >= base.relative_l2_k
    assert (again.max_error_v, again.relative_l2_v) == (0.0, 0.0)
    error_square, before_square = (
        sum(error.error_square for error in errors),
        sum(error.before_square for error in errors),
    )
    if before_square:
        assert base.relative_l2_k >= math.sqrt(error_square / before_square)
    elif error_square:
        assert base.relative_l2_k == math.inf


@given(content=st.binary(max_size=600), previous=st.binary(max_size=20))
def test_the_checksum_is_that_of_the_server_with_and_without_kernels(content: bytes, previous: bytes) -> None:
    before = crc32c(memoryview(previous))
    expected = crc32c(memoryview(content), before)
    assert checksums.crc32c_by_table(memoryview(content), before) == expected
    assert checksums.crc32c(memoryview(content), before) == expected
