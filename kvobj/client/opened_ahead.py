"""What a same-host client had opened before it reads it: an engine says which chunks it will load when it looks them up, and the
load then finds where they lie.

Each is used once, or given back: when the engine lets go of the chunk, when its time is over, with the connection that it was
opened on. What holds it at the server is a pin like that of any open; whether it still holds says the connection.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Final, NamedTuple

from kvobj.client.loans import Bell

if TYPE_CHECKING:
    from kvobj.client.same_host_lane import Lane
    from kvobj.same_host.messages import Extent

AHEAD_CHUNKS_MAX: Final = 4096
"""As many as a session may pin. Of bytes the server shows so a part of what a connection may hold."""
AHEAD_SECONDS: Final = 2.0
"""An engine loads within milliseconds; one that has not by now holds memory that others could use."""
COMING_SECONDS: Final = 0.05
"""Who loads waits so long for an answer that is under way already; to ask anew takes a hundredth."""


class _Ahead(NamedTuple):
    lane: Lane
    extent: Extent
    due: float


class Turn:
    """One asking for chunks; it goes on for as long as somebody has it."""

    __slots__ = ("__weakref__",)


class OpenedAhead:
    """By key. Thread-safe. `let_go` releases extents of a lane, and is called under no lock."""

    def __init__(self, let_go: Callable[[Lane, Sequence[int]], None]) -> None:
        self._let_go = let_go
        self._lock = threading.Lock()
        self._come = Bell()
        self._kept: dict[str, _Ahead] = {}  # the oldest first
        # By whose turn: an answer that comes late is not another's, and in a turn that nobody has any more, none comes.
        self._coming: dict[str, weakref.ref[Turn]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def due(self) -> float | None:
        """When the oldest has to go, of `time.monotonic`; None where nothing is kept."""
        with self._lock:
            return next((each.due for each in self._kept.values()), None)

    def begin(self, keys: Sequence[str]) -> tuple[Turn, list[str]]:
        """A turn, and which of these are to be opened in it, each once; those alone that are neither kept nor coming, as far as
        there is room. Whoever asked keeps the turn, says what came of it (`keep`), and ends it."""
        turn = Turn()
        reference = weakref.ref(turn)
        with self._lock:
            fresh = [key for key in dict.fromkeys(keys) if key not in self._kept and not self._is_coming(key)]
            if self._room < len(fresh):
                for key in [key for key in self._coming if not self._is_coming(key)]:
                    del self._coming[key]
            fresh = fresh[: max(0, self._room)]
            self._coming.update(dict.fromkeys(fresh, reference))
        return turn, fresh

    def keep(
        self, turn: Turn, lane: Lane, keys: Sequence[str], extents: Sequence[Extent | None], *, due: float | None = None
    ) -> None:
        """Some of what the turn is about lies here, or is not there (None). It is kept until `due`, of `time.monotonic`, or for
        `AHEAD_SECONDS`. What nobody wants any more is let go of."""
        unwanted: list[int] = []
        due = time.monotonic() + AHEAD_SECONDS if due is None else due
        with self._lock:
            for key, extent in zip(keys, extents, strict=True):
                is_wanted = (of := self._coming.get(key)) is not None and of() is turn
                if is_wanted:
                    del self._coming[key]
                if extent is None:
                    continue
                if is_wanted:
                    self._kept[key] = _Ahead(lane, extent, due)
                else:
                    unwanted.append(extent.handle)
            self._come.ring_all()
        if unwanted:
            self._let_go(lane, unwanted)

    def end(self, turn: Turn) -> None:
        """Nothing more comes in this turn."""
        with self._lock:
            for key in [key for key, of in self._coming.items() if of() is turn]:
                del self._coming[key]
            self._come.ring_all()

    def take(self, keys: Sequence[str]) -> tuple[Lane, list[Extent]] | None:
        """All of these, which are the caller's to release from now on; None where one is not here, and then none of them is."""
        if not self._kept and not self._coming:
            return None
        until = time.monotonic() + COMING_SECONDS
        while (left := until - time.monotonic()) > 0 and (ticket := self._ticket_for(keys)) is not None:
            self._come.wait(ticket, left)
        with self._lock:
            taken = self._pop(keys)
        lane = taken[0].lane if len(taken) == len(keys) > 0 else None
        if lane is not None and lane.is_valid:
            now = time.monotonic()
            if all(each.lane is lane and each.due > now for each in taken):
                return lane, [each.extent for each in taken]
        self._release(taken)
        return None

    def drop(self, keys: Sequence[str]) -> None:
        """These are not wanted any more."""
        if not self._kept and not self._coming:
            return
        with self._lock:
            for key in keys:
                self._coming.pop(key, None)
            dropped = self._pop(keys)
            self._come.ring_all()
        self._release(dropped)

    def expire(self) -> None:
        """Let go of those whose time is over; of one behind others that stay longer when theirs is."""
        now = time.monotonic()
        with self._lock:
            over = list(takewhile(lambda key: self._kept[key].due <= now, self._kept))
            dropped = self._pop(over)
        self._release(dropped)

    def _ticket_for(self, keys: Sequence[str]) -> threading.Lock | None:
        """To wait with for those that are coming; None where none is."""
        with self._lock:
            return self._come.ticket() if self._are_coming(keys) else None

    def _are_coming(self, keys: Sequence[str]) -> bool:
        return bool(self._coming) and any(map(self._is_coming, keys))

    def _is_coming(self, key: str) -> bool:
        of = self._coming.get(key)
        return of is not None and of() is not None

    @property
    def _room(self) -> int:
        return AHEAD_CHUNKS_MAX - len(self._kept) - len(self._coming)

    def _pop(self, keys: Sequence[str]) -> list[_Ahead]:
        kept = self._kept
        return [kept.pop(key) for key in keys if key in kept]

    def _release(self, dropped: Sequence[_Ahead]) -> None:
        for lane in {each.lane for each in dropped}:
            self._let_go(lane, [each.extent.handle for each in dropped if each.lane is lane])
