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
    """One event about chunks of one namespace. `keys` are S3 keys; those of a stored event are a chain in its order, each of
    equally many tokens, and `parent` is that of the first (as in `ObjectRow`). `tokens` are those of all of them together.
    `reason` is a removed event's `RemovalReason`, `durability` a stored one's class as it was reached then."""

    sequence: int
    time_ms: int
    type: EventType
    bucket: str
    namespace: str
    keys: tuple[str, ...] = ()
    parent: str | None = None
    tokens: int = 0
    reason: str = ""
    durability: str = ""


class RemovalRow(msgspec.Struct, frozen=True, array_like=True):
    """The last removal of a key that is still remembered."""

    reason: RemovalReason
    when_ms: int
    namespace: str
    sequence: int = 0


class EventPage(msgspec.Struct, frozen=True, array_like=True):
    """Events in order. `first_kept`: a reader who has not read up to the number before it may have missed something (retention
    or power loss took it; what is left of that time is still given); 0: nothing of the bucket was ever forgotten. `last`: where
    to read on, also where there are no events. `more`: there is more to read already."""

    events: tuple[EventRow, ...]
    first_kept: int
    last: int
    more: bool = False


class History(Protocol):
    """See the module's text."""

    async def read(self, bucket: str | None, *, after: int, limit: int = 1000) -> EventPage:
        """Events of a bucket (None: of all) with numbers above `after`, oldest first; at most `limit`, and fewer where many of
        other buckets lie between. Of a bucket made again under its name, only what is its own."""
        ...

    def last_sequence(self) -> int:
        """The number below which everything is told: a reader that wants only what is to come starts here."""
        ...

    def kept(self) -> int:
        """How many events are kept, about: for people."""
        ...

    async def wait(self, after: int, *, timeout_seconds: float) -> bool:
        """Wait until something above `after` (a page's `last`) may be there; False at the deadline."""
        ...

    async def tell_cleared(self, bucket: str, namespace: str, *, now_ms: int) -> None:
        """Tell that nothing of a namespace is left (its chunks' removals are told already); of the bucket where it is ""."""
        ...

    async def why_removed(self, bucket: str, key: str) -> RemovalRow | None:
        """How the chunk under this key went, if the bounded log still knows."""
        ...

    async def remembers_all(self, bucket: str) -> bool:
        """Whether the log of removals has forgotten nothing of this bucket: a key that it does not know was then never stored."""
        ...

    async def trim(self, *, now_ms: int, retention_ms: int, limit: int = 10_000) -> int:
        """Forget up to `limit` events and removals older than the retention or beyond the bound on their number; how many."""
        ...

    async def write_down(self, *, limit: int = 200_000) -> bool:
        """Before a clean stop that removes what lives only as long as the boot, after the last change: keep those events. False
        where they are more than `limit`: the next start then owns up to a gap."""
        ...
