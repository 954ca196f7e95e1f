"""Runs kernels on the calling thread, from the CPU library: the production path without a GPU, and the oracle beside one."""

from __future__ import annotations

import ctypes
import threading
from functools import cache

from kvobj.errors import UnavailableError
from kvobj.tensors.kernels.host_memory import address_of
from kvobj.tensors.kernels.launcher import Address
from kvobj.tensors.kernels.load import cpu_library, status

_ALIGNMENT = 256


class HostLauncher:
    """See `Launcher`. Scratch is kept for each thread and grows to the largest size asked for."""

    __slots__ = ("_library", "_local")

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._local = threading.local()

    @property
    def name(self) -> str:
        """See `Launcher.name`."""
        return "host"

    @property
    def is_host(self) -> bool:
        """See `Launcher.is_host`."""
        return True

    def launch(self, kernel: str, warps: int, *arguments: Address | float) -> None:
        """See `Launcher.launch`."""
        try:
            function = self._library[f"kv_{kernel}"]
        except AttributeError as error:
            raise KeyError(kernel) from error
        function.restype = None
        function(ctypes.c_uint32(warps), *map(_argument, arguments))

    def scratch(self, slot: str, size_bytes: int) -> Address:
        """See `Launcher.scratch`."""
        slots: dict[str, tuple[bytearray, Address]] | None = getattr(self._local, "slots", None)
        if slots is None:
            slots = self._local.slots = {}
        held = slots.get(slot)
        if held is None or len(held[0]) < size_bytes + _ALIGNMENT:
            memory = bytearray(size_bytes + _ALIGNMENT)
            start = address_of(memoryview(memory))
            held = slots[slot] = (memory, start.after(-start % _ALIGNMENT))
        return held[1]

    def upload(self, to: Address, data: bytes | memoryview) -> None:
        """See `Launcher.upload`."""
        view = memoryview(data)
        ctypes.memmove(int(to), int(address_of(view)), view.nbytes)

    def download(self, at: Address, into: memoryview) -> None:
        """See `Launcher.download`."""
        ctypes.memmove(int(address_of(into)), int(at), into.nbytes)


@cache
def host_launcher() -> HostLauncher:
    """The process's own. `UnavailableError` that says why where the CPU library is missing."""
    library = cpu_library()
    if library is None:
        raise UnavailableError(f"tensor codecs need the CPU kernels: {status().detail}")
    return HostLauncher(library)


def _argument(value: Address | float) -> ctypes.c_void_p | ctypes.c_uint32 | ctypes.c_float:
    if isinstance(value, Address):
        return ctypes.c_void_p(int(value))
    if isinstance(value, float):
        return ctypes.c_float(value)
    return ctypes.c_uint32(value)
