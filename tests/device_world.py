"""A device with a pool and codecs, and chunks of plain bytes on it: for tests over host memory and over emulated warps."""

from __future__ import annotations

import ctypes
from typing import Self

from kvobj.gpu.codec_copies import DeviceCodecs
from kvobj.gpu.host_device import HostDevice
from kvobj.gpu.pool import DevicePin, DevicePool

MIB = 1 << 20


class DeviceWorld:
    """A context manager; the device is closed with it."""

    def __init__(
        self, device: HostDevice, *, capacity_bytes: int, batch_bytes: int, hashes_there: bool | None = None
    ) -> None:
        self.device = device
        self.pool = DevicePool(device, capacity_bytes=capacity_bytes, slab_bytes=32 * MIB)
        self.codecs = DeviceCodecs(device, batch_bytes=batch_bytes, hashes_there=hashes_there)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.codecs.close()
        self.pool.close()
        self.device.close()

    def room(self, size_bytes: int) -> DevicePin:
        """Device memory."""
        pin = self.pool.try_reserve(size_bytes)
        assert pin is not None
        return pin

    def put(self, plain: bytes) -> DevicePin:
        """Device memory with these bytes."""
        pin = self.room(len(plain))
        ctypes.memmove(pin.address, plain, len(plain))
        return pin
