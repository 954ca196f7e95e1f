"""That no two stores use one place: the file that says whose segment files a directory holds, and whose an arena is.

A store that took another's directory for its own would find its room unused and write over it. A configuration that was copied,
its data directory changed and a tier's path not, is enough for that; so is a data directory that was copied.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from kvobj.arena.geometry import Geometry
from kvobj.data_directory import DataDirectory, store_id_in
from kvobj.errors import ConfigurationError, UnavailableError
from kvobj.tiers.nvme.segment_file import is_out_of_room

CLAIM_FILE: Final = "kvobj-store-id"
"""In the nvme tier's directory: the id of the store whose segment files lie beside it, in hex, and the path of its data directory,
a line each. Locked while a process uses them."""

_TEXT_BYTES_MAX: Final = 8192
_NO_LOCKS_HERE: Final = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK})
"""What file systems say that know no flock."""
_ATTEMPTS: Final = 8


@contextmanager
def claimed(
    directory: Path,
    store_id: bytes,
    data: Path,
    *,
    also: Collection[bytes] = (),
    is_new: bool = False,
    may_write: bool = True,
) -> Iterator[None]:
    """Keep the nvme tier's directory for this store, whose data directory is `data`, until the context ends; it is made (mode 0700)
    if need be.

    One without the file is taken for the store's own, since versions before it wrote none, unless the store `is_new` and there are
    segments. `ConfigurationError` where it is another store's, but for those of `also`, which give way; where another data
    directory of this store is there, whose it is; and where it cannot be used. `UnavailableError` while another process has it. A
    file system without room for the file, or without locks, is no reason not to start. Without `may_write` nothing is made or
    written, and what is not there is not kept.
    """
    lock = _opened(directory, may_write=may_write)
    if lock is None:
        yield
        return
    try:
        try:
            _lock(lock, directory, fcntl.LOCK_EX if may_write else fcntl.LOCK_SH)
            _look(lock, directory, {store_id, *also}, data, is_new=is_new)
            if may_write:
                _write(lock, directory, store_id, data)
        except OSError as error:
            raise cannot_be_used("nvme", directory, error) from error
        yield
    finally:
        os.close(lock)


def owner_of(directory: Path) -> str:
    """The id of the store that an nvme tier's directory is kept for, in hex; empty where no file says so."""
    try:
        with (directory / CLAIM_FILE).open("rb") as file:
            return file.readline(_TEXT_BYTES_MAX).decode("ascii", "replace").strip()
    except OSError:
        return ""


def _opened(directory: Path, *, may_write: bool) -> int | None:
    try:
        if may_write:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            return os.open(directory / CLAIM_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        return os.open(directory / CLAIM_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if is_out_of_room(error) or (isinstance(error, FileNotFoundError) and not may_write):
            return None
        raise cannot_be_used("nvme", directory, error) from error


def cannot_be_used(tier: str, directory: Path, error: OSError) -> ConfigurationError:
    """What is told of a tier whose directory cannot be used."""
    return ConfigurationError([f"tiers: {tier}: {directory}: cannot be used: {error.strerror}"])


def _lock(lock: int, directory: Path, kind: int, *, what: str = "the nvme tier's directory") -> None:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UnavailableError(f"{what} is in use by another process", path=directory) from error
    except OSError as error:
        if error.errno not in _NO_LOCKS_HERE:
            raise


def _look(lock: int, directory: Path, own: Collection[bytes], data: Path, *, is_new: bool) -> None:
    found, _, rest = os.pread(lock, _TEXT_BYTES_MAX, 0).partition(b"\n")
    owner = found.decode("ascii", "replace").strip()
    if owner not in {"", *(each.hex() for each in own)} or (not owner and is_new and any(directory.glob("segment-*"))):
        told = (
            f"tiers: nvme: {directory} belongs to another store ({owner[:32] or 'it holds segments'}): give this one a path of "
            "its own, or empty the directory if that store is gone"
        )
        raise ConfigurationError([told])
    other = Path(os.fsdecode(rest.partition(b"\n")[0]))
    if other.is_absolute() and not _lies_within(directory, data) and _is_anothers(other, bytes.fromhex(owner), data):
        told = (
            f"tiers: nvme: {directory} holds the segments of the store in {other}, whose data directory this one copies: give "
            f"this one a copy of them under a path of its own (without {CLAIM_FILE}), or move that data directory away"
        )
        raise ConfigurationError([told])


def _is_anothers(other: Path, store_id: bytes, data: Path) -> bool:
    """Whether `other` is a data directory of that store, and is not `data`. One that was moved away is none any more."""
    try:
        return store_id_in(other) == store_id and not other.samefile(data)
    except OSError:
        return False


def _lies_within(directory: Path, data: Path) -> bool:
    """Whether the directory is the data directory's own, and was copied with it if that was copied."""
    return directory.resolve().is_relative_to(data.resolve())


def _write(lock: int, directory: Path, store_id: bytes, data: Path) -> None:
    if os.geteuid() == 0:
        # Who repairs a store as root must not lock out the user that serves it. Where root may not (a user namespace), it stays.
        owner, own = directory.stat(), os.fstat(lock)
        if (owner.st_uid, owner.st_gid) != (own.st_uid, own.st_gid):
            with suppress(OSError):
                os.fchown(lock, owner.st_uid, owner.st_gid)
    text = f"{store_id.hex()}\n".encode() + os.fsencode(data.resolve()) + b"\n"
    if os.pread(lock, _TEXT_BYTES_MAX, 0) == text:
        return
    try:
        os.pwrite(lock, text, 0)
        os.ftruncate(lock, len(text))
        os.fsync(lock)
    except OSError as error:
        if not is_out_of_room(error):
            raise


def refuse_anothers_arena(directory: Path, left: Geometry | None, data: DataDirectory, *, boot_id: str) -> None:
    """`ConfigurationError` where an arena lies in `directory` that belongs to the store of another data directory: it runs, or
    crashed, and has there what lies nowhere else. What an earlier boot left is nobody's any more, and what lies within the data
    directory is its own, also in a copy."""
    if left is None or left.boot_id != boot_id or not left.data_directory or _lies_within(directory, data.path):
        return
    other = Path(left.data_directory)
    if not _is_anothers(other, left.store_id, data.path):
        return
    told = (
        f"tiers: dram: {directory} holds the memory of the store in {other}: give this one a path of its own, stop that one "
        "cleanly first, or move its data directory away"
    )
    raise ConfigurationError([told])


@contextmanager
def arena_kept(directory: Path) -> Iterator[None]:
    """Keep the arena's directory for this process until the context ends; it is made (mode 0700) if need be, and goes if it is left
    empty. `UnavailableError` while another process has it: two containers that share memory may call their data directories the
    same, so that the path of neither says whose the arena is. Where it cannot be had at all, the arena says so."""
    lock = None
    try:
        lock = _locked_directory(directory)
        yield
    finally:
        if lock is not None:
            # While the lock is held: who waits for it looks whether this is still the directory.
            with suppress(OSError):
                directory.rmdir()
            os.close(lock)


def _locked_directory(directory: Path) -> int | None:
    for _ in range(_ATTEMPTS):
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            _lock(lock, directory, fcntl.LOCK_EX, what="the arena's directory")
            if os.fstat(lock).st_nlink:
                return lock
        except OSError:
            os.close(lock)
            return None
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)  # its last holder has removed it meanwhile
    return None
