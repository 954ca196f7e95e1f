"""Which chunks of KV buckets lie in the home tier: what policy may name, and what each name stands for.

Policy knows chunks by 16-byte names that outlive blob ids; the collector needs bucket, key and blob id of each. One record of
bytes a chunk (about 250 B with its name and its place in the dict) and not an object: there may be millions.
"""

from __future__ import annotations

import asyncio
import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import msgspec

from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import BucketKind, ChunkName, Durability, ObjectRow
from kvobj.policy.chunk_policy import CacheTier, ChunkPolicy, chunk_name

_RECORD: Final = struct.Struct(
    "<16s16sQII"
)  # blob id, parent's name or zeros, size, group, last use in seconds of the boot clock
_NO_PARENT: Final = bytes(16)
_FOUND: Final = struct.Struct(">Q16s")  # commit number, name: sorts in commit order
LOAD_STEP: Final = 1000


class HomeChunk(msgspec.Struct, frozen=True, gc=False):
    """One chunk in the home tier. `used_ms` is its last use that this process knows of, on the boot clock."""

    name: bytes
    chunk: ChunkName
    namespace: str
    parent: bytes | None
    size_bytes: int
    used_ms: int


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

    def __len__(self) -> int:
        """How many chunks are known."""
        return len(self._records)

    def __contains__(self, name: bytes) -> bool:
        """Whether a chunk of this name is known to be at home."""
        return name in self._records

    def add(self, row: ObjectRow, *, boot_ms: int) -> None:
        """The row's blobs are at home from now on."""
        name = chunk_name(row.bucket, row.key)
        parent = parent_name(row)
        size_bytes = self._insert(name, row, parent, boot_ms)
        self._policy.stored(name, CacheTier.NVME, parent=parent, size_bytes=size_bytes, now_ms=boot_ms)

    def _insert(self, name: bytes, row: ObjectRow, parent: bytes | None, boot_ms: int) -> int:
        group, size_bytes = self._group(row.bucket, row.namespace), self._stored_bytes(row)
        self._records[name] = (
            _RECORD.pack(row.blobs[0].blob_id, parent or _NO_PARENT, size_bytes, group, boot_ms // 1000)
            + row.key.encode()
        )
        self._records.move_to_end(name)
        return size_bytes

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
        blob_id, parent, size_bytes, group, used_seconds = _RECORD.unpack_from(record)
        bucket, namespace = self._group_names[group]
        return HomeChunk(
            name=name,
            chunk=ChunkName(bucket, record[_RECORD.size :].decode(), blob_id),
            namespace=namespace,
            parent=None if parent == _NO_PARENT else parent,
            size_bytes=size_bytes,
            used_ms=used_seconds * 1000,
        )

    def take(self, name: bytes) -> HomeChunk | None:
        """Forget the chunk: it is gone or about to go."""
        record = self._records.pop(name, None)
        if record is None:
            return None
        self._policy.dropped(name, CacheTier.NVME)
        return self._decode(name, record)

    def put_back(self, chunk: HomeChunk, *, boot_ms: int) -> None:
        """A chunk that was taken stays after all, unless the name stands for a newer one already.

        Its last use stays what it was, before all others: a parent that was refused because of a child comes up again as soon as
        the child is gone. Were it used now, chains that are not named leaf first would outlive their time for ever.
        """
        if chunk.name in self._records:
            return
        group = self._group(chunk.chunk.bucket, chunk.namespace)
        self._records[chunk.name] = (
            _RECORD.pack(
                chunk.chunk.blob_id, chunk.parent or _NO_PARENT, chunk.size_bytes, group, chunk.used_ms // 1000
            )
            + chunk.chunk.key.encode()
        )
        self._records.move_to_end(chunk.name, last=False)
        self._policy.stored(
            chunk.name, CacheTier.NVME, parent=chunk.parent, size_bytes=chunk.size_bytes, now_ms=boot_ms
        )

    def is_row(self, row: ObjectRow, name: bytes) -> bool:
        """Whether the name stands for this very row (and not for one that was stored under its key since)."""
        record = self._records.get(name)
        return record is not None and bool(row.blobs) and record[:16] == row.blobs[0].blob_id

    def is_in(self, name: bytes, place: tuple[str, str]) -> bool:
        """Whether the chunk is of this bucket and namespace."""
        record = self._records.get(name)
        return record is not None and self._group_names[_RECORD.unpack_from(record)[3]] == place

    def unused_since(self, before_boot_ms: int, *, eligible: Callable[[bytes], bool], limit: int) -> list[HomeChunk]:
        """Chunks whose last use lies before the given time, longest unused first, children before their parents."""
        found: list[HomeChunk] = []
        for name, record in self._records.items():
            if len(found) == limit or _RECORD.unpack_from(record)[4] * 1000 >= before_boot_ms:
                break
            if eligible(name):
                found.append(self._decode(name, record))
        return _leaves_first(found)

    async def load(
        self,
        catalog: Catalog,
        *,
        boot_ms: Callable[[], int],
        on_row: Callable[[ObjectRow], None] = lambda _: None,
        spares: Callable[[ObjectRow], bool] = lambda _: False,
    ) -> None:
        """Learn what the catalog holds already: in commit order, for want of better knowledge, in slices between requests.

        `on_row` is told of every chunk at home but for those that `spares` says, which are left out. All count as used when this
        began, a chain's end longest ago.
        """
        began_ms = boot_ms()
        kinds = {bucket.name: bucket.kind for bucket in await catalog.buckets()}
        found: list[bytes] = []
        async for row in catalog.scan_objects():
            if row.durability is Durability.MEMORY or kinds.get(row.bucket) is not BucketKind.KV or not row.blobs:
                continue
            if spares(row):
                continue
            on_row(row)
            name = chunk_name(row.bucket, row.key)
            if name not in self._records:
                self._insert(name, row, parent_name(row), began_ms)
                found.append(_FOUND.pack(row.sequence, name))
            if len(found) % LOAD_STEP == 0:
                await asyncio.sleep(0)
        found.sort()
        for number, entry in enumerate(found):
            if number % LOAD_STEP == 0:
                await asyncio.sleep(0)
            chunk = self.chunk(entry[8:])
            if chunk is not None:  # else it was removed meanwhile
                if chunk.used_ms == began_ms // 1000 * 1000:
                    self._records.move_to_end(chunk.name, last=False)
                self._policy.stored(
                    chunk.name, CacheTier.NVME, parent=chunk.parent, size_bytes=chunk.size_bytes, now_ms=boot_ms()
                )


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
