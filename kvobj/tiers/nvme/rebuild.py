"""Makes a lost directory anew: blobs in segments from their record pages, small frames from the record log.

For a stopped store. Guarantees that what it finds was written by this store at that very place, that no two blobs it keeps
share room, and that what the log says was removed stays away. A blob that was written but never named by the catalog is found
too: whoever compares with the catalog deletes it. Frames that nothing casts doubt on are left for the first read to verify.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvobj.codec.frame import parse_frame
from kvobj.database import Database, ReadView, WriteView
from kvobj.errors import FrameCorruptError
from kvobj.ids import BlobId
from kvobj.tiers.nvme.directory import BLOBS, INLINE, Place, extent_bytes, padded
from kvobj.tiers.nvme.io import Disk, SystemDisk
from kvobj.tiers.nvme.log_entries import BlobsRemoved, InlinePut, decode_entry
from kvobj.tiers.nvme.record import RECORD_BYTES, RECORD_MAGIC, Record, decode_record
from kvobj.tiers.nvme.segment_file import SegmentFile, segment_number, segment_paths
from kvobj.tiers.nvme.space import unavailable
from kvobj.tiers.protocol import BlobNames

_PIECE_BYTES: Final = 8 << 20
_WRITTEN_AT_ONCE: Final = 1000

Verify = Callable[[memoryview], bool]
OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class RebuiltBlob:
    """A blob that has its directory row again."""

    blob_id: BlobId
    names: BlobNames
    frame_bytes: int


def is_sound(frame: memoryview) -> bool:
    """Whether a whole frame's header, directory and every block check out."""
    try:
        header = parse_frame(frame, len(frame))
        for block in range(header.block_count):
            header.check_block(block, frame[header.offset(block) : header.end(block)])
    except FrameCorruptError:
        return False
    return True


async def rebuild_directory(
    directory: Path,
    *,
    database: Database,
    record_key: bytes,
    removed: Container[BlobId],
    verify: Verify = is_sound,
    on_progress: OnProgress = lambda done, total: None,  # noqa: ARG005 - the names of the two are the contract
    disk: Disk | None = None,
) -> AsyncIterator[RebuiltBlob]:
    """Read all segments, write the rows of the blobs found (old rows of segments go), and yield each once its row is there.

    `removed` are ids to leave out. `verify` (blocking, on a thread) decides between blobs that claim the same room or the same
    id. `on_progress(done, total)` counts bytes read. Synced when the iteration has ended. Segments must not be open elsewhere.
    """
    disk = disk or SystemDisk()
    files: dict[int, SegmentFile] = {}
    try:
        for path in segment_paths(directory):
            file = SegmentFile.open(disk, path)
            files[file.number] = file
        found: list[Record] = []
        done, total = 0, sum(file.size_bytes for file in files.values())
        for file in files.values():
            async for records, piece_bytes in _scan(file, record_key):
                found += [record for record in records if record.blob_id not in removed]
                done += piece_bytes
                on_progress(done, total)
        kept = await asyncio.to_thread(_settle_claims, found, files, verify)
    except OSError as error:
        raise unavailable(error, "segments cannot be read") from error
    finally:
        for file in files.values():
            file.close()
    await database.write(_forget_segments)
    for start in range(0, len(kept), _WRITTEN_AT_ONCE):
        batch = kept[start : start + _WRITTEN_AT_ONCE]
        await database.write(_writing(batch), synced=start + _WRITTEN_AT_ONCE >= len(kept))
        for record in batch:
            yield RebuiltBlob(record.blob_id, record.names, record.frame_bytes)


def holds_records(directory: Path, record_key: bytes) -> bool:
    """Whether a segment there holds a record of this store at its own place. Blocks; reads up to the first one, which as a rule is
    the first page. OSError where files cannot be read."""
    with mmap.mmap(-1, _PIECE_BYTES) as room, memoryview(room) as buffer:
        for path in directory.glob("segment-*"):
            number = segment_number(path)
            if number is None:
                continue
            start = 0
            with path.open("rb", buffering=0) as file:
                while length := os.preadv(file.fileno(), [buffer], start) // RECORD_BYTES * RECORD_BYTES:
                    if any(_records_of(number, start, buffer[:length], record_key)):
                        return True
                    start += length
    return False


async def restore_inline(database: Database, entries: Iterable[bytes]) -> set[BlobId]:
    """Put small frames back from the record log's entries, in their order; returns the ids that the log says were removed.

    A small frame that was put again after its removal (a repaired one, or one that came back from the remote) is there again; of
    one in a segment nobody can tell which came last, so it stays away. Entries of other kinds are skipped. Nothing is logged: the
    log that the entries came from holds them already.
    """
    removed: set[BlobId] = set()
    batch: dict[BlobId, bytes] = {}
    for entry in entries:
        decoded = decode_entry(entry)
        if isinstance(decoded, InlinePut):
            batch[decoded.blob_id] = bytes(entry)
            removed.discard(decoded.blob_id)
            if len(batch) == _WRITTEN_AT_ONCE:
                await database.write(_restoring(batch), synced=False)
                batch = {}
        elif isinstance(decoded, BlobsRemoved):
            removed.update(decoded.blob_ids)
            for blob_id in decoded.blob_ids:
                batch.pop(blob_id, None)
    await database.write(_restoring(batch), synced=False)
    await database.write(_dropping(removed), synced=True)
    return removed


def live_inline_entries(view: ReadView) -> Iterator[bytes]:
    """Record-log entries of all small frames held, for a compaction of the log."""
    for _, entry in view.range(INLINE):
        yield entry


async def _scan(file: SegmentFile, record_key: bytes) -> AsyncIterator[tuple[list[Record], int]]:
    with mmap.mmap(-1, _PIECE_BYTES) as room, memoryview(room) as buffer:
        for start in range(0, file.size_bytes, _PIECE_BYTES):
            length = min(_PIECE_BYTES, file.size_bytes - start)
            with buffer[:length] as piece:
                yield await asyncio.to_thread(_records_in, file, start, piece, record_key), length


def _records_in(file: SegmentFile, start: int, piece: memoryview, record_key: bytes) -> list[Record]:
    """The records in `[start, start + len(piece))` that name the place that they are at and fit the file."""
    file.read([piece], start)
    return [
        record
        for record in _records_of(file.number, start, piece, record_key)
        if record.offset + extent_bytes(record.frame_bytes) <= file.size_bytes
    ]


def _records_of(segment: int, start: int, piece: memoryview, record_key: bytes) -> Iterator[Record]:
    for at in range(0, len(piece), RECORD_BYTES):
        if bytes(piece[at : at + len(RECORD_MAGIC)]) != RECORD_MAGIC:
            continue
        record = decode_record(piece[at : at + RECORD_BYTES], record_key)
        if record is not None and (record.segment, record.offset) == (segment, start + at):
            yield record


def _settle_claims(found: Sequence[Record], files: dict[int, SegmentFile], verify: Verify) -> list[Record]:
    """Of blobs that claim the same room or the same id, those whose frames are whole; all others as they are."""
    copies = Counter(record.blob_id for record in found)
    ordered = sorted(found, key=lambda record: (record.segment, record.offset))
    doubtful = {record.blob_id for record in found if copies[record.blob_id] > 1}
    reach, longest = (-1, 0), None
    for record in ordered:
        if (record.segment, record.offset) < reach and longest is not None:
            doubtful |= {longest.blob_id, record.blob_id}
        end = (record.segment, record.offset + extent_bytes(record.frame_bytes))
        if end > reach:
            reach, longest = end, record
    kept: dict[BlobId, Record] = {}
    reach = (-1, 0)
    for record in ordered:
        if (record.segment, record.offset) < reach or record.blob_id in kept:
            # Inside a whole frame, a record can only be its payload.
            continue
        if record.blob_id in doubtful and not _is_whole(record, files[record.segment], verify):
            continue
        kept[record.blob_id] = record
        reach = (record.segment, record.offset + extent_bytes(record.frame_bytes))
    return list(kept.values())


def _is_whole(record: Record, file: SegmentFile, verify: Verify) -> bool:
    with mmap.mmap(-1, padded(record.frame_bytes)) as room, memoryview(room) as buffer:
        file.read([buffer], record.offset + RECORD_BYTES)
        with buffer[: record.frame_bytes].toreadonly() as frame:
            return verify(frame)


def _forget_segments(view: WriteView) -> None:
    for blob_id in [blob_id for blob_id, row in view.range(BLOBS) if not Place.decode(row).inline]:
        view.delete(BLOBS, blob_id)


def _writing(records: Sequence[Record]) -> Callable[[WriteView], None]:
    def change(view: WriteView) -> None:
        for record in records:
            view.put(BLOBS, record.blob_id, Place(record.segment, record.offset, record.frame_bytes).encode())

    return change


def _restoring(entries: dict[BlobId, bytes]) -> Callable[[WriteView], None]:
    def change(view: WriteView) -> None:
        for blob_id, entry in entries.items():
            put = decode_entry(entry)
            if isinstance(put, InlinePut):
                view.put(INLINE, blob_id, entry)
                view.put(BLOBS, blob_id, Place.in_database(len(put.frame)).encode())

    return change


def _dropping(blob_ids: Iterable[BlobId]) -> Callable[[WriteView], None]:
    def change(view: WriteView) -> None:
        for blob_id in blob_ids:
            view.delete(INLINE, blob_id)
            view.delete(BLOBS, blob_id)

    return change
