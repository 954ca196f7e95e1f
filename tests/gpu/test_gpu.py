"""What only a GPU can show. Everything that can be shown without one is tested over `HostDevice` elsewhere, by the same code."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import bench_gpu
import pytest

from kvobj.gpu import open_device, status
from kvobj.gpu.ipc import Exports
from kvobj.gpu.pool import DevicePool
from kvobj.gpu.tensors import DeviceChunk, DeviceTensors
from kvobj.gpu.torch_slabs import TorchSlabs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not status().is_usable, reason=f"needs an NVIDIA GPU with CuPy: {status().detail}"),
]
MIB = 1 << 20

OTHER_PROCESS = """
import sys
from kvobj.gpu import open_device
from kvobj.gpu.ipc import Imports

import cupy
closed = []
imports = Imports(open_device(), on_closed=closed.append)
chunk = imports.open(bytes.fromhex(sys.argv[1]))
seen = cupy.from_dlpack(chunk.view((chunk.size_bytes,), "uint8", read_only=False))
print(int(seen.astype("uint64").sum()), flush=True)
"""

STATUS_ALONE = """
import ctypes
from kvobj.gpu import status

assert status().is_usable
driver, device, flags, is_open = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_uint(), ctypes.c_int(-1)
assert driver.cuDeviceGet(ctypes.byref(device), 0) == 0
assert driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(is_open)) == 0
print(status().detail, is_open.value, sep="\\n")
"""


@pytest.fixture
def world() -> Iterator[bench_gpu.World]:
    world = bench_gpu.World(open_device(), 1024 * MIB)
    yield world
    world.close()


def test_every_frame_and_every_decoded_byte_is_the_cpus(world: bench_gpu.World) -> None:
    found = bench_gpu.parity(world)
    assert found["cases"] > 0
    assert found["differ"] == []


def test_a_bounded_number_of_multiprocessors_makes_the_same_bytes() -> None:
    world = bench_gpu.World(open_device(max_sms=4), 1024 * MIB)
    try:
        assert bench_gpu.parity(world)["differ"] == []
    finally:
        world.close()


def test_saying_which_gpu_is_here_opens_no_context_on_it() -> None:
    done = subprocess.run([sys.executable, "-c", STATUS_ALONE], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [status().detail, "0"]
    facts = open_device().facts()
    assert status().detail == f"{facts.name}, {facts.arch}, {facts.total_bytes >> 20} MiB"


def test_bytes_go_to_the_gpu_and_come_back(world: bench_gpu.World) -> None:
    plain = bytes(range(256)) * 4096 * 8
    assert world.bytes_of(world.put(plain), len(plain)) == plain


def test_registered_memory_is_copied_at_the_drivers_speed(world: bench_gpu.World) -> None:
    found = bench_gpu.copy_speeds(world, 256 * MIB, 9)
    assert found["to_device_part"] >= 0.9
    assert found["to_host_part"] >= 0.9


def test_a_tensor_of_the_gpu_is_the_chunks_own_memory(world: bench_gpu.World) -> None:
    assert bench_gpu.hand_over(world, 3)["is_the_same_memory"]


async def test_a_torch_tensor_goes_in_and_comes_out(world: bench_gpu.World) -> None:
    torch = pytest.importorskip("torch")
    tensors = DeviceTensors(world.device, world.pool, world.copies)
    given = torch.randn(2, 2, 8, 256, 128, device="cuda").to(torch.bfloat16)
    with await tensors.put(given) as chunk:
        seen = chunk.tensor(given.shape, "bf16")
        assert torch.equal(seen, given)
        assert seen.data_ptr() == chunk.address
        del seen


def test_another_process_reads_the_memory_where_it_lies(world: bench_gpu.World) -> None:
    exports = Exports(world.device)
    chunk = DeviceChunk(world.put(bytes(range(256)) * 100), world.device)
    ticket = exports.export(chunk, peer="other")
    done = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS, ticket.hex()],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert done.stdout.strip() == str(sum(range(256)) * 100), done.stderr
    exports.peer_gone("other")
    chunk.release()


async def test_a_pool_lies_in_torchs_own_memory_and_gives_it_back(world: bench_gpu.World) -> None:
    torch = pytest.importorskip("torch")
    torch.cuda.init()
    before = torch.cuda.memory_allocated()
    pool = DevicePool(TorchSlabs(0), capacity_bytes=64 * MIB, slab_bytes=32 * MIB)
    tensors = DeviceTensors(world.device, pool, world.copies)
    given = torch.randn(1 << 20, device="cuda")
    allocated = torch.cuda.memory_allocated()
    with await tensors.put(given) as chunk:
        assert torch.cuda.memory_allocated() == allocated + 32 * MIB
        assert torch.equal(chunk.tensor(given.shape, "fp32"), given)
    torch.cuda.synchronize()
    assert pool.trim() == 32 * MIB
    del given
    assert torch.cuda.memory_allocated() == before
    pool.close()


async def test_memory_that_a_stream_still_reads_is_not_given_to_another(world: bench_gpu.World) -> None:
    """A tensor that is dropped while its stream is behind keeps its extent until that stream is done."""
    torch = pytest.importorskip("torch")
    tensors = DeviceTensors(world.device, world.pool, world.copies)
    given = torch.arange(1 << 22, dtype=torch.int32, device="cuda").view(torch.uint8)
    stream = torch.cuda.Stream()
    with await tensors.put(given) as chunk, torch.cuda.stream(stream):
        address = chunk.address
        torch.cuda._sleep(200_000_000)  # a tenth of a second of the GPU's clock
        seen = torch.from_dlpack(chunk.view((given.numel(),), "uint8", read_only=False))
        copy = seen.clone()
        del seen
    assert world.pool.usage().leaving_bytes == given.numel()
    other = world.room(given.numel())
    assert other.address != address
    stream.synchronize()
    assert torch.equal(copy, given)
    assert world.pool.usage().leaving_bytes == 0
    other.release()
