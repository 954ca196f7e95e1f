"""What a log is told of that happens again and again: at once where it is new or has come back, and seldom while it lasts."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final

AGAIN_SECONDS: Final = 600.0
"""What lasts is told again after so long."""
LINES_MAX: Final = 3
"""What comes and goes all the time is told so often in that time."""
KINDS_MAX: Final = 64
"""More kinds than there are reasons; some of their names come from servers."""


@dataclass(slots=True)
class _Note:
    since: float
    lines: int = 0
    untold: int = 0
    is_over: bool = True


class Notes:
    """Not thread-safe: its owner has a lock. A kind's first part says of which calls it is (`went_well`)."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._notes: dict[tuple[Hashable, ...], _Note] = {}

    def __len__(self) -> int:
        return len(self._notes)

    def happened(self, kind: tuple[Hashable, ...], times: int = 1) -> int:
        """It happened, so often: how often since it was told last, where it is to be told now, else 0."""
        note = self._notes.pop(kind, None)
        if note is None or self._now() - note.since >= AGAIN_SECONDS:
            note = _Note(self._now(), untold=0 if note is None else note.untold)
        self._notes[kind] = note  # last: the one that was not seen for longest goes first
        if len(self._notes) > KINDS_MAX:
            del self._notes[next(iter(self._notes))]
        note.untold += times
        if not note.is_over or note.lines >= LINES_MAX:
            return 0
        told, note.untold = note.untold, 0
        note.lines += 1
        note.is_over = False
        return told

    def went_well(self, calls: Hashable) -> None:
        """Such calls are answered as they should be: what they were refused with before is told at once if it comes back."""
        for kind, note in self._notes.items():
            if kind[0] == calls:
                note.is_over = True
