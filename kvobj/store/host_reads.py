"""What clients on this host read of memory at present, as far as it can be seen from here: they copy by themselves, on cores that
hashing would take."""

from __future__ import annotations


class HostReads:
    """Event-loop-only. Of the whole extents that clients open and let go of, `note` is told of both: a copy lies between them."""

    __slots__ = ("ahead_bytes", "seen_bytes")

    def __init__(self) -> None:
        self.seen_bytes = 0
        """That were opened or let go of so far."""
        self.ahead_bytes = 0
        """That are open ahead of their reading, now: it comes, or is under way."""

    def note(self, size_bytes: int) -> None:
        """So much was opened, or let go of."""
        self.seen_bytes += size_bytes
