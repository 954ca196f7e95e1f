"""What the collector would remove and why: the values of a dry run, and the units of a real one, which are counted."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """Why policy wants a chunk gone, first to go first; `lifecycle`: why its bucket's rules want an object gone."""

    QUOTA = "quota"
    EXPIRED = "expired"
    SPACE = "space"
    REFUSED = "refused"
    LIFECYCLE = "lifecycle"


@dataclass(frozen=True, slots=True)
class Victim:
    """One chunk that policy would condemn, or one object that has had its time. `unused_seconds` is the time since its last use
    that this process knows of, None where it does not know."""

    bucket: str
    key: str
    reason: Reason
    size_bytes: int
    unused_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class GcPlan:
    """What a cycle would condemn at this moment. `victims` are the first of them, the totals are over all that were found;
    `truncated`: more would follow. `quiet`: nothing would be done before quiet time ends."""

    victims: tuple[Victim, ...]
    chunks: int
    size_bytes: int
    quiet: bool
    home_used_bytes: int
    home_limit_bytes: int
    marked: int
    waiting_for_pins: int


@dataclass(slots=True)
class CollectorCounts:
    """Since the start. `spared`: the catalog would not give them up. `pressed_bytes`: removed because somebody waited."""

    condemned: int = 0
    claimed: int = 0
    claimed_bytes: int = 0
    rescued: int = 0
    spared: int = 0
    pressed_bytes: int = 0
    admitted: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True)
class GcReport:
    """What one cycle did."""

    condemned: int = 0
    claimed: int = 0
    claimed_bytes: int = 0
    rescued: int = 0
    quiet: bool = False
