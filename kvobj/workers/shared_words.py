"""A page of memory that the store process writes and its workers read: how often the settings that workers remember have changed.

Rows of buckets and namespaces are asked for with every request, so workers keep them, for as long as the number stands. It is
raised before the change is told to anybody; a worker looks at it before it reads a row that it is going to keep.
"""

from __future__ import annotations

import mmap
import os
from typing import Final, Self

_BYTES: Final = 4096
_SETTINGS: Final = 0


class SharedWords:
    """Words of 64 bits, read and written whole (aligned, so in one instruction). One writer."""

    __slots__ = ("_map", "_words", "descriptor")

    def __init__(self, descriptor: int, *, writable: bool) -> None:
        self.descriptor = descriptor
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._map = mmap.mmap(descriptor, _BYTES, mmap.MAP_SHARED, protection)
        self._words = memoryview(self._map).cast("Q")

    @classmethod
    def make(cls) -> Self:
        """New words, all 0, for the writer."""
        descriptor = os.memfd_create("kvobj-words", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _BYTES)
        return cls(descriptor, writable=True)

    @classmethod
    def of(cls, descriptor: int) -> Self:
        """The writer's words, for a reader that was given the descriptor."""
        return cls(descriptor, writable=False)

    def note_settings_changed(self) -> None:
        """A bucket or a namespace has changed, or gone."""
        self._words[_SETTINGS] += 1

    @property
    def settings(self) -> int:
        """Another number than before: what was remembered may be out of date."""
        return self._words[_SETTINGS]

    def close(self) -> None:
        """Unmap and close."""
        self._words.release()
        self._map.close()
        os.close(self.descriptor)
