"""Frames coded on a device are those that the CPU makes, byte for byte; over host memory in a GPU's place, by the same kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Final

import pytest
from device_world import MIB, DeviceWorld
from tensor_cases import CASES, TensorCase

from kvobj.errors import FrameCorruptError, InvalidRequestError, KvobjError
from kvobj.gpu.codec_copies import ChunkToEncode, FrameToDecode
from kvobj.gpu.host_device import HostDevice
from kvobj.gpu.pool import DevicePin
from kvobj.tensors.codecs import (
    LOSSLESS,
    LOSSY,
    TensorForm,
    decode_frame,
    encode_bound,
    encode_frame,
    parse_tensor_frame,
    refusal,
    unavailable,
)
from kvobj.tensors.frame import TensorFrame, tensor_frame_bound

CODECS: Final = sorted(codec for codec in LOSSLESS | LOSSY if codec != "ek" and unavailable(codec) is None)


def a_world(*, hashes_there: bool | None = None) -> DeviceWorld:
    return DeviceWorld(HostDevice(256 * MIB), capacity_bytes=128 * MIB, batch_bytes=MIB, hashes_there=hashes_there)


@pytest.fixture
def world() -> Iterator[DeviceWorld]:
    with a_world() as made:
        yield made


def on_cpu(plain: bytes, form: TensorForm, codec: str) -> memoryview:
    """The frame that the CPU's container makes."""
    room = memoryview(bytearray(encode_bound(codec, form)))
    return room[: encode_frame(memoryview(plain), room, codec=codec, form=form, first_position=64)]


def decoded_on_cpu(frame: memoryview, head: TensorFrame) -> bytes:
    into = memoryview(bytearray(head.plain_bytes))
    decode_frame(frame, head, into)
    return bytes(into)


def to_encode(pin: DevicePin, form: TensorForm, codec: str, *, digest: bytes | None = None) -> ChunkToEncode:
    room = memoryview(bytearray(tensor_frame_bound(form)))
    return ChunkToEncode(pin.address, form, codec, room, digest=digest, first_position=64)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", CASES)
async def test_a_frame_made_on_the_device_is_the_frame_made_on_the_cpu(
    world: DeviceWorld, codec: str, name: str
) -> None:
    case = CASES[name]
    if refusal(codec, case.form) is not None:
        with pytest.raises(InvalidRequestError):
            await world.codecs.encode([to_encode(world.room(case.form.plain_bytes), case.form, codec)])
        return
    plain = case.make(case.form)
    expected = on_cpu(plain, case.form, codec)
    pin = world.put(plain)
    chunk = to_encode(pin, case.form, codec)
    (length,) = await world.codecs.encode([chunk])
    assert chunk.into[:length] == expected
    head = parse_tensor_frame(expected, length)
    into = world.room(head.plain_bytes)
    assert await world.codecs.decode([FrameToDecode(expected, head, into.address)]) == [None]
    assert ctypes.string_at(into.address, head.plain_bytes) == decoded_on_cpu(expected, head)


def _some(names: tuple[str, ...]) -> list[TensorCase]:
    return [CASES[name] for name in names]


@pytest.mark.parametrize("codec", CODECS)
async def test_chunks_of_many_forms_go_together(world: DeviceWorld, codec: str) -> None:
    cases = [
        case for case in _some(("kv", "kv-paged", "kv", "k-odd", "mla", "kv")) if refusal(codec, case.form) is None
    ]
    plains = [case.make(case.form) for case in cases]
    frames = [on_cpu(plain, case.form, codec) for plain, case in zip(plains, cases, strict=True)]
    chunks = [to_encode(world.put(plain), case.form, codec) for plain, case in zip(plains, cases, strict=True)]
    lengths = await world.codecs.encode(chunks)
    assert [bytes(chunk.into[:length]) for chunk, length in zip(chunks, lengths, strict=True)] == frames
    heads = [parse_tensor_frame(frame, len(frame)) for frame in frames]
    pins = [world.room(head.plain_bytes) for head in heads]
    wanted = [FrameToDecode(f, h, p.address) for f, h, p in zip(frames, heads, pins, strict=True)]
    assert await world.codecs.decode(wanted) == [None] * len(cases)
    for frame, head, pin in zip(frames, heads, pins, strict=True):
        assert ctypes.string_at(pin.address, head.plain_bytes) == decoded_on_cpu(frame, head)


@pytest.mark.parametrize("codec", CODECS)
async def test_a_frame_that_lies_on_the_device_is_decoded_where_it_is(world: DeviceWorld, codec: str) -> None:
    case = CASES["kv-paged"]
    frame = on_cpu(case.make(case.form), case.form, codec)
    head = parse_tensor_frame(frame, len(frame))
    lying, into = world.put(bytes(frame)), world.room(head.plain_bytes)
    assert await world.codecs.decode([FrameToDecode(None, head, into.address, at=lying.address)]) == [None]
    assert ctypes.string_at(into.address, head.plain_bytes) == decoded_on_cpu(frame, head)


@pytest.mark.parametrize("codec", CODECS)
async def test_a_corrupt_frame_is_named_and_its_neighbours_are_decoded(world: DeviceWorld, codec: str) -> None:
    case = CASES["kv"]
    frame = on_cpu(case.make(case.form), case.form, codec)
    head = parse_tensor_frame(frame, len(frame))
    bad = memoryview(bytearray(frame))
    at = head.blocks[1].offset + head.blocks[1].length // 2
    bad[at] ^= 0x10
    pins = [world.room(head.plain_bytes) for _ in range(3)]
    answers = await world.codecs.decode(
        [FrameToDecode(each, head, pin.address) for each, pin in zip((frame, bad, frame), pins, strict=True)]
    )
    assert [answer is None for answer in answers] == [True, False, True]
    assert isinstance(answers[1], FrameCorruptError)
    for pin in (pins[0], pins[2]):
        assert ctypes.string_at(pin.address, head.plain_bytes) == decoded_on_cpu(frame, head)


@pytest.mark.parametrize("codec", CODECS)
async def test_bytes_that_are_no_block_touch_nothing_else(world: DeviceWorld, codec: str) -> None:
    """Unchecked, as what lies on a device is: whatever the bytes are, only the chunk's own memory is written."""
    case = CASES["kv"]
    frame = on_cpu(case.make(case.form), case.form, codec)
    head = parse_tensor_frame(frame, len(frame))
    bad = memoryview(bytearray(frame))
    for block in head.blocks:
        bad[block.offset : block.offset + block.length] = bytes(
            (7 * i + block.offset) & 0xFF for i in range(block.length)
        )
    into = world.room(head.plain_bytes + 1024)
    ctypes.memset(into.address, 0xA5, head.plain_bytes + 1024)
    answers = await world.codecs.decode([FrameToDecode(bad, head, into.address + 512, is_checked=True)])
    assert answers[0] is None or isinstance(answers[0], FrameCorruptError)
    assert ctypes.string_at(into.address, 512) == b"\xa5" * 512
    assert ctypes.string_at(into.address + 512 + head.plain_bytes, 512) == b"\xa5" * 512


@pytest.mark.parametrize("codec", sorted(LOSSLESS & set(CODECS)))
async def test_a_digest_that_is_known_spares_the_plain_bytes_their_way(world: DeviceWorld, codec: str) -> None:
    case = CASES["kv"]
    plain = case.make(case.form)
    expected = on_cpu(plain, case.form, codec)
    chunk = to_encode(world.put(plain), case.form, codec, digest=parse_tensor_frame(expected, len(expected)).digest)
    (length,) = await world.codecs.encode([chunk])
    assert chunk.into[:length] == expected


@pytest.mark.parametrize("codec", CODECS)
async def test_digests_taken_on_the_device_are_the_same(codec: str) -> None:
    with a_world(hashes_there=True) as world:
        cases = [case for case in _some(("kv", "kv-paged", "kv-transposed")) if refusal(codec, case.form) is None]
        plains = [case.make(case.form) for case in cases]
        chunks = [to_encode(world.put(plain), case.form, codec) for plain, case in zip(plains, cases, strict=True)]
        lengths = await world.codecs.encode(chunks)
        for chunk, length, plain, case in zip(chunks, lengths, plains, cases, strict=True):
            assert chunk.into[:length] == on_cpu(plain, case.form, codec)


async def test_room_that_is_too_small_is_refused_before_anything_is_done(world: DeviceWorld) -> None:
    case = CASES["kv"]
    pin = world.room(case.form.plain_bytes)
    with pytest.raises(ValueError, match="of room"):
        await world.codecs.encode([ChunkToEncode(pin.address, case.form, CODECS[0], memoryview(bytearray(100)))])
    with pytest.raises(ValueError, match="unknown tensor codec"):
        await world.codecs.encode([to_encode(pin, case.form, "no-such-codec")])
    with pytest.raises((InvalidRequestError, KvobjError)):
        await world.codecs.encode([to_encode(pin, case.form, "ek")])
