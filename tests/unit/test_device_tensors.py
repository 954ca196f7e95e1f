"""Tensors of device memory: handed to others and taken from them by DLPack, without copies, kept as long as anybody looks."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from torch_python import run_with_torch

from kvobj.errors import InvalidRequestError, StoreFullError
from kvobj.gpu import dlpack
from kvobj.gpu.copies import Copies
from kvobj.gpu.device import Event
from kvobj.gpu.host_device import HostDevice, HostEvent
from kvobj.gpu.pool import DevicePool
from kvobj.gpu.tensors import DeviceTensors

MIB = 1 << 20


class World:
    """A pool on a host device, whose work of others can be held up."""

    def __init__(self) -> None:
        self.device = HostDevice(16 * MIB)
        self.pool = DevicePool(self.device, capacity_bytes=4 * MIB, slab_bytes=MIB)
        self.copies = Copies(self.device)
        self.tensors = DeviceTensors(self.device, self.pool, self.copies)

    @property
    def extents(self) -> int:
        return self.pool.usage().extents


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.copies.close()
    world.pool.close()
    world.device.close()


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp16", "float16"), ("fp32", "float32"), ("int8", "int8"), ("uint8", "uint8")]
)
async def test_a_tensor_goes_in_and_comes_out_without_a_copy(world: World, name: str, dtype: str) -> None:
    given = np.arange(2 * 3 * 8 * 16).reshape(2, 3, 8, 16).astype(np.dtype(dtype))
    with await world.tensors.put(given) as chunk:
        seen = np.from_dlpack(chunk.view(given.shape, name))
        assert np.array_equal(seen, given)
        assert seen.dtype == given.dtype
        assert seen.ctypes.data == chunk.address


async def test_what_others_are_given_is_for_reading(world: World) -> None:
    with await world.tensors.put(np.zeros(10, np.uint8)) as chunk:
        assert not np.from_dlpack(chunk.view((10,), "uint8")).flags.writeable
        writable = np.from_dlpack(chunk.view((10,), "uint8", read_only=False))
        assert writable.flags.writeable


async def test_a_part_of_a_chunk_is_a_tensor_too(world: World) -> None:
    given = np.arange(100, dtype=np.float32)
    with await world.tensors.put(given) as chunk:
        part = np.from_dlpack(chunk.view((5, 4), "fp32", offset=40))
        assert np.array_equal(part, given[10:30].reshape(5, 4))


async def test_a_tensor_of_more_than_the_chunk_is_refused(world: World) -> None:
    with await world.tensors.put(np.zeros(10, np.uint8)) as chunk:
        for shape, dtype, offset in (((11,), "uint8", 0), ((10,), "uint8", 1), ((-1,), "uint8", 0), ((3,), "fp32", 0)):
            with pytest.raises(InvalidRequestError):
                chunk.view(shape, dtype, offset=offset)
        with pytest.raises(InvalidRequestError):
            chunk.view((1,), "complex64")


async def test_memory_is_kept_as_long_as_any_tensor_of_it(world: World) -> None:
    chunk = await world.tensors.put(np.full(1000, 7, np.uint8))
    first = np.from_dlpack(chunk.view((1000,), "uint8"))
    second = np.from_dlpack(chunk.view((10,), "uint8", offset=5))
    chunk.release()
    assert world.extents == 1
    del first
    gc.collect()
    assert world.extents == 1
    assert second.tolist() == [7] * 10
    del second
    gc.collect()
    assert world.extents == 0


async def test_a_capsule_that_nobody_takes_keeps_nothing(world: World) -> None:
    chunk = await world.tensors.put(np.zeros(10, np.uint8))
    view = chunk.view((10,), "uint8")
    for version in (None, (1, 0)):
        capsule = view.__dlpack__(max_version=version)
        assert capsule is not None
        del capsule
    gc.collect()
    chunk.release()
    assert world.extents == 0


async def test_a_tensor_may_be_let_go_on_any_thread(world: World) -> None:
    chunk = await world.tensors.put(np.zeros(10, np.uint8))
    held = [np.from_dlpack(chunk.view((10,), "uint8"))]
    chunk.release()
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join(10)
    assert world.extents == 0


async def test_memory_is_used_again_only_after_the_work_that_others_queued(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    event, asked = HostEvent(), []

    def fence(stream: int) -> Event:
        asked.append(stream)
        return event

    chunk = await world.tensors.put(np.zeros(10, np.uint8))
    monkeypatch.setattr(world.device, "fence", fence)
    capsule = chunk.view((10,), "uint8").__dlpack__(stream=77)
    chunk.release()
    del capsule
    gc.collect()
    assert asked == [77]
    assert world.pool.usage().leaving_bytes == 256
    event.happen(None)
    assert world.extents == 0


async def test_a_copy_or_another_device_is_not_to_be_had(world: World) -> None:
    with await world.tensors.put(np.zeros(10, np.uint8)) as chunk:
        view = chunk.view((10,), "uint8")
        assert view.__dlpack_device__() == (dlpack.CPU, 0)
        for asked in ({"copy": True}, {"dl_device": (dlpack.CUDA, 0)}):
            with pytest.raises(BufferError):
                view.__dlpack__(**asked)


async def test_what_cannot_be_put_is_refused_and_takes_no_room(world: World) -> None:
    for given in (np.zeros((4, 4), np.uint8).T[:2], np.zeros(0, np.uint8)):
        with pytest.raises(InvalidRequestError):
            await world.tensors.put(given)
    with pytest.raises(TypeError):
        await world.tensors.put(b"bytes have no __dlpack__")
    with pytest.raises(StoreFullError):
        await world.tensors.put(np.zeros(5 * MIB, np.uint8))
    assert world.extents == 0


class Elsewhere:
    """A tensor of a GPU, as seen by a pool that is on none."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CUDA, 0

    def __dlpack__(self, **_: object) -> object:
        raise AssertionError("it is not even asked")


async def test_a_tensor_of_another_device_is_refused(world: World) -> None:
    with pytest.raises(InvalidRequestError, match="another device"):
        await world.tensors.put(Elsewhere())


async def test_the_source_is_kept_until_its_copy_is_done(world: World) -> None:
    given = np.arange(1000, dtype=np.uint8)
    gate = threading.Event()
    lane = world.copies._lanes[3]  # type: ignore[index]
    lane._stream.run(gate.wait)  # type: ignore[attr-defined]
    chunk, work = world.tensors.begin_put(given)
    expected = given.tobytes()
    del given
    gc.collect()
    gate.set()
    await asyncio.wrap_future(work)
    assert np.from_dlpack(chunk.view((1000,), "uint8")).tobytes() == expected
    chunk.release()


TORCH_SCRIPT = """
import asyncio, gc, torch
from kvobj.gpu.copies import Copies
from kvobj.gpu.host_device import HostDevice
from kvobj.gpu.pool import DevicePool
from kvobj.gpu.tensors import DeviceTensors

device = HostDevice(1 << 24)
pool, copies = DevicePool(device, capacity_bytes=1 << 22), Copies(device)
tensors = DeviceTensors(device, pool, copies)

async def main():
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "int8": torch.int8,
              "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
    for name, dtype in dtypes.items():
        given = (torch.randn(2, 2, 3, 16, 8) * 3).to(dtype)
        chunk = await tensors.put(given.view(torch.uint8) if name.startswith("fp8") else given)
        seen = chunk.tensor(given.shape, name)
        assert seen.dtype == dtype and seen.data_ptr() == chunk.address
        assert torch.equal(seen.view(torch.uint8), given.view(torch.uint8)), name
        layer = seen[1]
        chunk.release()
        del seen
        gc.collect()
        assert pool.usage().extents == 1
        del layer
        gc.collect()
        assert pool.usage().extents == 0, name
    return (await tensors.put(torch.ones(7))).tensor((7,), "fp32")

alive = asyncio.run(main())
print("tensors agree")
"""


def test_torch_sees_the_very_memory_and_may_outlive_everything() -> None:
    assert run_with_torch(["-c", TORCH_SCRIPT]) == "tensors agree\n"
