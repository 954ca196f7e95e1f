"""Sessions, pins and match: the part of the catalog that knows who reads what (`gc-protocol` §2.4).

A holder registers a session and renews it as a whole; a pin names the tail of a chain and protects every ancestor, because rows go
leaf first. All state here is reclaimable: it survives the process, not the machine's power; after the loss of it nothing
is claimed for one TTL (quiet time) while holders open sessions and pin again. Verbs are one atomic step each, in the same
transactions as the objects: "exists, and is now pinned" is one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvobj.catalog.chunk_heads import MatchedChunk
from kvobj.catalog.chunk_list import ChunkList
from kvobj.catalog.lease_rows import PinRow, SessionRow
from kvobj.catalog.rows import ObjectRow


@dataclass(frozen=True, slots=True)
class LeaseLimits:
    """Bounds on what holders may hold. `pins_per_session` counts the chunks that its pins name. `pinned_bytes_per_user`: totals
    of pinned chains, shared ancestors counted once for each pin; None: no bound."""

    ttl_ms_min: int = 1_000
    ttl_ms_max: int = 600_000
    sessions_per_user: int = 4096
    pins_per_session: int = 4096
    pinned_bytes_per_user: int | None = None


@dataclass(frozen=True, slots=True)
class MatchResult:
    """The longest run of live chunks at the head of a list. `rows` are all of them, in order, where asked for.

    `pin` (with the session's `deadline_ms` from now and its `grant`) is there where a pin was asked for and anything matched.
    """

    matched: int
    tokens: int
    size_bytes: int
    tail: ObjectRow | None
    rows: Sequence[MatchedChunk] = ()
    pin: bytes | None = None
    grant: int = 0
    deadline_ms: int = 0


@dataclass(frozen=True, slots=True)
class Renewal:
    """A renewed session. `reclaim`: the pins that the holder counts are not those recorded: it must pin its full set again."""

    ttl_ms: int
    reclaim: bool


@dataclass(frozen=True, slots=True)
class TailPin:
    """One tail's answer: its pin, or None because it is not live."""

    tail: str
    pin: bytes | None


@dataclass(frozen=True, slots=True)
class PinsResult:
    """Pins granted together."""

    pins: tuple[TailPin, ...]
    grant: int
    deadline_ms: int


@dataclass(frozen=True, slots=True)
class LeaseUsage:
    """What is held now."""

    sessions: int
    pins: int
    quiet: bool


class Leases(Protocol):
    """See the module's text. A session belongs to one user and one bucket: to others it does not exist (`NoSuchSessionError`).

    A session whose time has passed is `SessionExpiredError` until `expire` has removed it, then `NoSuchSessionError`.
    """

    async def open_session(self, *, user: str, bucket: str, holder: str, ttl_ms: int, now_boot_ms: int) -> SessionRow:
        """Register a holder. The TTL is cut to its bounds. `NoSuchBucketError`, `PinLimitExceededError` (too many sessions)."""
        ...

    async def renew(
        self,
        session_id: bytes,
        *,
        user: str,
        bucket: str,
        as_of: int,
        pins: int,
        pins_digest: bytes,
        release: Sequence[bytes] = (),
        now_boot_ms: int,
    ) -> Renewal:
        """Release pins (unknown ones are fine), extend the session by its TTL from now, and compare the pins granted up to
        `as_of` with the holder's count and digest (BLAKE3 over the sorted raw pin ids, those released left out)."""
        ...

    def renew_at_once(
        self,
        session_id: bytes,
        *,
        user: str,
        bucket: str,
        as_of: int,
        pins: int,
        pins_digest: bytes,
        now_boot_ms: int,
    ) -> Renewal | None:
        """`renew` without releases, where nothing has to be waited for; None: nothing was done, ask `renew`. Raises as it does."""
        ...

    async def close_session(self, session_id: bytes, *, user: str, bucket: str) -> None:
        """End a session and its pins."""
        ...

    async def match(
        self,
        bucket: str,
        chunks: ChunkList,
        *,
        namespace: str | None = None,
        rows: bool = False,
        pin_for: bytes | None = None,
        user: str = "",
        now_boot_ms: int,
    ) -> MatchResult:
        """The longest run: it ends at the first chunk that is not live, or whose parent is not the element before it (the
        namespace's root for the first); chunks without a parent end it only by being absent. Exact for any list. Chunks of another
        `namespace` count as absent (None: of any), for who may read one need not know of another.

        By binary search over depth and chain sum where the first chunk has a parent (the root); else one by one. Chunks in the
        run that policy has condemned are rescued: of a chain the tail, which protects the others. `pin_for`: a session's id; the
        tail (each chunk, where they have no parents) is pinned in the same step: one new pin. `PinLimitExceededError` changes
        nothing. `NoSuchBucketError`.
        """
        ...

    async def pin_tails(
        self,
        session_id: bytes,
        tails: Sequence[str],
        *,
        release: Sequence[bytes] = (),
        user: str,
        bucket: str,
        now_boot_ms: int,
    ) -> PinsResult:
        """Pin chunks by key, each with a pin of its own, and release others, in one step; at most `pins_per_session`."""
        ...

    async def pin(self, pin_id: bytes, *, user: str, bucket: str) -> PinRow | None:
        """The pin, if it is this user's in this bucket and its session lives."""
        ...

    async def covers(self, pin: PinRow, key: str) -> bool:
        """Whether the pin protects this key: it is a pinned tail or an ancestor of one, hidden or not."""
        ...

    async def expire(self, *, now_boot_ms: int, limit: int = 1000) -> int:
        """Remove up to `limit` sessions that ended half a second ago or more, with their pins; how many."""
        ...

    async def note_alive(self, *, now_boot_ms: int) -> None:
        """Record that the catalog is up: a restart in the same boot extends sessions by the time since (one TTL at most)."""
        ...

    async def stopped_cleanly(self) -> None:
        """Called by a clean stop: where no session is open, the next start needs no quiet time."""
        ...

    def end_quiet(self, *, now_boot_ms: int) -> bool:
        """Whether quiet time is over at this moment; it then stays so."""
        ...

    def usage(self) -> LeaseUsage:
        """What is held now."""
        ...
