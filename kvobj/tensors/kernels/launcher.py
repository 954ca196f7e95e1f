"""What runs a kernel: the CPU library or a GPU, behind one small protocol, so that a codec's orchestration exists once.

A kernel is a function of `warps` independent warps (`lanes.h`); its arguments are addresses, unsigned 32-bit integers and floats,
in the order of its declaration after the number of warps. Launches of one launcher on one thread happen in order.
"""

from __future__ import annotations

from typing import Protocol


class Address(int):
    """An address in the launcher's memory: what a kernel takes for a pointer. Arithmetic gives plain integers: wrap again."""

    __slots__ = ()

    def after(self, size_bytes: int) -> Address:
        """The address so many bytes on."""
        return Address(self + size_bytes)


class Launcher(Protocol):
    """Runs kernels over one memory. Any thread may use it; what one thread launches and copies happens in order."""

    @property
    def name(self) -> str:
        """`host`, or the device's name."""
        ...

    @property
    def is_host(self) -> bool:
        """Whether its memory is the process's own, so that a view's address serves (`host_memory.address_of`)."""
        ...

    def launch(self, kernel: str, warps: int, *arguments: Address | float) -> None:
        """Run `kv_<kernel>`. Returns when it is done (host) or queued (GPU). KeyError for a kernel that does not exist."""
        ...

    def scratch(self, slot: str, size_bytes: int) -> Address:
        """Working memory of this thread, 256-byte aligned, contents undefined: valid until the same slot is asked for again."""
        ...

    def upload(self, to: Address, data: bytes | memoryview) -> None:
        """Copy from the process's memory. `data` may be changed once this returns."""
        ...

    def download(self, at: Address, into: memoryview) -> None:
        """Copy to the process's memory, after everything launched before."""
        ...
