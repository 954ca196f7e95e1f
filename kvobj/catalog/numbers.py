"""The store's one line of numbers (sequences, node ids, queue positions), and how far along it everything has settled.

Numbers are drawn inside changes, on the event loop and on the durable writer's thread, and what a durable group wrote is seen
only when the whole group is. So a reader who goes by numbers may read up to `floor` and no further: what appears later is above.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Self

from kvobj.database import Database


class NumberLine:
    """`allocate` may be called on any thread; all else on the event loop."""

    __slots__ = ("_held", "allocate")

    def __init__(self, first: int) -> None:
        self.allocate: Callable[[], int] = count(first).__next__
        self._held: int | None = None

    @classmethod
    def of(cls, database: Database, first: int) -> Self:
        """The line of a database's catalog, from `first` on."""
        line = cls(first)
        database.watch_groups(started=line.hold, settled=line.release)
        return line

    def hold(self) -> None:
        """A durable group begins: numbers above the present one are open until it has settled."""
        self._held = self.allocate()

    def release(self) -> None:
        """The durable group has settled: its effects are seen, or never will be."""
        self._held = None

    @property
    def is_held(self) -> bool:
        """Whether a durable group is under way."""
        return self._held is not None

    def floor(self) -> int:
        """No number up to this one will be used any more: what bears one is visible, or never will be. Ascends."""
        return self._held if self._held is not None else self.allocate()
