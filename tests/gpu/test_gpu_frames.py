"""Frames of a GPU against the CPU's: shapes drawn at random, damaged bytes, frames with a profile, and the ladder of `eq`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Final, get_args

import bench_gpu
import numpy as np
import pytest
from kernel_blocks import words_of
from tensor_cases import CASES, profile_of, sparse_bits

from kvobj.gpu import open_device, status
from kvobj.gpu.codec_copies import ChunkToEncode, FrameToDecode
from kvobj.gpu.lane import Lane
from kvobj.tensors.codec_protocol import BlockToDemote, Coding, EncodedLength
from kvobj.tensors.codecs import decode_frame, encode_bound, encode_frame, parse_tensor_frame, refusal
from kvobj.tensors.eq import Eq
from kvobj.tensors.form import AXES, Dtype, TensorForm
from kvobj.tensors.frame import tensor_frame_bound
from kvobj.tensors.kernels.host_launcher import host_launcher
from kvobj.tensors.kernels.host_memory import address_of
from kvobj.tensors.kernels.launcher import Address, Launcher

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not status().is_usable, reason=f"needs an NVIDIA GPU with CuPy: {status().detail}"),
]
MIB: Final = 1 << 20
CODECS: Final = (*bench_gpu.CODECS, "eq:83/2", "eq:500/0")
DRAWN: Final = 12
"""Chunks a codec."""
LARGEST: Final = 4 * MIB


@pytest.fixture(scope="module")
def world() -> Iterator[bench_gpu.World]:
    world = bench_gpu.World(open_device(), 1024 * MIB)
    yield world
    world.close()


def drawn(chance: random.Random) -> tuple[TensorForm, bytes]:
    """A form of any shape, and values: bell-shaped with outliers, of few exponents, or noise of all bits."""
    axes = list(AXES)
    if chance.random() < 0.5:
        chance.shuffle(axes)
    kind = chance.choice(("kv", "kv", "k", "v", "mla"))
    form = TensorForm(
        kind,  # type: ignore[arg-type]
        chance.choice(get_args(Dtype)),
        layers=chance.randint(1, 3),
        kv_heads=1 if kind == "mla" else chance.choice((1, 1, 2, 3, 8)),
        head_dim=chance.choice((1, 8, 31, 32, 64, 80, 96, 128, 160, 256, 576)),
        tokens=chance.choice((1, 7, 16, 33, 64, 100, 257)),
        order=tuple(axes),
    )
    values = form.plain_bytes // form.element_bytes
    look = chance.random()
    if look < 0.2:
        return form, sparse_bits(form)
    spread = 0.1 if look < 0.4 else 1.5
    floats = [chance.gauss(0, 2 ** chance.gauss(0, spread)) for _ in range(min(values, 4099))]
    words = [element(value, form.dtype) for value in floats]
    return form, b"".join(words[at % len(words)] for at in range(values))


def element(value: float, dtype: str) -> bytes:
    import struct  # noqa: PLC0415 - only here

    match dtype:
        case "fp32":
            return struct.pack("<f", value)
        case "bf16":
            return struct.pack("<f", value)[2:]
        case "fp16":
            return struct.pack("<e", value)
        case _:
            return struct.pack("<e", value)[1:]


@pytest.mark.parametrize("codec", CODECS)
def test_frames_of_any_shape_are_the_cpus(world: bench_gpu.World, codec: str) -> None:
    chance = random.Random(codec)
    chunks: list[tuple[TensorForm, bytes]] = []
    while len(chunks) < DRAWN:
        form, plain = drawn(chance)
        if refusal(codec, form) is None and form.plain_bytes <= LARGEST:
            chunks.append((form, plain))
    frames = [bench_gpu.on_cpu(plain, form, codec) for form, plain in chunks]
    heads = [parse_tensor_frame(frame, len(frame)) for frame in frames]
    sources = [world.put(plain) for _, plain in chunks]
    rooms = [memoryview(bytearray(tensor_frame_bound(form))) for form, _ in chunks]
    work, lengths = world.codecs.begin_encode(
        [
            ChunkToEncode(pin.address, form, codec, room)
            for pin, (form, _), room in zip(sources, chunks, rooms, strict=True)
        ]
    )
    world.wait(work)
    for (form, _), frame, room, length in zip(chunks, frames, rooms, lengths(), strict=True):
        assert room[:length] == frame, form
    targets = [world.room(head.plain_bytes) for head in heads]
    work, answers = world.codecs.begin_decode(
        [FrameToDecode(f, h, t.address) for f, h, t in zip(frames, heads, targets, strict=True)]
    )
    world.wait(work)
    assert answers() == [None] * DRAWN
    for (form, plain), frame, head, target in zip(chunks, frames, heads, targets, strict=True):
        expected = memoryview(bytearray(head.plain_bytes))
        decode_frame(frame, head, expected)
        assert world.bytes_of(target, head.plain_bytes) == expected, form
        assert codec not in {"x3", "xa"} or expected == plain
    for pin in (*sources, *targets):
        pin.release()


@pytest.mark.parametrize("tokens", [256, 99])
@pytest.mark.parametrize("codec", ["eq57", "eq4", "eq3", "eq:83/2", "h4"])
def test_frames_with_sinks_and_outliers_are_the_cpus(world: bench_gpu.World, codec: str, tokens: int) -> None:
    """Guarded tokens and escapes, in heads of 128."""
    form = TensorForm("kv", "bf16", 2, 3, 128, tokens)
    chance = np.random.default_rng(tokens)
    values = chance.standard_normal((2, 2, 3, tokens, 128)).astype(np.float32)
    values *= np.exp(chance.standard_normal((2, 2, 3, 1, 128))).astype(np.float32)
    values[..., 0, :] *= 0.01
    values[..., 7, :] *= 30
    values[..., 64, 5] = 4000
    plain = words_of(values).tobytes()
    frame = bench_gpu.on_cpu(plain, form, codec)
    head = parse_tensor_frame(frame, len(frame))
    source, room = world.put(plain), memoryview(bytearray(tensor_frame_bound(form)))
    work, lengths = world.codecs.begin_encode([ChunkToEncode(source.address, form, codec, room)])
    world.wait(work)
    assert not any(block.is_raw for block in head.blocks)
    assert room[: lengths()[0]] == frame
    work, answers = world.codecs.begin_decode([FrameToDecode(frame, head, source.address)])
    world.wait(work)
    assert answers() == [None]
    expected = memoryview(bytearray(head.plain_bytes))
    decode_frame(frame, head, expected)
    assert world.bytes_of(source, head.plain_bytes) == expected
    source.release()


@pytest.mark.parametrize("codec", bench_gpu.CODECS)
def test_damaged_blocks_are_the_same_to_the_gpu_and_harm_nothing(world: bench_gpu.World, codec: str) -> None:
    """Checksums left aside: statuses, and bytes where these say that all is well."""
    case, chance = CASES["kv"], random.Random(codec)
    frame = bench_gpu.on_cpu(case.make(case.form), case.form, codec)
    head = parse_tensor_frame(frame, len(frame))
    fence = bytes([0xA5]) * 4096
    for _ in range(24):
        bad = bytearray(frame)
        for _ in range(chance.choice((1, 1, 3, 40))):
            block = chance.choice(head.blocks)
            bad[block.offset + chance.randrange(block.length)] ^= 1 << chance.randrange(8)
        lying = world.put(bytes(bad))
        target = world.put(fence + bytes(head.plain_bytes) + fence)
        asked = FrameToDecode(None, head, target.address + len(fence), at=lying.address)
        work, answers = world.codecs.begin_decode([asked])
        world.wait(work)
        seen = world.bytes_of(target, head.plain_bytes + 2 * len(fence))
        assert seen.startswith(fence)
        assert seen.endswith(fence)
        here = memoryview(bytearray(head.plain_bytes))
        is_good = decoded_without_checksums(memoryview(bad), head, here)
        assert (answers()[0] is None) == is_good
        if is_good:
            assert seen[len(fence) : -len(fence)] == here
        lying.release()
        target.release()


def decoded_without_checksums(frame: memoryview, head: object, into: memoryview) -> bool:
    """What the CPU makes of the blocks."""
    from kvobj.gpu import HostDevice  # noqa: PLC0415 - only here
    from kvobj.gpu.codec_copies import DeviceCodecs  # noqa: PLC0415 - only here

    device = HostDevice(64 * MIB)
    codecs = DeviceCodecs(device)
    try:
        asked = FrameToDecode(None, head, address_of(into), at=address_of(frame))  # type: ignore[arg-type]
        work, answers = codecs.begin_decode([asked])
        work.result(60)
        return answers()[0] is None
    finally:
        codecs.close()
        device.close()


@pytest.mark.parametrize("name", ["kv", "kv-paged", "k-odd", "fp16"])
def test_a_frame_with_a_profile_decodes_to_the_cpus_bytes(world: bench_gpu.World, name: str) -> None:
    case = CASES[name]
    if refusal("ek", case.form) is not None:
        pytest.skip("ek does not take this form")
    profile = profile_of(case.form)
    room = memoryview(bytearray(encode_bound("ek", case.form)))
    plain = case.make(case.form)
    frame = room[: encode_frame(memoryview(plain), room, codec="ek", form=case.form, profile=profile)]
    head = parse_tensor_frame(frame, len(frame))
    expected = memoryview(bytearray(head.plain_bytes))
    decode_frame(frame, head, expected, profile=profile)
    target = world.room(head.plain_bytes)
    work, answers = world.codecs.begin_decode([FrameToDecode(frame, head, target.address, profile=profile)])
    world.wait(work)
    assert answers() == [None]
    assert world.bytes_of(target, head.plain_bytes) == expected
    target.release()


def demoted(
    launcher: Launcher, frame: Address, frame_bytes: list[tuple[int, int]], form: TensorForm, room: Address
) -> list[EncodedLength | None]:
    """Blocks of an eq57 frame as blocks of eq4, each in a slot of `room`, what they decode to behind all slots."""
    slot = -(-form.block_bytes // 256) * 256
    blocks = [
        BlockToDemote(
            number, frame.after(offset), length, room.after(number * slot), room.after((form.blocks + number) * slot)
        )
        for number, (offset, length) in enumerate(frame_bytes)
    ]
    return Eq(83, 1).demote(launcher, Coding(form), "eq:83/0", blocks)


def test_the_ladder_gives_the_same_blocks(world: bench_gpu.World) -> None:
    form = TensorForm("kv", "bf16", 2, 4, 128, 96)
    chance = random.Random(3)
    plain = b"".join(element(chance.gauss(0, 1), "bf16") for _ in range(form.plain_bytes // 2))
    frame = bench_gpu.on_cpu(plain, form, "eq57")
    head = parse_tensor_frame(frame, len(frame))
    spans = [(block.offset, block.length) for block in head.blocks]
    assert not any(block.is_raw for block in head.blocks)
    size = 2 * form.blocks * -(-form.block_bytes // 256) * 256
    here = bytearray(size)
    aligned = bytearray(len(frame) + 256)
    shift = -int(address_of(memoryview(aligned))) % 256
    aligned[shift : shift + len(frame)] = frame
    spare = memoryview(bytearray(size + 256))
    start = -int(address_of(spare)) % 256
    expected = demoted(
        host_launcher(), address_of(memoryview(aligned)).after(shift), spans, form, address_of(spare).after(start)
    )
    here[:] = spare[start : start + size]
    lying, room = world.put(bytes(frame)), world.put(bytes(size))
    stream = world.device.new_stream()
    launcher, lane = world.device.launcher(stream), Lane(stream, name="test")
    found: list[EncodedLength | None] = []
    lane.submit(
        lambda _: found.extend(demoted(launcher, Address(lying.address), spans, form, Address(room.address))), 0
    ).result(120)
    lane.close()
    assert found == expected
    there = world.bytes_of(room, size)
    slot = -(-form.block_bytes // 256) * 256
    for number, length in enumerate(expected):
        assert length is not None
        at, decoded = number * slot, (form.blocks + number) * slot
        assert there[at : at + length.length] == here[at : at + length.length]
        assert there[decoded : decoded + form.block_bytes] == here[decoded : decoded + form.block_bytes]
    lying.release()
    room.release()
