"""What happens between opening two environments and using them: who they belong to, the last redo, the end of the log.

Guarantees: a volatile environment of another store, another durable environment or another boot is wiped, since the bytes
that it names are gone; effects that a crash left unapplied are applied; the record log ends where the durable environment does.
"""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from kvobj.database.effects import Redo
from kvobj.database.environment import Environment, translated
from kvobj.database.group import LOG_END, REDO, pack_log_end, unpack_log_end
from kvobj.database.table import META, Table
from kvobj.errors import CorruptionError
from kvobj.record_log import LogPosition, RecordLog

META_VOLATILE: Final = Table("database_meta_volatile", volatile=True)
STORE_ID: Final = b"store_id"
ENVIRONMENT_ID: Final = b"environment_id"
REBUILDING: Final = b"rebuilding"
SNAPSHOT_DUE: Final = b"log_snapshot_due"
IDENTITY: Final = b"identity"
APPLIED: Final = b"applied"


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose a volatile environment is: a store's, beside one durable environment, in one boot."""

    store_id: bytes
    environment_id: bytes
    boot_id: str

    def packed(self) -> bytes:
        """The stored form."""
        return msgspec.msgpack.encode([self.store_id, self.environment_id, self.boot_id])


def this_boot() -> str:
    """The kernel's id of this boot (random, Linux: /proc/sys/kernel/random/boot_id)."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def claim_durable(
    durable: Environment, *, store_id: bytes | None, boot_id: str, rebuild: bool, log: RecordLog | None
) -> Identity:
    """Read or write whose the durable environment is. `CorruptionError` where it is another store's, where a rebuild
    did not finish, or where it is new beside a record log that is not."""
    directory = durable.directory
    handle = durable.handles[META.name]
    with translated(directory), durable.begin(write=True) as transaction:
        environment_id = transaction.get(ENVIRONMENT_ID, None, handle)
        if environment_id is None:
            if log is not None and not rebuild and not log.is_empty():
                raise CorruptionError(
                    "the database is lost but its record log is not: rebuild it (kvobj-admin rebuild, with --config "
                    "and the server's configuration)",
                    directory=directory,
                )
            environment_id = uuid.uuid4().bytes
            transaction.put(ENVIRONMENT_ID, environment_id, db=handle)
            transaction.put(STORE_ID, store_id or uuid.uuid4().bytes, db=handle)
            if rebuild:
                transaction.put(REBUILDING, b"1", db=handle)
            elif log is not None:
                transaction.put(LOG_END, pack_log_end(LogPosition(0, 0), LogPosition(0, 0)), db=handle)
        elif not rebuild and transaction.get(REBUILDING, None, handle) is not None:
            raise CorruptionError("a rebuild of the database did not finish: start it again", directory=directory)
        recorded = transaction.get(STORE_ID, None, handle) or b""
        if store_id is not None and recorded != store_id:
            raise CorruptionError("the database belongs to another store", directory=directory)
    return Identity(recorded, environment_id, boot_id)


def open_volatile(
    directory: Path, *, tables: Sequence[str], map_bytes: int, identity: Identity
) -> tuple[Environment, bool]:
    """The volatile environment and whether it is new. One that is not ours, or cannot be read, is replaced."""
    environment: Environment | None = None
    with contextlib.suppress(CorruptionError):
        environment = Environment(directory, tables=tables, map_bytes=map_bytes, durable=False, sync=False)
        with translated(directory), environment.begin() as transaction:
            recorded = transaction.get(IDENTITY, None, environment.handles[META_VOLATILE.name])
        if recorded == identity.packed():
            return environment, False
    if environment is not None:
        environment.close()
    _wipe(directory)
    environment = Environment(directory, tables=tables, map_bytes=map_bytes, durable=False, sync=False)
    return environment, True


def finish_redo(durable: Environment, volatile: Environment, *, identity: Identity, is_fresh: bool) -> int:
    """Apply what the last group before a crash left unapplied; returns the number of the last group with effects.

    Idempotent: the number goes into the volatile transaction with the effects. A new volatile environment gets only the number:
    what the effects are about went with the old one.
    """
    with translated(durable.directory), durable.begin() as transaction:
        recorded = transaction.get(REDO, None, durable.handles[META.name])
    redo = msgspec.msgpack.decode(recorded, type=Redo) if recorded is not None else None
    number = redo.number if redo is not None else 0
    handle = volatile.handles[META_VOLATILE.name]
    with translated(volatile.directory), volatile.begin(write=True) as transaction:
        applied = int.from_bytes(transaction.get(APPLIED, None, handle) or b"", "big")
        if redo is not None and not is_fresh and applied < number:
            redo.effects.apply(transaction, volatile.handles)
        transaction.put(APPLIED, number.to_bytes(8, "big"), db=handle)
        transaction.put(IDENTITY, identity.packed(), db=handle)
    return number


def align_log(durable: Environment, log: RecordLog) -> None:
    """Make the log end where the environment says. What lies behind was acknowledged to nobody and is cut off; if the log is
    shorter (its tail was lost with the power, or it is new beside an old environment), a snapshot falls due."""
    handle = durable.handles[META.name]
    with translated(durable.directory), durable.begin(write=True) as transaction:
        recorded = transaction.get(LOG_END, None, handle)
        if recorded is None:
            if not log.is_empty():
                raise CorruptionError("the record log is not this database's", directory=log.directory)
            is_behind, end = True, log.recover()
        else:
            expected, synced = unpack_log_end(recorded)
            end = log.recover(since=synced, upto=expected)
            is_behind = end < expected
        transaction.put(LOG_END, pack_log_end(end, end), db=handle)
        if is_behind:
            transaction.put(SNAPSHOT_DUE, b"1", db=handle)


def _wipe(directory: Path) -> None:
    for name in ("data.mdb", "lock.mdb"):
        (directory / name).unlink(missing_ok=True)


def wipe_durable(directory: Path) -> None:
    """Remove a durable environment, for a rebuild that takes its place."""
    if directory.exists():
        _wipe(directory)


def remove_volatile(directory: Path) -> None:
    """Remove a closed volatile environment after a clean stop."""
    shutil.rmtree(directory, ignore_errors=True)
