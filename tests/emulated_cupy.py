"""As much of CuPy as `CudaLauncher` calls, over emulated warps and host memory. Arguments of a launch are what they are to CUDA: so
many bytes each as the given scalar has, of which a kernel takes as many as it declares."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
from emulated_gpu import EmulatedLauncher, parameters_of

from kvobj.gpu.kernel_source import warp_bytes
from kvobj.tensors.kernels.launcher import Address

_POINTER: Final = 8


class DriverError(Exception):
    """What CuPy raises of CUDA's."""


class _Device(nullcontext[None]):
    attributes: Final = {"MaxSharedMemoryPerBlockOptin": 64 * 1024}


class EmulatedStream:
    """A stream on which everything is done at once."""

    ptr = 1

    def __init__(self) -> None:
        self.is_current = False

    def __enter__(self) -> None:
        self.is_current = True

    def __exit__(self, *_: object) -> None:
        self.is_current = False

    def synchronize(self) -> None:
        """Nothing is left to wait for."""


class EmulatedModule:
    """The kernels of an emulated library; `launches` are the grids that were asked for."""

    def __init__(self, inner: EmulatedLauncher, stream: EmulatedStream) -> None:
        self._inner = inner
        self._stream = stream
        self.launches: list[tuple[str, int, int, int]] = []

    def get_function(self, name: str) -> Any:  # noqa: ANN401 - as CuPy's
        """A kernel."""
        return EmulatedFunction(self._inner, self._stream, name.removeprefix("kv_"), self.launches)


class EmulatedFunction:
    """A kernel, called as CuPy's are."""

    max_threads_per_block = 640
    max_dynamic_shared_size_bytes = 0

    def __init__(
        self, inner: EmulatedLauncher, stream: EmulatedStream, name: str, launches: list[tuple[str, int, int, int]]
    ) -> None:
        self._inner = inner
        self._stream = stream
        self._name = name
        self._launches = launches

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], arguments: Sequence[np.generic], *, shared_mem: int
    ) -> None:
        assert self._stream.is_current, "CuPy launches on the current stream"
        assert shared_mem == block[0] // 32 * warp_bytes(self._name)
        assert shared_mem <= max(48 * 1024, self.max_dynamic_shared_size_bytes)
        assert block[0] % 32 == 0
        assert 32 <= block[0] <= self.max_threads_per_block
        warps, *given = arguments
        assert warps.dtype == np.uint32
        self._launches.append((self._name, int(warps), grid[0], block[0] // 32))
        declared = parameters_of(self._name)
        assert len(given) == len(declared)
        passed: list[Address | float] = []
        for value, wanted in zip(given, declared, strict=True):
            assert value.itemsize == (_POINTER if wanted.endswith("*") else 4)
            passed.append(
                Address(int(value)) if wanted.endswith("*") else float(value) if wanted == "float" else int(value)
            )
        self._inner.launch(self._name, int(warps), *passed)


def emulated_cupy(stream: EmulatedStream) -> Any:  # noqa: ANN401 - as CuPy
    """The module."""

    def device(ordinal: int = 0) -> AbstractContextManager[None]:
        assert ordinal == 0
        return _Device()

    def copy(to: int, source: int, size_bytes: int, kind: int, on: int) -> None:
        assert kind in {1, 2}
        assert on == stream.ptr
        ctypes.memmove(to, source, size_bytes)

    runtime = SimpleNamespace(memcpyAsync=copy, CUDARuntimeError=DriverError)
    cuda = SimpleNamespace(Device=device, runtime=runtime, driver=SimpleNamespace(CUDADriverError=DriverError))
    return SimpleNamespace(uint32=np.uint32, uint64=np.uint64, float32=np.float32, cuda=cuda)
