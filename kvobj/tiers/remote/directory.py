"""What this node knows of the remote: which blobs lie there, under which names, and how long their frames are.

A row is written when a blob has been put and taken away when it has been deleted; it is durable no later than the next synced
commit in the same environment, such as the catalog's that calls the blob's object shared. It may be behind: a blob that another
process put, or whose row was lost, is found by asking the remote. The key prefix is no part of a row, the blob's name is
(`names`), and that says in which codec the frame lies.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Final, Self

from kvobj.database import Database, Table, WriteView
from kvobj.errors import CorruptionError
from kvobj.ids import BlobId
from kvobj.tiers.coded_blobs import CodecUsage, CodedBlob
from kvobj.tiers.remote.names import coded_by

REMOTE_BLOBS: Final = Table("remote_blobs", volatile=False)
REMOTE_TOTALS: Final = Table("remote_totals", volatile=False)
REMOTE_TABLES: Final = (REMOTE_BLOBS, REMOTE_TOTALS)

_FRAME_BYTES: Final = struct.Struct("<Q")
_PLAIN: Final = "-"
"""Stands for "as readers are given it" among the codecs of the totals."""
_BATCH: Final = 1000


@dataclass(frozen=True, slots=True)
class RemotePlace:
    """How one blob lies on the remote: its frame's length, and its name (`RemoteNames.name`)."""

    frame_bytes: int
    name: str

    @property
    def coded(self) -> CodedBlob | None:
        """Its codec and sizes where readers are to be given it decoded; None where it lies as they get it."""
        coded = coded_by(self.name)
        return None if coded is None else CodedBlob(coded[0], coded[1], self.frame_bytes)

    def encode(self) -> bytes:
        """The directory row."""
        return _FRAME_BYTES.pack(self.frame_bytes) + self.name.encode()

    @classmethod
    def decode(cls, row: bytes) -> Self:
        """Read a directory row back. `CorruptionError` for anything else."""
        try:
            (frame_bytes,) = _FRAME_BYTES.unpack_from(row)
            name = str(row[_FRAME_BYTES.size :], "ascii")
        except (struct.error, UnicodeDecodeError) as error:
            raise CorruptionError("row of the remote directory is not one", row=bytes(row[:64]).hex()) from error
        return cls(frame_bytes, name)


class RemoteDirectory:
    """The rows, and sums over them. Event-loop-only. The database has `REMOTE_TABLES` and is the caller's. A look-up takes 3 µs."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def find(self, blob_id: BlobId) -> RemotePlace | None:
        """Where the blob lies, or None where this node does not know of it."""
        with self._database.read() as view:
            row = view.get(REMOTE_BLOBS, blob_id)
        return None if row is None else RemotePlace.decode(row)

    def find_many(self, blob_ids: Sequence[BlobId]) -> dict[BlobId, RemotePlace]:
        """Those of the blobs that this node knows of."""
        with self._database.read() as view:
            rows = view.get_many(REMOTE_BLOBS, blob_ids)
        return {
            blob_id: RemotePlace.decode(row) for blob_id, row in zip(blob_ids, rows, strict=True) if row is not None
        }

    def blob_ids(self, after: bytes = b"", *, limit: int = _BATCH) -> list[BlobId]:
        """The first ids behind `after`, ascending: for who goes through all of them, a page at a time."""
        start = after + b"\0" if after else b""
        with self._database.read() as view:
            return [BlobId(key) for key, _ in islice(view.range(REMOTE_BLOBS, start), limit)]

    async def note(self, blob_id: BlobId, place: RemotePlace) -> None:
        """The blob lies there. Survives the process when this returns, and power loss with the next synced commit."""
        await self._database.write(partial(_put, places={blob_id: place}), synced=False)

    async def note_many(self, places: Mapping[BlobId, RemotePlace]) -> None:
        """`note` of each, a thousand at a time."""
        items = list(places.items())
        for start in range(0, len(items), _BATCH):
            batch = dict(items[start : start + _BATCH])
            await self._database.write(partial(_put, places=batch), synced=False)

    async def forget(self, blob_ids: Sequence[BlobId]) -> None:
        """The blobs are there no more. Unknown ones are fine. Which are unknown is seen in the order of writes: the note of a put
        that was cancelled may be on its way still, and must not come behind this."""
        for start in range(0, len(blob_ids), _BATCH):
            batch = list(dict.fromkeys(blob_ids[start : start + _BATCH]))
            await self._database.write(partial(_take, blob_ids=batch), synced=False)

    async def forget_all(self) -> None:
        """It was another remote that this tells of. Survives power loss when this returns."""
        while known := self.blob_ids():
            await self._database.write(partial(_take, blob_ids=known), synced=len(known) < _BATCH)

    @property
    def totals(self) -> tuple[int, int]:
        """Blobs known to lie there, and their frames' bytes."""
        usages = self._usages()
        return sum(usage.blobs for usage in usages), sum(usage.stored_bytes for usage in usages)

    def usage(self) -> list[CodecUsage]:
        """What lies there coded, by codec (`coded_blobs.codec_families`)."""
        return [usage for usage in self._usages() if usage.codec != _PLAIN]

    def _usages(self) -> list[CodecUsage]:
        with self._database.read() as view:
            keys = [bytes(key) for key, _ in view.range(REMOTE_TOTALS)]
            sums = {key: view.counters(REMOTE_TOTALS, key) for key in keys}
        return [CodecUsage(key.decode(), *counters) for key, counters in sums.items() if counters and counters[0]]


class RemoteCodings:
    """Which blobs of the remote lie coded, as `tiers.coded` asks it."""

    __slots__ = ("_directory",)

    def __init__(self, directory: RemoteDirectory) -> None:
        self._directory = directory

    def find(self, blob_id: bytes) -> CodedBlob | None:
        """See `CodedIndex.find`. None, too, of a blob that the directory does not know."""
        place = self._directory.find(BlobId(blob_id))
        return None if place is None else place.coded


def _put(view: WriteView, places: Mapping[BlobId, RemotePlace]) -> None:
    for blob_id, place in places.items():
        before = view.get(REMOTE_BLOBS, blob_id)
        view.put(REMOTE_BLOBS, blob_id, place.encode())
        if before is not None:
            _count(view, RemotePlace.decode(before), times=-1)
        _count(view, place)


def _take(view: WriteView, blob_ids: Iterable[BlobId]) -> None:
    for blob_id in blob_ids:
        row = view.get(REMOTE_BLOBS, blob_id)
        if row is not None:
            view.delete(REMOTE_BLOBS, blob_id)
            _count(view, RemotePlace.decode(row), times=-1)


def _count(view: WriteView, place: RemotePlace, *, times: int = 1) -> None:
    coded = place.coded
    codec, plain_bytes = (_PLAIN, 0) if coded is None else (coded.codec, coded.plain_bytes)
    view.add(REMOTE_TOTALS, codec.encode(), (times, times * plain_bytes, times * place.frame_bytes))
