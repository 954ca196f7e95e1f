"""What a device is: memory of its own, streams that work in order, and copies that go on beside the program.

`CudaDevice` is an NVIDIA GPU; `HostDevice` has host memory in a GPU's place, with real streams, so that all that stands on this
line (pool, copies, tensors, the hbm tier) runs and is tested without one. Addresses are plain integers: of a GPU they mean
nothing to the host. Every call may block for as long as a driver call does and belongs off the event loop, but for
`Event.is_done`; calls may come from any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, Protocol

from kvobj.tensors.kernels.launcher import Launcher

DeviceKind = Literal["cuda", "host"]


class CopyKind(IntEnum):
    """Which way a copy goes; the numbers are those of `cudaMemcpyKind`."""

    TO_DEVICE = 1
    TO_HOST = 2
    ON_DEVICE = 3


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What a device is. `sms` and `arch` ("sm_90") are 0 and empty of a host device."""

    kind: DeviceKind
    ordinal: int
    name: str
    total_bytes: int
    free_bytes: int
    sms: int
    arch: str


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """One large allocation: `[address, address + size_bytes)`. Its taker gives it back."""

    address: int
    size_bytes: int


class Event(Protocol):
    """A point in a stream's work."""

    def is_done(self) -> bool:
        """Whether the work before it is over. Never waits. `DeviceError` where that work failed."""
        ...


class Stream(Protocol):
    """Work that is done in the order in which it was given, beside other streams'. One thread at a time gives it."""

    @property
    def handle(self) -> int:
        """What the driver knows it by (`cudaStream_t`); 0 of a host device."""
        ...

    def copy(self, destination: int, source: int, size_bytes: int, kind: CopyKind) -> None:
        """Copy later. Both memories stay valid until an event recorded after this is done."""
        ...

    def record(self) -> Event:
        """An event behind all that was given so far."""
        ...

    def after(self, event: Event) -> None:
        """What is given from now on waits for an event of another stream of the same device."""
        ...

    def wait(self) -> None:
        """Until everything that was given is done: on the thread that gives it. `DeviceError` where some of it failed."""
        ...

    def close(self) -> None:
        """Let go of it; what was given is still done. Idempotent."""
        ...


class Device(Protocol):
    """A device that is open. `close` is the last call."""

    @property
    def kind(self) -> DeviceKind:
        """`cuda` or `host`."""
        ...

    @property
    def ordinal(self) -> int:
        """The driver's number of it."""
        ...

    def facts(self) -> DeviceFacts:
        """What it is, and what memory it has now."""
        ...

    def take(self, size_bytes: int) -> DeviceMemory:
        """Memory, aligned to 256 bytes at least. `StoreFullError` where the device has not that much."""
        ...

    def give_back(self, memory: DeviceMemory) -> None:
        """Give memory back of which nobody uses any more."""
        ...

    def new_stream(self) -> Stream:
        """A stream of its own, which waits for no other."""
        ...

    def launcher(self, stream: Stream) -> Launcher:
        """What runs kernels of `kvobj.tensors.kernels` on the stream, over this device's addresses."""
        ...

    def fence(self, stream: int) -> Event:
        """An event behind all that somebody else's stream was given, by its handle as DLPack has it (1: the default stream).
        Quick."""
        ...

    def register(self, address: int, size_bytes: int) -> None:
        """Pin host memory, so that copies from and to it need no staging. Its owner unregisters it before it goes."""
        ...

    def unregister(self, address: int) -> None:
        """Undo `register`."""
        ...

    def export(self, memory: DeviceMemory) -> bytes:
        """A handle by which another process of the same user opens memory that `take` gave; at most 128 bytes."""
        ...

    def open_exported(self, handle: bytes) -> DeviceMemory:
        """Memory of another process, valid until `close_exported` or until that process ends. `DeviceError` where it cannot be
        had."""
        ...

    def close_exported(self, memory: DeviceMemory) -> None:
        """Undo `open_exported`."""
        ...

    def close(self) -> None:
        """Give everything back. Idempotent."""
        ...
