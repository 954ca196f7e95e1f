"""Until when sessions were renewed: in memory, and in a file beside the volatile environment, of one slot a session.

Every holder renews all the time, and a renewal changes one number: in LMDB six pages and their commit, here one write of 32 bytes.
Slots outlive the process as the environment does (both lie in shared memory), so that a restart finds every renewal that was
answered. A session lasts until the later of its row and its slot. Ids are never used again: a slot of a session that is gone says
nothing, and one that was not written whole counts for nothing.
"""

from __future__ import annotations

import os
import struct
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvobj.errors import UnavailableError

FILE_NAME: Final = "renewals"
_SLOT: Final = struct.Struct("<16sQQ")
_ALL_ONES: Final = 2**64 - 1


class Renewals:
    """Event loop only. Holds as many slots as sessions were renewed at once; `close` it, or it closes with the last reference."""

    __slots__ = ("__weakref__", "_close", "_descriptor", "_free", "_slots", "_until")

    def __init__(self, directory: Path) -> None:
        """Open the file in the directory of the volatile environment, making it if it is missing. `UnavailableError`."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            self._descriptor = os.open(directory / FILE_NAME, flags, 0o600)
        except OSError as error:
            raise UnavailableError("renewals cannot be kept", directory=directory, reason=error.strerror) from error
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self._until: dict[bytes, int] = {}
        self._slots: dict[bytes, int] = {}
        self._free: list[int] = []

    def close(self) -> None:
        """Close the file. Idempotent; nothing is extended after it."""
        self._close()
        self._descriptor = -1

    def recorded(self) -> dict[bytes, int]:
        """What earlier processes left: until when, by session. Blocking; 32 bytes a session."""
        with os.fdopen(os.dup(self._descriptor), "rb") as file:
            file.seek(0)
            return dict(_whole_slots(file.read()))

    def clear(self) -> None:
        """Forget what earlier processes left, once it stands in the sessions' rows."""
        os.ftruncate(self._descriptor, 0)

    def until(self, session_id: bytes) -> int:
        """Until when (boot time, ms) this process has extended the session; 0: it has not."""
        return self._until.get(session_id, 0)

    def extend(self, session_id: bytes, until_boot_ms: int) -> bool:
        """Record a renewal, so that it survives the process; False where there is no room for it: then it is none. ~2 µs."""
        slot = self._slots.get(session_id)
        number = slot if slot is not None else self._free[-1] if self._free else len(self._slots)
        content = _SLOT.pack(session_id, until_boot_ms, until_boot_ms ^ _ALL_ONES)
        try:
            is_whole = os.pwrite(self._descriptor, content, number * _SLOT.size) == _SLOT.size
        except OSError:
            return False
        if slot is None and is_whole:
            if self._free:
                self._free.pop()
            self._slots[session_id] = number
        if is_whole:
            self._until[session_id] = until_boot_ms
        return is_whole

    def forget(self, session_id: bytes) -> None:
        """Of a session that ends, or whose row says it all: its slot is another's from now on."""
        self._until.pop(session_id, None)
        slot = self._slots.pop(session_id, None)
        if slot is not None:
            self._free.append(slot)


def _whole_slots(content: bytes) -> Iterator[tuple[bytes, int]]:
    for session_id, until, inverted in _SLOT.iter_unpack(content[: len(content) // _SLOT.size * _SLOT.size]):
        if until ^ inverted == _ALL_ONES:
            yield session_id, until
