"""Which chunks of KV buckets lie in the home tier: what policy may name, and what each name stands for.

Policy knows chunks by 16-byte names that outlive blob ids; the collector needs bucket, key and blob id of each. One record of
bytes a chunk (about 250 B with its name and its place in the dict) and not an object: there may be millions.

Where there is a remote tier, a chunk of class `shared` may have left nvme: it is *away*. Its record stays, for its time to live and
its namespace's quota go on; policy ranks only what is here.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final

import msgspec

from kvobj.catalog.rows import ChunkName, Durability, ObjectRow
from kvobj.policy.chunk_policy import CacheTier, ChunkPolicy, chunk_name

# Blob id, parent's name or zeros, size, group, last use in seconds of the boot clock, flags.
_RECORD: Final = struct.Struct("<16s16sQIIB")
_GROUP: Final = struct.Struct("<I")
_GROUP_AT: Final = struct.calcsize("<16s16sQ")
_GROUP_STOP: Final = _GROUP_AT + _GROUP.size
_SHARED: Final = 1
_AWAY: Final = 2
_NO_PARENT: Final = bytes(16)
SCAN_MAX: Final = 10_000
"""How many chunks one call looks at where policy does not rank them."""


class HomeChunk(msgspec.Struct, frozen=True, gc=False):
    """One chunk in the home tier. `used_ms` is its last use that this process knows of, on the boot clock. `is_shared`: its row
    is of class `shared`; `is_away`: it lies on the remote alone."""

    name: bytes
    chunk: ChunkName
    namespace: str
    parent: bytes | None
    size_bytes: int
    used_ms: int
    is_shared: bool = False
    is_away: bool = False

    @property
    def home_bytes(self) -> int:
        """What it takes in nvme."""
        return 0 if self.is_away else self.size_bytes


def parent_name(row: ObjectRow) -> bytes | None:
    """The policy's name of the row's parent; None for a first chunk and for one without a parent."""
    return chunk_name(row.bucket, row.parent) if row.parent else None


def plain_size(row: ObjectRow) -> int:
    """What a chunk takes that lies as it was put."""
    return row.size_bytes


class HomeChunks:
    """See the module's text. `tracks_use`: keep the order of use, for a time to live. `stored_bytes` is what a chunk takes in the
    home tier. Event-loop-only."""

    def __init__(
        self, policy: ChunkPolicy, *, tracks_use: bool, stored_bytes: Callable[[ObjectRow], int] = plain_size
    ) -> None:
        self._policy = policy
        self._stored_bytes = stored_bytes
        self._tracks_use = tracks_use
        self._records: OrderedDict[bytes, bytes] = OrderedDict()
        self._groups: dict[tuple[str, str], int] = {}
        self._group_names: list[tuple[str, str]] = []
        self._shared: OrderedDict[bytes, None] = OrderedDict()
        self._away: dict[int, OrderedDict[bytes, None]] = {}
        self.shared_bytes = 0
        """Of chunks of class `shared` in nvme: what may leave it and lose nothing."""

    def __len__(self) -> int:
        """How many chunks are known."""
        return len(self._records)

    def __contains__(self, name: bytes) -> bool:
        """Whether a chunk of this name is known to be at home."""
        return name in self._records

    def known(self, names: Sequence[bytes]) -> list[bytes]:
        """Those of the names that stand for chunks here."""
        records = self._records
        return [name for name in names if name in records]

    def add(self, row: ObjectRow, *, boot_ms: int) -> None:
        """The row's blobs are at home from now on."""
        name = chunk_name(row.bucket, row.key)
        parent = parent_name(row)
        size_bytes = self._insert(name, row, parent, boot_ms)
        self._policy.stored(name, CacheTier.NVME, parent=parent, size_bytes=size_bytes, now_ms=boot_ms)

    def _insert(self, name: bytes, row: ObjectRow, parent: bytes | None, boot_ms: int, *, is_away: bool = False) -> int:
        group, size_bytes = self._group(row.bucket, row.namespace), self._stored_bytes(row)
        flags = (_SHARED if row.durability is Durability.SHARED else 0) | (_AWAY if is_away else 0)
        blob_id, above = row.blobs[0].blob_id, parent or _NO_PARENT
        record = _RECORD.pack(blob_id, above, size_bytes, group, boot_ms // 1000, flags) + row.key.encode()
        self._enter(name, record, is_newest=True)
        return size_bytes

    def _enter(self, name: bytes, record: bytes, *, is_newest: bool) -> None:
        """Keep the record, in the place of one that there may be, and what is counted by its flags."""
        if name in self._records:
            self._leave(name)
        self._records[name] = record
        self._records.move_to_end(name, last=is_newest)
        _, _, size_bytes, group, _, flags = _RECORD.unpack_from(record)
        if flags & _AWAY:
            self._away.setdefault(group, OrderedDict())[name] = None
        elif flags & _SHARED:
            self._shared[name] = None
            self.shared_bytes += size_bytes

    def _leave(self, name: bytes) -> bytes | None:
        record = self._records.pop(name, None)
        if record is not None:
            _, _, size_bytes, group, _, flags = _RECORD.unpack_from(record)
            if flags & _AWAY:
                self._away[group].pop(name, None)
            elif flags & _SHARED:
                del self._shared[name]
                self.shared_bytes -= size_bytes
        return record

    def _flag(self, name: bytes, change: Callable[[int], int]) -> None:
        """Change the flags of a record that is there, in its place in the order of use."""
        record = self._records[name]
        _, _, size_bytes, group, _, before = _RECORD.unpack_from(record)
        if before & _AWAY:
            self._away[group].pop(name, None)
        elif before & _SHARED:
            del self._shared[name]
            self.shared_bytes -= size_bytes
        flags = change(before)
        self._records[name] = record[: _RECORD.size - 1] + bytes((flags,)) + record[_RECORD.size :]
        if flags & _AWAY:
            self._away.setdefault(group, OrderedDict())[name] = None
        elif flags & _SHARED:
            self._shared[name] = None
            self.shared_bytes += size_bytes

    # -- where there is a remote -----------------------------------------------------------------------------------
    def shared(self, row: ObjectRow) -> None:
        """The row is of class `shared` now: its copy here may go. Nothing where the name does not stand for this row."""
        name = chunk_name(row.bucket, row.key)
        if self.is_row(row, name):
            self._flag(name, lambda flags: flags | _SHARED)

    def left(self, row: ObjectRow) -> None:
        """The row's blobs lie on the remote alone from now on."""
        name = chunk_name(row.bucket, row.key)
        if self.is_row(row, name):
            self._flag(name, lambda flags: flags | _SHARED | _AWAY)
            self._policy.dropped(name, CacheTier.NVME)

    def keep(self, row: ObjectRow) -> None:
        """The row's copy here is not to leave, whatever its class."""
        name = chunk_name(row.bucket, row.key)
        if self.is_row(row, name):
            self._flag(name, lambda flags: flags & ~_SHARED)

    def is_evictable(self, name: bytes) -> bool:
        """Whether the chunk is of class `shared` and in nvme."""
        return name in self._shared

    def evictable(self, wanted_bytes: int, limit: int) -> list[bytes]:
        """Names of such chunks, of so many bytes together if there are; the one first that has been one for longest."""
        found: list[bytes] = []
        found_bytes = 0
        for name in self._shared:
            if found_bytes >= wanted_bytes or len(found) == limit:
                break
            found.append(name)
            found_bytes += _RECORD.unpack_from(self._records[name])[2]
        return found

    def oldest(self, *, eligible: Callable[[bytes], bool], limit: int) -> list[bytes]:
        """Chunks in nvme in the order in which they came (of their use, where that is followed), children before parents: for what
        policy does not name, since it may be the way to something in memory."""
        found: list[HomeChunk] = []
        for name, record in islice(self._records.items(), SCAN_MAX):
            if len(found) == limit:
                break
            if not record[_RECORD.size - 1] & _AWAY and eligible(name):
                found.append(self._decode(name, record))
        return [chunk.name for chunk in _leaves_first(found)]

    def away_in(
        self, place: tuple[str, str], wanted_bytes: int, *, eligible: Callable[[bytes], bool], limit: int
    ) -> list[bytes]:
        """Chunks of a namespace that lie on the remote alone, of so many bytes if there are: children before parents, otherwise the
        one first that left first."""
        group = self._groups.get(place)
        found: list[HomeChunk] = []
        found_bytes = 0
        for looked_at, name in enumerate(self._away.get(-1 if group is None else group, ())):
            if len(found) == limit or found_bytes >= wanted_bytes or looked_at == SCAN_MAX:
                break
            if eligible(name):
                found.append(self._decode(name, self._records[name]))
                found_bytes += found[-1].size_bytes
        return [chunk.name for chunk in _leaves_first(found)]

    def bucket_of(self, name: bytes) -> str:
        """The bucket of a chunk that is known."""
        group: int = _RECORD.unpack_from(self._records[name])[3]
        return self._group_names[group][0]

    # -- all of them -----------------------------------------------------------------------------------------------

    def _group(self, bucket: str, namespace: str) -> int:
        group = self._groups.setdefault((bucket, namespace), len(self._group_names))
        if group == len(self._group_names):
            self._group_names.append((bucket, namespace))
        return group

    def used(self, name: bytes, *, boot_ms: int) -> None:
        """The chunk was used; nothing where use is not followed or the chunk is not known."""
        if not self._tracks_use:
            return
        record = self._records.get(name)
        if record is not None:
            self._records[name] = record[:44] + struct.pack("<I", boot_ms // 1000) + record[48:]
            self._records.move_to_end(name)

    def chunk(self, name: bytes) -> HomeChunk | None:
        """What the name stands for, or None."""
        record = self._records.get(name)
        return None if record is None else self._decode(name, record)

    def _decode(self, name: bytes, record: bytes) -> HomeChunk:
        blob_id, parent, size_bytes, group, used_seconds, flags = _RECORD.unpack_from(record)
        bucket, namespace = self._group_names[group]
        return HomeChunk(  # by position: two thirds of the time
            name,
            ChunkName(bucket, record[_RECORD.size :].decode(), blob_id),
            namespace,
            None if parent == _NO_PARENT else parent,
            size_bytes,
            used_seconds * 1000,
            flags & _SHARED != 0,
            flags & _AWAY != 0,
        )

    def take(self, name: bytes) -> HomeChunk | None:
        """Forget the chunk: it is gone or about to go."""
        record = self._leave(name)
        if record is None:
            return None
        self._policy.dropped(name, CacheTier.NVME)
        return self._decode(name, record)

    def take_many(self, names: Sequence[bytes]) -> list[HomeChunk]:
        """`take` of each, those left out that are not known."""
        if self._shared or self._away:
            found = [(name, record) for name in names if (record := self._leave(name)) is not None]
        else:
            take = self._records.pop
            found = [(name, record) for name in names if (record := take(name, None)) is not None]
        self._policy.dropped_many([name for name, _ in found], CacheTier.NVME)
        return [self._decode(name, record) for name, record in found]

    def put_back(self, chunk: HomeChunk, *, boot_ms: int) -> None:
        """A chunk that was taken stays after all, unless the name stands for a newer one already.

        Its last use stays what it was, before all others: a parent that was refused because of a child comes up again as soon as
        the child is gone. Were it used now, chains that are not named leaf first would outlive their time for ever.
        """
        if chunk.name in self._records:
            return
        group = self._group(chunk.chunk.bucket, chunk.namespace)
        flags = (_SHARED if chunk.is_shared else 0) | (_AWAY if chunk.is_away else 0)
        blob_id, above = chunk.chunk.blob_id, chunk.parent or _NO_PARENT
        record = _RECORD.pack(blob_id, above, chunk.size_bytes, group, chunk.used_ms // 1000, flags)
        self._enter(chunk.name, record + chunk.chunk.key.encode(), is_newest=False)
        if not chunk.is_away:
            self._policy.stored(
                chunk.name, CacheTier.NVME, parent=chunk.parent, size_bytes=chunk.size_bytes, now_ms=boot_ms
            )

    def is_row(self, row: ObjectRow, name: bytes) -> bool:
        """Whether the name stands for this very row (and not for one that was stored under its key since)."""
        return bool(row.blobs) and self.is_blob(name, row.blobs[0].blob_id)

    def is_blob(self, name: bytes, blob_id: bytes) -> bool:
        """Whether the name stands for a chunk with this first blob."""
        record = self._records.get(name)
        return record is not None and record[:16] == blob_id

    def members(self, place: tuple[str, str]) -> Callable[[bytes], bool]:
        """What tells of a name whether it stands for a chunk of this bucket and namespace."""
        records, group = self._records, _GROUP.pack(self._group(*place))
        return lambda name: name in records and records[name][_GROUP_AT:_GROUP_STOP] == group

    def unused_since(self, before_boot_ms: int, *, eligible: Callable[[bytes], bool], limit: int) -> list[HomeChunk]:
        """Chunks whose last use lies before the given time, longest unused first, children before their parents."""
        found: list[HomeChunk] = []
        for name, record in self._records.items():
            if len(found) == limit or _RECORD.unpack_from(record)[4] * 1000 >= before_boot_ms:
                break
            if eligible(name):
                found.append(self._decode(name, record))
        return _leaves_first(found)

    def learn(self, row: ObjectRow, *, boot_ms: int, is_away: bool) -> bytes | None:
        """The catalog has the row, which was used at that time for all that is known: its name, or None where that is known
        already. Policy is told later, of all of them in order (`learnt`)."""
        name = chunk_name(row.bucket, row.key)
        if name in self._records:
            return None
        self._insert(name, row, parent_name(row), boot_ms, is_away=is_away)
        return name

    def learnt(self, name: bytes, *, began_ms: int, boot_ms: int) -> None:
        """Tell policy of a chunk that was learnt, after all that were committed before it. One that nobody used since this began
        counts as used longer ago than those before it."""
        chunk = self.chunk(name)
        if chunk is None:
            return  # it was removed meanwhile
        if chunk.used_ms == began_ms // 1000 * 1000:
            self._records.move_to_end(name, last=False)
        if not chunk.is_away:
            self._policy.stored(name, CacheTier.NVME, parent=chunk.parent, size_bytes=chunk.size_bytes, now_ms=boot_ms)


def lasting_blob(row: ObjectRow) -> bytes:
    """The first blob that has to last: of a chunk with a lossy copy that copy."""
    return row.blobs[0].blob_id if row.lossy is None else row.lossy.blob_id


def _leaves_first(chunks: list[HomeChunk]) -> list[HomeChunk]:
    """Children before their parents, otherwise in the order given."""
    by_name = {chunk.name: chunk for chunk in chunks}
    depths: dict[bytes, int] = {}
    for chunk in chunks:
        path: list[bytes] = []
        at: HomeChunk | None = chunk
        while at is not None and at.name not in depths and len(path) < len(chunks):
            path.append(at.name)
            at = None if at.parent is None else by_name.get(at.parent)
        depth = -1 if at is None else depths.get(at.name, -1)
        for name in reversed(path):
            depth += 1
            depths[name] = depth
    return sorted(chunks, key=lambda chunk: -depths[chunk.name])
