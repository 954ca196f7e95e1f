"""What the power-loss test records: a catalog on a directory, changed in small groups; every change is said before and after.

`DIRECTORY SEED STEPS`: it prints "ready" when its first state lies on the disk, waits for a line, and then works. Lines on stdout:
"begin N" before change number N is given to the catalog, "done N" when it was acknowledged, "told P" where a manifest could have
told of position P of the outbox (which is then discarded up to there). `changes` says what the changes are, here and to who
checks. Chains with odd numbers are raised to class SHARED once they are committed, and were queued for the remote until then.
"""

from __future__ import annotations

import asyncio
import random
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvobj.catalog.encoding import CATALOG_TABLES, REMOTE_TABLES
from kvobj.catalog.lmdb import LmdbCatalog
from kvobj.catalog.rows import BlobRef, BucketKind, BucketRow, Durability, ObjectRow
from kvobj.clock import SystemClock
from kvobj.database import Database
from kvobj.record_log import RecordLog

BUCKET = "cache"
CHAINS = 8
LENGTH = 6
EPOCH = 7
WIDTH = 3
MAP_BYTES = 1 << 26
LOG_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Change:
    """A chain is stored from some depth on, with these blobs by key, or the chunk and all below it is deleted (blobs None)."""

    number: int
    chain: int
    blobs: dict[str, bytes | None]


def key_of(chain: int, depth: int) -> str:
    """The key of a chunk."""
    return f"{chain:02d}/{depth}"


def changes(seed: int, steps: int) -> list[list[Change]]:
    """Steps of up to `WIDTH` changes that go on beside each other, of different chains."""
    chance = random.Random(seed)
    stored = [0] * CHAINS
    made: list[list[Change]] = []
    number = 0
    for _ in range(steps):
        step: list[Change] = []
        for chain in chance.sample(range(CHAINS), chance.randint(1, WIDTH)):
            number += 1
            if stored[chain] == LENGTH or (stored[chain] and chance.random() < 0.3):
                start = chance.randrange(stored[chain])
                gone: dict[str, bytes | None] = {key_of(chain, at): None for at in range(start, stored[chain])}
                step.append(Change(number, chain, gone))
                stored[chain] = start
            else:
                start, stop = stored[chain], min(LENGTH, stored[chain] + chance.randint(1, 3))
                new = {key_of(chain, at): blob_of(number, at) for at in range(start, stop)}
                step.append(Change(number, chain, dict(new)))
                stored[chain] = stop
        made.append(step)
    return made


def blob_of(number: int, depth: int) -> bytes:
    """The blob that change `number` stores at this depth."""
    return EPOCH.to_bytes(8, "big") + (number * LENGTH + depth).to_bytes(8, "big")


def rows_of(change: Change) -> list[ObjectRow]:
    """What is committed."""
    rows: list[ObjectRow] = []
    for key, blob in change.blobs.items():
        depth = int(key.partition("/")[2])
        parent = key_of(change.chain, depth - 1) if depth else ""
        size = 300 + depth
        refs = (BlobRef(blob or b"", size, size, b"d" * 32),)
        rows.append(
            ObjectRow(
                bucket=BUCKET, key=key, blobs=refs, size_bytes=size, etag="e" * 32, modified_ms=1, owner="main",
                durability=Durability.LOCAL, parent=parent, tokens=16,
            )
        )  # fmt: skip
    return rows


def opened(directory: Path, *, sync: bool, boot_id: str, rebuild: bool = False) -> Database:
    """The database of a directory as the store opens it."""
    return Database.open(
        durable=directory / "durable",
        volatile=directory / "volatile",
        tables=[*CATALOG_TABLES, *REMOTE_TABLES],
        map_bytes=MAP_BYTES,
        volatile_map_bytes=MAP_BYTES,
        record_log=RecordLog.open(directory / "log", rotate_bytes=LOG_BYTES),
        sync=sync,
        boot_id=boot_id,
        rebuild=rebuild,
        outbox=SystemClock(),
    )


async def _work(directory: Path, steps: list[list[Change]]) -> None:
    database = opened(directory, sync=True, boot_id="before")
    catalog = await LmdbCatalog.open(database, now_boot_ms=0)
    await catalog.open_epoch(EPOCH)
    await catalog.create_bucket(BucketRow(BUCKET, BucketKind.KV, "main", 1, Durability.LOCAL))
    _say("ready")
    sys.stdin.readline()
    for step in steps:
        await asyncio.gather(*(_do(catalog, change) for change in step))
        await catalog.reap(await catalog.due(now_ms=1 << 60))
        position = catalog.outbox.position
        _say(f"told {position}")
        await catalog.outbox.discard(position - WIDTH)
    _say("end")
    sys.stdin.readline()  # nothing more is written: what is recorded ends in the middle of a running process


async def _do(catalog: LmdbCatalog, change: Change) -> None:
    _say(f"begin {change.number}")
    if None in change.blobs.values():
        await catalog.delete(BUCKET, [next(iter(change.blobs))], now_ms=1)
    else:
        is_shared = change.chain % 2 == 1
        stored: list[ObjectRow] = []
        for outcome in await catalog.commit_chain(rows_of(change), now_ms=1, to_remote=is_shared):
            if isinstance(outcome, Exception):
                raise outcome
            stored.append(outcome.row)
        if is_shared:
            raised = [msgspec.structs.replace(row, durability=Durability.SHARED) for row in stored]
            assert all(await catalog.raise_durability(raised))
    _say(f"done {change.number}")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(_work(Path(sys.argv[1]), changes(int(sys.argv[2]), int(sys.argv[3]))))
