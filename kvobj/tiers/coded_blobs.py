"""Which blobs of a tier lie there in another codec than readers are given, and how much room that saves.

A row is written before the blob is put and removed after it is deleted, in the same environment as the tier's own directory, so
a blob that lies coded always has one; a row without a blob (a crash in between) says nothing that anybody asks for, and is
dropped at the next start.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Final, Protocol

from kvobj.database import Database, Table, WriteView
from kvobj.errors import CorruptionError
from kvobj.ids import BlobId
from kvobj.metrics import Family
from kvobj.tiers.protocol import Tier

CODED_BLOBS: Final = Table("coded_blobs", volatile=False)

_SIZES: Final = struct.Struct("<QQ")
_BATCH: Final = 1000


@dataclass(frozen=True, slots=True)
class CodedBlob:
    """How one blob lies in a tier: its codec, what it decodes to, the bytes that it takes there, and how many of these are behind
    the end of its frame."""

    codec: str
    plain_bytes: int
    stored_bytes: int
    spare_bytes: int = 0

    @property
    def frame_bytes(self) -> int:
        """Its frame's length."""
        return self.stored_bytes - self.spare_bytes


@dataclass(frozen=True, slots=True)
class CodecUsage:
    """What a tier holds in one codec: blobs, the plain bytes that they are of, and the bytes that they take."""

    codec: str
    blobs: int
    plain_bytes: int
    stored_bytes: int

    @property
    def ratio(self) -> float:
        """Plain over stored bytes; 1.0 of nothing."""
        return self.plain_bytes / self.stored_bytes if self.stored_bytes else 1.0


class CodecTotals:
    """Sums per codec, kept along."""

    __slots__ = ("_sums",)

    def __init__(self) -> None:
        self._sums: dict[str, list[int]] = {}

    def add(self, blob: CodedBlob, *, times: int = 1) -> None:
        """Count one blob more, or, with `times=-1`, less."""
        sums = self._sums.setdefault(blob.codec, [0, 0, 0])
        sums[0] += times
        sums[1] += times * blob.plain_bytes
        sums[2] += times * blob.stored_bytes

    @property
    def stored_bytes(self) -> int:
        """Of all codecs together."""
        return sum(sums[2] for sums in self._sums.values())

    @property
    def blobs(self) -> int:
        """Of all codecs together."""
        return sum(sums[0] for sums in self._sums.values())

    def usage(self) -> list[CodecUsage]:
        """By name, without those of which nothing is left."""
        return [CodecUsage(codec, *sums) for codec, sums in sorted(self._sums.items()) if sums[0]]


class CodecSums(Protocol):
    """Who knows what a tier holds in which codec."""

    def usage(self) -> list[CodecUsage]:
        """By name, without those of which there is nothing."""
        ...


def codec_families(tiers: Mapping[str, CodecSums]) -> list[Family]:
    """What tiers hold coded, by tier and codec, as gauges."""
    usages = [(tier, usage) for tier, totals in tiers.items() for usage in totals.usage()]
    figures: tuple[tuple[str, str, Callable[[CodecUsage], int]], ...] = (
        ("kvobj_tier_codec_blobs", "Blobs that lie coded, by tier and codec.", lambda usage: usage.blobs),
        ("kvobj_tier_codec_plain_bytes", "Plain bytes of blobs that lie coded.", lambda usage: usage.plain_bytes),
        ("kvobj_tier_codec_stored_bytes", "Bytes that blobs that lie coded take.", lambda usage: usage.stored_bytes),
    )
    return [
        Family(
            name,
            documentation,
            "gauge",
            [(name, {"tier": tier, "codec": usage.codec}, float(figure(usage))) for tier, usage in usages],
        )
        for name, documentation, figure in figures
    ]


class CodedBlobs:
    """The rows of one durable tier. Event-loop-only; a look-up takes 2 µs, and nothing while no blob lies coded."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.totals = CodecTotals()
        with database.read() as view:
            for _, row in view.range(CODED_BLOBS):
                self.totals.add(_decode(row))
        self._rows = self.totals.blobs

    def find(self, blob_id: bytes) -> CodedBlob | None:
        """How the blob lies, or None where it lies as readers are given it."""
        if not self._rows:
            return None
        with self._database.read() as view:
            row = view.get(CODED_BLOBS, blob_id)
        return None if row is None else _decode(row)

    async def note(self, blob_id: bytes, blob: CodedBlob) -> None:
        """The blob is about to be put so. Survives the process when this returns, and power loss with the tier's own row."""
        row = _encode(blob)
        before = await self._database.write(lambda view: _put(view, blob_id, row), synced=False)
        self._rows += 1
        if before is not None:
            self._rows -= 1
            self.totals.add(_decode(before), times=-1)
        self.totals.add(blob)

    async def forget(self, blob_ids: Sequence[bytes]) -> None:
        """The blobs are gone, or lie plain. Unknown ones are fine."""
        if not self._rows or not blob_ids:
            return
        for start in range(0, len(blob_ids), _BATCH):
            batch = list(blob_ids[start : start + _BATCH])
            known = [blob_id for blob_id in batch if self.find(blob_id) is not None]
            if not known:
                continue
            for row in await self._database.write(partial(_take, blob_ids=known), synced=False):
                self._rows -= 1
                self.totals.add(_decode(row), times=-1)

    async def settle(self, tier: Tier) -> int:
        """Drop rows of blobs that the tier does not hold; how many. For a start, before anything is put."""
        if not self._rows:
            return 0
        dropped, start = 0, b""
        while True:
            with self._database.read() as view:
                page = [bytes(key) for key, _ in islice(view.range(CODED_BLOBS, start), _BATCH)]
            stale = await tier.missing([BlobId(key) for key in page])
            await self.forget(stale)
            dropped += len(stale)
            if len(page) < _BATCH:
                return dropped
            start = page[-1] + b"\0"


def _put(view: WriteView, blob_id: bytes, row: bytes) -> bytes | None:
    before = view.get(CODED_BLOBS, blob_id)
    before = None if before is None else bytes(before)
    view.put(CODED_BLOBS, blob_id, row)
    return before


def _take(view: WriteView, blob_ids: Iterable[bytes]) -> list[bytes]:
    taken: list[bytes] = []
    for blob_id in blob_ids:
        row = view.get(CODED_BLOBS, blob_id)
        if row is not None:
            taken.append(bytes(row))
            view.delete(CODED_BLOBS, blob_id)
    return taken


def _encode(blob: CodedBlob) -> bytes:
    return _SIZES.pack(blob.plain_bytes, blob.stored_bytes) + blob.codec.encode()


def _decode(row: bytes) -> CodedBlob:
    if len(row) <= _SIZES.size:
        raise CorruptionError("row of a coded blob is not one", row=bytes(row).hex())
    plain_bytes, stored_bytes = _SIZES.unpack_from(row)
    return CodedBlob(bytes(row[_SIZES.size :]).decode("ascii", "replace"), plain_bytes, stored_bytes)
