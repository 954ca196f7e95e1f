"""What class `shared` waits for, and what buckets' rules queue by themselves, over the reference catalog."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence

import msgspec
import pytest
from catalog_contract import BUCKET, prepared, row
from chain_contract import KV as CHUNKS
from chain_contract import with_chunks
from fakes import ManualClock

from kvobj.catalog.memory import MemoryCatalog
from kvobj.catalog.remote_protocol import QueueReason
from kvobj.catalog.rows import BucketKind, BucketRow, CommitMode, Durability, ObjectRow, UserRow
from kvobj.catalog.setting_rows import BucketUpdate, RemoteRule
from kvobj.errors import BusyError, NotSharedError, TierUnavailableError
from kvobj.store.remote_class import SharedWrites, Sharing
from kvobj.store.remote_room import QueueRoom
from kvobj.store.remote_rules import REUSE_AFTER_MS, RemoteRules
from kvobj.store.remote_uploads import RemoteUploads
from kvobj.tiers.in_use import BlobsInUse

LOG = logging.getLogger("test")
ORDINARY = BucketRow("b", BucketKind.ORDINARY, "main", 1, Durability.LOCAL)
SAFE = BucketRow("s", BucketKind.ORDINARY, "main", 1, Durability.SHARED)


class World:
    """The parts over one catalog. `sent` are keys that went up, `lost` those that fail; `refusal` is the remote's."""

    def __init__(self, catalog: MemoryCatalog) -> None:
        self.catalog = catalog
        self.sent: list[str] = []
        self.lost: set[str] = set()
        self.looked_up = 0
        self.refusal = ""
        self.tells = True
        self.awaited: list[int] = []
        self.uploads = RemoteUploads(
            catalog=catalog,
            frames=self,
            journal=self,
            in_use=BlobsInUse(),
            clock=ManualClock(),
            log=LOG,
            bytes_at_once=10_000,
        )
        self.room = QueueRoom(catalog.remote_queue, limit_bytes=10_000, wait_seconds=0.05, entry_bytes=0)
        self.shared = SharedWrites(
            catalog=catalog,
            uploads=self.uploads,
            room=self.room,
            journal=self,
            refusal=lambda: self.refusal,
            settle=self._settle,
            write_down=self._write_down,
            deadline_seconds=0.5,
            waiting_max=2,
            log=LOG,
        )

    async def put(self, row: ObjectRow) -> int:
        if row.key in self.lost:
            raise TierUnavailableError("no")
        self.sent.append(row.key)
        return row.size_bytes

    async def put_all(self, row: ObjectRow) -> int:
        return await self.put(row)

    async def settled(self, position: int, *, timeout_seconds: float) -> bool:
        del timeout_seconds
        self.awaited.append(position)
        return self.tells

    async def flush(self, *, timeout_seconds: float) -> bool:
        del timeout_seconds
        return self.tells

    async def _settle(self, row: ObjectRow) -> ObjectRow:
        return row

    async def _write_down(self, rows: Sequence[ObjectRow], *, lossless: bool) -> None:
        del lossless
        local = [msgspec.structs.replace(each, durability=Durability.LOCAL) for each in rows]
        assert all(await self.catalog.raise_durability(local))

    async def chain(self, length: int, *, durability: Durability = Durability.LOCAL) -> list[ObjectRow]:
        """Chunks c0 … that follow on each other."""
        rows = []
        for number in range(length):
            chunk = msgspec.structs.replace(
                row(f"c{number}", 100 + number, bucket=CHUNKS, durability=durability),
                parent=f"c{number - 1}" if number else "",
            )
            outcome = await self.catalog.commit(chunk, mode=CommitMode.FIRST_WRITER_WINS, now_ms=1)
            rows.append(outcome.row)
        return rows

    async def class_of(self, bucket: str, key: str) -> Durability:
        (live,) = await self.catalog.lookup(bucket, [key])
        assert live is not None
        return live.durability


@pytest.fixture
async def world() -> AsyncIterator[World]:
    catalog = MemoryCatalog(has_remote=True)
    await with_chunks(await prepared(catalog))
    made = World(catalog)
    made.uploads.start()
    yield made
    await made.uploads.aclose()


@pytest.mark.parametrize(
    ("bucket", "durability", "by_name", "sharing"),
    [
        (ORDINARY, Durability.LOCAL, True, Sharing.NONE),
        (ORDINARY, Durability.SHARED, True, Sharing.REQUIRED),
        (ORDINARY, Durability.SHARED, False, Sharing.REQUIRED),  # of an upload that was begun so
        (SAFE, Durability.SHARED, False, Sharing.WISHED),
        (SAFE, Durability.SHARED, True, Sharing.REQUIRED),
    ],
)
def test_a_class_that_is_asked_for_by_name_is_required_and_a_default_is_wished(
    bucket: BucketRow,
    durability: Durability,
    by_name: bool,  # noqa: FBT001 - one of the cases
    sharing: Sharing,
) -> None:
    assert SharedWrites.sharing(bucket, durability, by_name=by_name) is sharing


async def test_a_chunk_is_shared_once_all_its_ancestors_are(world: World) -> None:
    rows = await world.chain(5)
    (reached,) = await world.shared.reached([rows[4]], Sharing.REQUIRED)
    assert reached.durability is Durability.SHARED
    assert sorted(world.sent) == [f"c{number}" for number in range(5)]
    assert [await world.class_of(CHUNKS, f"c{number}") for number in range(5)] == [Durability.SHARED] * 5
    await world.shared.reached([rows[4], rows[2]], Sharing.REQUIRED)
    assert len(world.sent) == 5  # known by now, and nothing is uploaded twice


async def test_ancestors_in_memory_are_written_down_first(world: World) -> None:
    rows = await world.chain(3, durability=Durability.MEMORY)
    (reached,) = await world.shared.reached([rows[2]], Sharing.REQUIRED)
    assert reached.durability is Durability.SHARED
    assert await world.class_of(CHUNKS, "c0") is Durability.SHARED


async def test_a_chunk_without_one_ancestor_on_the_remote_is_not_shared(world: World) -> None:
    rows = await world.chain(3)
    world.lost.add("c1")
    first, second, third = await world.shared.reached(rows, Sharing.WISHED)
    classes = [first.durability, second.durability, third.durability]
    assert classes == [Durability.SHARED, Durability.LOCAL, Durability.LOCAL]
    with pytest.raises(NotSharedError) as refused:
        await world.shared.reached([rows[2]], Sharing.REQUIRED)
    assert refused.value.data["reached"] == "local"


async def test_a_shared_row_that_no_manifest_tells_of_yet_is_not_acknowledged_as_shared(world: World) -> None:
    (only,) = await world.chain(1)
    await world.shared.reached([only], Sharing.REQUIRED)
    (live,) = await world.catalog.lookup(CHUNKS, ["c0"])
    assert live is not None
    world.tells = False
    (reached,) = await world.shared.reached([live], Sharing.WISHED)
    assert reached.durability is Durability.LOCAL
    with pytest.raises(NotSharedError):
        await world.shared.reached([live], Sharing.REQUIRED)


async def test_what_is_wished_waits_for_nothing_while_the_remote_is_away(world: World) -> None:
    rows = await world.chain(1)
    world.refusal = "it is down"
    assert await world.shared.reached(rows, Sharing.WISHED) == rows
    world.shared.check(Sharing.WISHED)
    with pytest.raises(NotSharedError) as refused:
        world.shared.check(Sharing.REQUIRED)
    assert "reached" not in refused.value.data


async def test_who_removes_something_waits_for_whatever_was_removed_of_the_bucket(world: World) -> None:
    catalog, shared = world.catalog, world.shared
    local = await catalog.commit(row("local", 1), mode=CommitMode.REPLACE, now_ms=1)
    for number, key in enumerate(("plain", "shadowed", "overwritten"), 2):
        stored = await catalog.commit(row(key, number), mode=CommitMode.REPLACE, now_ms=1, to_remote=True)
        await shared.reached([stored.row], Sharing.REQUIRED)
    world.awaited.clear()
    await catalog.delete(BUCKET, [local.row.key], now_ms=1)
    await shared.removed(BUCKET)
    assert not world.awaited, "nothing was told of what went"
    over = row("shadowed", 8, durability=Durability.MEMORY)
    await catalog.commit(over, mode=CommitMode.REPLACE, now_ms=1)
    await catalog.delete(BUCKET, ["shadowed"], now_ms=1)
    await shared.removed(BUCKET)
    assert world.awaited == [catalog.outbox.position]
    await catalog.commit(row("overwritten", 9), mode=CommitMode.REPLACE, now_ms=1)
    await catalog.delete(BUCKET, ["overwritten"], now_ms=1)
    await catalog.delete(BUCKET, ["absent"], now_ms=1)
    await shared.removed(BUCKET)
    assert world.awaited[1:] == [catalog.outbox.position]
    await shared.removed(CHUNKS)
    await catalog.add_user(UserRow("u", "U", "AKU", "secret"))
    await catalog.remove_user("u")
    await shared.removed(None)
    assert world.awaited[2:] == [catalog.outbox.position]
    world.refusal = "it is down"
    await shared.removed(BUCKET)
    assert len(world.awaited) == 3


async def test_over_an_object_in_memory_the_new_bytes_go_up_before_the_commit(world: World) -> None:
    await world.catalog.commit(row("k", 1, durability=Durability.MEMORY), mode=CommitMode.REPLACE, now_ms=1)
    replaced = await world.shared.replacing(row("k", 2), Sharing.REQUIRED)
    assert (replaced.durability, world.sent) == (Durability.SHARED, ["k"])


async def test_writes_that_wait_are_bounded_in_number(world: World) -> None:
    world.lost.update({"c0", "c1", "c2"})
    rows = await world.chain(3)
    waiting = [asyncio.create_task(world.shared.reached([each], Sharing.WISHED)) for each in rows[:2]]
    await asyncio.sleep(0)
    with pytest.raises(BusyError):
        world.shared.check(Sharing.REQUIRED)
    assert await world.shared.reached([rows[2]], Sharing.WISHED) == [rows[2]]
    assert not any(each.done() for each in waiting)
    await asyncio.gather(*waiting)
    world.shared.check(Sharing.REQUIRED)


async def test_over_a_shared_object_the_new_bytes_go_up_before_the_commit(world: World) -> None:
    old = await world.catalog.commit(row("k", 1), mode=CommitMode.REPLACE, now_ms=1, to_remote=True)
    await world.shared.reached([old.row], Sharing.REQUIRED)
    assert await world.shared.replacing(row("new", 2), Sharing.REQUIRED) == row("new", 2)
    replaced = await world.shared.replacing(row("k", 3), Sharing.REQUIRED)
    assert replaced.durability is Durability.SHARED
    world.lost.add("k")
    assert (await world.shared.replacing(row("k", 4), Sharing.WISHED)).durability is Durability.LOCAL
    with pytest.raises(NotSharedError) as refused:
        await world.shared.replacing(row("k", 4), Sharing.REQUIRED)
    assert "reached" not in refused.value.data
    assert await world.class_of(BUCKET, "k") is Durability.SHARED


# -- buckets' rules ------------------------------------------------------------------------------------------------------


def rules_of(world: World, clock: ManualClock) -> RemoteRules:
    return RemoteRules(catalog=world.catalog, room=world.room, clock=clock, log=LOG)


async def test_an_object_is_queued_when_it_is_read_for_the_second_time(world: World) -> None:
    await world.uploads.aclose()
    clock = ManualClock()
    rules = rules_of(world, clock)
    fresh = msgspec.structs.replace(row("k", 1), modified_ms=clock.now_ms())
    stored = (await world.catalog.commit(fresh, mode=CommitMode.REPLACE, now_ms=clock.now_ms())).row
    await world.catalog.update_bucket(BUCKET, BucketUpdate(remote=RemoteRule.REUSED))
    await rules.step()
    rules.note_reused(stored)
    rules.note_reused(stored)  # a writer that checks what it wrote
    await rules.step()
    assert not world.catalog.remote_queue.entries()
    clock.advance(REUSE_AFTER_MS / 1000)
    rules.note_reused(stored)
    await rules.step()
    assert not world.catalog.remote_queue.entries()
    rules.note_reused(stored)
    await rules.step()
    (entry,) = world.catalog.remote_queue.entries()
    assert (entry.key, entry.reason, rules.reused_objects) == ("k", QueueReason.REUSED, 1)


async def test_reads_of_other_buckets_are_not_remembered(world: World) -> None:
    rules = rules_of(world, ManualClock())
    await rules.step()
    stored = (await world.catalog.commit(row("k", 1), mode=CommitMode.REPLACE, now_ms=1)).row
    for _ in range(3):
        rules.note_reused(stored)
    await rules.step()
    assert not world.catalog.remote_queue.entries()


async def test_what_was_there_before_the_rule_is_queued_once_and_again_when_the_rule_comes_back(world: World) -> None:
    await world.uploads.aclose()
    rules = rules_of(world, ManualClock())
    await rules.step()
    for number in range(3):
        await world.catalog.commit(row(f"k{number}", number + 1), mode=CommitMode.REPLACE, now_ms=1)
    await world.catalog.update_bucket(BUCKET, BucketUpdate(remote=RemoteRule.ALWAYS))
    rules.look()
    await rules.step()
    entries = world.catalog.remote_queue.entries()
    assert [(each.key, each.reason) for each in entries] == [(f"k{number}", QueueReason.ALWAYS) for number in range(3)]
    await world.catalog.remote_queue.remove([entries[0].position])
    rules.look()
    await rules.step()
    assert len(world.catalog.remote_queue.entries()) == 2  # looked through already
    for rule in (RemoteRule.NEVER, RemoteRule.ALWAYS):
        await world.catalog.update_bucket(BUCKET, BucketUpdate(remote=rule))
        rules.look()
        await rules.step()
    assert len(world.catalog.remote_queue.entries()) == 3
