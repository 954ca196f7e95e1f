"""Holds: a chunk that a client asked for a moment ago is not removed by policy, so that a HEAD's 200 is not followed by a 404.

For clients that know of no leases (plain S3). A hold binds policy alone: DELETE and recall go over it. It is a promise of
one process and one clock (`boot_ms`), and bounded: when too much is held, the oldest holds are let go first.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

HOLDS_MAX: Final = 262_144
"""How many chunks are held at once, whatever their sizes: about 40 MB of memory."""


class Holds:
    """Names of chunks (`chunk_name`) and until when they are held. Event-loop-only; every call is O(1) but for what has ended."""

    __slots__ = ("_bytes_max", "_grace_ms", "_holds", "_holds_max", "size_bytes")

    def __init__(self, *, grace_ms: int, bytes_max: int, holds_max: int = HOLDS_MAX) -> None:
        self._grace_ms = grace_ms
        self._bytes_max = bytes_max
        self._holds_max = holds_max
        self._holds: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self.size_bytes = 0

    def hold(self, name: bytes, size_bytes: int, *, now_boot_ms: int) -> None:
        """Hold the chunk for the grace time from now, as the newest."""
        self.drop(name)
        self._holds[name] = (now_boot_ms + self._grace_ms, size_bytes)
        self.size_bytes += size_bytes
        while self._holds and (
            self.size_bytes > self._bytes_max
            or len(self._holds) > self._holds_max
            or next(iter(self._holds.values()))[0] <= now_boot_ms
        ):
            _, (_, released_bytes) = self._holds.popitem(last=False)
            self.size_bytes -= released_bytes

    def is_held(self, name: bytes, *, now_boot_ms: int) -> bool:
        """Whether the chunk is held at this moment."""
        hold = self._holds.get(name)
        return hold is not None and now_boot_ms < hold[0]

    def drop(self, name: bytes) -> None:
        """The chunk is gone, or was never there."""
        hold = self._holds.pop(name, None)
        if hold is not None:
            self.size_bytes -= hold[1]

    def __len__(self) -> int:
        """How many chunks are held, those included whose time has ended since the last call of `hold`."""
        return len(self._holds)
