"""GIPE without a compiler: the twin of `native/gipe.c`, decision for decision. Some 20 µs an access where that takes 0.2."""

from __future__ import annotations

import struct
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Final

from kvobj.policy.chunk_policy import CacheTier
from kvobj.policy.gipe_core import CoreSettings, CoreTotals, names_of
from kvobj.policy.gipe_rank import (
    BOUNDS,
    BUCKETS,
    CLASSES,
    GAPS,
    PARTIAL_GAP,
    REFRESH_EVERY,
    TICK_MS,
    USES,
    Rank,
    class_of,
    gap_class,
)

DRAM: Final = int(CacheTier.DRAM)
NVME: Final = int(CacheTier.NVME)
ADMISSION_LOOKS: Final = 64
"""So many chunks at most make room for one."""
_COUNTS: Final = struct.Struct(f"<{CLASSES * BUCKETS}I")
_NOT_LOGGED: Final = -1
_NOT_OLD: Final = -1
_OLD_TURNS: Final = 2


class _Chunk:
    """One chunk known: held by a tier, or a ghost, or the parent of one that is held. Pairs are by tier.

    `position` is where it stands in the log; one with an `old_turn` has left the log and is held, and `bucket` is where it was
    last counted.
    """

    __slots__ = (
        "bucket", "children", "class_", "inside", "listed", "name", "old_turn", "parent", "position", "size", "tick",
    )  # fmt: skip

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.position = _NOT_LOGGED
        self.tick = 0
        self.class_ = 0
        self.bucket = 0
        self.old_turn = _NOT_OLD
        self.inside = [False, False]
        self.listed = [False, False]
        self.size = [0, 0]
        self.children = [0, 0]
        self.parent: list[_Chunk | None] = [None, None]

    @property
    def is_known(self) -> bool:
        return self.position != _NOT_LOGGED or self.inside[DRAM] or self.inside[NVME]

    @property
    def is_dead(self) -> bool:
        return not self.is_known and not self.children[DRAM] and not self.children[NVME]

    def cell(self, tier: int) -> int:
        """A copy in nvme whose chunk is in dram too is ranked in a class of its own."""
        return self.class_ + (CLASSES if tier == NVME and self.inside[DRAM] else 0)


class PythonCore:
    """See `GipeCore`."""

    def __init__(self, settings: CoreSettings) -> None:
        self._settings = settings
        self._capacities = list(settings.capacities)
        self._chunks: dict[bytes, _Chunk] = {}
        self._lists: tuple[dict[tuple[int, int], OrderedDict[_Chunk, None]], ...] = ({}, {})
        self._rank = Rank()
        self._used = [0, 0]
        self._count = [0, 0]
        # Positions of the log count up for ever; only latest accesses are in the dict.
        self._log: dict[int, _Chunk] = {}
        self._log_start = 0
        self._log_end = 0
        self._log_limit = settings.log_least
        self._pointers = [0] * len(BOUNDS)
        self._old: deque[tuple[int, _Chunk]] = deque()
        self._old_turns = 0
        self._base_ms: int | None = None
        self._tick = 0
        self._since_refresh = 0

    # -- the log and ages ------------------------------------------------------------------------------------------------
    def _advance(self, now_ms: int) -> None:
        if self._base_ms is None:
            self._base_ms = now_ms
        tick = max(0, now_ms - self._base_ms) // TICK_MS
        if tick <= self._tick:
            return
        self._tick = tick
        for number, bound in enumerate(BOUNDS):
            at = self._pointers[number]
            while at < self._log_end:
                chunk = self._log.get(at)
                if chunk is not None:
                    if tick - chunk.tick < bound:
                        break
                    self._pass(chunk, number + 1)
                at += 1
            self._pointers[number] = at

    def _pass(self, chunk: _Chunk, bucket: int) -> None:
        self._rank.count_entered(chunk.class_, bucket)
        self._move_on(chunk, bucket)

    def _move_on(self, chunk: _Chunk, bucket: int) -> None:
        was_listed = list(chunk.listed)
        for tier in (DRAM, NVME):
            self._unlist(chunk, tier)
        for tier in (DRAM, NVME):
            if was_listed[tier]:
                self._list(chunk, tier, bucket, is_young=True)

    def _bucket(self, chunk: _Chunk) -> int:
        if chunk.position == _NOT_LOGGED:
            return chunk.bucket
        return sum(pointer > chunk.position for pointer in self._pointers)

    def _finish(self) -> None:
        if self._since_refresh >= REFRESH_EVERY:
            self._refresh()
        while self._log_end - self._log_start > self._log_limit:
            chunk = self._log.pop(self._log_start, None)
            if chunk is not None:
                bucket = self._bucket(chunk)
                chunk.position = _NOT_LOGGED
                if chunk.inside[DRAM] or chunk.inside[NVME]:
                    chunk.bucket = bucket
                    self._old_push(chunk)
                else:
                    self._forget_if_dead(chunk)
            self._log_start += 1
            for _ in range(_OLD_TURNS):
                self._old_turn()
        self._pointers = [max(pointer, self._log_start) for pointer in self._pointers]

    # -- chunks that a tier holds and that the log has forgotten: a queue in which each comes up in turn and is counted on
    def _old_push(self, chunk: _Chunk) -> None:
        chunk.old_turn = self._old_turns
        self._old_turns += 1
        self._old.append((chunk.old_turn, chunk))

    def _old_turn(self) -> None:
        if self._old:
            turn, chunk = self._old.popleft()
            if chunk.old_turn == turn:
                self._count_on(chunk)
                self._old_push(chunk)

    def _count_on(self, chunk: _Chunk) -> None:
        bucket = chunk.bucket
        while bucket < len(BOUNDS) and self._tick - chunk.tick >= BOUNDS[bucket]:
            bucket += 1
            self._rank.count_entered(chunk.class_, bucket)
        if bucket != chunk.bucket:
            self._move_on(chunk, bucket)
            chunk.bucket = bucket

    def _refresh(self) -> None:
        self._rank.refresh()
        self._since_refresh = 0
        blocks = 0
        for tier in (DRAM, NVME):
            mean = self._used[tier] // self._count[tier] if self._count[tier] else 0
            if mean:
                blocks += self._capacities[tier] // mean
        if blocks:
            limit = min(blocks * self._settings.log_factor, self._settings.log_most)
            self._log_limit = max(limit, self._settings.log_least)

    def _forget_if_dead(self, chunk: _Chunk) -> None:
        if chunk.is_dead:
            self._chunks.pop(chunk.name, None)

    def _find_or_add(self, name: bytes) -> _Chunk:
        chunk = self._chunks.get(name)
        if chunk is None:
            chunk = self._chunks[name] = _Chunk(name)
        return chunk

    # -- lists of candidates -----------------------------------------------------------------------------------------------
    def _list(self, chunk: _Chunk, tier: int, bucket: int, *, is_young: bool) -> None:
        cell = self._lists[tier].setdefault((chunk.cell(tier), bucket), OrderedDict())
        cell[chunk] = None
        if not is_young:
            cell.move_to_end(chunk, last=False)
        chunk.bucket = bucket
        chunk.listed[tier] = True

    def _unlist(self, chunk: _Chunk, tier: int) -> None:
        if not chunk.listed[tier]:
            return
        key = (chunk.cell(tier), chunk.bucket)
        cell = self._lists[tier][key]
        del cell[chunk]
        if not cell:
            del self._lists[tier][key]
        chunk.listed[tier] = False

    def _is_candidate(self, chunk: _Chunk, tier: int) -> bool:
        if not chunk.inside[tier] or chunk.children[tier]:
            return False
        # The only copy of a chunk whose children are in dram: without it they could not be reached.
        return tier == DRAM or chunk.inside[DRAM] or not chunk.children[DRAM]

    def _reconsider(self, chunk: _Chunk, tier: int, *, is_young: bool = False) -> None:
        if not self._is_candidate(chunk, tier):
            self._unlist(chunk, tier)
        elif not chunk.listed[tier]:
            self._list(chunk, tier, self._bucket(chunk), is_young=is_young)

    def _worth_of_cell(self, cell: int, bucket: int) -> float:
        if cell < CLASSES:
            return self._rank.worth(cell, bucket)
        return self._rank.worth(cell - CLASSES, bucket) * self._settings.duplicate_factor

    def _first_victim(self, tier: int) -> _Chunk | None:
        cells = self._lists[tier]
        if not cells:
            return None
        _, least = min((self._worth_of_cell(*key), key) for key in cells)
        return next(iter(cells[least]))

    # -- accesses --------------------------------------------------------------------------------------------------------
    def request(self, chain: bytes, now_ms: int, *, partial_last: bool, hint: int) -> int:
        """See `GipeCore.request`."""
        self._advance(now_ms)
        names = list(names_of(chain))
        if not names:
            return 0
        known = 0
        for name in names:
            chunk = self._chunks.get(name)
            if chunk is None or not chunk.is_known:
                break
            known += 1
        gap = 0 if known < 2 else gap_class(self._tick - self._chunks[names[known - 1]].tick)  # noqa: PLR2004 - eviction.md §3
        for index in range(len(names) - 1, -1, -1):
            is_partial = partial_last and index == len(names) - 1
            self._touch(self._find_or_add(names[index]), PARTIAL_GAP if is_partial else gap, hint)
        self._finish()
        return known

    def access(self, name: bytes, now_ms: int) -> None:
        """See `GipeCore.access`."""
        self._advance(now_ms)
        chunk = self._find_or_add(name)
        if not chunk.is_known:
            self._touch(chunk, 0, 0)
        elif self._tick - chunk.tick >= BOUNDS[0]:
            self._touch(chunk, gap_class(self._tick - chunk.tick), 0)
        self._finish()

    def _touch(self, chunk: _Chunk, gap: int, hint: int) -> None:
        uses = chunk.class_ % USES + 2 if chunk.is_known else 1
        if chunk.old_turn != _NOT_OLD:
            self._count_on(chunk)
            chunk.old_turn = _NOT_OLD
            self._rank.count_ended(chunk.class_, chunk.bucket)
        elif chunk.position != _NOT_LOGGED:
            self._rank.count_ended(chunk.class_, self._bucket(chunk))
            del self._log[chunk.position]
        self._unlist(chunk, DRAM)
        self._unlist(chunk, NVME)
        chunk.class_ = class_of(uses, gap, hint)
        chunk.tick = self._tick
        chunk.position = self._log_end
        self._log[chunk.position] = chunk
        self._log_end += 1
        self._rank.count_entered(chunk.class_, 0)
        self._since_refresh += 1
        self._reconsider(chunk, DRAM, is_young=True)
        self._reconsider(chunk, NVME, is_young=True)

    # -- what tiers hold ---------------------------------------------------------------------------------------------------
    def stored(self, name: bytes, tier: int, size_bytes: int, parent: bytes | None, now_ms: int) -> None:
        """See `GipeCore.stored`."""
        self._advance(now_ms)
        chunk = self._find_or_add(name)
        if chunk.inside[tier]:
            self._used[tier] += size_bytes - chunk.size[tier]
            chunk.size[tier] = size_bytes
            return
        above = self._find_or_add(parent) if parent is not None and parent != name else None
        self._put_in(chunk, above, tier, size_bytes)
        self._finish()

    def _put_in(self, chunk: _Chunk, parent: _Chunk | None, tier: int, size_bytes: int) -> None:
        if not chunk.is_known:  # nobody asked for it before it was stored: it is of its parent's request
            hint, gap = divmod(parent.class_ // USES, GAPS) if parent is not None else (0, 0)
            self._touch(chunk, 0 if gap == PARTIAL_GAP else gap, hint)
        if tier == DRAM:
            self._unlist(chunk, NVME)
        chunk.inside[tier] = True
        chunk.size[tier] = size_bytes
        chunk.parent[tier] = parent
        self._used[tier] += size_bytes
        self._count[tier] += 1
        if parent is not None:
            parent.children[tier] += 1
            for each in range(tier, NVME + 1):
                self._reconsider(parent, each)
        self._reconsider(chunk, tier, is_young=True)
        if tier == DRAM:
            self._reconsider(chunk, NVME)

    def stored_many(self, chunks: Sequence[tuple[bytes, int]], tier: int, now_ms: int) -> None:
        """See `GipeCore.stored_many`."""
        for name, size_bytes in chunks:
            self.stored(name, tier, size_bytes, None, now_ms)

    def dropped(self, name: bytes, tier: int) -> None:
        """See `GipeCore.dropped`."""
        chunk = self._chunks.get(name)
        if chunk is not None and chunk.inside[tier]:
            self._take_out(chunk, tier)

    def dropped_many(self, names: Sequence[bytes], tier: int) -> None:
        """See `GipeCore.dropped_many`."""
        for name in names:
            self.dropped(name, tier)

    def _take_out(self, chunk: _Chunk, tier: int) -> None:
        parent = chunk.parent[tier]
        self._used[tier] -= chunk.size[tier]
        self._count[tier] -= 1
        self._unlist(chunk, tier)
        if tier == DRAM:
            self._unlist(chunk, NVME)
        chunk.inside[tier] = False
        chunk.parent[tier] = None
        if not chunk.inside[DRAM] and not chunk.inside[NVME]:
            chunk.old_turn = _NOT_OLD
        if tier == DRAM:
            self._reconsider(chunk, NVME)
        if parent is not None:
            parent.children[tier] -= 1
            if not parent.children[tier]:
                for each in range(tier, NVME + 1):
                    self._reconsider(parent, each)
                self._forget_if_dead(parent)
        self._forget_if_dead(chunk)

    def set_capacity(self, tier: int, capacity_bytes: int) -> None:
        """See `GipeCore.set_capacity`."""
        self._capacities[tier] = capacity_bytes

    # -- victims ---------------------------------------------------------------------------------------------------------
    def walk(self, tier: int, now_ms: int) -> PythonWalk:
        """See `GipeCore.walk`."""
        self._advance(now_ms)
        return PythonWalk(self, tier)

    def admits(self, name: bytes, tier: int, size_bytes: int, parent: bytes | None, now_ms: int) -> bool:
        """See `GipeCore.admits`."""
        self._advance(now_ms)
        if not self._excess(tier, size_bytes):
            return True
        return self._victims_worth_less(name, tier, size_bytes, parent) is not None

    def _excess(self, tier: int, size_bytes: int) -> int:
        return max(0, self._used[tier] + size_bytes - self._capacities[tier])

    def _victims_worth_less(self, name: bytes, tier: int, size_bytes: int, parent: bytes | None) -> list[bytes] | None:
        if size_bytes > self._capacities[tier]:
            return None
        chunk = self._chunks.get(name)
        is_known = chunk is not None and chunk.is_known
        worth = self._rank.worth(chunk.class_, self._bucket(chunk)) if is_known and chunk else self._rank.worth(0, 0)
        excess, found, victims = self._excess(tier, size_bytes), 0, list[bytes]()
        walk = PythonWalk(self, tier)
        try:
            take = False
            while len(victims) < ADMISSION_LOOKS:
                victim = walk.step(take=take)
                if victim is None:
                    return None
                take = victim.name != parent
                if not take:
                    continue  # no look: where an offer has just stored it, the twin does not even list it
                least = self._worth_of_cell(victim.cell(tier), victim.bucket)
                if not worth > (least * self._settings.write_margin if tier == NVME else least):
                    return None
                victims.append(victim.name)
                found += victim.size[tier]
                if found >= excess:
                    return victims
            return None
        finally:
            walk.end()

    def offer(self, chain: bytes, first: int, tier: int, size_bytes: int, now_ms: int) -> tuple[int, list[bytes]]:
        """See `GipeCore.offer`."""
        self._advance(now_ms)
        names = list(names_of(chain))
        gone: list[bytes] = []
        at = first = max(first, 0)
        while at < len(names):
            name, parent = names[at], names[at - 1] if at else None
            chunk = self._chunks.get(name)
            if chunk is None or not chunk.inside[tier]:
                if self._excess(tier, size_bytes):
                    victims = self._victims_worth_less(name, tier, size_bytes, parent)
                    if victims is None:
                        break
                    for victim in victims:
                        self._take_out(self._chunks[victim], tier)
                    gone += victims
                chunk = self._find_or_add(name)
                above = self._find_or_add(parent) if parent is not None and parent != name else None
                self._put_in(chunk, above, tier, size_bytes)
            at += 1
        self._finish()
        return at - first, gone

    # -- the rest --------------------------------------------------------------------------------------------------------
    def locate(self, chain: bytes) -> bytes:
        """See `GipeCore.locate`."""
        found = (self._chunks.get(name) for name in names_of(chain))
        return bytes(0 if chunk is None else chunk.inside[DRAM] | chunk.inside[NVME] << 1 for chunk in found)

    def used_bytes(self, tier: int) -> int:
        """See `GipeCore.used_bytes`."""
        return self._used[tier]

    def count(self, tier: int) -> int:
        """See `GipeCore.count`."""
        return self._count[tier]

    def totals(self) -> CoreTotals:
        """See `GipeCore.totals`."""
        return CoreTotals(len(self._chunks), self._log_end - self._log_start, self._log_limit, 0)

    def counts(self) -> bytes:
        """See `GipeCore.counts`."""
        return b"".join(
            _COUNTS.pack(*(count for row in table for count in row)) for table in (self._rank.entered, self._rank.ended)
        )

    def set_counts(self, raw: bytes) -> None:
        """See `GipeCore.set_counts`."""
        for table, at in ((self._rank.entered, 0), (self._rank.ended, _COUNTS.size)):
            counts = _COUNTS.unpack_from(raw, at)
            table[:] = [list(counts[row * BUCKETS : (row + 1) * BUCKETS]) for row in range(CLASSES)]
        self._refresh()


class PythonWalk:
    """See `Walk`."""

    def __init__(self, core: PythonCore, tier: int) -> None:
        self._core = core
        self._tier = tier
        # Chunks popped, each with its parent where it was taken, and whether that became a candidate.
        self._undo: list[tuple[_Chunk, _Chunk | None, bool]] = []

    def next(self, *, take: bool) -> tuple[bytes, int] | None:
        """See `Walk.next`."""
        chunk = self.step(take=take)
        return None if chunk is None else (chunk.name, chunk.size[self._tier])

    def some(self, bytes_needed: int, limit: int, *, take: bool) -> tuple[list[bytes], int]:
        """See `Walk.some`."""
        names: list[bytes] = []
        found_bytes = 0
        while found_bytes < bytes_needed and len(names) < limit:
            found = self.next(take=take)
            if found is None:
                break
            take = True
            names.append(found[0])
            found_bytes += found[1]
        return names, found_bytes

    def step(self, *, take: bool) -> _Chunk | None:
        """`next`, for the core itself."""
        core, tier = self._core, self._tier
        if take and self._undo:
            chunk = self._undo[-1][0]
            parent = chunk.parent[tier]
            if parent is not None:
                parent.children[tier] -= 1
                core._reconsider(parent, tier)  # noqa: SLF001 - two classes of one module
                self._undo[-1] = (chunk, parent, parent.listed[tier])
        victim = core._first_victim(tier)  # noqa: SLF001
        if victim is not None:
            core._unlist(victim, tier)  # noqa: SLF001
            self._undo.append((victim, None, False))
        return victim

    def end(self) -> None:
        """See `Walk.end`."""
        core, tier = self._core, self._tier
        for chunk, parent, is_freed in reversed(self._undo):
            if is_freed and parent is not None:
                core._unlist(parent, tier)  # noqa: SLF001
            if parent is not None:
                parent.children[tier] += 1
            core._list(chunk, tier, chunk.bucket, is_young=False)  # noqa: SLF001
        self._undo.clear()
