"""What was stored and removed, in order, for a while: the event stream of routers, and why a chunk is not there any more.

Entries are written in the transactions that they tell of. Sequence numbers ascend store-wide and have gaps; `read` gives
only what no transaction in flight can still precede, so who reads on from the last number misses nothing.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

import msgspec


class EventType(StrEnum):
    """`kv-api` §7."""

    STORED = "stored"
    REMOVED = "removed"
    CLEARED = "cleared"


class RemovalReason(StrEnum):
    """Why a chunk went (`kv-api` §5, explain)."""

    EVICTED = "evicted"
    DELETED = "deleted"
    RECALLED = "recalled"
    LOST = "lost"


class EventRow(msgspec.Struct, frozen=True, array_like=True):
    """One event about chunks of one namespace. `keys` are S3 keys, of a chain in chain order; `parent` is that of the first
    (as in `ObjectRow`); `tokens` are those of all of them together."""

    sequence: int
    time_ms: int
    type: EventType
    bucket: str
    namespace: str
    keys: tuple[str, ...] = ()
    parent: str | None = None
    tokens: int = 0
    reason: str = ""


class RemovalRow(msgspec.Struct, frozen=True, array_like=True):
    """The last removal of a key that is still remembered."""

    reason: RemovalReason
    when_ms: int
    namespace: str


class EventPage(msgspec.Struct, frozen=True, array_like=True):
    """Events in order. `first_kept`: the lowest number that retention has left; a reader that asked for an earlier one missed
    what lay before it. `last`: where to read on."""

    events: tuple[EventRow, ...]
    first_kept: int
    last: int


class History(Protocol):
    """See the module's text."""

    async def read(self, bucket: str, *, after: int, limit: int = 1000) -> EventPage:
        """Events of a bucket with numbers above `after`, oldest first."""
        ...

    def last_sequence(self) -> int:
        """The number below which everything is told: a reader that wants only what is to come starts here."""
        ...

    async def wait(self, after: int, *, timeout_seconds: float) -> bool:
        """Wait until something above `after` may be there; False at the deadline."""
        ...

    async def why_removed(self, bucket: str, key: str) -> RemovalRow | None:
        """How the chunk under this key went, if the bounded log still knows."""
        ...

    async def trim(self, *, now_ms: int, retention_ms: int, limit: int = 10_000) -> int:
        """Forget up to `limit` events and removals older than the retention or beyond the bound on their number; how many."""
        ...
