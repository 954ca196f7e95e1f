"""The marks of chunks that policy has condemned, and which of them are being claimed. A crash forgets them, which is safe.

Event-loop-only but for `is_marked`. At most `MARKS_MAX`: what is not marked stays, and policy will ask again.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Final

from kvobj.catalog.rows import ChunkName

MARKS_MAX: Final = 1_000_000

_Name = tuple[str, str]


class Marks:
    """See the module's text. Names are (bucket, key)."""

    __slots__ = ("_claiming", "_due", "_marked", "_order")

    def __init__(self) -> None:
        self._marked: dict[_Name, tuple[int, ChunkName]] = {}
        # (not before, order, name): entries whose mark was taken away or given anew since are skipped when their time comes.
        self._due: list[tuple[int, int, _Name]] = []
        self._order = count()
        self._claiming: set[_Name] = set()

    def __len__(self) -> int:
        return len(self._marked)

    def is_marked(self, bucket: str, key: str) -> bool:
        """Whether the chunk is condemned, or being claimed. May be asked on any thread."""
        name = (bucket, key)
        return name in self._marked or name in self._claiming

    def is_claiming(self, bucket: str, key: str) -> bool:
        """Whether a claim of the chunk is under way: to look-ups it is absent."""
        return (bucket, key) in self._claiming

    def absent(self, bucket: str, keys: Iterable[str]) -> set[str]:
        """Those of the keys that are being claimed."""
        claiming = self._claiming
        return {key for key in keys if (bucket, key) in claiming} if claiming else set()

    def add(self, chunk: ChunkName, *, not_before_boot_ms: int) -> bool:
        """Mark a chunk (again: its earlier time stands). False if it is being claimed or there are too many."""
        name = (chunk.bucket, chunk.key)
        standing = self._marked.get(name)
        if standing is not None and standing[1].blob_id == chunk.blob_id:
            return True
        if name in self._claiming or len(self._marked) >= MARKS_MAX:
            return False
        order = next(self._order)
        self._marked[name] = (order, chunk)
        heapq.heappush(self._due, (not_before_boot_ms, order, name))
        return True

    def forget(self, bucket: str, keys: Iterable[str]) -> None:
        """Somebody wants these chunks: they are not condemned any more."""
        if self._marked:
            for key in keys:
                self._marked.pop((bucket, key), None)

    def begin_claim(self, *, now_boot_ms: int, limit: int) -> list[ChunkName]:
        """Take the marks whose time has come, in the order in which they were given; they are being claimed from now on."""
        taken: list[tuple[int, ChunkName]] = []
        while self._due and self._due[0][0] <= now_boot_ms and len(taken) < limit:
            _, order, name = heapq.heappop(self._due)
            standing = self._marked.get(name)
            if standing is not None and standing[0] == order:
                del self._marked[name]
                self._claiming.add(name)
                taken.append(standing)
        taken.sort(key=lambda mark: mark[0])
        return [chunk for _, chunk in taken]

    def end_claim(self, chunks: Sequence[ChunkName]) -> None:
        """The claim is over; what it left has no mark any more."""
        self._claiming.difference_update((chunk.bucket, chunk.key) for chunk in chunks)
