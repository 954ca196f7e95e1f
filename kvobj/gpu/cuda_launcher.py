"""Runs kernels on a GPU: the same source as the CPU's, compiled by NVRTC, loaded by CuPy, launched on one stream.

A kernel is written for a warp and walks over the warps that it is asked for (`lanes_gpu.h`), so any grid gives the same bytes; a
bounded number of blocks bounds the multiprocessors that are used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Self

from kvobj.errors import DeviceError
from kvobj.gpu.device import Device, DeviceFacts, DeviceMemory
from kvobj.gpu.kernel_source import cubin_path, kernel_names, warp_bytes
from kvobj.gpu.nvrtc import find_nvrtc
from kvobj.tensors.kernels.host_memory import address_of
from kvobj.tensors.kernels.launcher import Address

_WARP: Final = 32
_BLOCK_WARPS: Final = 8
_BLOCKS_PER_SM: Final = 16
"""Blocks of a launch without a bound: enough to fill every multiprocessor, few enough to keep the tail of a launch short."""
_TO_DEVICE: Final = 1
_TO_HOST: Final = 2
_SCRATCH_STEP: Final = 2**20
_SHARED_UNASKED: Final = 48 * 2**10
"""Bytes of memory that a block's threads share, beyond which CUDA wants to be told."""


class KernelModule:
    """The kernels' machine code, loaded into the current GPU."""

    def __init__(self, cupy: Any, module: Any) -> None:  # noqa: ANN401 - CuPy has no types
        self._cupy = cupy
        self._module = module
        self._functions: dict[str, tuple[Any, int]] = {}
        self._names = frozenset(kernel_names())

    @classmethod
    def load(cls, cupy: Any, arch: str, *, directory: Path | None = None) -> Self:  # noqa: ANN401 - CuPy has no types
        """Compile for `arch`, or take what was compiled before, and load. Blocks for seconds the first time."""
        driver_major = int(cupy.cuda.runtime.driverGetVersion()) // 1000
        path = cubin_path(find_nvrtc(driver_major), arch, directory)
        return cls(cupy, cupy.RawModule(path=str(path)))

    def function(self, kernel: str) -> tuple[Any, int]:
        """The function `kv_<kernel>`, and how many warps a block of it may have; KeyError where there is none. The GPU is the
        thread's own: CuPy loads into that."""
        if kernel not in self._names:
            raise KeyError(kernel)
        found = self._functions.get(kernel)
        if found is None:
            function = self._module.get_function(f"kv_{kernel}")
            block_warps_max, each = max(1, int(function.max_threads_per_block) // _WARP), warp_bytes(kernel)
            if block_warps_max * each > _SHARED_UNASKED:
                most = int(self._cupy.cuda.Device().attributes["MaxSharedMemoryPerBlockOptin"])
                block_warps_max = min(block_warps_max, most // each)
                function.max_dynamic_shared_size_bytes = block_warps_max * each
            found = self._functions[kernel] = (function, block_warps_max)
        return found


def grid_of(warps: int, *, sms: int, block_warps_max: int, max_sms: int | None) -> tuple[int, int]:
    """Blocks, and warps of each, for a launch of so many warps: few warps are spread over all multiprocessors that may be used.

    With a bound there is one block for each: blocks of one grid spread, so a grid of n blocks never runs on more than n of them.
    """
    usable, most = (sms, _BLOCK_WARPS) if max_sms is None else (max(1, min(max_sms, sms)), block_warps_max)
    block_warps = max(1, min(most, block_warps_max, -(-warps // usable)))
    return min(-(-warps // block_warps), usable * (_BLOCKS_PER_SM if max_sms is None else 1)), block_warps


class CudaLauncher:
    """See `kvobj.tensors.kernels.launcher.Launcher`. One thread at a time: scratch and order are the stream's."""

    def __init__(
        self,
        device: Device,
        module: KernelModule,
        stream: Any,  # noqa: ANN401 - CuPy has no types
        facts: DeviceFacts,
        *,
        max_sms: int | None,
    ) -> None:
        import cupy  # noqa: PLC0415 - only where a GPU is open

        self._cupy = cupy
        self._device = device
        self._module = module
        self._stream = stream
        self._facts = facts
        self._max_sms = max_sms
        self._scratch: dict[str, DeviceMemory] = {}

    @property
    def name(self) -> str:
        """See `Launcher.name`."""
        return self._facts.name

    @property
    def is_host(self) -> bool:
        """See `Launcher.is_host`."""
        return False

    def launch(self, kernel: str, warps: int, *arguments: Address | float) -> None:
        """See `Launcher.launch`."""
        given = (self._number(warps), *map(self._argument, arguments))
        with self._failures(), self._stream:
            function, block_warps_max = self._module.function(kernel)
            if not warps:
                return
            blocks, block_warps = grid_of(
                warps, sms=self._facts.sms, block_warps_max=block_warps_max, max_sms=self._max_sms
            )
            function((blocks,), (block_warps * _WARP,), given, shared_mem=block_warps * warp_bytes(kernel))

    def scratch(self, slot: str, size_bytes: int) -> Address:
        """See `Launcher.scratch`."""
        held = self._scratch.get(slot)
        if held is None or held.size_bytes < size_bytes:
            if held is not None:
                self._synchronize()  # what was launched may still use it
                del self._scratch[slot]
                self._device.give_back(held)
            held = self._device.take(-(-max(1, size_bytes) // _SCRATCH_STEP) * _SCRATCH_STEP)
            self._scratch[slot] = held
        return Address(held.address)

    def upload(self, to: Address, data: bytes | memoryview) -> None:
        """See `Launcher.upload`."""
        view = memoryview(data)
        if not view.nbytes:
            return
        with self._failures():
            self._cupy.cuda.runtime.memcpyAsync(
                int(to), int(address_of(view)), view.nbytes, _TO_DEVICE, self._stream.ptr
            )
        self._synchronize()  # from pinned memory the copy returns before it has read it

    def download(self, at: Address, into: memoryview) -> None:
        """See `Launcher.download`."""
        if not into.nbytes:
            return
        with self._failures():
            self._cupy.cuda.runtime.memcpyAsync(int(address_of(into)), int(at), into.nbytes, _TO_HOST, self._stream.ptr)
        self._synchronize()

    def close(self) -> None:
        """Give the scratch back. Nothing is launched any more."""
        scratch, self._scratch = self._scratch, {}
        for memory in scratch.values():
            self._device.give_back(memory)

    def _synchronize(self) -> None:
        with self._failures():
            self._stream.synchronize()

    def _failures(self) -> _Failures:
        return _Failures(self._cupy, self._facts.ordinal)

    def _argument(self, value: Address | float) -> Any:  # noqa: ANN401 - a NumPy scalar
        if isinstance(value, Address):
            return self._cupy.uint64(int(value))
        if isinstance(value, float):
            return self._cupy.float32(value)
        return self._number(value)

    def _number(self, value: int) -> Any:  # noqa: ANN401 - a NumPy scalar
        return self._cupy.uint32(value)


class _Failures:
    """The GPU as the thread's own, and CUDA's errors as `DeviceError`."""

    __slots__ = ("_cupy", "_device")

    def __init__(self, cupy: Any, ordinal: int) -> None:  # noqa: ANN401 - CuPy has no types
        self._cupy = cupy
        self._device = cupy.cuda.Device(ordinal)

    def __enter__(self) -> None:
        self._device.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._device.__exit__(kind, error, trace)
        if isinstance(error, (self._cupy.cuda.runtime.CUDARuntimeError, self._cupy.cuda.driver.CUDADriverError)):
            raise DeviceError("the GPU failed", cause=str(error)) from error
