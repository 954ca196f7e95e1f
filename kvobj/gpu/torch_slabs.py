"""Slabs from torch's caching allocator: so that the pool and the engine beside it share one view of what is free on the GPU.

An engine that profiles its memory sees the pool's slabs as its own allocations; `DevicePool.trim` gives them back to it. Such slabs
cannot be exported to other processes.
"""

from __future__ import annotations

from typing import Any

from kvobj.errors import StoreFullError
from kvobj.gpu.device import DeviceMemory


class TorchSlabs:
    """See `kvobj.gpu.pool.SlabSource`. `ordinal` is torch's number of the GPU. `ModuleNotFoundError` without torch."""

    def __init__(self, ordinal: int = 0) -> None:
        import torch  # noqa: PLC0415 - of engines, and of nobody else

        self._torch: Any = torch
        self._ordinal = ordinal

    def take(self, size_bytes: int) -> DeviceMemory:
        """See `SlabSource.take`."""
        try:
            address = self._torch.cuda.caching_allocator_alloc(size_bytes, self._ordinal)
        except self._torch.cuda.OutOfMemoryError as error:
            raise StoreFullError("no room on the GPU", cause=str(error)) from error
        return DeviceMemory(int(address), size_bytes)

    def give_back(self, memory: DeviceMemory) -> None:
        """See `SlabSource.give_back`."""
        self._torch.cuda.caching_allocator_delete(memory.address)
