"""A snapshot: what is true at one position of the outbox, in parts, and a head that names them.

It is read from the catalog page by page while commits go on. A row that changed meanwhile may be in it as it was or as it became:
the change has a higher position, so the journal's record of it, which is kept, says what it is. Until its head is written a
snapshot is nothing; its parts are then leftovers (`kvobj.manifests.compaction`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from kvobj.catalog.remote_protocol import Outbox
from kvobj.errors import CorruptionError, FencedError
from kvobj.manifests.folder import ManifestFolder
from kvobj.manifests.format import MAX_PLAIN_BYTES, ManifestEntry, ManifestKind, entry_bytes
from kvobj.manifests.names import ManifestName
from kvobj.manifests.sealing import Sealer, sealed_content

_PART_ENTRIES: Final = 16_384
"""Fewer than a manifest may have: encoding one holds the interpreter for ~2 µs an entry, beside requests."""


class SnapshotPart(msgspec.Struct, frozen=True, array_like=True):
    """What a head says of one part: its number in its writer's count, which makes its name, and how many entries it has."""

    number: int
    entries: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A complete snapshot: what its head says."""

    name: ManifestName
    parts: tuple[SnapshotPart, ...]

    @property
    def position(self) -> int:
        """What is above it is not in here."""
        return self.name.last

    @property
    def entries(self) -> int:
        """How many records it has."""
        return sum(part.entries for part in self.parts)

    @property
    def part_names(self) -> list[ManifestName]:
        """Where its parts lie, in order."""
        name = self.name
        return [
            ManifestName(name.lineage, name.last, name.epoch, name.after, part.number, ManifestKind.PART)
            for part in self.parts
        ]


_decode_part = msgspec.msgpack.Decoder(SnapshotPart).decode


async def write_snapshot(
    folder: ManifestFolder,
    outbox: Outbox,
    sealer: Sealer,
    *,
    is_fenced: Callable[[], bool],
    on_entries: Callable[[int], None] = lambda _: None,
) -> Snapshot:
    """Write what the catalog says now; complete when it returns. Holds one part in memory, 16 MiB at most.

    `on_entries` is told how many records were written with each part. Errors are the bucket's, and `FencedError`.
    """
    position = outbox.position
    parts: list[SnapshotPart] = []
    async for batch in _batches(outbox.snapshot(), sealer, position):
        if is_fenced():
            raise FencedError("a newer lineage has taken over: no snapshot", lineage=folder.lineage)
        name, content = await folder.encode(ManifestKind.PART, batch, after=0, last=position)
        await folder.write(name, content)
        parts.append(SnapshotPart(name.number, len(batch)))
        on_entries(len(batch))
    described = [ManifestEntry(position, msgspec.msgpack.encode(part)) for part in parts]
    name, content = await folder.encode(ManifestKind.HEAD, described, after=0, last=position)
    await folder.write(name, content)
    return Snapshot(name, tuple(parts))


async def read_snapshot_head(folder: ManifestFolder, name: ManifestName) -> Snapshot:
    """What a head names. `CorruptionError` where it cannot be read."""
    _, entries = await folder.read(name)
    try:
        return Snapshot(name, tuple(_decode_part(content) for _, content in entries))
    except msgspec.MsgspecError as error:
        raise CorruptionError("the head of a snapshot cannot be decoded", name=name.key) from error


async def _batches(contents: AsyncIterator[bytes], sealer: Sealer, position: int) -> AsyncIterator[list[ManifestEntry]]:
    batch: list[ManifestEntry] = []
    size = 0
    async for raw in contents:
        content = sealed_content(raw, sealer)
        if content is None:
            continue
        if batch and (len(batch) == _PART_ENTRIES or size + entry_bytes(content) > MAX_PLAIN_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(ManifestEntry(position, content))
        size += entry_bytes(content)
    if batch:
        yield batch
