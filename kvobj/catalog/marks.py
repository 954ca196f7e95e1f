"""The marks of chunks that policy has condemned, and which of them are being claimed. A crash forgets them, which is safe.

Event-loop-only but for `is_marked`. At most `MARKS_MAX`: what is not marked stays, and policy will ask again.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import count, repeat
from operator import itemgetter
from typing import Final

from kvobj.catalog.rows import ChunkName

MARKS_MAX: Final = 1_000_000

_Name = tuple[str, str]


class Marks:
    """See the module's text. Names are (bucket, key)."""

    __slots__ = ("_claiming", "_due", "_marked", "_order")

    def __init__(self) -> None:
        self._marked: dict[_Name, tuple[int, ChunkName]] = {}
        # (not before, order, names): what was marked together. Names whose mark was taken away or given anew since are skipped
        # when their time comes.
        self._due: list[tuple[int, int, list[_Name]]] = []
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

    def add(self, chunks: Iterable[ChunkName], *, not_before_boot_ms: int) -> list[bool]:
        """Mark chunks (again: the earlier time stands). False for those that are being claimed, and where there are too many."""
        given = list(chunks)
        order, marked = next(self._order), self._marked
        fresh = dict(zip([(chunk.bucket, chunk.key) for chunk in given], zip(repeat(order), given), strict=False))
        if (
            len(marked) + len(fresh) <= MARKS_MAX
            and marked.keys().isdisjoint(fresh)
            and self._claiming.isdisjoint(fresh)
        ):
            # As nearly always: in a third of the time.
            marked.update(fresh)
            if fresh:
                heapq.heappush(self._due, (not_before_boot_ms, order, list(fresh)))
            return [True] * len(given)
        names: list[_Name] = []
        outcomes: list[bool] = []
        for chunk in given:
            name = (chunk.bucket, chunk.key)
            standing = marked.get(name)
            is_marked = standing is not None and standing[1].blob_id == chunk.blob_id
            if not is_marked and name not in self._claiming and len(marked) < MARKS_MAX:
                if standing is None or standing[0] != order:  # else given twice, of two blobs: the later stands
                    names.append(name)
                marked[name] = (order, chunk)
                is_marked = True
            outcomes.append(is_marked)
        if names:
            heapq.heappush(self._due, (not_before_boot_ms, order, names))
        return outcomes

    def forget(self, bucket: str, keys: Iterable[str]) -> None:
        """Somebody wants these chunks: they are not condemned any more."""
        if self._marked:
            for key in keys:
                self._marked.pop((bucket, key), None)

    def begin_claim(self, *, now_boot_ms: int, limit: int) -> list[ChunkName]:
        """Take the marks whose time has come, in the order in which they were given; they are being claimed from now on."""
        taken: list[tuple[int, ChunkName]] = []
        marked = self._marked
        while self._due and self._due[0][0] <= now_boot_ms and len(taken) < limit:
            not_before_boot_ms, order, names = heapq.heappop(self._due)
            room = limit - len(taken)
            if len(names) > room:
                heapq.heappush(self._due, (not_before_boot_ms, order, names[room:]))
            mine = {
                name: standing
                for name in names[:room]
                if (standing := marked.get(name)) is not None and standing[0] == order
            }
            self._claiming.update(mine)  # first: who asks on another thread finds each in one of the two
            for name in mine:
                del marked[name]
            taken += mine.values()
        taken.sort(key=itemgetter(0))
        return [chunk for _, chunk in taken]

    def end_claim(self, chunks: Sequence[ChunkName]) -> None:
        """The claim is over; what it left has no mark any more."""
        self._claiming.difference_update([(chunk.bucket, chunk.key) for chunk in chunks])
