"""What a holder knows of its session's pins, and what it says of them when it renews. Pure; not thread-safe.

The server compares the holder's statement with its own record of the grants up to `as_of` (`kv-api` §5). Grants count upwards, one
for each request that pins; a request under way may have been granted already. So a statement goes up to the last grant seen before
the oldest request under way began: every grant up to that one has been answered, or its answer was lost, which is a mismatch.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from blake3 import blake3

from kvobj.client.loans import Loans

RELEASES_MAX: Final = 4096
"""Released with one renewal."""


@dataclass(frozen=True, slots=True)
class Statement:
    """What one renewal says: `pins` ids granted up to `as_of` are held, their digest, and those that are let go of now."""

    as_of: int
    pins: int
    pins_digest: bytes
    release: tuple[bytes, ...]


class Ticket:
    """A request that may pin, for as long as somebody has it: one that was interrupted is over without a word. So are pins that are
    held by it."""

    __slots__ = ("__weakref__", "seen")

    def __init__(self, seen: int) -> None:
        self.seen = seen


class PinLedger:
    """The pins of one session, from grant to confirmed release."""

    __slots__ = ("_by_ticket", "_gone", "_held", "_leaving", "_seen", "_under_way")

    def __init__(self) -> None:
        self._held: dict[bytes, int] = {}
        self._leaving: dict[bytes, None] = {}
        self._seen = 0
        self._under_way: Loans[Ticket] = Loans()
        self._by_ticket: dict[weakref.ref[Ticket], tuple[bytes, ...]] = {}
        self._gone: deque[weakref.ref[Ticket]] = deque()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def leaving(self) -> int:
        """Pins that are to be released with the next renewals."""
        self._release_gone()
        return len(self._leaving)

    def begin(self) -> Ticket:
        """A request that may pin is about to be sent. The ticket goes to `end`."""
        ticket = Ticket(self._seen)
        self._under_way.add(ticket)
        return ticket

    def end(
        self, ticket: Ticket, *, grant: int = 0, pins: Iterable[bytes] = (), is_held_by_ticket: bool = False
    ) -> None:
        """The request is over: what it was granted, nothing where it failed or pinned nothing. `is_held_by_ticket`: the pins are
        released, if nobody does so before, once nobody has the ticket."""
        pins = tuple(pins)
        if is_held_by_ticket and pins:
            # First: of pins that are held, and are nobody's, the server would never hear. What is called back is written in C, and
            # so is sure to run (`loans`).
            self._by_ticket[weakref.ref(ticket, self._gone.append)] = pins
        self._under_way.remove(ticket)
        self._seen = max(self._seen, grant)
        self._held.update(dict.fromkeys(pins, grant))

    def release(self, pins: Iterable[bytes]) -> None:
        """Let go of pins with the next renewal. Unknown ones are ignored."""
        self._leaving.update(dict.fromkeys(pin for pin in pins if pin in self._held))

    def statement(self) -> Statement:
        """What to say now."""
        self._release_gone()
        release = tuple(list(self._leaving)[:RELEASES_MAX])
        as_of = min([ticket.seen for ticket in self._under_way.alive()], default=self._seen)
        leaving = set(release)
        counted = sorted(pin for pin, grant in self._held.items() if grant <= as_of and pin not in leaving)
        return Statement(as_of, len(counted), digest_of_pins(counted), release)

    def confirm(self, statement: Statement) -> None:
        """The server has answered this statement."""
        for pin in statement.release:
            self._held.pop(pin, None)
            self._leaving.pop(pin, None)

    def _release_gone(self) -> None:
        while self._gone:
            reference = self._gone[0]
            self.release(self._by_ticket.get(reference, ()))
            self._by_ticket.pop(reference, None)
            self._gone.popleft()  # last: who is interrupted before leaves it to the next


def digest_of_pins(sorted_ids: Iterable[bytes]) -> bytes:
    """BLAKE3 over the sorted raw pin ids (`kv-api` §5)."""
    return blake3(b"".join(sorted_ids)).digest()
