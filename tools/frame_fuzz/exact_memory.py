"""Memory of exactly the size asked for, each piece an allocation of its own.

Where AddressSanitizer is loaded (`sanitized.py`) it watches the edges. Elsewhere the piece ends at a page that nobody may touch, so
that whatever goes beyond its end ends the process: kernels as they are in production are held to their bounds too.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Final

from kvobj.tensors.kernels.host_launcher import HostLauncher
from kvobj.tensors.kernels.launcher import Address
from kvobj.tensors.kernels.load import cpu_library

INSIDE: Final = "KVOBJ_FUZZ_TREE"
"""In the environment of a process that runs sanitized kernels: where its own copy of kvobj is."""
CODE_ALIGNMENT: Final = 16
SCRATCH_ALIGNMENT: Final = 256

_IS_SANITIZED: Final = INSIDE in os.environ
_FAILED: Final = ctypes.c_void_p(-1).value
_PRIVATE_MEMORY: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS

_libc: Final = ctypes.CDLL(None, use_errno=True)  # the sanitizer's own functions, where its library is loaded before
_libc.posix_memalign.argtypes = (ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t)
_libc.free.argtypes = (ctypes.c_void_p,)
_libc.free.restype = None
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class ExactMemory:
    """So many bytes, `shift` bytes behind an aligned address. Freed with the object, which outlives every use of `address` and
    `view`. Between the last byte and what is watched there is nothing under AddressSanitizer, else what alignment asks for."""

    __slots__ = ("_mapped_bytes", "_start", "address", "view")

    def __init__(self, size_bytes: int, *, alignment: int = CODE_ALIGNMENT, shift: int = 0) -> None:
        if _IS_SANITIZED:
            found = ctypes.c_void_p()
            if _libc.posix_memalign(ctypes.byref(found), alignment, size_bytes + shift):
                raise MemoryError(f"no {size_bytes} bytes")
            assert found.value is not None, "posix_memalign gives an address"
            self._start, self._mapped_bytes = found.value, 0
            self.address = Address(found.value + shift)
        else:
            usable = -(-(size_bytes + shift + alignment) // mmap.PAGESIZE) * mmap.PAGESIZE
            start = _libc.mmap(None, usable + mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE, _PRIVATE_MEMORY, -1, 0)
            if start in {None, _FAILED} or _libc.mprotect(start + usable, mmap.PAGESIZE, 0):
                raise MemoryError(f"no {size_bytes} bytes")
            self._start, self._mapped_bytes = start, usable + mmap.PAGESIZE
            self.address = Address(start + (usable - size_bytes - shift) // alignment * alignment + shift)
        self.view = memoryview((ctypes.c_char * size_bytes).from_address(self.address)).cast("B")

    @classmethod
    def of(cls, content: bytes, *, shift: int = 0) -> ExactMemory:
        """A copy of these bytes."""
        memory = cls(len(content), shift=shift)
        memory.view[:] = content
        return memory

    def __del__(self) -> None:
        if not hasattr(self, "_start"):
            return
        if self._mapped_bytes:
            _libc.munmap(self._start, self._mapped_bytes)
        else:
            _libc.free(self._start)


class ExactLauncher(HostLauncher):
    """The CPU's kernels, whose scratch is exactly as long as it was last asked for. For one thread."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        library = cpu_library()
        assert library is not None, "the kernels are loaded"
        super().__init__(library)
        self._held: dict[str, tuple[int, ExactMemory]] = {}

    def scratch(self, slot: str, size_bytes: int) -> Address:
        """See `Launcher.scratch`. A slot asked for at the same size again is the same memory."""
        held = self._held.get(slot)
        if held is None or held[0] != size_bytes:
            held = self._held[slot] = (size_bytes, ExactMemory(size_bytes, alignment=SCRATCH_ALIGNMENT))
        return held[1].address
