"""The GPU's half of the kernels, run on emulated warps: the bytes are the CPU's, whatever the order of threads, and no thread
relies on what a GPU does not promise (`kernels_gpu/emulated_warp.cc` says what is looked for)."""

from __future__ import annotations

import ctypes
import random
import shutil
import sys
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from blake3 import blake3
from device_world import MIB, DeviceWorld
from emulated_cupy import EmulatedModule, EmulatedStream, emulated_cupy
from emulated_gpu import ASCENDING, DESCENDING, EmulatedDevice, EmulatedLauncher, emulated_library
from kernel_blocks import Fenced, decoded, encoded, form_of, gaussian, launchers, values_of, words_of
from module_paths import ModulePaths
from profile_models import Model
from tensor_cases import CASES

from kvobj.gpu.codec_copies import ChunkToEncode, FrameToDecode
from kvobj.gpu.cuda_launcher import CudaLauncher, KernelModule, grid_of
from kvobj.gpu.device import DeviceFacts
from kvobj.tensors import ek, eq
from kvobj.tensors.codec_protocol import BlockToDecode, BlockToDemote, Coding, EncodedLength, TensorCodec
from kvobj.tensors.codecs import TensorForm, decode_frame, encode_bound, encode_frame, parse_tensor_frame, refusal
from kvobj.tensors.device_blake3 import digests
from kvobj.tensors.frame import TensorFrame, tensor_frame_bound
from kvobj.tensors.kernels import build
from kvobj.tensors.kernels.host_launcher import HostLauncher
from kvobj.tensors.registry import codec_named

pytestmark = pytest.mark.skipif(not launchers(), reason="no kernel library was built")

ORDERS: Final = (ASCENDING, DESCENDING, 2, 3, 5, 8)
"""Lanes one after the other, from the last, and seeds of random orders: cases take them in turn."""
CODECS: Final = ("x3", "xa", "f8", "h4", "eq57", "eq3")
FRAMES: Final = [
    (codec, name, order)
    for (codec, name), order in zip(
        ((codec, name) for codec in CODECS for name in CASES if refusal(codec, CASES[name].form) is None),
        cycle(ORDERS),
        strict=False,
    )
]


@pytest.fixture(scope="module")
def emulated(module_paths: ModulePaths) -> EmulatedLauncher:
    """One for all tests: it is compiled, and makes its tables, once."""
    return EmulatedLauncher(emulated_library(module_paths.mktemp("emulated")))


@pytest.fixture
def gpu(emulated: EmulatedLauncher) -> EmulatedLauncher:
    emulated.given()
    return emulated


@pytest.fixture
def cpu() -> HostLauncher:
    return next(iter(launchers().values()))


@pytest.fixture
def world(gpu: EmulatedLauncher) -> Iterator[DeviceWorld]:
    """A device of emulated warps."""
    with DeviceWorld(
        EmulatedDevice(128 * MIB, gpu), capacity_bytes=64 * MIB, batch_bytes=4 * MIB, hashes_there=True
    ) as made:
        yield made


def on_cpu(plain: bytes, form: TensorForm, codec: str) -> tuple[memoryview, TensorFrame, bytes]:
    """The frame that the CPU makes, its head, and what it decodes to there."""
    room = memoryview(bytearray(encode_bound(codec, form)))
    frame = room[: encode_frame(memoryview(plain), room, codec=codec, form=form, first_position=64)]
    head = parse_tensor_frame(frame, len(frame))
    into = bytearray(head.plain_bytes)
    decode_frame(frame, head, memoryview(into))
    return frame, head, bytes(into)


@pytest.mark.parametrize(("codec", "name", "order"), FRAMES)
async def test_frames_of_emulated_warps_are_those_of_the_cpu(
    gpu: EmulatedLauncher, world: DeviceWorld, codec: str, name: str, order: int
) -> None:
    gpu.order(order)
    form = CASES[name].form
    plain = CASES[name].make(form)
    frame, head, expected = on_cpu(plain, form, codec)
    room = memoryview(bytearray(tensor_frame_bound(form)))
    chunk = ChunkToEncode(world.put(plain).address, form, codec, room, first_position=64)
    (length,) = await world.codecs.encode([chunk])
    assert room[:length] == frame
    into = world.room(len(expected))
    assert await world.codecs.decode([FrameToDecode(frame, head, into.address)]) == [None]
    assert ctypes.string_at(into.address, len(expected)) == expected


def with_extremes(
    heads: int, tokens: int, dim: int, dtype: str, seed: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.uint16]]:
    """Words of a model, with a token that is guarded and one channel beyond all symbols."""
    values = values_of(gaussian(heads, tokens, dim, seed=seed, dtype=dtype), dtype).copy()
    values[:, 3] *= 20
    values[0, 5, 0] = 3e4
    values[0, 7] = 0
    return words_of(values, dtype)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("codec", ["x3", "xa", "eq4"])
async def test_chunks_of_one_launch_do_not_disturb_each_other(
    gpu: EmulatedLauncher, world: DeviceWorld, codec: str, order: int
) -> None:
    gpu.order(order)
    form = TensorForm("kv", "bf16", 1, 3, 35, 33, ("kv", "layer", "head", "token", "dim"))
    plains = [with_extremes(6, 33, 35, "bf16", seed=seed).tobytes() for seed in range(3)]
    wanted = [on_cpu(plain, form, codec) for plain in plains]
    rooms = [memoryview(bytearray(tensor_frame_bound(form))) for _ in plains]
    lengths = await world.codecs.encode(
        [
            ChunkToEncode(world.put(plain).address, form, codec, room, first_position=64)
            for plain, room in zip(plains, rooms, strict=True)
        ]
    )
    made = [room[:length] for room, length in zip(rooms, lengths, strict=True)]
    assert made == [frame for frame, _, _ in wanted]
    pins = [world.room(form.plain_bytes) for _ in wanted]
    asked = [FrameToDecode(frame, head, pin.address) for (frame, head, _), pin in zip(wanted, pins, strict=True)]
    assert await world.codecs.decode(asked) == [None] * len(asked)
    for pin, (_, _, expected) in zip(pins, wanted, strict=True):
        assert ctypes.string_at(pin.address, form.plain_bytes) == expected


@pytest.mark.parametrize(
    ("model", "tokens", "order"),
    [
        (Model(2, 64, theta=1e4), 21, DESCENDING),
        (Model(1, 96), 17, 3),
        (Model(3, 32, kind="v"), 40, ASCENDING),
        (Model(1, 32), 3, 5),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_blocks_of_ek_are_those_of_the_cpu(
    gpu: EmulatedLauncher, cpu: HostLauncher, model: Model, *, tokens: int, order: int, dtype: str
) -> None:
    gpu.order(order)
    words = model.words(tokens, position=1000, dtype=dtype)
    words[:, tokens // 2] = 0  # a guarded token, where there may be one
    coding = Coding(model.form(tokens, dtype), 1000, 0, model.profile())
    expected = encoded(ek.codec(150), cpu, words, coding)
    done, block, said = encoded(ek.codec(150), gpu, words, coding)
    assert (done, block) == expected[:2]
    assert (said == expected[2]).all()
    if done.length:
        status, found = decoded(ek.codec(150), gpu, block, coding)
        assert status == 0
        assert (found == said).all()


def demoted(
    codec: eq.Eq, finer: str, launcher: HostLauncher, data: bytes, coding: Coding
) -> tuple[EncodedLength | None, bytes, bytes]:
    source, slot, plain = Fenced(len(data)), Fenced(codec.slot_bytes(coding.form)), Fenced(coding.form.block_bytes)
    source.view[:] = data
    if isinstance(launcher, EmulatedLauncher):
        launcher.given(source, slot, plain)
    block = BlockToDemote(0, source.address, len(data), slot.address, plain.address)
    [done] = codec.demote(launcher, coding, finer, [block])
    return done, bytes(slot.view[: done.length]) if done else b"", bytes(plain.view) if done else b""


@pytest.mark.parametrize(("shape", "dtype"), [((2, 40, 33), "bf16"), ((1, 33, 64), "fp16"), ((3, 64, 16), "bf16")])
@pytest.mark.parametrize(("fine", "coarse", "order"), [(0, 1, DESCENDING), (0, 3, 2), (1, 2, ASCENDING)])
def test_blocks_demote_to_those_of_the_cpu(
    gpu: EmulatedLauncher,
    cpu: HostLauncher,
    shape: tuple[int, int, int],
    *,
    dtype: str,
    fine: int,
    coarse: int,
    order: int,
) -> None:
    gpu.order(order)
    words = with_extremes(*shape, dtype, seed=coarse)
    coding = Coding(form_of(words, dtype))
    finer, coarser = eq.Eq(83, fine), eq.Eq(83, coarse)
    done, block, _ = encoded(finer, cpu, words, coding)
    assert done.length
    _, direct, after = encoded(coarser, cpu, words, coding)
    expected = demoted(coarser, finer.name, cpu, block, coding)
    assert demoted(coarser, finer.name, gpu, block, coding) == expected
    assert expected[1:] == (direct, after.tobytes())
    changed = block[:70] + bytes([block[70] ^ 0xFF]) + block[71:]
    assert demoted(coarser, finer.name, gpu, changed, coding) == demoted(coarser, finer.name, cpu, changed, coding)


@pytest.mark.parametrize("length", [0, 1, 63, 1024, 1025, 3 * 1024, 33 * 1024 + 7])
def test_digests_are_those_of_the_package(gpu: EmulatedLauncher, length: int) -> None:
    source = random.Random(length)
    inputs = [Fenced(length) for _ in range(2)]
    for each in inputs:
        each.view[:] = source.randbytes(length)
    gpu.given(*inputs)
    for order in ORDERS[1:3]:
        gpu.order(order)
        assert digests(gpu, [each.address for each in inputs], length) == [
            blake3(each.view).digest() for each in inputs
        ]


@pytest.mark.parametrize("element_bytes", [1, 2, 4])
@pytest.mark.parametrize("sizes", [(2, 5, 3), (1, 70, 33), (3, 65, 16)])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 0, 2), (2, 1, 0)])
def test_values_are_packed_and_unpacked_as_by_the_cpu(
    gpu: EmulatedLauncher, element_bytes: int, sizes: tuple[int, int, int], order: tuple[int, int, int]
) -> None:
    gpu.order(7)
    dtype = {1: np.uint8, 2: np.uint16, 4: np.uint32}[element_bytes]
    shape = [sizes[axis] for axis in order]
    declared = np.random.default_rng(2).integers(0, 1 << 8 * element_bytes, shape).astype(dtype)
    by_axis = declared.transpose(np.argsort(order))
    strides = [each // element_bytes for each in by_axis.strides]
    warps = -(-sizes[0] * sizes[1] // 64)
    whole, packed = Fenced(declared.nbytes), Fenced(declared.nbytes)
    gpu.given(whole, packed)
    whole.view[:] = declared.tobytes()
    gpu.launch("pack_block", warps, whole.address, packed.address, element_bytes, *sizes, *strides)
    assert bytes(packed.view) == by_axis.tobytes()
    whole.view[:] = bytes(declared.nbytes)
    gpu.launch("unpack_block", warps, packed.address, whole.address, element_bytes, *sizes, *strides)
    assert bytes(whole.view) == declared.tobytes()


def decoded_within(codec: TensorCodec, launcher: HostLauncher, data: bytes, coding: Coding) -> tuple[int, bytes | None]:
    """One block: its status, and where that is 0 its values. On emulated warps no other memory may even be read."""
    source, plain = Fenced(len(data)), Fenced(coding.form.block_bytes)
    source.view[:] = data
    if isinstance(launcher, EmulatedLauncher):
        launcher.given(source, plain)
    [status] = codec.decode(launcher, coding, [BlockToDecode(0, source.address, len(data), plain.address)])
    assert source.intact
    assert plain.intact
    return status, None if status else bytes(plain.view)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["x3", "xa", "f8", "h4", "eq57", "eq3"])
def test_damaged_blocks_have_the_status_and_values_of_the_cpu(
    gpu: EmulatedLauncher, cpu: HostLauncher, name: str, dtype: str
) -> None:
    words = with_extremes(2, 101, 32, dtype, seed=4)
    if name in {"x3", "xa"}:
        words = words_of(np.random.default_rng(4).standard_normal(words.shape).astype(np.float32), dtype)
        words[1, 4, :6] = [0, 0x8000, 1, 0x7F80, 0x7FC1, 0xFFFF]
    codec, coding = codec_named(name), Coding(form_of(words, dtype))
    done, block, _ = encoded(codec, cpu, words, coding)
    assert done.length
    source = random.Random(f"{name} {dtype}")
    damaged = [
        block,
        block[:-2],
        block[:7],
        block[: len(block) // 2],
        block + bytes(4),
        bytes(len(block)),
        b"\xff" * len(block),
    ]
    for number in range(26):
        at = source.randrange(64 if number % 2 else len(block))
        damaged.append(block[:at] + bytes([block[at] ^ source.randrange(1, 256)]) + block[at + 1 :])
    statuses = set()
    for order, data in zip(cycle(ORDERS), damaged, strict=False):
        gpu.order(order)
        found = decoded_within(codec, gpu, data, coding)
        assert found == decoded_within(codec, cpu, data, coding)
        statuses.add(found[0])
    assert len(statuses) > 1


def test_damaged_blocks_of_ek_have_the_status_of_the_cpu(gpu: EmulatedLauncher, cpu: HostLauncher) -> None:
    model, tokens = Model(2, 32, theta=1e4), 34
    words = model.words(tokens)
    words[:, 9] = 0
    coding = Coding(model.form(tokens), 0, 0, model.profile())
    done, block, _ = encoded(ek.codec(150), cpu, words, coding)
    assert done.length
    source = random.Random(9)
    for number in range(24):
        at = source.randrange(16 if number % 2 else len(block))
        data = block[:at] + bytes([block[at] ^ source.randrange(1, 256)]) + block[at + 1 :]
        gpu.order(ORDERS[number % len(ORDERS)])
        for each in (data, block[:at]):
            assert decoded_within(ek.codec(150), gpu, each, coding) == decoded_within(ek.codec(150), cpu, each, coding)


@pytest.mark.parametrize("max_sms", [None, 2])
@pytest.mark.parametrize("name", ["x3", "xa", "f8", "h4", "eq4"])
def test_the_cuda_launcher_gives_kernels_what_they_declare(
    gpu: EmulatedLauncher, cpu: HostLauncher, monkeypatch: pytest.MonkeyPatch, name: str, max_sms: int | None
) -> None:
    gpu.order(ASCENDING)
    stream = EmulatedStream()
    module, cupy = EmulatedModule(gpu, stream), emulated_cupy(stream)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    device = EmulatedDevice(64 * MIB, gpu)
    facts = DeviceFacts("cuda", 0, "emulated", 64 * MIB, 64 * MIB, 4, "sm_90")
    launcher = CudaLauncher(device, KernelModule(cupy, module), stream, facts, max_sms=max_sms)
    codec = codec_named(name)
    for words in (
        with_extremes(3, 37, 32, "bf16", seed=6),
        gaussian(5, 90, 32),
    ):  # the second needs more working memory
        coding = Coding(form_of(words))
        done, block, _ = encoded(codec, launcher, words, coding)
        assert done.length
        assert (done, block) == encoded(codec, cpu, words, coding)[:2]
        status, found = decoded(codec, launcher, block, coding)
        assert status == 0
        assert (found == decoded(codec, cpu, block, coding)[1]).all()
    for kernel, warps, blocks, block_warps in module.launches:
        assert blocks * block_warps >= min(warps, 4 if max_sms is None else max_sms), kernel
        assert max_sms is None or blocks <= max_sms
    launcher.close()
    device.close()
    with pytest.raises(KeyError):
        launcher.launch("no_such_kernel", 1)


@pytest.fixture(scope="module")
def planted(module_paths: ModulePaths) -> ctypes.CDLL:
    return emulated_library(module_paths.mktemp("planted"), source="planted_defects.cc")


@pytest.mark.parametrize("order", ORDERS[:3])
@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        ("reads_too_early", "race"),
        ("writes_too_early", "race"),
        ("warps_share", "race"),
        ("warps_differ", "changes what another warp"),
        ("meets_elsewhere", "at collective"),
        ("ends_early", "ended or waits"),
        ("loads_unaligned", "not aligned"),
        ("writes_beyond", "beyond what was given"),
        ("shifts_all_out", "shift"),
    ],
)
def test_planted_defects_are_noticed(planted: ctypes.CDLL, kernel: str, said: str, order: int) -> None:
    launcher, memory = EmulatedLauncher(planted), Fenced(4096, fill=5)
    memory.view[:4] = b"\5\0\0\0"
    launcher.order(order)
    launcher.given(memory)
    launcher.launch("right", 9, memory.address)
    memory.view[:4] = b"\5\0\0\0"
    with pytest.raises(AssertionError, match=said):
        launcher.launch(kernel, 9, memory.address)
    launcher.launch("right", 9, memory.address)  # and nothing of it is left


def test_a_sync_that_is_missing_from_a_codec_is_noticed(tmp_path: Path) -> None:
    copy = tmp_path / "kernels"
    shutil.copytree(
        build.DIRECTORY,
        copy,
        ignore=lambda _, names: [name for name in names if not name.endswith((".cc", ".h", ".cuh"))],
    )
    text = (copy / "x3.cuh").read_text()
    assert "    kv_sync();\n" in text
    (copy / "x3.cuh").write_text(text.replace("    kv_sync();\n", "", 1))
    unit = (copy / "kernels.cc").read_text()
    for other in ("f8", "h4", "blake3", "eq", "ek", "pack"):  # half of what the compiler would do
        unit = unit.replace(f'#include "{other}.cuh"\n', "")
    (copy / "kernels.cc").write_text(unit)
    launcher = EmulatedLauncher(emulated_library(tmp_path, kernels=copy))
    words = gaussian(2, 48, 64)
    with pytest.raises(AssertionError, match="race"):
        encoded(codec_named("x3"), launcher, words, Coding(form_of(words)))


@pytest.mark.parametrize("max_sms", [None, 1, 16, 500])
@pytest.mark.parametrize("warps", [1, 31, 132, 133, 1056, 5000, 1 << 20])
def test_a_grid_reaches_every_multiprocessor_that_it_may_use_and_no_more(warps: int, max_sms: int | None) -> None:
    sms, most = 132, 20
    blocks, block_warps = grid_of(warps, sms=sms, block_warps_max=most, max_sms=max_sms)
    usable = min(sms, max_sms or sms)
    assert 1 <= block_warps <= most
    assert blocks >= min(warps, usable) // 2
    assert blocks <= (usable if max_sms else 16 * sms)
    assert (blocks - 1) * block_warps < warps, "no block is without work"
