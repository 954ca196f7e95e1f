"""Tensor frames whole: what every codec owes through the container, for every form, order and content."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from kvobj.codec.checksums import crc32c
from kvobj.codec.frame import parse_frame
from kvobj.errors import FrameCorruptError, InvalidRequestError
from kvobj.tensors.codecs import (
    LOSSLESS,
    LOSSY,
    TensorFrame,
    decode_frame,
    decode_layers,
    demote,
    encode_bound,
    encode_frame,
    parse_tensor_frame,
    refusal,
    unavailable,
)
from kvobj.tensors.form import AXES, ELEMENT_BYTES, ORDERS, Dtype, Kind, TensorForm
from kvobj.tensors.frame import RAW_FLAG, tensor_frame_bound, write_tensor_head

EXACT = sorted(LOSSLESS)
ROUNDED = sorted(LOSSY - {"ek"})  # `ek` needs a profile: test_ek.py
LADDER = ["eq57", "eq4", "eq:83/2"]
KINDS: list[Kind] = ["kv", "k", "v", "mla"]
DTYPES: list[Dtype] = ["bf16", "fp16", "fp32", "fp8_e4m3", "fp8_e5m2", "int8", "uint8"]
FLOATS: list[Dtype] = ["bf16", "fp16"]
USUAL = TensorForm("kv", "bf16", layers=3, kv_heads=2, head_dim=64, tokens=96)
ENGINE_ORDERS = [AXES, ("layer", "kv", "token", "head", "dim"), ("kv", "layer", "token", "head", "dim"), ORDERS[119]]

Words = npt.NDArray[np.uint16]


def words_of(values: npt.NDArray[np.float64]) -> Words:
    """bf16 nearest to the values."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def values_of(words: Words, dtype: str) -> npt.NDArray[np.float64]:
    if dtype == "fp16":
        return words.view(np.float16).astype(np.float64)
    return (words.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def plain_of(form: TensorForm, *, seed: int = 1) -> bytes:
    """A tensor such as models make, in the form's order: Gaussian channels of unequal size, a few of them off centre, a first token
    unlike the rest."""
    random = np.random.default_rng(seed)
    sizes = [form.sizes[axis] for axis in AXES]
    values = random.standard_normal(sizes) * np.exp(random.standard_normal((*sizes[:3], 1, sizes[4])) / 2)
    values += 8 * (random.random((*sizes[:3], 1, sizes[4])) < 0.1)
    values[:, :, :, 0] *= 4
    if ELEMENT_BYTES[form.dtype] == 1:
        typed: npt.NDArray[np.generic] = (values * 20).astype(np.int8)
    elif form.dtype == "fp32":
        typed = values.astype(np.float32)
    else:
        typed = values.astype(np.float16) if form.dtype == "fp16" else words_of(values)
    return typed.transpose([AXES.index(axis) for axis in form.order]).tobytes()


def axes_of(plain: bytes | bytearray, form: TensorForm) -> npt.NDArray[np.unsignedinteger]:
    """The plain bytes as an array whose axes are in the order of `AXES`, over the same memory."""
    words = np.frombuffer(plain, np.dtype(f"u{form.element_bytes}")).reshape(form.shape)
    return words.transpose([form.order.index(axis) for axis in AXES])


def encoded(plain: bytes | bytearray | memoryview, codec: str, form: TensorForm, **others: object) -> bytes:
    into = memoryview(bytearray(b"\xaa" * encode_bound(codec, form)))
    size_bytes = encode_frame(memoryview(plain), into, codec=codec, form=form, **others)  # type: ignore[arg-type]
    assert size_bytes <= tensor_frame_bound(form)
    return bytes(into[:size_bytes])


def head_of(frame: bytes) -> TensorFrame:
    return parse_tensor_frame(memoryview(frame), len(frame))


def decoded(frame: bytes) -> bytes:
    head = head_of(frame)
    plain = bytearray(b"\x55" * head.plain_bytes)
    decode_frame(memoryview(frame), head, memoryview(plain))
    return bytes(plain)


def check_certificate(frame: bytes, plain: bytes, after: bytes) -> None:
    """The certificate holds for every value, and does not overstate the error without bound."""
    head = head_of(frame)
    form, certificate = head.form, head.certificate
    before_values = values_of(axes_of(plain, form).astype(np.uint16), form.dtype)
    after_values = values_of(axes_of(after, form).astype(np.uint16), form.dtype)
    bounds = [
        (certificate.max_error_k, certificate.relative_l2_k),
        (certificate.max_error_v, certificate.relative_l2_v),
    ]
    if form.kind == "v":
        bounds.reverse()
    for kind in range(form.kinds):
        before, error = before_values[:, kind], after_values[:, kind] - before_values[:, kind]
        largest, relative = float(np.abs(error).max()), float(np.linalg.norm(error) / np.linalg.norm(before))
        assert largest <= bounds[kind][0]
        assert relative <= bounds[kind][1]
        if not any(block.is_raw for block in head.blocks):  # those are counted as if they had been coded
            assert bounds[kind][1] <= 4 * relative + 0.01


@st.composite
def forms(draw: st.DrawFn, dtypes: list[Dtype]) -> TensorForm:
    kind = draw(st.sampled_from(KINDS))
    return TensorForm(
        kind,
        draw(st.sampled_from(dtypes)),
        layers=draw(st.integers(1, 3)),
        kv_heads=1 if kind == "mla" else draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from([1, 2, 31, 32, 33, 64, 80, 128, 576])),
        tokens=draw(st.integers(1, 70)),
        order=draw(st.sampled_from(ORDERS)),
    )


@pytest.mark.parametrize("codec", EXACT)
@settings(max_examples=30)
@given(form=forms(DTYPES), seed=st.integers(0, 2**32), noise=st.sampled_from(["model", "bits", "zeros", "one"]))
def test_a_lossless_codec_gives_back_every_bit_of_every_form_that_it_takes(
    codec: str, form: TensorForm, seed: int, noise: str
) -> None:
    if refusal(codec, form) is not None:
        assert codec == "x3"
        assert form.dtype in {"fp32", "int8", "uint8"}
        return
    random = np.random.default_rng(seed)
    plain = bytearray(plain_of(form, seed=seed) if noise != "zeros" else form.plain_bytes)
    if noise == "bits":
        plain[:] = random.bytes(len(plain))
    elif noise == "one":
        plain[random.integers(len(plain))] ^= 0xFF
    frame = encoded(plain, codec, form)
    assert decoded(frame) == plain
    head = head_of(frame)
    assert (head.codec, head.form, head.digest) == (codec, form, blake3(plain).digest())
    assert parse_frame(memoryview(frame), len(frame)).tensor == head
    assert encoded(plain, codec, form, digest=head.digest) == frame


@pytest.mark.parametrize("codec", EXACT)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_lossless_codec_gives_back_all_patterns_of_two_bytes(codec: str, dtype: Dtype) -> None:
    form = TensorForm("k", dtype, 1, 2, 128, 256)
    patterns = np.random.default_rng(3).permutation(2**16).astype(np.uint16).tobytes()
    assert decoded(encoded(patterns, codec, form)) == patterns


@pytest.mark.parametrize("codec", EXACT)
def test_a_lossless_codec_gains_what_it_is_for(codec: str) -> None:
    form = replace(USUAL, kv_heads=8, head_dim=128, tokens=256)
    frame = encoded(plain_of(form), codec, form)
    assert form.plain_bytes / len(frame) >= {"x3": 1.39, "xa": 1.45}[codec]


@pytest.mark.parametrize("codec", ROUNDED)
@settings(max_examples=30)
@given(form=forms(FLOATS), seed=st.integers(0, 2**32))
def test_a_lossy_frame_decodes_to_its_digest_within_its_certificate(codec: str, form: TensorForm, seed: int) -> None:
    plain = plain_of(form, seed=seed)
    if refusal(codec, form) is not None:
        with pytest.raises(InvalidRequestError):
            encoded(plain, codec, form)
        return
    frame = encoded(plain, codec, form)
    after = decoded(frame)
    assert blake3(after).digest() == head_of(frame).digest
    check_certificate(frame, plain, after)


@pytest.mark.parametrize("codec", ROUNDED)
def test_a_lossy_codec_takes_the_forms_of_models(codec: str) -> None:
    for dim in (32, 64, 128, 256):
        form = replace(USUAL, head_dim=dim)
        assert refusal(codec, form) is None
        assert not any(block.is_raw for block in head_of(encoded(plain_of(form), codec, form)).blocks)


@pytest.mark.parametrize("codec", ROUNDED)
def test_a_lossy_codec_refuses_dtypes_that_have_no_error_to_bound(codec: str) -> None:
    for dtype in DTYPES[2:]:
        form = replace(USUAL, dtype=dtype)
        assert refusal(codec, form) is not None
        with pytest.raises(InvalidRequestError, match=codec):
            encoded(bytes(form.plain_bytes), codec, form)


@pytest.mark.parametrize("codec", ROUNDED)
@pytest.mark.parametrize("pattern", [0x7F80, 0xFF80, 0x7FC0, 0xFF81])
@pytest.mark.parametrize("order", ENGINE_ORDERS)
def test_a_block_that_is_not_finite_is_kept_as_it_is_and_the_others_coded(
    codec: str, pattern: int, order: tuple[str, ...]
) -> None:
    form = replace(USUAL, order=order)
    plain = bytearray(plain_of(form))
    layer, kind = 1, 0
    axes_of(plain, form)[layer, kind, 1, 40, 7] = pattern
    frame = encoded(plain, codec, form)
    after = decoded(frame)
    assert [number for number, entry in enumerate(head_of(frame).blocks) if entry.is_raw] == [layer * 2 + kind]
    assert np.array_equal(axes_of(after, form)[layer, kind], axes_of(bytes(plain), form)[layer, kind])
    assert blake3(after).digest() == head_of(frame).digest


@pytest.mark.parametrize("codec", [*EXACT, *ROUNDED])
def test_the_declared_order_changes_the_header_and_not_the_blocks(codec: str) -> None:
    blocks = set()
    for order in ENGINE_ORDERS:
        form = replace(USUAL, order=order)
        frame = encoded(plain_of(form), codec, form)
        head = head_of(frame)
        blocks.add(frame[head.blocks[0].offset :])
        assert head.form.order == order
    assert len(blocks) == 1


@pytest.mark.parametrize("codec", [*EXACT, *ROUNDED])
@pytest.mark.parametrize("order", ENGINE_ORDERS)
def test_layers_are_decoded_from_their_own_bytes_alone(codec: str, order: tuple[str, ...]) -> None:
    form = replace(USUAL, order=order)
    frame = encoded(plain_of(form), codec, form)
    head, whole = head_of(frame), decoded(frame)
    for first in range(form.layers):
        for last in range(first, form.layers):
            layers = range(first, last + 1)
            start, stop = head.layers_span(layers)
            plain = bytearray(form.layers_only(layers).plain_bytes)
            decode_layers(memoryview(frame)[start:stop], head, layers, memoryview(plain), offset=start)
            assert plain == b"".join(whole[slice(*span)] for span in form.layer_spans(first, last))


@pytest.mark.parametrize("codec", [*EXACT, *ROUNDED])
@pytest.mark.parametrize("shift", [1, 2, 8])
def test_buffers_may_lie_anywhere(codec: str, shift: int) -> None:
    plain = plain_of(USUAL)
    frame = encoded(plain, codec, USUAL)
    moved = memoryview(bytearray(shift) + plain)[shift:]
    into = memoryview(bytearray(encode_bound(codec, USUAL) + shift))[shift:]
    size_bytes = encode_frame(moved, into, codec=codec, form=USUAL)
    assert into[:size_bytes] == frame
    head, after = head_of(frame), memoryview(bytearray(USUAL.plain_bytes + shift))[shift:]
    decode_frame(into[:size_bytes], head, after)
    assert after == decoded(frame)


@pytest.mark.parametrize("codec", [*EXACT, *ROUNDED])
def test_threads_encode_and_decode_side_by_side(codec: str) -> None:
    plains = [plain_of(USUAL, seed=seed) for seed in range(8)]
    expected = [encoded(plain, codec, USUAL) for plain in plains]
    after = [decoded(frame) for frame in expected]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            assert list(pool.map(lambda plain: encoded(plain, codec, USUAL), plains)) == expected
            assert list(pool.map(decoded, expected)) == after


@pytest.mark.parametrize("codec", [*EXACT, *ROUNDED])
def test_every_byte_of_every_block_is_under_its_checksum(codec: str) -> None:
    frame = bytearray(encoded(plain_of(USUAL), codec, USUAL))
    head = head_of(bytes(frame))
    into = memoryview(bytearray(USUAL.plain_bytes))
    for block in head.blocks:
        for at in (block.offset, block.offset + block.length // 2, block.offset + block.length - 1):
            frame[at] ^= 4
            with pytest.raises(FrameCorruptError, match="checksum"):
                decode_frame(memoryview(frame), head, into)
            frame[at] ^= 4
    decode_frame(memoryview(frame), head, into)


@pytest.mark.parametrize("codec", [*EXACT, *ROUNDED])
def test_gaps_between_blocks_are_zero(codec: str) -> None:
    frame = encoded(plain_of(USUAL), codec, USUAL)
    ends = [head_of(frame).blocks[0].offset]
    for block in head_of(frame).blocks:
        assert not any(frame[ends[-1] : block.offset])
        ends.append(block.offset + block.length)
    assert ends[-1] == len(frame)


@pytest.mark.parametrize("codec", [*EXACT, *ROUNDED])
def test_a_frame_cut_short_does_not_decode(codec: str) -> None:
    frame = encoded(plain_of(USUAL), codec, USUAL)
    head = head_of(frame)
    for size_bytes in (len(frame) - 1, head.blocks[-1].offset, head.head_bytes, 0):
        with pytest.raises(FrameCorruptError):
            decode_frame(memoryview(frame)[:size_bytes], head, memoryview(bytearray(USUAL.plain_bytes)))


@pytest.mark.parametrize("codec", [*EXACT, *ROUNDED])
@settings(max_examples=60)
@given(data=st.data())
def test_a_block_that_is_wrong_under_a_right_checksum_is_corrupt_or_decodes_in_bounds(
    codec: str, data: st.DataObject
) -> None:
    frame, head = DAMAGED.setdefault(codec, _small(codec))
    number = data.draw(st.integers(0, len(head.blocks) - 1))
    block = head.blocks[number]
    changed = bytearray(frame)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(block.length, 400) - 1) | st.integers(0, block.length - 1))
        changed[block.offset + at] = data.draw(st.integers(0, 255))
    view = memoryview(changed)
    crc = crc32c(view[block.offset : block.offset + block.length])
    blocks = (*head.blocks[:number], replace(block, crc=crc), *head.blocks[number + 1 :])
    into = bytearray(head.plain_bytes)
    try:
        decode_frame(view, replace(head, blocks=blocks), memoryview(into))
    except FrameCorruptError:
        return
    assert len(into) == head.plain_bytes


DAMAGED: dict[str, tuple[bytes, TensorFrame]] = {}


def _small(codec: str) -> tuple[bytes, TensorFrame]:
    form = replace(USUAL, layers=1)
    frame = encoded(plain_of(form), codec, form)
    return frame, head_of(frame)


@pytest.mark.parametrize("codec", [*EXACT, *ROUNDED])
def test_a_block_that_claims_another_length_is_corrupt_or_decodes_in_bounds(codec: str) -> None:
    frame, head = _small(codec)
    for length in (1, 2, 15, 16, 63, 64, head.blocks[0].length - 1, head.blocks[0].length + 1):
        start = head.blocks[0].offset
        content = frame[start : start + length]
        block = replace(head.blocks[0], length=length, crc=crc32c(memoryview(content)))
        other = replace(head, blocks=(block, head.blocks[1]))
        with pytest.raises(FrameCorruptError):
            decode_frame(memoryview(frame), other, memoryview(bytearray(head.plain_bytes)))


def test_buffers_of_the_wrong_length_are_refused_before_anything_is_written() -> None:
    plain = plain_of(USUAL)
    room = bytearray(encode_bound("x3", USUAL))
    with pytest.raises(ValueError, match="plain bytes"):
        encode_frame(memoryview(plain)[:-1], memoryview(room), codec="x3", form=USUAL)
    with pytest.raises(ValueError, match="room"):
        encode_frame(memoryview(plain), memoryview(room)[:-1], codec="x3", form=USUAL)
    with pytest.raises(ValueError, match="room"):
        encode_frame(memoryview(plain), memoryview(bytes(room)), codec="x3", form=USUAL)
    assert not any(room)
    frame = encoded(plain, "x3", USUAL)
    for size_bytes in (USUAL.plain_bytes - 1, USUAL.plain_bytes + 1):
        with pytest.raises(ValueError, match="plain bytes"):
            decode_frame(memoryview(frame), head_of(frame), memoryview(bytearray(size_bytes)))
    with pytest.raises(ValueError, match="layers"):
        decode_layers(memoryview(frame), head_of(frame), range(2, 4), memoryview(room), offset=0)


def test_a_codec_that_does_not_exist_is_a_fault_of_the_caller() -> None:
    for call in (unavailable, lambda name: refusal(name, USUAL), lambda name: encode_bound(name, USUAL)):
        with pytest.raises(ValueError, match="unknown tensor codec"):
            call("zp")


@pytest.mark.parametrize(("codec", "form"), [("f8", replace(USUAL, dtype="fp32")), ("h4", replace(USUAL, head_dim=48))])
def test_a_frame_of_a_form_that_its_codec_does_not_write_is_corrupt(codec: str, form: TensorForm) -> None:
    frame = bytearray(encoded(plain_of(USUAL), codec, USUAL))
    blocks = tuple(replace(block, is_raw=False) for block in head_of(bytes(frame)).blocks)
    head = replace(head_of(bytes(frame)), form=form, blocks=blocks)
    with pytest.raises(FrameCorruptError, match="does not take"):
        decode_frame(memoryview(frame), head, memoryview(bytearray(form.plain_bytes)))


def test_a_profile_is_asked_for_where_a_codec_needs_one() -> None:
    with pytest.raises(InvalidRequestError, match="profile"):
        encoded(plain_of(USUAL), "ek", USUAL)


@pytest.mark.parametrize(("finer", "coarser"), [(0, 1), (1, 2), (0, 2)])
@settings(max_examples=15)
@given(form=forms(FLOATS[:1]), seed=st.integers(0, 2**32), special=st.booleans())
def test_demotion_gives_the_bytes_of_direct_coding(
    finer: int, coarser: int, form: TensorForm, seed: int, *, special: bool
) -> None:
    plain = bytearray(plain_of(form, seed=seed))
    if special:
        plain[-2:] = b"\x80\x7f"
    frame = encoded(plain, LADDER[finer], form, first_position=512, fingerprint=bytes(range(16)))
    into = memoryview(bytearray(encode_bound(LADDER[coarser], form)))
    size_bytes = demote(memoryview(frame), head_of(frame), into, codec=LADDER[coarser])
    direct = encoded(plain, LADDER[coarser], form, first_position=512, fingerprint=bytes(range(16)))
    assert into[:size_bytes] == direct
    if not special:
        check_certificate(direct, bytes(plain), decoded(direct))


@pytest.mark.parametrize(
    ("held", "wanted"),
    [("eq4", "eq57"), ("eq4", "eq4"), ("eq57", "eq3"), ("eq57", "f8"), ("x3", "eq4"), ("eq55", "eq4")],
)
def test_there_is_no_way_up_or_across_the_ladder(held: str, wanted: str) -> None:
    frame = encoded(plain_of(USUAL), held, USUAL)
    with pytest.raises(InvalidRequestError, match="not demoted"):
        demote(memoryview(frame), head_of(frame), memoryview(bytearray(encode_bound(wanted, USUAL))), codec=wanted)


def test_a_damaged_frame_is_not_demoted() -> None:
    frame = bytearray(encoded(plain_of(USUAL), "eq57", USUAL))
    head = head_of(bytes(frame))
    frame[head.blocks[2].offset] ^= 1
    with pytest.raises(FrameCorruptError, match="checksum"):
        demote(memoryview(frame), head, memoryview(bytearray(encode_bound("eq4", USUAL))), codec="eq4")


def test_a_header_can_be_written_again_from_what_was_read() -> None:
    frame = encoded(plain_of(USUAL), "x3", USUAL)
    head = head_of(frame)
    again = bytearray(frame)
    write_tensor_head(memoryview(again), head)
    assert again == frame
    assert all(block.length < RAW_FLAG for block in head.blocks)


WITHOUT_KERNELS = """
from kvobj.errors import UnavailableError
from kvobj.tensors.codecs import *
from kvobj.tensors.codecs import encode_frame
import sys
frame = memoryview(sys.stdin.buffer.read())
head = parse_tensor_frame(frame, len(frame))
print(head.codec, head.form.layers, head.digest.hex(), unavailable("x3"))
for call in (
    lambda: encode_frame(memoryview(bytes(head.plain_bytes)), memoryview(bytearray(1 << 20)), codec="x3", form=head.form),
    lambda: decode_frame(frame, head, memoryview(bytearray(head.plain_bytes))),
):
    try:
        call()
    except UnavailableError as error:
        print("unavailable", error)
"""


def test_without_kernels_frames_are_read_and_what_is_missing_is_said() -> None:
    frame = encoded(plain_of(USUAL), "x3", USUAL)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_KERNELS],
        input=frame,
        env={**os.environ, "KVOBJ_KERNELS": "off"},
        capture_output=True,
        timeout=60,
        check=True,
    )
    first, *rest = done.stdout.decode().splitlines()
    assert first.startswith(f"x3 3 {head_of(frame).digest.hex()} ")
    assert "KVOBJ_KERNELS" in first
    assert [line.split()[0] for line in rest] == ["unavailable", "unavailable"]
