"""Which extents of all regions are taken, for whom, and what would have to go to make room for one more.

Pure bookkeeping over one line of bytes, `region * region_bytes + offset`. Most room is shared; a region can serve one declared
bucket alone, from when that bucket needs it until it is empty (for good, once it is lent). Guarantees that no extent crosses
regions or lies in a region of another bucket. Room exists only once `add` has given it (populated memory), or an adopted extent
in it is freed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Final

from kvobj.arena.allocator import ExtentAllocator
from kvobj.arena.lane import Lane, NamedBucket

# How much `obstacles` looks at before it takes the best it has seen: bounds its time to a few milliseconds.
_LOOKED_AT_REGIONS: Final = 8
_LOOKED_AT_EXTENTS: Final = 8192
# Where nothing was found yet, the look ends here (about 50 ms) and goes on with the next regions next time.
_LOOKED_AT_MOST: Final = 65536


class Room:
    """Extents by absolute offset. `dedicated_buckets` names those that get regions of their own; all others share. `on_dedicated`
    is told of a region that was used before it becomes a bucket's own; `may_share` is asked about one that is to serve all again,
    and where it may not yet, that is asked again when room is short."""

    __slots__ = (
        "_dedicated_buckets",
        "_kept",
        "_may_share",
        "_next_look",
        "_on_dedicated",
        "_pools",
        "_shared",
        "_unshared",
        "_used",
        "capacity_bytes",
        "extents",
        "lent",
        "owners",
        "region_bytes",
        "usable_bytes",
    )

    def __init__(
        self,
        capacity_bytes: int,
        region_bytes: int,
        dedicated_buckets: frozenset[str],
        *,
        on_dedicated: Callable[[int], None] = lambda _: None,
        may_share: Callable[[int], bool] = lambda _: True,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.region_bytes = region_bytes
        # What can be had at all: less than the capacity once a region could not be created.
        self.usable_bytes = capacity_bytes
        self.owners: dict[int, Lane] = {}  # region -> the bucket it is dedicated to
        self.extents: list[dict[int, int]] = [{} for _ in range(-(-capacity_bytes // region_bytes))]
        self._shared = self._pool()
        self._dedicated_buckets = dedicated_buckets
        self._pools: dict[Lane, ExtentAllocator] = {}  # of those that have a region
        self._kept: set[Lane] = set()
        self._next_look = 0
        self._on_dedicated = on_dedicated
        self._may_share = may_share
        # Empty regions that stay their bucket's for now, since they may not be shared yet.
        self._unshared: set[int] = set()
        self._used: set[int] = set()
        # Regions that somebody outside was shown: they stay their bucket's, since they may be looked at for ever.
        self.lent: set[int] = set()

    def _pool(self) -> ExtentAllocator:
        return ExtentAllocator(self.capacity_bytes, segment_bytes=self.region_bytes, empty=True)

    @property
    def allocated_bytes(self) -> int:
        """All extents, with what rounding added."""
        return self._shared.allocated_bytes + sum(pool.allocated_bytes for pool in self._pools.values())

    @property
    def free_bytes(self) -> int:
        """All gaps in populated memory, dedicated regions included."""
        return self._shared.free_bytes + sum(pool.free_bytes for pool in self._pools.values())

    def lane(self, bucket: NamedBucket | None) -> Lane | None:
        """Whose room a bucket's extents come from: its own if it is dedicated, else None for the shared room."""
        if bucket is None:
            return None
        if bucket.name in self._dedicated_buckets:
            return Lane.of(bucket)
        if self._kept and (lane := Lane.of(bucket)) in self._kept:
            return lane
        return None

    def adopt_owners(self, owners: Mapping[int, Lane], lent: Iterable[int]) -> None:
        """Before anything else: whom regions served before, and which of them somebody was shown. These stay their bucket's,
        declared so or not, and no other's of its name; so do the others if their bucket is still declared so."""
        self.lent.update(lent)
        for region, lane in owners.items():
            if region < len(self.extents) and (region in self.lent or lane.name in self._dedicated_buckets):
                self.owners[region] = lane
                self._pools.setdefault(lane, self._pool())
                if region in self.lent:
                    self._kept.add(lane)
        # Nobody knows what was in any region before.
        self._used.update(range(len(self.extents)))

    def lent_bytes_of_former(self, lane: Lane) -> int:
        """Of regions that were shown to those whose the bucket's name was before: nobody else gets them."""
        owners = self.owners
        former = [
            region
            for region in self.lent
            if (owner := owners.get(region)) is not None and owner.name == lane.name and owner != lane
        ]
        return sum(self.region_span(region)[1] for region in former)

    def rounded(self, length: int) -> int:
        """The bytes that an extent of `length` takes up."""
        return self._shared.rounded(length)

    def region_span(self, region: int) -> tuple[int, int]:
        """Absolute offset and length of a region; the last may be shorter."""
        start = region * self.region_bytes
        return start, min(self.region_bytes, self.capacity_bytes - start)

    def can_ever_hold(self, lengths: Sequence[int]) -> bool:
        """Whether extents of these lengths fit side by side if all else were gone (first fit, longest first)."""
        left: list[int] = []
        region, regions = 0, -(-self.usable_bytes // self.region_bytes)
        for length in sorted((self.rounded(length) for length in lengths), reverse=True):
            for place, room in enumerate(left):
                if room >= length:
                    left[place] = room - length
                    break
            else:
                if region == regions:
                    return False
                room = min(self.region_span(region)[1], self.usable_bytes - region * self.region_bytes)
                region += 1
                if room < length:
                    return False
                left.append(room - length)
        return True

    def allocate(self, length: int, lane: Lane | None) -> int | None:
        """Absolute offset of a new extent in the lane's room, or None. A dedicated lane takes one more region if one is empty."""
        offset = self._allocate(length, lane)
        if offset is None and self._unshared:
            for region in list(self._unshared):
                self._undedicate_if_empty(region)
            offset = self._allocate(length, lane)
        if offset is not None:
            region = offset // self.region_bytes
            self.extents[region][offset] = self._shared.rounded(length)
            self._used.add(region)
        return offset

    def _allocate(self, length: int, lane: Lane | None) -> int | None:
        pool = self._shared if lane is None else self._pools.get(lane)
        offset = None if pool is None else pool.allocate(length)
        if offset is None and lane is not None and self._dedicate_one(lane, length):
            offset = self._pools[lane].allocate(length)
        return offset

    def free(self, offset: int) -> int:
        """Give an extent back and return its length. A dedicated region that is empty now returns to the shared room."""
        region = offset // self.region_bytes
        del self.extents[region][offset]
        length = self._pool_of(region).free(offset)
        self._undedicate_if_empty(region)
        return length

    def free_many(self, offsets: Sequence[int]) -> None:
        """`free` of each."""
        for region, members in groupby(sorted(offsets), key=self._region_of):
            own, held = list(members), self.extents[region]
            for offset in own:
                del held[offset]
            self._pool_of(region).free_many(own)
            self._undedicate_if_empty(region)

    def _region_of(self, offset: int) -> int:
        return offset // self.region_bytes

    def add(self, start: int, stop: int) -> None:
        """The span (within one region) is populated: hand it out from now on."""
        region = start // self.region_bytes
        self._pool_of(region).add(start, stop - start)
        self._undedicate_if_empty(region)

    def record(self, extents: Sequence[tuple[int, int]]) -> None:
        """Offset and length of adopted extents, ascending, in room that was never added. The caller has checked that none overlaps
        another."""
        first = 0
        for region, held in enumerate(self.extents):
            behind = bisect_left(extents, ((region + 1) * self.region_bytes,), first)
            own, first = extents[first:behind], behind
            held.update(own)
            self._pool_of(region).record(own)

    def obstacles(self, length: int, lane: Lane | None, may_go: Callable[[int], bool]) -> list[int]:
        """Offsets of extents whose removal makes one gap for `length` in the lane: the fewest bytes found, none of which
        `may_go` refuses. Empty where there is no such place (or a gap is there already).

        Least recently used victims lie scattered; without this, large extents would empty half of the arena before two
        neighbours happened to go (83 % in use on average at full occupancy, 54 % at worst; with it 94 to 98 % and 88 %;
        sizes log-uniform from 64 KiB to 80 MiB, 4 GiB).
        """
        length = self.rounded(length)
        own = [region for region in range(len(self.extents)) if self.owners.get(region) == lane]
        best = self._cheapest(own, length, may_go, whole=False)
        if best is None:
            # No region of the lane's own can give it: empty one of somebody else's, which then changes hands.
            others = [
                region
                for region in range(len(self.extents))
                if self.owners.get(region) != lane and region not in self.lent
            ]
            best = self._cheapest(others, length, may_go, whole=True)
        return best or []

    def _cheapest(
        self, regions: list[int], length: int, may_go: Callable[[int], bool], *, whole: bool
    ) -> list[int] | None:
        best: tuple[int, list[int]] | None = None
        seen = 0
        turn = self._next_look % max(1, len(regions))
        for looked, region in enumerate(regions[turn:] + regions[:turn]):
            # A window that was found is good enough; without one the look goes on, or a waiter would starve.
            if best is not None and (looked >= _LOOKED_AT_REGIONS or seen > _LOOKED_AT_EXTENTS):
                break
            if seen > _LOOKED_AT_MOST:
                break
            self._next_look += 1
            seen += len(self.extents[region])
            start, room = self.region_span(region)
            if room < length:
                continue
            extents = sorted(self.extents[region].items())
            found = _cheapest_window(extents, start, start + room, room if whole else length, may_go)
            if found is not None and (best is None or found[0] < best[0]):
                best = found
        return None if best is None else best[1]

    def _pool_of(self, region: int) -> ExtentAllocator:
        owner = self.owners.get(region)
        return self._shared if owner is None else self._pools[owner]

    def _dedicate_one(self, lane: Lane, length: int) -> bool:
        for region in range(len(self.extents)):
            start, room = self.region_span(region)
            if room >= length and region not in self.owners and self._shared.is_free(start, room):
                self._shared.remove(start, room)
                self.owners[region] = lane
                if lane not in self._pools:
                    self._pools[lane] = self._pool()
                self._pools[lane].add(start, room)
                if region in self._used:
                    self._on_dedicated(region)
                return True
        return False

    def _undedicate_if_empty(self, region: int) -> None:
        self._unshared.discard(region)
        owner = self.owners.get(region)
        if owner is None or self.extents[region] or region in self.lent:
            return
        start, room = self.region_span(region)
        pool = self._pools[owner]
        if not pool.is_free(start, room):
            return
        if not self._may_share(region):
            self._unshared.add(region)
            return
        pool.remove(start, room)
        del self.owners[region]
        if owner not in self.owners.values():
            del self._pools[owner]
        self._shared.add(start, room)


def _cheapest_window(
    extents: list[tuple[int, int]], start: int, stop: int, length: int, may_go: Callable[[int], bool]
) -> tuple[int, list[int]] | None:
    """The window of `length` within `[start, stop)` whose extents sum to the fewest bytes, all of which may go."""
    best: tuple[int, int, int] | None = None  # bytes, first, end
    last = cost = refused = 0
    allowed = [may_go(offset) for offset, _ in extents]
    for first in range(len(extents) + 1):
        if first:
            offset, size = extents[first - 1]
            start = offset + size
            if first <= last:
                cost -= size
                refused -= not allowed[first - 1]
            else:
                last = first  # it lay behind the window before
        if start + length > stop:
            break
        while last < len(extents) and extents[last][0] < start + length:
            cost += extents[last][1]
            refused += not allowed[last]
            last += 1
        if not refused and (best is None or cost < best[0]):
            best = (cost, first, last)
    if best is None:
        return None
    return best[0], [offset for offset, _ in extents[best[1] : best[2]]]
