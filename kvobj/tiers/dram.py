"""The dram tier: frames that stay in the arena, and a directory of them in shared memory, so that they outlive the process.

A put takes a pin on the frame's own extent: nothing is copied. A directory row is written after the bytes are there and deleted
before their extent is given back, so a row always names its blob's bytes and a restart adopts them. Eviction is inline (one
volatile commit) and takes only what is clean and sealed. It does not limit dirty bytes (the store does) and does not check
what it adopted (a wrapper asks `needs_verification`).
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, TypeVar

import msgspec

from kvobj.arena import Arena, Extent, Pin, PinnedFrame
from kvobj.database import Database, Table, WriteView
from kvobj.errors import InvalidRangeError, NotFoundError
from kvobj.ids import BLOB_ID_BYTES, BlobId
from kvobj.metrics import Metrics
from kvobj.policy import EvictionPolicy
from kvobj.tiers.coded_blobs import CodecTotals, CodedBlob
from kvobj.tiers.protocol import BlobNames, ByteRange, TierUsage

T = TypeVar("T")

DRAM_BLOBS: Final = Table("dram_blobs", volatile=True)

# region, offset, length, generation, frame_bytes, flags: 37 bytes a blob; little-endian, never read on another machine.
_ROW: Final = struct.Struct("<IQQQQB")
_DIRTY: Final = 1
_UNSEALED: Final = 2
# A blob that lies coded has this behind its row: its plain bytes, and then the codec's name.
_CODED: Final = struct.Struct("<Q")
_CODEC_BYTES_MAX: Final = 32

# Rows changed in one volatile commit: bounds how long the event loop stands still (3 µs a row).
_BATCH: Final = 1000
_DELETED_AT_ONCE: Final = 128
"""A millisecond of the event loop."""
# Above the watermark this much more than the excess is evicted, so that not every put evicts.
_SLACK: Final = 0.01


class Entry(msgspec.Struct, eq=False, gc=False):
    """One blob held. `pin` is the tier's own. The cyclic collector follows none of them: see `arena.extent.Hold`."""

    pin: Pin
    frame_bytes: int
    dirty: bool
    sealed: bool
    verified: bool

    @property
    def evictable(self) -> bool:
        """Whether the policy may name it: clean, and its frame's header written."""
        return self.sealed and not self.dirty


@dataclass(frozen=True, slots=True)
class Adoption:
    """What a start found: blobs taken over, and rows dropped because their extents could not be."""

    adopted_blobs: int
    adopted_bytes: int
    dropped_blobs: int


class DramTier:
    """See `kvobj.tiers.protocol.Tier`; with it the dirty, sealed and verified marks that only memory needs.

    Constructing it reads the directory: it adopts what an earlier process left, or empties the directory where the arena is
    new (100,000 rows: 0.25 s with the garbage collector off). It becomes the arena's reclaimer. Above
    `high_watermark` of the arena's capacity each put evicts. Marks are one inline volatile commit each; those on a blob
    that is not held are ignored.
    """

    def __init__(
        self,
        arena: Arena,
        database: Database,
        policy: EvictionPolicy,
        *,
        metrics: Metrics,
        high_watermark: float = 0.9,
    ) -> None:
        self._arena = arena
        self._database = database
        self._policy = policy
        self._watermark_bytes = int(arena.capacity_bytes * high_watermark)
        self._entries: dict[BlobId, Entry] = {}
        self._coded: dict[bytes, CodedBlob] = {}
        self.coded_totals = CodecTotals()
        self._by_generation: dict[int, BlobId] = {}
        self._unsealed: set[BlobId] = set()
        self._dirty: dict[BlobId, None] = {}
        self._dirty_bytes = 0
        self._used_bytes = 0
        # Pins let go by eviction whose extents readers still hold: room that is on its way.
        self._leaving: list[Pin] = []
        self._evicted = metrics.counter("kvobj_dram_evicted_blobs", "blobs evicted from the dram tier")
        self._evicted_bytes = metrics.counter("kvobj_dram_evicted_bytes", "bytes of extents evicted from the dram tier")
        metrics.gauge_of("kvobj_dram_dirty_bytes", "bytes in dram without a home copy", lambda: self._dirty_bytes)
        self.adoption = self._adopt()
        arena.set_reclaimer(self._reclaim)

    @property
    def name(self) -> str:
        """`dram`."""
        return "dram"

    @property
    def dirty_bytes(self) -> int:
        """Bytes of extents whose blobs have no home copy yet."""
        return self._dirty_bytes

    # -- the tier protocol -----------------------------------------------------------------------------------------------
    async def get(self, blob_id: BlobId, byte_range: ByteRange | None = None) -> PinnedFrame | None:
        """See `Tier.get`. Never waits and never copies. An unsealed blob's payload is valid, its frame's header is not."""
        entry = self._entries.get(blob_id)
        if entry is None:
            return None
        start, size = 0, entry.frame_bytes
        if byte_range is not None:
            if byte_range.stop > entry.frame_bytes:
                raise InvalidRangeError(
                    "past the end of the frame", stop=byte_range.stop, frame_bytes=entry.frame_bytes
                )
            start, size = byte_range.start, byte_range.stop - byte_range.start
        if entry.evictable:
            self._policy.touch(blob_id)
        return PinnedFrame(entry.pin.share(), frame_bytes=entry.frame_bytes, start=start, size=size, tier="dram")

    async def put(self, blob_id: BlobId, frame: PinnedFrame, names: BlobNames, *, dirty: bool = False) -> None:  # noqa: ARG002 - memory keeps no names
        """See `Tier.put`. The frame's extent itself is kept; the frame must cover its whole frame (ValueError). Waits for a frame
        that is still filling. `dirty` is recorded in the same commit, so that there is no instant at which it could be evicted."""
        await frame.complete()
        self._hold(blob_id, frame, dirty=dirty, sealed=True)

    async def missing(self, blob_ids: Sequence[BlobId]) -> list[BlobId]:
        """See `Tier.missing`."""
        return [blob_id for blob_id in blob_ids if blob_id not in self._entries]

    async def delete(self, blob_ids: Sequence[BlobId]) -> None:
        """See `Tier.delete`. Dirty ones go too: who deletes knows that nobody needs them. Between many it lets others in."""
        for begin in range(0, len(blob_ids), _DELETED_AT_ONCE):
            if begin:
                await asyncio.sleep(0)
            batch = blob_ids[begin : begin + _DELETED_AT_ONCE]
            self._forget([blob_id for blob_id in batch if blob_id in self._entries])

    async def scan(self) -> AsyncIterator[BlobId]:
        """See `Tier.scan`. Reads the directory page by page, so no snapshot is held while the caller works; others run in
        between."""
        start = b""
        while True:
            await asyncio.sleep(0)  # a hundred pages in one go held every request up for 0.14 s
            with self._database.read() as view:
                page = [bytes(key) for key, _ in islice(view.range(DRAM_BLOBS, start), _BATCH)]
            for key in page:
                yield BlobId(key)
            if len(page) < _BATCH:
                return
            start = page[-1] + b"\0"

    async def usage(self) -> TierUsage:
        """See `Tier.usage`. `used_bytes` are the extents of blobs held, without what is being received."""
        arena = self._arena.usage()
        mode = "huge pages" if arena.huge_pages else "4 KiB pages"
        return TierUsage(arena.capacity_bytes, self._used_bytes, len(self._entries), mode)

    async def aclose(self) -> None:
        """Let go of all pins. The directory stays, for the next process to adopt, unless the arena is removed."""
        self._arena.set_reclaimer(None)
        entries, self._entries = self._entries, {}
        for blob_id, entry in entries.items():
            self._policy.discard(blob_id)
            entry.pin.release()
        self._by_generation.clear()
        self._leaving.clear()

    # -- marks -----------------------------------------------------------------------------------------------------------
    async def put_unsealed(self, blob_id: BlobId, frame: PinnedFrame, names: BlobNames, *, dirty: bool = True) -> None:  # noqa: ARG002 - memory keeps no names
        """Hold a frame whose payload is complete and whose header is not written yet. Neither evictable nor to be written down
        until `mark_sealed`. Otherwise as `put`."""
        await frame.complete()
        self._hold(blob_id, frame, dirty=dirty, sealed=False)

    def put_within(
        self,
        blob_id: BlobId,
        pin: Pin,
        frame_bytes: int,
        commit: Callable[[Callable[[WriteView], None]], T | None],
        *,
        sealed: bool,
    ) -> T | None:
        """`put`, or `put_unsealed`, of a dirty, complete frame that begins where the pin's extent does, within a volatile commit of
        somebody else's. `commit` does the change that it is given, and whatever more, in one step, and answers what is returned
        here; None, or what it raises: it did nothing, and nothing is held. Else the pin is the tier's from here on."""
        row = _encode(pin.extent, frame_bytes, dirty=True, sealed=sealed)
        self._make_way(None)  # before the commit: it may fail, and nothing may after that
        answer = commit(lambda view: view.put(DRAM_BLOBS, blob_id, row))
        if answer is not None:
            self._enter(blob_id, Entry(pin, frame_bytes, True, sealed, True))  # noqa: FBT003 - by position: half the time
        return answer

    def put_unsealed_many(self, blobs: Sequence[tuple[BlobId, PinnedFrame]]) -> None:
        """`put_unsealed` of many dirty ones, whose frames are complete, in one commit: a quarter of the time of one for each."""
        fresh: list[tuple[BlobId, PinnedFrame, Entry]] = []
        rows: list[tuple[BlobId, bytes]] = []
        for blob_id, frame in blobs:
            if not frame.is_whole or frame.progress is not None:
                raise ValueError(f"not a whole, complete frame: {frame.start} + {frame.size} of {frame.frame_bytes}")
            if blob_id not in self._entries:
                fresh.append(
                    (blob_id, frame, Entry(frame.pin, frame.frame_bytes, dirty=True, sealed=False, verified=True))
                )
                rows.append((blob_id, _encode(frame.pin.extent, frame.frame_bytes, dirty=True, sealed=False)))

        def change(view: WriteView) -> None:
            for item in rows[:1]:
                # Refuses where the store is full; it was not for this one, nor is it for the others.
                view.put(DRAM_BLOBS, *item)
            view.put_many(DRAM_BLOBS, rows[1:])

        self._database.write_volatile(change)
        for blob_id, frame, entry in fresh:
            entry.pin = frame.pin.share()
            self._enter(blob_id, entry)
        self._make_way(None)

    def mark_sealed(self, blob_id: BlobId) -> None:
        """The frame's header and directory are written."""
        entry = self._entries.get(blob_id)
        if entry is not None and not entry.sealed:
            self._mark(blob_id, entry, dirty=entry.dirty, sealed=True)

    def mark_dirty(self, blob_id: BlobId) -> None:
        """The blob has no home copy: it must not be evicted."""
        entry = self._entries.get(blob_id)
        if entry is not None and not entry.dirty:
            self._mark(blob_id, entry, dirty=True, sealed=entry.sealed)

    def mark_clean(self, blob_id: BlobId, *, remember: bool = False) -> None:
        """The blob has a home copy (or needs none): it may be evicted from now on. `remember`: a restart is to know it too, which
        else asks the home tier (one volatile commit)."""
        entry = self._entries.get(blob_id)
        if entry is not None and entry.dirty:
            if remember:
                coded = self._coded.get(blob_id)
                row = _encode(entry.pin.extent, entry.frame_bytes, dirty=False, sealed=entry.sealed, coded=coded)
                self._database.write_volatile(lambda view: view.put(DRAM_BLOBS, blob_id, row))
            self._mark(blob_id, entry, dirty=False, sealed=entry.sealed)

    def mark_written_down(self, blob_ids: Iterable[BlobId]) -> None:
        """`mark_sealed` and `mark_clean` of many, for a start: only a sealed frame ever gets a home copy."""
        entries = self._entries
        unsealed, dirty = self._unsealed, self._dirty
        evictable: list[tuple[BlobId, int]] = []
        for blob_id in blob_ids:
            entry = entries.get(blob_id)
            if entry is None or (entry.sealed and not entry.dirty):
                continue
            length = entry.pin.extent.length
            if entry.dirty:
                del dirty[blob_id]
                self._dirty_bytes -= length
                entry.dirty = False
            if not entry.sealed:
                unsealed.discard(blob_id)
                entry.sealed = True
            evictable.append((blob_id, length))
        self._policy.insert_many(evictable)
        self._arena.reconsider()

    def mark_verified(self, blob_id: BlobId) -> None:
        """The blob's bytes were checked in this process."""
        entry = self._entries.get(blob_id)
        if entry is not None:
            entry.verified = True

    def evict_corrupt(self, blob_id: BlobId) -> bool:
        """Forget a copy that does not check out, so that the next read brings up a good one. False where it is the only copy."""
        entry = self._entries.get(blob_id)
        if entry is not None and entry.dirty:
            return False
        self._forget([blob_id])
        return True

    # -- blobs that lie coded --------------------------------------------------------------------------------------------
    def find(self, blob_id: bytes) -> CodedBlob | None:
        """How the blob lies, or None where it lies plain or is not here (`coded.CodedIndex`); 60 ns."""
        return self._coded.get(blob_id)

    def plain_to_code(self, blob_id: BlobId) -> tuple[PinnedFrame, int] | None:
        """A blob that could lie coded, pinned, and its extent's generation, for `hold_coded`; None where it is not here, not whole
        yet, or coded already. Counts as no use of it. One that was adopted need not have been checked: its frame's digest goes into
        the coded one, so that wrong bytes are found when that is decoded."""
        entry = self._entries.get(blob_id)
        if entry is None or not entry.sealed or blob_id in self._coded:
            return None
        return PinnedFrame(entry.pin.share(), frame_bytes=entry.frame_bytes, tier="dram"), entry.pin.extent.generation

    def hold_coded(self, blob_id: BlobId, frame: PinnedFrame, *, codec: str, plain_bytes: int, instead_of: int) -> bool:
        """Let the blob lie in this coded frame from now on, if the extent of generation `instead_of` is what it lies in still.

        One volatile commit names the new extent in the old one's place: a process that dies before it leaves the plain blob, after
        it the coded one. Who reads the old extent goes on doing so; it comes back when the last is done. Marks stay as they are.
        """
        if not frame.is_whole or frame.progress is not None:
            raise ValueError(f"not a whole, complete frame: {frame.start} + {frame.size} of {frame.frame_bytes}")
        entry = self._entries.get(blob_id)
        if entry is None or entry.pin.extent.generation != instead_of or blob_id in self._coded or not entry.sealed:
            return False
        length = frame.pin.extent.length
        coded = CodedBlob(codec, plain_bytes, length, length - frame.frame_bytes)
        row = _encode(frame.pin.extent, frame.frame_bytes, dirty=entry.dirty, sealed=True, coded=coded)
        self._database.write_volatile(lambda view: view.put(DRAM_BLOBS, blob_id, row))
        old, new = entry.pin.extent, frame.pin.extent
        del self._by_generation[old.generation]
        self._by_generation[new.generation] = blob_id
        self._used_bytes += new.length - old.length
        if entry.dirty:
            self._dirty_bytes += new.length - old.length
        before, entry.pin, entry.frame_bytes = entry.pin, frame.pin.share(), frame.frame_bytes
        self._note_coded(blob_id, coded)
        if entry.evictable:
            self._policy.insert(blob_id, new.length)
        before.release()
        self._arena.reconsider()
        return True

    def _note_coded(self, blob_id: BlobId, coded: CodedBlob) -> None:
        self._coded[blob_id] = coded
        self.coded_totals.add(coded)

    def held(self, blob_ids: Sequence[bytes]) -> list[bool]:
        """Of each blob whether it is here now; 40 ns a blob."""
        return list(map(self._entries.__contains__, blob_ids))

    def get_hot(self, blob_id: BlobId) -> PinnedFrame | None:
        """The whole frame as `get` gives it, at once, where the blob is here and nobody has to check or decode it first; else
        None. What wraps this tier does not see it: who asks counts."""
        found = self.pin_hot(blob_id)
        return None if found is None else PinnedFrame(found[0], frame_bytes=found[1], tier="dram")

    def pin_hot(self, blob_id: BlobId) -> tuple[Pin, int] | None:
        """`get_hot` for who needs no more than the whole frame's pin and its bytes."""
        entry = self._entries.get(blob_id)
        if entry is None or not entry.verified or blob_id in self._coded:
            return None
        if entry.sealed and not entry.dirty:
            self._policy.touch(blob_id)
        return entry.pin.share(), entry.frame_bytes

    def copy_hot(self, blob_id: BlobId, start: int, stop: int) -> bytes | None:
        """Encoded bytes `[start, stop)` of the frame, copied, where `get_hot` would give it: for a few bytes."""
        entry = self._entries.get(blob_id)
        if entry is None or not entry.verified or blob_id in self._coded or stop > entry.frame_bytes:
            return None
        if entry.sealed and not entry.dirty:
            self._policy.touch(blob_id)
        return entry.pin.copy(start, stop)

    def needs_verification(self, blob_id: BlobId) -> bool:
        """Whether the blob was adopted and nobody has checked its bytes since."""
        entry = self._entries.get(blob_id)
        return entry is not None and not entry.verified

    def is_sealed(self, blob_id: BlobId) -> bool:
        """Whether the blob's frame is whole, header included. `NotFoundError` if it is not held."""
        entry = self._entries.get(blob_id)
        if entry is None:
            raise NotFoundError("blob is not in dram", blob_id=blob_id)
        return entry.sealed

    def unsealed(self) -> frozenset[BlobId]:
        """Blobs whose frames are not sealed; right after a start, those that the earlier process did not get to."""
        return frozenset(self._unsealed)

    def dirty(self) -> list[BlobId]:
        """Blobs without a home copy, longest dirty first."""
        return list(self._dirty)

    # -- holding and letting go --------------------------------------------------------------------------------------------
    def _hold(self, blob_id: BlobId, frame: PinnedFrame, *, dirty: bool, sealed: bool) -> None:
        if not frame.is_whole:
            raise ValueError(f"a piece of a frame cannot be held: {frame.start} + {frame.size} of {frame.frame_bytes}")
        if blob_id in self._entries:
            return
        entry = Entry(frame.pin, frame.frame_bytes, dirty=dirty, sealed=sealed, verified=True)
        row = _encode(entry.pin.extent, frame.frame_bytes, dirty=dirty, sealed=sealed)
        self._database.write_volatile(lambda view: view.put(DRAM_BLOBS, blob_id, row))
        entry.pin = frame.pin.share()
        self._enter(blob_id, entry)
        self._make_way(blob_id)

    def _make_way(self, keep: BlobId | None) -> None:
        """Evict what is above the watermark."""
        excess = self._arena.reserved_bytes - self._watermark_bytes
        if excess > 0:
            self._let_go(self._unpinned_victims(excess + int(self._watermark_bytes * _SLACK), keep=keep))
        self._arena.reconsider()

    def _enter(self, blob_id: BlobId, entry: Entry) -> None:
        extent = entry.pin.extent
        self._entries[blob_id] = entry
        self._by_generation[extent.generation] = blob_id
        self._used_bytes += extent.length
        if not entry.sealed:
            self._unsealed.add(blob_id)
        if entry.dirty:
            self._dirty[blob_id] = None
            self._dirty_bytes += extent.length
        # The policy knows only what it may name: ten thousand dirty blobs in front would hide the clean ones from it.
        if entry.evictable:
            self._policy.insert(blob_id, extent.length)

    def _mark(self, blob_id: BlobId, entry: Entry, *, dirty: bool, sealed: bool) -> None:
        # In memory only: three rewritten rows a chunk (75 µs of event loop) told a start nothing that it cannot see for itself
        # in the frame's header and in the home tier (`store.recovery`).
        extent = entry.pin.extent
        if dirty and not entry.dirty:
            self._dirty[blob_id] = None
            self._dirty_bytes += extent.length
        elif entry.dirty and not dirty:
            del self._dirty[blob_id]
            self._dirty_bytes -= extent.length
        entry.dirty = dirty
        entry.sealed = sealed
        if sealed:
            self._unsealed.discard(blob_id)
        if entry.evictable:
            self._policy.insert(blob_id, extent.length)
            self._arena.reconsider()
        else:
            self._policy.discard(blob_id)

    def _forget(self, blob_ids: Sequence[BlobId]) -> None:
        """Delete the rows, then let the extents go: an extent that is given to somebody else is named by no row."""
        for begin in range(0, len(blob_ids), _BATCH):
            batch = blob_ids[begin : begin + _BATCH]
            self._delete_rows(batch)
            self._policy.discard_many(batch)
            pins: list[Pin] = []
            for blob_id in batch:
                entry = self._entries.pop(blob_id, None)
                if entry is None:
                    continue
                extent = entry.pin.extent
                del self._by_generation[extent.generation]
                self._used_bytes -= extent.length
                coded = self._coded.pop(blob_id, None)
                if coded is not None:
                    self.coded_totals.add(coded, times=-1)
                self._unsealed.discard(blob_id)
                if entry.dirty:
                    del self._dirty[blob_id]
                    self._dirty_bytes -= extent.length
                pins.append(entry.pin)
            self._arena.release_many(pins)

    def _delete_rows(self, blob_ids: Sequence[bytes]) -> None:
        self._database.write_volatile(lambda view: view.delete_many(DRAM_BLOBS, blob_ids))

    # -- eviction ----------------------------------------------------------------------------------------------------------
    async def _reclaim(self, needed_bytes: int) -> int:
        """Free about so many bytes for those who wait in the arena; returns what was freed at once.

        Least recently used first. If the room that makes does not let the first one in, it is scattered: then the cheapest run of
        neighbours goes. What readers hold goes last, and counts once they are done.
        """
        freed = self._evict(needed_bytes)
        if not self._arena.is_waited_for or not len(self._policy):
            return freed
        obstacles = self._arena.obstacles(self._may_go)
        blob_ids = [self._by_generation[extent.generation] for extent in obstacles]
        return freed + self._let_go(blob_ids)

    def _may_go(self, extent: Extent) -> bool:
        blob_id = self._by_generation.get(extent.generation)
        if blob_id is None:
            return False
        entry = self._entries[blob_id]
        return entry.evictable and entry.pin.pins == 1

    def _evict(self, needed_bytes: int) -> int:
        freed = self._let_go(self._unpinned_victims(needed_bytes))
        self._leaving = [pin for pin in self._leaving if pin.pins]
        lacking = needed_bytes - freed - sum(pin.extent.length for pin in self._leaving)
        if lacking > 0:
            freed += self._let_go(self._policy.victims(lacking, lambda _: True))
        return freed

    def _unpinned_victims(self, needed_bytes: int, *, keep: BlobId | None = None) -> list[BlobId]:
        entries = self._entries
        return self._policy.victims(needed_bytes, lambda blob_id: entries[blob_id].pin.pins == 1 and blob_id != keep)

    def _let_go(self, victims: Sequence[BlobId]) -> int:
        freed = 0
        pins = [self._entries[blob_id].pin for blob_id in victims]
        self._forget(victims)
        for pin in pins:
            self._evicted_bytes.inc(pin.extent.length)
            if pin.pins:
                self._leaving.append(pin)
            else:
                freed += pin.extent.length
        if victims:
            self._evicted.inc(len(victims))
        return freed

    # -- a start -----------------------------------------------------------------------------------------------------------
    def _adopt(self) -> Adoption:
        with self._database.read() as view:
            rows = list(view.range(DRAM_BLOBS))
        if self._arena.adopted:
            self._take_over(rows)
        dropped: list[bytes] = []
        if len(self._entries) != len(rows):
            dropped = [key for key, _ in rows if key not in self._entries]
        for begin in range(0, len(dropped), _BATCH):
            self._delete_rows(dropped[begin : begin + _BATCH])
        return Adoption(len(self._entries), self._used_bytes, len(dropped))

    def _take_over(self, rows: Sequence[tuple[bytes, bytes]]) -> None:
        """Hold the blobs whose extents can be adopted. One pass and no call a blob: a start waits for it."""
        blob_ids: list[BlobId] = []
        extents: list[Extent] = []
        states: list[tuple[int, int, CodedBlob | None]] = []
        unpack, plain_bytes = _ROW.unpack_from, _ROW.size
        for key, value in rows:
            is_plain = len(value) == plain_bytes
            if (is_plain or _is_row(value)) and len(key) == BLOB_ID_BYTES:
                region, offset, length, generation, frame_bytes, flags = unpack(value)
                if frame_bytes <= length:
                    blob_ids.append(BlobId(key))
                    extents.append(Extent(region, offset, length, generation))
                    states.append((frame_bytes, flags, None if is_plain else _coded_of(value, length, frame_bytes)))
        entries, by_generation = self._entries, self._by_generation
        evictable: list[tuple[BlobId, int]] = []
        for blob_id, extent, (frame_bytes, flags, coded), pin in zip(
            blob_ids, extents, states, self._arena.adopt_usable(extents), strict=True
        ):
            if pin is None:
                continue
            dirty, sealed = flags & _DIRTY != 0, flags & _UNSEALED == 0
            entries[blob_id] = Entry(pin, frame_bytes, dirty, sealed, False)  # noqa: FBT003 - by position: half the time
            by_generation[extent.generation] = blob_id
            length = extent.length
            self._used_bytes += length
            if not sealed:
                self._unsealed.add(blob_id)
            if dirty:
                self._dirty[blob_id] = None
                self._dirty_bytes += length
            elif sealed:
                evictable.append((blob_id, length))
            if coded is not None:
                self._note_coded(blob_id, coded)
        self._policy.insert_many(evictable)


def _encode(extent: Extent, frame_bytes: int, *, dirty: bool, sealed: bool, coded: CodedBlob | None = None) -> bytes:
    flags = (_DIRTY if dirty else 0) | (0 if sealed else _UNSEALED)
    row = _ROW.pack(extent.region, extent.offset, extent.length, extent.generation, frame_bytes, flags)
    return row if coded is None else row + _CODED.pack(coded.plain_bytes) + coded.codec.encode()


def _is_row(value: bytes) -> bool:
    front = _ROW.size + _CODED.size
    return len(value) == _ROW.size or front < len(value) <= front + _CODEC_BYTES_MAX


def _coded_of(value: bytes, extent_bytes: int, frame_bytes: int) -> CodedBlob:
    (plain_bytes,) = _CODED.unpack_from(value, _ROW.size)
    codec = bytes(value[_ROW.size + _CODED.size :]).decode("ascii", "replace")
    return CodedBlob(codec, plain_bytes, extent_bytes, extent_bytes - frame_bytes)
