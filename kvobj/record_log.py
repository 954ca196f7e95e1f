"""Append-only log of what became durable on the home tier, from which a lost catalog or directory is rebuilt.

Guarantees: entries come back in the order they were appended, a group whole or not at all; a torn tail (a crash during
an append) ends the replay cleanly; damage with valid groups behind it raises `CorruptionError` with its position.
After a failed flush nothing more is accepted: the kernel may have dropped the pages (fsyncgate, gc-protocol §8).
Does not know what entries mean, and does not decide which tail was acknowledged: `recover` is told.

File: header (magic, version, kind, number, CRC), then groups (magic, length, CRC-32C over place and body, body);
a body is entries with a 32-bit length each. The place in the CRC keeps stale bytes of an earlier tail from passing.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final, Self

from kvobj.codec.checksums import crc32c
from kvobj.errors import CorruptionError, StoreFullError, UnavailableError

_FILE_MAGIC: Final = b"KVRL"
_FORMAT_VERSION: Final = 1
_FILE_HEADER: Final = struct.Struct("<4sHHI")
_GROUP_MAGIC: Final = b"\xa9grp"
_GROUP_HEADER: Final = struct.Struct("<4sII")
_PLACE: Final = struct.Struct("<IQI")
_LENGTH: Final = struct.Struct("<I")
_NAME: Final = re.compile(r"records-(\d{6,})\.log")
_DATA_START: Final = _FILE_HEADER.size + _LENGTH.size
_KIND_LIVE: Final = 0
_KIND_SNAPSHOT: Final = 1


@dataclass(frozen=True, slots=True, order=True)
class LogPosition:
    """A place between two groups: file number, then offset in bytes in it. Later places compare greater."""

    file_number: int
    offset: int


class RecordLog:
    """The log in one directory. One thread at a time appends; `sync` may run on another thread meanwhile.

    The newest file is allocated ahead, so that a full disk still takes the removals that make room (`is_short` says that
    only this reserve is left).
    """

    def __init__(self, directory: Path, *, rotate_bytes: int) -> None:
        self.directory = directory
        self.is_short = False
        self.synced = LogPosition(0, 0)
        self._rotate_bytes = rotate_bytes
        self._reserve_bytes = max(64 * 1024, rotate_bytes // 16)
        self._descriptor: int | None = None
        self._end = LogPosition(0, 0)
        self._failed: OSError | None = None
        self._closed_bytes = 0

    @classmethod
    def open(cls, directory: Path, rotate_bytes: int = 64 * 1024 * 1024) -> Self:
        """Take the directory (made if absent, mode 0700). Nothing is read until `recover`, `replay` or an append."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return cls(directory, rotate_bytes=rotate_bytes)

    @property
    def end(self) -> LogPosition:
        """Where the next group goes; (0, 0) before `recover` or the first append."""
        return self._end

    @property
    def size_bytes(self) -> int:
        """Bytes of all files, without what is only allocated ahead."""
        return self._closed_bytes + self._end.offset

    def is_empty(self) -> bool:
        """Whether no file holds a group."""
        return next(iter(Replay(self)), None) is None

    def recover(self, *, since: LogPosition | None = None, upto: LogPosition | None = None) -> LogPosition:
        """Find the end, cut off what lies behind it, and return it.

        `upto`: what lies behind this place was acknowledged to nobody and is cut off; a returned end before it means that
        acknowledged or visible changes are missing and a snapshot is due. `since`: groups before it are known to be good,
        so that a start reads little. Without either the newest file is checked from its first group. Raises
        `CorruptionError` for damage in the middle.
        """
        self._require_closed()
        for leftover in self.directory.glob("snapshot-*.tmp"):
            leftover.unlink()
        numbers = [number for number in self._numbers() if self._kind(number) is not None or self._remove(number)]
        if upto is not None:
            numbers = [number for number in numbers if number <= upto.file_number or self._remove(number)]
        if not numbers:
            return self._end
        number = numbers[-1]
        with _FileView(self._path(number)) as view:
            stop = len(view.data)
            if upto is not None and upto.file_number == number:
                stop = min(stop, upto.offset)
            end = _DATA_START
            if since is not None and since.file_number == number and since.offset <= stop:
                end = max(end, since.offset)
            groups = _groups(view.data, number, start=end, stop=stop, strict=upto is None, path=view.path)
            end = max((group_end for _, group_end in groups), default=end)
        self._closed_bytes = sum(self._path(other).stat().st_size for other in numbers[:-1])
        self._resume(LogPosition(number, end))
        return self._end

    def append(self, entries: Sequence[bytes]) -> LogPosition:
        """Write one group; it is durable once `sync` returned. Returns the place behind it. All or nothing.

        Raises `StoreFullError` when the disk is full (nothing was written), `UnavailableError` after any other failure.
        """
        self._require_good()
        if not entries:
            return self._end
        if self._descriptor is None:
            self.recover()
        if self._descriptor is None:
            self._begin(self._end.file_number + 1)
        elif self._end.offset >= self._rotate_bytes:
            self._rotate_if_room()
        number, offset = self._end.file_number, self._end.offset
        group = _encode_group(entries, number, offset)
        try:
            _write_all(self._opened(), group, offset)
        except OSError as error:
            self._take_back(error)
            raise StoreFullError("no room for the record log", directory=self.directory) from error
        self._end = LogPosition(number, offset + len(group))
        return self._end

    def sync(self) -> None:
        """Flush what was appended before the call. A failure is final: `UnavailableError` from then on."""
        self._require_good()
        if self._descriptor is None or self.synced == self._end:
            return
        end = self._end
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            raise self._fail(error) from error
        self.synced = end

    def take_back(self, before: LogPosition) -> None:
        """Cut off the group appended last, whose `end` was `before` then: its change did not happen elsewhere."""
        same_file = before.file_number == self._end.file_number
        offset = before.offset if same_file else _DATA_START
        if before == self._end:
            return
        try:
            os.ftruncate(self._opened(), offset)
            with contextlib.suppress(OSError):
                self._allocate(self._opened())
        except OSError as error:
            raise self._fail(error) from error
        self._end = LogPosition(self._end.file_number, offset)
        self.synced = min(self.synced, self._end)

    def drop_before(self, file_number: int) -> None:
        """Remove the files with smaller numbers (never the newest)."""
        for number in self._numbers():
            if number < min(file_number, self._end.file_number):
                self._closed_bytes -= self._path(number).stat().st_size
                self._path(number).unlink()
        _sync_directory(self.directory)

    def begin_snapshot(self) -> SnapshotWriter:
        """Set a file number aside for a snapshot of the state as of now, and go on behind it.

        What is appended from now on replays after the snapshot. The caller fixes the state (a read transaction) before
        it lets anybody append again.
        """
        self._require_good()
        if self._descriptor is None:
            self.recover()
        number = self._end.file_number + 1
        self._begin(number + 1)
        return SnapshotWriter(self, number)

    def replay(self) -> Replay:
        """All entries from the newest snapshot on (from the first file if there is none), oldest first."""
        return Replay(self)

    def close(self) -> None:
        """Give back what was allocated ahead and close. Idempotent. Does not flush."""
        if self._descriptor is None:
            return
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, self._end.offset)
        os.close(self._descriptor)
        self._descriptor = None

    # -- files ---------------------------------------------------------------------------------------------------

    def _path(self, number: int) -> Path:
        return self.directory / f"records-{number:06d}.log"

    def _numbers(self) -> list[int]:
        matches = (_NAME.fullmatch(path.name) for path in self.directory.iterdir())
        return sorted(int(match.group(1)) for match in matches if match is not None)

    def _kind(self, number: int) -> int | None:
        """The file's kind; None where its header was never written (a crash during a rotation)."""
        with self._path(number).open("rb") as file:
            head = file.read(_DATA_START)
        if not head.strip(b"\0") or (len(head) < _DATA_START and number == self._numbers()[-1]):
            return None
        problem = CorruptionError("bad header of a record log file", path=self._path(number))
        if len(head) < _DATA_START or _LENGTH.unpack_from(head, _FILE_HEADER.size)[0] != crc32c(
            memoryview(head)[: _FILE_HEADER.size]
        ):
            raise problem
        magic, version, kind, named = _FILE_HEADER.unpack_from(head)
        if magic != _FILE_MAGIC or version != _FORMAT_VERSION or named != number:
            raise problem
        return int(kind)

    def _remove(self, number: int) -> bool:
        self._path(number).unlink()
        return False

    def _begin(self, number: int) -> None:
        """Make file `number` the newest. Its header is written only when the former file is cut to size and durable."""
        try:
            descriptor = os.open(self._path(number), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                self._allocate(descriptor)
                if self._descriptor is not None:
                    os.ftruncate(self._descriptor, self._end.offset)
                    os.fsync(self._descriptor)
                _write_all(descriptor, _file_header(number, _KIND_LIVE), 0)
                os.fsync(descriptor)
                _sync_directory(self.directory)
            except OSError:
                os.close(descriptor)
                self._path(number).unlink()
                raise
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                raise StoreFullError("no room for a record log file", directory=self.directory) from error
            raise self._fail(error) from error
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._closed_bytes += self._end.offset
        self._descriptor = descriptor
        self._end = self.synced = LogPosition(number, _DATA_START)
        self.is_short = False

    def _rotate_if_room(self) -> None:
        try:
            self._begin(self._end.file_number + 1)
        except StoreFullError:
            self.is_short = True

    def _resume(self, end: LogPosition) -> None:
        descriptor = os.open(self._path(end.file_number), os.O_RDWR | os.O_CLOEXEC)
        try:
            os.ftruncate(descriptor, end.offset)
            with contextlib.suppress(OSError):  # a full disk is no reason not to start: reads and removals go on
                self._allocate(descriptor)
            os.fsync(descriptor)
        except OSError as error:
            os.close(descriptor)
            raise self._fail(error) from error
        self._descriptor = descriptor
        self._end = self.synced = end

    def _allocate(self, descriptor: int) -> None:
        try:
            os.posix_fallocate(descriptor, 0, self._rotate_bytes + self._reserve_bytes)
        except OSError as error:
            if error.errno not in {errno.EOPNOTSUPP, errno.EINVAL}:
                raise

    def _take_back(self, error: OSError) -> None:
        """Undo a partial append; whatever cannot be undone, or is no lack of room, ends the log."""
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise self._fail(error) from error
        self.is_short = True
        try:
            os.ftruncate(self._opened(), self._end.offset)
        except OSError as second:
            raise self._fail(second) from error

    def _opened(self) -> int:
        if self._descriptor is None:
            raise UnavailableError("the record log is closed", directory=self.directory)
        return self._descriptor

    def _fail(self, error: OSError) -> UnavailableError:
        self._failed = error
        return UnavailableError("the record log failed", directory=self.directory, reason=error.strerror)

    def _require_good(self) -> None:
        if self._failed is not None:
            raise UnavailableError("the record log failed earlier", directory=self.directory) from self._failed

    def _require_closed(self) -> None:
        if self._descriptor is not None:
            raise RuntimeError("the record log was recovered already")


class SnapshotWriter:
    """Writes the file that stands for all earlier ones. Nothing changes until `finish`; a crash before it changes nothing."""

    def __init__(self, log: RecordLog, number: int) -> None:
        self._log = log
        self._number = number
        self._temporary = log.directory / f"snapshot-{number:06d}.tmp"
        self._descriptor = os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._offset = _DATA_START
        _write_all(self._descriptor, _file_header(number, _KIND_SNAPSHOT), 0)

    def append(self, entries: Sequence[bytes]) -> None:
        """Write one group. Raises OSError as the disk does; then call `abandon`."""
        group = _encode_group(entries, self._number, self._offset)
        _write_all(self._descriptor, group, self._offset)
        self._offset += len(group)

    def finish(self) -> int:
        """Make the snapshot durable and return its file number: earlier files are not replayed any more."""
        os.fsync(self._descriptor)
        os.close(self._descriptor)
        self._temporary.rename(self._log.directory / f"records-{self._number:06d}.log")
        _sync_directory(self._log.directory)
        return self._number

    def abandon(self) -> None:
        """Give up before `finish`."""
        os.close(self._descriptor)
        self._temporary.unlink(missing_ok=True)


class Replay:
    """Iterates over entries once; `entries` and `torn_bytes` tell how many there were and what the tail lost."""

    def __init__(self, log: RecordLog) -> None:
        self._log = log
        self.entries = 0
        self.torn_bytes = 0

    def __iter__(self) -> Iterator[bytes]:
        kinds = [(number, self._log._kind(number)) for number in self._log._numbers()]  # noqa: SLF001 - one module
        files = [number for number, kind in kinds if kind is not None]
        snapshots = [number for number, kind in kinds if kind == _KIND_SNAPSHOT]
        for number in files:
            if snapshots and number < snapshots[-1]:
                continue
            with _FileView(self._log._path(number)) as view:  # noqa: SLF001 - one module
                end = _DATA_START
                strict = number != files[-1]
                groups = _groups(view.data, number, start=end, stop=len(view.data), strict=True, path=view.path)
                for body, group_end in groups:
                    end = group_end
                    for entry in _entries(body):
                        self.entries += 1
                        yield entry
                rest = len(bytes(view.data[end:]).rstrip(b"\0"))
                if rest and strict:
                    raise CorruptionError("damage in a record log file", path=view.path, offset=end)
                self.torn_bytes = rest


class _FileView:
    """A file mapped read-only for the time of a `with`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> Self:
        with self.path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.data = memoryview(self._map)
        return self

    def __exit__(self, *_: object) -> None:
        self.data.release()
        self._map.close()


def _groups(
    data: memoryview, number: int, *, start: int, stop: int, strict: bool, path: Path
) -> Iterator[tuple[bytes, int]]:
    """Bodies of the groups in [start, stop) and the place behind each, up to the first that does not check out.

    `strict`: valid groups behind that one mean damage in the middle, not a torn tail.
    """
    offset = start
    while (body := _group_at(data, number, offset, stop)) is not None:
        offset += _GROUP_HEADER.size + len(body)
        yield body, offset
    if not strict:
        return
    rest = bytes(data[offset:stop]).rstrip(b"\0")
    found = rest.find(_GROUP_MAGIC, 1)
    while found >= 0:
        if _group_at(data, number, offset + found, stop) is not None:
            raise CorruptionError("damage in the middle of a record log file", path=path, offset=offset)
        found = rest.find(_GROUP_MAGIC, found + 1)


def _group_at(data: memoryview, number: int, offset: int, stop: int) -> bytes | None:
    if offset + _GROUP_HEADER.size > stop:
        return None
    magic, length, crc = _GROUP_HEADER.unpack_from(data, offset)
    body_start = offset + _GROUP_HEADER.size
    if magic != _GROUP_MAGIC or body_start + length > stop:
        return None
    body = bytes(data[body_start : body_start + length])
    return body if crc == _group_crc(body, number, offset) else None


def _entries(body: bytes) -> Iterator[bytes]:
    offset = 0
    while offset < len(body):
        start = offset + _LENGTH.size
        offset = start + int(_LENGTH.unpack_from(body, offset)[0])
        yield body[start:offset]


def _encode_group(entries: Sequence[bytes], number: int, offset: int) -> bytes:
    runs: list[bytes] = []
    for length, some in groupby(entries, len):  # many of one length in a row: a sixth of the time
        head = _LENGTH.pack(length)
        runs += (head, head.join(some))
    body = b"".join(runs)
    return _GROUP_HEADER.pack(_GROUP_MAGIC, len(body), _group_crc(body, number, offset)) + body


def _group_crc(body: bytes, number: int, offset: int) -> int:
    return crc32c(memoryview(body), crc32c(memoryview(_PLACE.pack(number, offset, len(body)))))


def _file_header(number: int, kind: int) -> bytes:
    head = _FILE_HEADER.pack(_FILE_MAGIC, _FORMAT_VERSION, kind, number)
    return head + _LENGTH.pack(crc32c(memoryview(head)))


def _write_all(descriptor: int, content: bytes, offset: int) -> None:
    view = memoryview(content)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view = view[written:]
        offset += written


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
