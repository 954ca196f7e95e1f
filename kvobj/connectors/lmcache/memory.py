"""The bytes of LMCache's memory objects, without a copy.

An object's own `byte_array` makes a ctypes view each time, some microseconds. Where LMCache tells of the arena that its objects lie
in, that is mapped once, and each object is a slice of it.
"""

from __future__ import annotations

import ctypes
from typing import Any


class ObjectMemory:
    """Views of memory objects (`v1/memory_management.py`). `arena`: LMCache's `L1MemoryDesc`, or None.

    A view is valid for as long as LMCache keeps the object, which it does until the task that it came with has its result.
    """

    def __init__(self, arena: Any = None) -> None:  # noqa: ANN401 - LMCache's class
        self._base: int = arena.ptr if arena is not None else 0
        size = int(arena.size) if arena is not None else 0
        self._view = memoryview((ctypes.c_ubyte * size).from_address(self._base)).cast("B") if size > 0 else None

    @property
    def arena_bytes(self) -> int:
        """Size of the arena that was mapped; 0 for none."""
        return 0 if self._view is None else len(self._view)

    def view(self, memory_object: Any) -> memoryview:  # noqa: ANN401 - LMCache's class
        """The object's bytes: as many as it has, not the padding behind them."""
        if self._view is not None:
            size = memory_object.get_size()
            start = memory_object.data_ptr - self._base
            if start >= 0 and start + size <= len(self._view):
                return self._view[start : start + size]
        return memoryview(memory_object.byte_array).cast("B")
